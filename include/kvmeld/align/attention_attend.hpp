#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/align/attention_kernels.hpp>
#include <kvmeld/align/attention_rows.hpp>
#include <kvmeld/align/attention_state.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/float_environment.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// One layer's running softmax: blocks of 64 tokens in f32, their sums in f64.
class LayerAttention {
 public:
  LayerAttention(const AttentionReader::Layer& layer, std::size_t queries)
      : layer_(layer), rows_(layer.heads * queries), queries_(queries), dots_(rows_ * attended_block), weights_(rows_ * attended_block),
        block_(rows_ * layer.value_width), key_row_(layer.heads * layer.key_width), value_rows_((added_rows + 1) * layer.heads * layer.value_width),
        outputs(rows_ * layer.value_width), sums(rows_), tops(rows_, -INFINITY) {}

  /// Adds up to `attended_block` tokens.
  void add(const AttentionReader& reader, std::size_t l, std::span<const AttendedToken> tokens) {
    if (tokens.size() < attended_block) std::fill(dots_.begin(), dots_.end(), -INFINITY);
    for (std::size_t j = 0; j < tokens.size(); ++j) {
      const float* const keys = reader.keys(l, tokens[j], key_row_.data());
      for (std::size_t h = 0; h < layer_.heads; ++h) {
        steps_.dots(layer_.queries.data() + h * queries_ * layer_.key_width, queries_, keys + h * layer_.key_width, layer_.key_width,
                    dots_.data() + h * queries_ * attended_block + j, attended_block);
      }
    }
    scales_.resize(rows_);
    for (std::size_t r = 0; r < rows_; ++r) {
      const float* const dots = dots_.data() + r * attended_block;
      float largest = -INFINITY;
      for (std::size_t j = 0; j < attended_block; ++j) largest = dots[j] > largest ? dots[j] : largest;
      const double here = fma(static_cast<double>(largest), layer_.factor, 0.0);
      const double top = here > tops[r] ? here : tops[r];
      scales_[r] = math::exp(tops[r] - top);
      tops[r] = top;
      sums[r] = fma(sums[r], scales_[r], steps_.weigh(dots, layer_.factor, top, weights_.data() + r * attended_block));
    }
    const std::size_t width = layer_.heads * layer_.value_width;
    const float* rows[added_rows];
    for (std::size_t j = 0; j < tokens.size(); j += added_rows) {
      for (std::size_t i = 0; i < added_rows; ++i) {
        float* const scratch = value_rows_.data() + i * width;
        rows[i] = j + i < tokens.size() ? reader.values(l, tokens[j + i], scratch) : value_rows_.data() + added_rows * width;  // zeros
      }
      for (std::size_t h = 0; h < layer_.heads; ++h) {
        steps_.add(weights_.data() + h * queries_ * attended_block + j, attended_block, queries_, rows, layer_.value_width,
                   block_.data() + h * queries_ * layer_.value_width);
        for (const float*& row : rows) row += layer_.value_width;
      }
    }
    for (std::size_t r = 0; r < rows_; ++r) {
      steps_.carry(block_.data() + r * layer_.value_width, scales_[r], layer_.value_width, outputs.data() + r * layer_.value_width);
    }
  }

 private:
  const AttentionReader::Layer& layer_;
  std::size_t rows_;                // head · queries + query
  std::size_t queries_;
  AttentionSteps steps_ = attention_steps(best_isa());
  std::vector<float> dots_;         // (row, attended_block)
  std::vector<float> weights_;      // (row, attended_block)
  std::vector<float> block_;        // (row, value_width)
  std::vector<float> key_row_;      // (head, key_width)
  std::vector<float> value_rows_;   // (added_rows + 1, head, value_width) the last: zeros
  std::vector<double> scales_;      // (row)

 public:
  std::vector<double> outputs;      // (row, value_width) not yet divided by `sums`
  std::vector<double> sums;         // (row) of e^(logit − top)
  std::vector<double> tops;         // (row) largest logit
};

}  // namespace detail

