#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/align/attention_rows.hpp>
#include <kvmeld/align/attention_state.hpp>
#include <kvmeld/align/attention_steps.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/float_environment.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// One layer's running softmax: blocks of 64 tokens in f32, their sums in f64.
class LayerAttention {
 public:
  LayerAttention(const AttentionReader& reader, std::size_t layer, std::size_t queries)
      : reader_(reader), layer_(reader.layer(layer)), index_(layer), rows_(layer_.heads * queries), queries_(queries),
        key_steps_(attention_steps(best_isa(), layer_.key_type)), value_steps_(attention_steps(best_isa(), layer_.value_type)),
        dots_(rows_ * attended_block), weights_(rows_ * attended_block), block_(rows_ * layer_.value_width), scales_(rows_),
        key_rows_(attended_rows * layer_.heads * layer_.key_width), value_rows_(attended_rows * layer_.heads * layer_.value_width),
        zeros_(layer_.heads * layer_.value_width), at_once_(rows_ * layer_.key_width > most_cached ? attended_rows : added_rows),
        outputs(rows_ * layer_.value_width), sums(rows_), tops(rows_, -INFINITY) {}

  /// Adds up to `attended_block` tokens.
  void add(std::span<const AttendedToken> tokens) {
    if (tokens.size() < attended_block) std::fill_n(dots_.data(), dots_.size(), -INFINITY);
    for (std::size_t j = 0; j < tokens.size(); j += at_once_) add_dots(tokens.subspan(j, (std::min)(at_once_, tokens.size() - j)), j);
    for (std::size_t r = 0; r < rows_; ++r) {
      const float* const dots = dots_.data() + r * attended_block;
      const double here = fma(static_cast<double>(key_steps_.largest(dots)), layer_.factor, 0.0);
      const double top = here > tops[r] ? here : tops[r];
      scales_[r] = math::exp(tops[r] - top);
      tops[r] = top;
      sums[r] = fma(sums[r], scales_[r], key_steps_.weigh(dots, layer_.factor, top, weights_.data() + r * attended_block));
    }
    for (std::size_t j = 0; j < tokens.size(); j += at_once_) add_values(tokens.subspan(j, (std::min)(at_once_, tokens.size() - j)), j);
    for (std::size_t r = 0; r < rows_; ++r) {
      value_steps_.carry(block_.data() + r * layer_.value_width, scales_[r], layer_.value_width, outputs.data() + r * layer_.value_width);
    }
  }

 private:
  // Rows are converted in registers where few queries read them, and once into memory where many do.
  static constexpr std::size_t most_raw_dots = 4, most_raw_sums = 1;
  // Queries of all heads that stay in the first cache beside the rows: beyond, more tokens are taken in hand for each walk over them.
  static constexpr std::size_t most_cached = 4096;

  void add_dots(std::span<const AttendedToken> tokens, std::size_t at) {
    const bool wanted = key_steps_.raw_dots != nullptr && (queries_ <= most_raw_dots || layer_.key_type == ElementType::f32);
    const std::byte* rows[attended_rows] = {};
    const bool raw = gather(tokens, wanted, rows, key_rows_, layer_.heads * layer_.key_width,
                            [this](AttendedToken t, bool r, float* scratch) { return reader_.keys(index_, t, r, scratch); });
    const auto stride = static_cast<std::ptrdiff_t>(layer_.key_width) * (raw ? block_bytes(layer_.key_type) : block_bytes(ElementType::f32));
    const AttentionSteps::Dots dots = raw ? key_steps_.raw_dots : key_steps_.dots;
    for (std::size_t h = 0; h < layer_.heads; ++h) {
      dots(layer_.queries.data() + h * queries_ * layer_.key_width, queries_, rows, tokens.size(), static_cast<std::ptrdiff_t>(h) * stride, layer_.key_width,
           dots_.data() + h * queries_ * attended_block + at, attended_block);
    }
  }
  void add_values(std::span<const AttendedToken> tokens, std::size_t at) {
    const bool wanted = value_steps_.raw_add != nullptr && (queries_ <= most_raw_sums || layer_.value_type == ElementType::f32);
    const std::size_t width = layer_.heads * layer_.value_width;
    const std::byte* rows[attended_rows] = {};
    const bool raw = gather(tokens, wanted, rows, value_rows_, width,
                            [this](AttendedToken t, bool r, float* scratch) { return reader_.values(index_, t, r, scratch); });
    // Behind the last token: zeros, of every type, whose weights are 0.
    const std::size_t end = (tokens.size() + added_rows - 1) / added_rows * added_rows;
    for (std::size_t i = tokens.size(); i < end; ++i) rows[i] = reinterpret_cast<const std::byte*>(zeros_.data());
    const auto stride = static_cast<std::ptrdiff_t>(layer_.value_width) * (raw ? block_bytes(layer_.value_type) : block_bytes(ElementType::f32));
    const AttentionSteps::Add sum = raw ? value_steps_.raw_add : value_steps_.add;
    for (std::size_t h = 0; h < layer_.heads; ++h) {
      for (std::size_t i = 0; i < end; i += added_rows) {
        sum(weights_.data() + h * queries_ * attended_block + at + i, attended_block, queries_, rows + i, static_cast<std::ptrdiff_t>(h) * stride,
            layer_.value_width, block_.data() + h * queries_ * layer_.value_width);
      }
    }
  }
  /// Rows of a few tokens, all raw or all f32; whether they are raw.
  template <class Read>
  static bool gather(std::span<const AttendedToken> tokens, bool raw, const std::byte** rows, AlignedRows<float>& scratch, std::size_t width, const Read& read) {
    for (std::size_t i = 0; i < tokens.size();) {
      const AttendedRow row = read(tokens[i], raw, scratch.data() + i * width);
      rows[i++] = row.data;
      if (row.raw == raw) continue;
      raw = false;
      i = 0;  // caches of several layouts: all over again
    }
    return raw;
  }

  const AttentionReader& reader_;
  const AttentionReader::Layer& layer_;
  std::size_t index_;
  std::size_t rows_;                // head · queries + query
  std::size_t queries_;
  AttentionSteps key_steps_, value_steps_;
  AlignedRows<float> dots_;         // (row, attended_block)
  AlignedRows<float> weights_;      // (row, attended_block)
  AlignedRows<float> block_;        // (row, value_width)
  std::vector<double> scales_;      // (row)
  AlignedRows<float> key_rows_;     // (attended_rows, head, key_width)
  AlignedRows<float> value_rows_;   // (attended_rows, head, value_width)
  AlignedRows<float> zeros_;        // (head, value_width)
  std::size_t at_once_;             // tokens

 public:
  AlignedRows<double> outputs;      // (row, value_width) not yet divided by `sums`
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
    detail::LayerAttention attention(*reader, l, m);
    tokens.clear();
    for (std::size_t s = 0; s < sources.size(); ++s) reader->tokens(l, s, tokens);
    for (std::size_t at = 0; at < tokens.size(); at += detail::attended_block) {
      attention.add(std::span(tokens).subspan(at, (std::min)(detail::attended_block, tokens.size() - at)));
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
