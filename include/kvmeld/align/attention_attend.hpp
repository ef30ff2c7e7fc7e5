#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/align/attention_layer.hpp>
#include <kvmeld/align/attention_rows.hpp>
#include <kvmeld/align/attention_state.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/float_environment.hpp>

KVMELD_NAMESPACE_BEGIN

/// Context vectors: what each query reads from all caches together, in one pass over their keys and
/// values (online softmax, Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022,
/// FlashAttention, arXiv:2205.14135).
///
/// `out` has a row a query; its heads are those of all layers, layer by layer; its channels a value
/// head's, which all layers share. o = Σ softmax(q·k · scale / temperature) v over every token that
/// the layer holds; `lse` the natural logarithm of Σ e^logit. States of separate calls combine by
/// `merge_attention_states` to what one call over all caches gives, within 1e-6 of the largest
/// value for logits of order 10: products are f32 sums over 32 lanes, weights f64 rounded to f32,
/// sums f32 over 64 tokens and f64 beyond. No tokens: the empty state. Equal bytes on every machine
/// for equal caches in equal order. Reads keys and values once; O(queries · bytes) arithmetic.
/// Memory: what `out` takes, in f64, and, where keys are turned, a cosine and sine for each
/// position and pair. Errors, with `out` untouched: `invalid_argument` (queries, sizes,
/// selections), `non_finite` (queries, keys or values, logits beyond f32), `unsupported` (latent
/// caches, Hadamard bases, scales apart, value heads of different sizes), `geometry_mismatch`,
/// `token_count_mismatch` (positions), `rope_unsupported`, `rope_length_dependent`, `aliasing`
/// (sums across outputs).
KVMELD_LAZY [[nodiscard]] Status attend(const AttentionQueries& queries,
                                        std::span<const AttendSource> sources,
                                        const MutableAttentionState<LseNatural>& out) {
  const FloatEnvironmentGuard guard;
  KVMELD_TRY(check_float_environment());
  KVMELD_TRY(detail::check_state_size<LseNatural>(out, "out"));
  if (detail::any_overlap(out.outputs, out.lse))
    return detail::error(ErrorCode::aliasing, "out: its ", out.lse.size(),
                         " sums lie across its outputs");
  const auto reader = detail::AttentionReader::of(queries, sources);
  if (!reader) return reader.error();
  if (out.rows != queries.count)
    return detail::error(ErrorCode::invalid_argument, "out: ", out.rows, " rows for ",
                         queries.count, " queries");
  const auto m = static_cast<std::size_t>(queries.count);
  std::size_t heads = 0;
  for (std::size_t l = 0; l < reader->count(); ++l) {
    heads += reader->layer(l).heads;
    if (reader->layer(l).heads > 0 && reader->layer(l).value_channels != out.channels) {
      return detail::error(ErrorCode::unsupported, "out: heads of ", out.channels,
                           " channels, while layer ", l, " has values of ",
                           reader->layer(l).value_channels);
    }
  }
  if (!sources.empty() && static_cast<std::int64_t>(heads) != out.heads) {
    return detail::error(ErrorCode::invalid_argument, "out: ", out.heads, " heads for ", heads,
                         " of all layers together");
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
      attention.add(
          std::span(tokens).subspan(at, (std::min)(detail::attended_block, tokens.size() - at)));
    }
    for (std::size_t q = 0; q < m && !tokens.empty(); ++q) {
      for (std::size_t h = 0; h < layer.heads; ++h) {
        const std::size_t row = h * m + q;
        const std::size_t to = q * heads + first + h;
        lse[to] = static_cast<float>(attention.tops[row] + math::log(attention.sums[row]));
        attention.finish(row, channels, outputs.data() + to * channels);
        if (!std::isfinite(lse[to]) ||
            detail::has_non_finite(best_isa(), outputs.data() + to * channels, channels)) {
          return detail::error(ErrorCode::non_finite, "attention: query ", q, " at layer ", l,
                               " head ", h, " gives ", lse[to],
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
KVMELD_LAZY [[nodiscard]] Status attend(const AttentionQueries& queries, const KvCacheRef& cache,
                                        const MutableAttentionState<LseNatural>& out,
                                        std::span<const std::int64_t> positions = {}) {
  const AttendSource source{cache, positions, {}};
  return attend(queries, std::span(&source, 1), out);
}

KVMELD_NAMESPACE_END
