#pragma once

/// The Attention aligner: rows gathered by attention over other fragments, and its gradients.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/detail/attention_rows.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/policies/attention_state.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Over what a softmax of `Attention` runs.
enum class AttentionMode : std::uint8_t {
  exact,  ///< all tokens of all fragments together: what one model would read from all of them
  /// Each fragment by itself, then the mean over fragments: every agent counts alike, however well
  /// it fits.
  per_agent_mean,
};

namespace detail {

/// Turns dots into weights in place, of which those of `range` sum to `share`; −infinity: not
/// there. False: not finite.
[[nodiscard]] inline bool softmax_range(const AttentionSteps& steps, double factor, double share,
                                        std::span<float> range) noexcept {
  float largest = -INFINITY;
  for (const float x : range) largest = x > largest ? x : largest;
  const double top = fma(static_cast<double>(largest), factor, 0.0);
  if (!std::isfinite(top)) return false;
  double total = 0;
  for (std::size_t at = 0; at < range.size(); at += attended_block) {
    const std::size_t n = range.size() - at < attended_block ? range.size() - at : attended_block;
    float dots[attended_block], weights[attended_block];
    for (std::size_t j = 0; j < attended_block; ++j) dots[j] = j < n ? range[at + j] : -INFINITY;
    total += steps.weigh(dots, factor, top, weights);
    for (std::size_t j = 0; j < n; ++j) range[at + j] = weights[j];
  }
  for (float& w : range) w = static_cast<float>(static_cast<double>(w) * share / total);
  return std::isfinite(total);
}

}  // namespace detail

/// Pools all tokens into `count` summary tokens: coordinator queries, given for each layer and KV
/// head, attend over every key of every fragment, and what they read becomes the cache.
///
/// Output token j stands at the j-th free position and has no id. In each layer and head, with w =
/// softmax(q·k · scale / temperature) over the tokens that the layer holds, V = Σ w·v and K = Σ
/// w·(key un-rotated) rotated to the output's position: a weighted mean with
/// `AlignmentGroup::head_weights`, so the fuser is `WeightedMean` (or `Sum`: weights add up to 1).
/// A model reads the result only as well as its queries were chosen; unlike concatenation it keeps
/// no single token. For exact attention whose result is a vector and no token, see `attend`.
///
/// Weights are made when the plan is made, on the host, by the arithmetic of `attend`. O(count ·
/// bytes of keys) time, and count · tokens · heads · layers weights of 4 bytes. No fragments: no
/// output. Reproducible, and blind to the order in which fragments came. A coordinator and pooling
/// of this kind: Perceiver (Jaegle et al. 2021, arXiv:2103.03206), Set Transformer (Lee et al.
/// 2019, arXiv:1810.00825). Errors: those of `attend`; `oversized` beyond 2^31 weights a head;
/// `payload_missing`.
struct Attention {
  static constexpr bool reproducible = true;