/// Context vectors: what each query reads from all caches together, in one pass over their keys and values (online softmax,
/// Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, FlashAttention, arXiv:2205.14135).
///
/// `out` has a row a query; its heads are those of all layers, layer by layer; its channels a value head's, which all layers share.
/// o = Σ softmax(q·k · scale / temperature) v over every token that the layer holds; `lse` the natural logarithm of Σ e^logit. States
/// of separate calls combine by `merge_attention_states` to what one call over all caches gives, within 1e-6 of the largest value
/// for logits of order 10: products are f32 sums over 32 lanes, weights f64 rounded to f32, sums f32 over 64 tokens and f64 beyond.
/// No tokens: the empty state. Equal bytes on every machine for equal caches in equal order. Reads keys and values once;
/// O(queries · bytes) arithmetic. Memory: what `out` takes, in f64, and, where keys are turned, a cosine and sine for each
/// position and pair.
/// Errors, with `out` untouched: `invalid_argument` (queries, sizes, selections), `non_finite` (queries, keys or values, logits beyond f32),
/// `unsupported` (latent caches, Hadamard bases, scales apart, value heads of different sizes), `geometry_mismatch`,
/// `token_count_mismatch` (positions), `rope_unsupported`, `rope_length_dependent`, `aliasing` (sums across outputs).
KVMELD_LAZY [[nodiscard]] Status attend(const AttentionQueries& queries, std::span<const AttendSource> sources,
                                        const MutableAttentionState<LseNatural>& out) {
  const FloatEnvironmentGuard guard;
  KVMELD_TRY(check_float_environment());
  KVMELD_TRY(detail::check_state_size<LseNatural>(out, "out"));
  if (detail::any_overlap(out.outputs, out.lse)) return detail::error(ErrorCode::aliasing, "out: its ", out.lse.size(), " sums lie across its outputs");
  const auto reader = detail::AttentionReader::of(queries, sources);
  if (!reader) return reader.error();
  if (out.rows != queries.count) return detail::error(ErrorCode::invalid_argument, "out: ", out.rows, " rows for ", queries.count, " queries");
  const auto m = static_cast<std::size_t>(queries.count);
  std::size_t heads = 0;
  for (std::size_t l = 0; l < reader->count(); ++l) {
    heads += reader->layer(l).heads;
    if (reader->layer(l).heads > 0 && reader->layer(l).value_channels != out.channels) {
      return detail::error(ErrorCode::unsupported, "out: heads of ", out.channels, " channels, while layer ", l, " has values of ",
                           reader->layer(l).value_channels);
    }
  }
  if (!sources.empty() && static_cast<std::int64_t>(heads) != out.heads) {
    return detail::error(ErrorCode::invalid_argument, "out: ", out.heads, " heads for ", heads, " of all layers together");
  }
  std::vector<float> lse(out.lse.size(), -INFINITY);
  std::vector<float> outputs(out.outputs.size(), 0.0F);
  const auto channels = static_cast<std::size_t>(out.channels);
  std::size_t first = 0;
  std::vector<detail::AttendedToken> tokens;
  for (std::size_t l = 0; l < reader->count(); ++l) {
    const detail::AttentionReader::Layer& layer = reader->layer(l);
    detail::LayerAttention attention(layer, m);
    tokens.clear();
    for (std::size_t s = 0; s < sources.size(); ++s) reader->tokens(l, s, tokens);
    for (std::size_t at = 0; at < tokens.size(); at += detail::attended_block) {
      attention.add(*reader, l, std::span(tokens).subspan(at, (std::min)(detail::attended_block, tokens.size() - at)));
    }
    for (std::size_t q = 0; q < m && !tokens.empty(); ++q) {
      for (std::size_t h = 0; h < layer.heads; ++h) {
        const std::size_t row = h * m + q;
        const std::size_t to = q * heads + first + h;
        lse[to] = static_cast<float>(attention.tops[row] + math::log(attention.sums[row]));
        bool finite = std::isfinite(lse[to]);
        for (std::size_t c = 0; c < channels; ++c) {
          outputs[to * channels + c] = static_cast<float>(attention.outputs[row * layer.value_width + c] / attention.sums[row]);
          finite = finite && std::isfinite(outputs[to * channels + c]);
        }
        if (!finite) {
          return detail::error(ErrorCode::non_finite, "attention: query ", q, " at layer ", l, " head ", h, " gives ", lse[to],
                               " as log-sum-exp: keys, values or logits are not finite");
        }
      }
    }
    first += layer.heads;
  }
  std::copy(outputs.begin(), outputs.end(), out.outputs.begin());
  std::copy(lse.begin(), lse.end(), out.lse.begin());
  return {};
}

/// The same over one cache.
KVMELD_LAZY [[nodiscard]] Status attend(const AttentionQueries& queries, const KvCacheRef& cache, const MutableAttentionState<LseNatural>& out,
                                        std::span<const std::int64_t> positions = {}) {
  const AttendSource source{cache, positions, {}};
  return attend(queries, std::span(&source, 1), out);
}

KVMELD_NAMESPACE_END