  std::shared_ptr<const std::vector<float>> queries{};  ///< (query, layer, KV head, key channel)
  std::int64_t count = 1;                               ///< queries, and so output tokens
  QueryFrame frame = QueryFrame::pre_rope;
  std::vector<std::int64_t> positions{};  ///< (query) of `at_positions`
  float scale = 0.0F;                     ///< 0: 1 / √channels
  float temperature = 1.0F;
  AttentionMode mode = AttentionMode::exact;

  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
                                        std::int64_t first_position) const {
    return align_all(ordered, first_position);
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Attention");
    hasher.value(count);
    hasher.value(frame);
    hasher.value(scale);
    hasher.value(temperature);
    hasher.value(mode);
    hasher.values(std::span<const std::int64_t>(positions));
    hasher.values(queries == nullptr ? std::span<const float>() : std::span<const float>(*queries));
  }

 private:
  [[nodiscard]] Result<Alignment> align_all(std::span<const Source> ordered,
                                            std::int64_t first_position) const {
    const exec::FloatEnvironmentGuard guard;
    if (mode > AttentionMode::per_agent_mean)
      return extend::error(ErrorCode::unknown_field, "Attention: mode ", static_cast<int>(mode),
                           " is none of this build");
    std::vector<std::unique_ptr<FragmentView>> views;
    std::vector<AttendSource> sources;
    std::vector<std::size_t> begin{0};
    for (const Source& source : ordered) {
      // The first span is rendered in its encoding without lead-in, if it has one: weights are made
      // from the keys that are mixed.
      const std::size_t payload = sources.empty() && source.fragment->payloads().size() > 1 ? 1 : 0;
      if (source.fragment->payloads()[payload].bytes == nullptr) {
        return extend::error(ErrorCode::payload_missing,
                             "evicted payloads: ", source.fragment->id().hex(),
                             "; fetch it and plan again");
      }
      views.push_back(std::make_unique<FragmentView>(*source.fragment, payload));
      sources.push_back(
          {views.back()->ref(), source.fragment->payloads()[payload].positions, source.selected});
      begin.push_back(begin.back() + static_cast<std::size_t>(source.selected_count()));
    }
    const std::span<const float> values =
        queries == nullptr ? std::span<const float>() : std::span<const float>(*queries);
    const auto reader =
        detail::AttentionReader::of({values, count, frame, positions, scale, temperature}, sources);
    if (!reader) return reader.error();
    Alignment out;
    AlignmentGroup& group = out.groups.emplace_back();
    const std::size_t n = begin.back();
    if (n == 0) return out;
    const auto m = static_cast<std::size_t>(count);
    if (m > (std::size_t{1} << 31) / n)
      return extend::error(ErrorCode::oversized, "Attention: ", count, " queries over ", n,
                           " tokens");
    for (std::size_t q = 0; q < m; ++q) {
      out.positions.push_back(first_position + static_cast<std::int64_t>(q));
      out.tokens.push_back(-1);
      for (std::uint32_t s = 0; s < ordered.size(); ++s) {
        for (std::int64_t i = 0; i < ordered[s].selected_count(); ++i) {
          group.contributions.push_back(
              {s, static_cast<std::uint32_t>(ordered[s].selected_token(i)), 1.0F});
        }
      }
      group.end_row();
    }
    std::size_t rows = 0;
    for (std::size_t l = 0; l < reader->count(); ++l) rows += reader->layer(l).heads;
    group.head_weights.assign(rows * m * n, -INFINITY);
    float* weights = group.head_weights.data();  // (head, query, token) of the layer
    for (std::size_t l = 0; l < reader->count(); ++l) {
      KVMELD_TRY(weigh_layer(*reader, l, ordered, begin, weights));
      weights += reader->layer(l).heads * m * n;
    }
    return out;
  }

  [[nodiscard]] Status weigh_layer(const detail::AttentionReader& reader, std::size_t l,
                                   std::span<const Source> ordered,
                                   std::span<const std::size_t> begin, float* weights) const {
    const detail::AttentionReader::Layer& layer = reader.layer(l);
    detail::RowsInHand keys(reader, l, 0, static_cast<std::size_t>(count));
    const auto m = static_cast<std::size_t>(count);
    const std::size_t n = begin.back();
    std::vector<detail::AttendedToken> held;
    std::vector<std::span<const std::size_t>> ranges;  // that hold tokens: their begin and end
    for (std::size_t s = 0; s < ordered.size(); ++s) {
      held.clear();
      reader.tokens(l, s, held);
      if (!held.empty()) ranges.push_back(begin.subspan(s, 2));
      const auto stands_at = [&](std::size_t i, std::size_t k) {
        return ordered[s].selected_token(static_cast<std::int64_t>(i - begin[s])) ==
               static_cast<std::int64_t>(held[k].token);
      };
      std::size_t i = begin[s];
      for (std::size_t k = 0, some = 0; k < held.size(); k += some, i += some) {
        while (!stands_at(i, k)) ++i;
        for (some = 1; some < detail::attended_rows && k + some < held.size() &&
                       stands_at(i + some, k + some);)
          ++some;
        keys.take(std::span(held).subspan(k, some), detail::attended_rows);
        for (std::size_t h = 0; h < layer.heads; ++h) {
          const detail::RowParts& rows = keys.head(h);
          keys.dots()(layer.queries.data() + h * m * layer.key_width, m, rows,
                      weights + h * m * n + i, n);
        }
      }
    }
    const bool exact = mode == AttentionMode::exact;
    for (std::size_t r = 0; r < layer.heads * m; ++r) {
      const std::span<float> row(weights + r * n, n);
      bool finite = true;
      if (exact && !ranges.empty())
        finite = detail::softmax_range(keys.steps(), layer.factor, 1.0, row);
      for (std::size_t k = 0; k < ranges.size() && !exact; ++k) {
        const std::size_t first = ranges[k][0];
        finite = detail::softmax_range(keys.steps(), layer.factor,
                                       1.0 / static_cast<double>(ranges.size()),
                                       row.subspan(first, ranges[k][1] - first)) &&
                 finite;
      }
      if (!finite) {
        return extend::error(ErrorCode::non_finite, "Attention: query ", r % m, " at layer ", l,
                             " head ", r / m, ": q·k leaves f32; scale the queries");
      }
      for (float& w : row) w = w > 0.0F ? w : 0.0F;  // what the layer does not hold
    }
    return {};
  }
};

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
/// Memory: what `out` takes, in f64, and, where keys are rotated, a cosine and sine for each
/// position and pair. Errors, with `out` untouched: `invalid_argument` (queries, sizes,
/// selections), `non_finite` (queries, keys or values, logits beyond f32), `unsupported` (latent
/// caches, Hadamard bases, scales apart, value heads of different sizes), `geometry_mismatch`,
/// `token_count_mismatch` (positions), `rope_unsupported`, `rope_length_dependent`, `aliasing`
/// (sums across outputs).
[[nodiscard]] inline Status attend(
    const AttentionQueries& queries, std::span<const AttendSource> sources,
    const attention::MutableAttentionState<attention::LseNatural>& out) {
  const exec::FloatEnvironmentGuard guard;
  KVMELD_TRY(exec::check_float_environment());
  KVMELD_TRY(detail::check_state_size<attention::LseNatural>(out, "out"));
  if (detail::any_overlap(out.outputs, out.lse))
    return extend::error(ErrorCode::aliasing, "out: its ", out.lse.size(),
                         " sums lie across its outputs");
  const auto reader = detail::AttentionReader::of(queries, sources);
  if (!reader) return reader.error();
  if (out.rows != queries.count)
    return extend::error(ErrorCode::invalid_argument, "out: ", out.rows, " rows for ",
                         queries.count, " queries");
  const auto m = static_cast<std::size_t>(queries.count);
  std::size_t heads = 0;
  for (std::size_t l = 0; l < reader->count(); ++l) {
    heads += reader->layer(l).heads;
    if (reader->layer(l).heads > 0 && reader->layer(l).value_channels != out.channels) {
      return extend::error(ErrorCode::unsupported, "out: heads of ", out.channels,
                           " channels, while layer ", l, " has values of ",
                           reader->layer(l).value_channels);
    }
  }
  if (!sources.empty() && static_cast<std::int64_t>(heads) != out.heads) {
    return extend::error(ErrorCode::invalid_argument, "out: ", out.heads, " heads for ", heads,
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
          return extend::error(ErrorCode::non_finite, "attention: query ", q, " at layer ", l,
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
[[nodiscard]] inline Status attend(
    const AttentionQueries& queries, const KvCacheRef& cache,
    const attention::MutableAttentionState<attention::LseNatural>& out,
    std::span<const std::int64_t> positions = {}) {
  const AttendSource source{cache, positions, {}};
  return attend(queries, std::span(&source, 1), out);
}

namespace gradients {

/// One head's pooling, as it was computed, and the cotangents of its results. Contiguous, the
/// caller's memory.
///
/// Keys stand in the queries' frame. Rotation is orthogonal: a caller whose keys are rotated turns
/// gradients back.
template <std::floating_point T>
struct AttentionPullback {
  std::span<const T> queries{};  ///< (query, key channel)
  std::span<const T> keys{};     ///< (token, key channel)
  std::span<const T> values{};   ///< (token, value channel)
  std::size_t key_channels = 0;
  std::size_t value_channels = 0;
  T factor = 1;  ///< logit = q·k · factor
  /// Where each agent's tokens begin, ascending from 0: the mean over agents; empty: exact.
  std::span<const std::size_t> agents{};
  std::span<const T> pooled_values{};  ///< cotangent of Σ w·v (query, value channel)
  std::span<const T> pooled_keys{};    ///< cotangent of Σ w·k (query, key channel); empty: 0
  /// Cotangent of log Σ e^logit (query), exact form only; empty: 0.
  std::span<const T> lse_natural{};
};

/// What comes back: vector-Jacobian products, added to what the memory holds.
template <std::floating_point T>
struct AttentionGradients {
  std::span<T> queries{};  ///< (query, key channel)
  std::span<T> keys{};     ///< (token, key channel)
  std::span<T> values{};   ///< (token, value channel)
};

}  // namespace gradients

namespace detail {

template <class T>
[[nodiscard]] Status check_pullback(const gradients::AttentionPullback<T>& p,
                                    const gradients::AttentionGradients<T>& out,
                                    std::size_t& queries, std::size_t& tokens) {
  if (p.key_channels == 0 || p.value_channels == 0) {
    return error(ErrorCode::invalid_argument, "attention vjp: ", p.key_channels, " key and ",
                 p.value_channels, " value channels");
  }
  queries = p.queries.size() / p.key_channels;
  tokens = p.keys.size() / p.key_channels;
  const auto differs = [](const char* what, std::size_t size, std::size_t wanted) {
    return error(ErrorCode::invalid_argument, "attention vjp: ", what, " holds ", size,
                 " numbers, ", wanted, " fit");
  };
  if (p.queries.size() != queries * p.key_channels)
    return differs("queries", p.queries.size(), queries * p.key_channels);
  if (p.keys.size() != tokens * p.key_channels)
    return differs("keys", p.keys.size(), tokens * p.key_channels);
  if (p.values.size() != tokens * p.value_channels)
    return differs("values", p.values.size(), tokens * p.value_channels);
  if (p.pooled_values.size() != queries * p.value_channels)
    return differs("pooled_values", p.pooled_values.size(), queries * p.value_channels);
  if (!p.pooled_keys.empty() && p.pooled_keys.size() != p.queries.size())
    return differs("pooled_keys", p.pooled_keys.size(), p.queries.size());
  if (!p.lse_natural.empty() && p.lse_natural.size() != queries)
    return differs("lse_natural", p.lse_natural.size(), queries);
  if (out.queries.size() != p.queries.size())
    return differs("the gradient of queries", out.queries.size(), p.queries.size());
  if (out.keys.size() != p.keys.size())
    return differs("the gradient of keys", out.keys.size(), p.keys.size());
  if (out.values.size() != p.values.size())
    return differs("the gradient of values", out.values.size(), p.values.size());
  if (!p.agents.empty() && !p.lse_natural.empty()) {
    return error(ErrorCode::unsupported, "attention vjp: the mean over ", p.agents.size(),
                 " agents has no log-sum-exp");
  }
  for (std::size_t a = 0; a < p.agents.size(); ++a) {
    if ((a == 0 && p.agents[a] != 0) || (a > 0 && p.agents[a] < p.agents[a - 1]) ||
        p.agents[a] > tokens) {
      return error(ErrorCode::invalid_argument, "attention vjp: agent ", a, " begins at token ",
                   p.agents[a], " of ", tokens, "; begins ascend from 0");
    }
  }
  if (!std::isfinite(p.factor))
    return error(ErrorCode::non_finite, "attention vjp: the factor is ", p.factor);
  return {};
}

template <class T>
[[nodiscard]] T dot_in_order(const T* a, const T* b, std::size_t n) noexcept {
  T sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum = fma(a[i], b[i], sum);
  return sum;
}
template <class T>
void add_scaled(T* to, T scale, const T* from, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) to[i] = fma(scale, from[i], to[i]);
}

}  // namespace detail

namespace gradients {

/// Vector-Jacobian products of attention pooling with respect to queries, keys and values, of one
/// head.
///
/// With w = softmax over the tokens (or over each agent's, divided by the number of agents that
/// have tokens), g = v·V̄ + k·K̄ and s a softmax: d logit = w (g − Σ s g) + w·lse̅; q̄ = factor Σ
/// d·k; k̄ = factor Σ d·q + Σ w·K̄; v̄ = Σ w·V̄. Sums in order, exponentials in f64, nothing stored
/// but one query's weights: O(queries · tokens · channels). T is f32 or f64; f64 is what trainers
/// should take. Errors, with the gradients untouched: `invalid_argument` (sizes), `unsupported`
/// (log-sum-exp of a mean), `non_finite` (factor).
template <std::floating_point T>
[[nodiscard]] Status attention_vjp(const gradients::AttentionPullback<T>& p,
                                   const gradients::AttentionGradients<T>& out) {
  std::size_t queries = 0, tokens = 0;
  KVMELD_TRY(detail::check_pullback(p, out, queries, tokens));
  const std::size_t d = p.key_channels, e = p.value_channels;
  const std::size_t whole[] = {0};
  const std::span<const std::size_t> begins =
      p.agents.empty() ? std::span<const std::size_t>(whole) : p.agents;
  const auto end_of = [&](std::size_t a) { return a + 1 < begins.size() ? begins[a + 1] : tokens; };
  std::size_t speakers = 0;
  for (std::size_t a = 0; a < begins.size(); ++a)
    speakers += end_of(a) > begins[a] ? std::size_t{1} : std::size_t{0};
  std::vector<double> mass(tokens);
  std::vector<T> pull(tokens);
  for (std::size_t q = 0; q < queries; ++q) {
    const T* const query = p.queries.data() + q * d;
    const T* const to_values = p.pooled_values.data() + q * e;
    const T* const to_keys = p.pooled_keys.empty() ? nullptr : p.pooled_keys.data() + q * d;
    for (std::size_t a = 0; a < begins.size(); ++a) {
      const std::size_t first = begins[a], last = end_of(a);
      double top = -static_cast<double>(INFINITY), total = 0;
      for (std::size_t t = first; t < last; ++t) {
        mass[t] = static_cast<double>(detail::dot_in_order(query, p.keys.data() + t * d, d)) *
                  static_cast<double>(p.factor);
        top = mass[t] > top ? mass[t] : top;
      }
      for (std::size_t t = first; t < last; ++t) {
        mass[t] = math::exp(mass[t] - top);
        total += mass[t];
      }
      double mean = 0;
      for (std::size_t t = first; t < last; ++t) {
        mass[t] = mass[t] / total;
        pull[t] = detail::dot_in_order(to_values, p.values.data() + t * e, e);
        if (to_keys != nullptr) pull[t] += detail::dot_in_order(to_keys, p.keys.data() + t * d, d);
        mean = fma(mass[t], static_cast<double>(pull[t]), mean);
      }
      for (std::size_t t = first; t < last; ++t) {
        const double w = mass[t] / static_cast<double>(speakers);
        double logit = w * (static_cast<double>(pull[t]) - mean);
        if (!p.lse_natural.empty()) logit = fma(w, static_cast<double>(p.lse_natural[q]), logit);
        const T step = static_cast<T>(logit * static_cast<double>(p.factor));
        detail::add_scaled(out.queries.data() + q * d, step, p.keys.data() + t * d, d);
        detail::add_scaled(out.keys.data() + t * d, step, query, d);
        if (to_keys != nullptr)
          detail::add_scaled(out.keys.data() + t * d, static_cast<T>(w), to_keys, d);
        detail::add_scaled(out.values.data() + t * e, static_cast<T>(w), to_values, e);
      }
    }
  }
  return {};
}

}  // namespace gradients

KVMELD_NAMESPACE_END
