#pragma once

/// Attention states, their merge by log-sum-exp, and the queries that produce them.

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Whether any of `n` floats is NaN or infinite.
KVMELD_ALWAYS_INLINE bool non_finite_body(const float* x, std::size_t n) noexcept {
  std::uint32_t found[16] = {};
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (std::size_t j = 0; j < 16; ++j)
      found[j] |=
          (__builtin_bit_cast(std::uint32_t, x[i + j]) & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
  }
  for (; i < n; ++i)
    found[0] |= (__builtin_bit_cast(std::uint32_t, x[i]) & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
  for (std::size_t j = 1; j < 16; ++j) found[0] |= found[j];
  return found[0] != 0;
}
KVMELD_NOINLINE inline bool non_finite_baseline(const float* x, std::size_t n) noexcept {
  return non_finite_body(x, n);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline bool non_finite_avx2(const float* x,
                                                               std::size_t n) noexcept {
  return non_finite_body(x, n);
}
[[nodiscard]] inline bool has_non_finite(Isa isa, const float* x, std::size_t n) noexcept {
  return isa == Isa::baseline ? non_finite_baseline(x, n) : non_finite_avx2(x, n);
}

}  // namespace detail

// The arithmetic of merging attention states: the expression, its lane form, its rows on hosts.

namespace attention {

/// The log-sum-exp of a state is a natural logarithm.
struct LseNatural {
  static constexpr double natural = 1.0;  ///< natural logarithms in one of these
};

/// The log-sum-exp of a state is a logarithm to base 2, as kernels that use `exp2` give it.
struct LseBase2 {
  static constexpr double natural = 0x1.62e42fefa39efp-1;  // ln 2
};

/// The base of a state's logarithm: e or 2.
template <class B>
concept LseBase = std::same_as<B, attention::LseNatural> || std::same_as<B, attention::LseBase2>;

/// How two states of one (row, head) make one. A weight of 0 leaves its part out, whatever that
/// part's outputs hold.
struct LseMerge {
  float weight_a = 0;
  float weight_b = 0;
  float lse = 0;
};

/// Softmax of two log-sum-exps, and their own: max() is taken apart from −infinity, where the
/// difference would be NaN.
template <attention::LseBase Base>
[[nodiscard]] KVMELD_HD inline attention::LseMerge merge_lse(float a, float b) noexcept {
  const float top = a > b ? a : b;
  if (!(top > -__builtin_huge_valf())) return {0.0F, 0.0F, top};  // empty and empty is empty
  const double ea = math::exp((static_cast<double>(a) - static_cast<double>(top)) * Base::natural);
  const double eb = math::exp((static_cast<double>(b) - static_cast<double>(top)) * Base::natural);
  const double total = ea + eb;
  return {static_cast<float>(ea / total), static_cast<float>(eb / total),
          static_cast<float>(static_cast<double>(top) + math::log(total) / Base::natural)};
}

/// One channel of the merged output. Products are rounded before they meet, so that the order of a
/// and b leaves no trace.
[[nodiscard]] KVMELD_HD inline float merge_outputs(const attention::LseMerge& merge, float a,
                                                   float b) noexcept {
  if (merge.weight_b == 0.0F) return merge.weight_a == 0.0F ? 0.0F : a;
  if (merge.weight_a == 0.0F) return b;
  return fma(merge.weight_a, a, 0.0F) + fma(merge.weight_b, b, 0.0F);
}

}  // namespace attention

namespace detail {

/// A state without its sizes.
struct StateRows {
  const float* outputs = nullptr;  // (row · head, channel)
  const float* lse = nullptr;      // (row · head)
};

/// Merges two states, one (row, head) a row. Models `RowWork`: what `lse` holds is read before any
/// lane writes, so that the output may be an input.
template <attention::LseBase Base>
struct MergeStatesWork {
  using State = attention::LseMerge;

  StateRows a, b;
  float* outputs = nullptr;
  float* lse = nullptr;
  std::int64_t channels = 0;

  [[nodiscard]] KVMELD_HD attention::LseMerge partial(std::int64_t row, int lane) const noexcept {
    return lane == 0 ? attention::merge_lse<Base>(a.lse[row], b.lse[row])
                     : attention::LseMerge{0.0F, 0.0F, -__builtin_huge_valf()};
  }
  [[nodiscard]] KVMELD_HD static attention::LseMerge join(attention::LseMerge x,
                                                          attention::LseMerge y) noexcept {
    return x.weight_a + x.weight_b > 0.0F ? x : y;
  }
  KVMELD_HD void finish(std::int64_t row, int lane, attention::LseMerge merge) const noexcept {
    for (std::int64_t c = row * channels + lane; c < (row + 1) * channels; c += lanes_per_row)
      outputs[c] = merge_outputs(merge, a.outputs[c], b.outputs[c]);
    if (lane == 0) lse[row] = merge.lse;
  }
};

/// Whether `size` is a · b · c, none of which is negative or above 2^48.
[[nodiscard]] inline bool equals_product(std::size_t size, std::int64_t a, std::int64_t b,
                                         std::int64_t c) noexcept {
  std::size_t product = 0;
  if (__builtin_mul_overflow(static_cast<std::size_t>(a), static_cast<std::size_t>(b), &product))
    return false;
  return !__builtin_mul_overflow(product, static_cast<std::size_t>(c), &product) && product == size;
}

[[nodiscard]] inline bool any_overlap(std::span<const float> a, std::span<const float> b) noexcept {
  const auto x = reinterpret_cast<std::uintptr_t>(a.data()),
             y = reinterpret_cast<std::uintptr_t>(b.data());
  return !a.empty() && !b.empty() && x < y + b.size_bytes() && y < x + a.size_bytes();
}
[[nodiscard]] inline bool partly_overlap(std::span<const float> a,
                                         std::span<const float> b) noexcept {
  return a.data() != b.data() && any_overlap(a, b);
}

/// The first (row, head) whose sum is NaN or +infinity, or that is not empty and whose outputs are
/// not finite; −1: none is.
[[nodiscard]] inline std::int64_t first_bad_row(const float* outputs, const float* lse,
                                                std::int64_t rows, std::int64_t channels) noexcept {
  const Isa isa = best_isa();
  for (std::int64_t r = 0; r < rows; ++r) {
    if (!(lse[r] < __builtin_huge_valf())) return r;
    if (lse[r] > -__builtin_huge_valf() &&
        has_non_finite(isa, outputs + r * channels, static_cast<std::size_t>(channels)))
      return r;
  }
  return -1;
}

/// Weights of all states in one (row, head), and the log-sum-exp of all: of two, the bits of
/// `merge_lse`.
template <attention::LseBase Base>
[[nodiscard]] float state_weights(std::span<const StateRows> states, std::size_t row,
                                  std::span<float> weights) noexcept {
  float top = -__builtin_huge_valf();
  for (const StateRows& s : states) top = s.lse[row] > top ? s.lse[row] : top;
  double total = 0;
  const auto mass = [&](const StateRows& s) {
    return math::exp((static_cast<double>(s.lse[row]) - static_cast<double>(top)) * Base::natural);
  };
  if (!(top > -__builtin_huge_valf())) {
    for (float& w : weights) w = 0.0F;
    return top;
  }
  for (const StateRows& s : states) total += mass(s);
  for (std::size_t i = 0; i < states.size(); ++i)
    weights[i] = static_cast<float>(mass(states[i]) / total);
  return static_cast<float>(static_cast<double>(top) + math::log(total) / Base::natural);
}

/// out[row] = Σ weight · outputs[row], states in order, in blocks that are read before they are
/// written.
KVMELD_ALWAYS_INLINE void merge_row_body(std::span<const StateRows> states,
                                         std::span<const float> weights, std::size_t row,
                                         std::size_t channels, float* out) noexcept {
  constexpr std::size_t block = 32;
  std::size_t used = 0;
  for (const float w : weights) used += w != 0.0F ? 1 : 0;
  for (std::size_t at = 0; at < channels; at += block) {
    const std::size_t n = channels - at < block ? channels - at : block;
    float acc[block] = {};
    bool started = false;
    for (std::size_t i = 0; i < states.size(); ++i) {
      const float w = weights[i];
      const float* const in = states[i].outputs + row * channels + at;
      if (w == 0.0F) continue;
      if (used == 1) {  // the identity, to the bit
        for (std::size_t c = 0; c < n; ++c) acc[c] = in[c];
        break;
      }
      if (n == block) {
        float product[block];
        for (std::size_t c = 0; c < block; ++c) product[c] = fma(w, in[c], 0.0F);
        for (std::size_t c = 0; c < block; ++c) acc[c] = started ? acc[c] + product[c] : product[c];
      } else {
        for (std::size_t c = 0; c < n; ++c) {
          const float product = fma(w, in[c], 0.0F);
          acc[c] = started ? acc[c] + product : product;
        }
      }
      started = true;
    }
    for (std::size_t c = 0; c < n; ++c) out[row * channels + at + c] = acc[c];
  }
}
KVMELD_NOINLINE inline void merge_row_baseline(std::span<const StateRows> states,
                                               std::span<const float> weights, std::size_t row,
                                               std::size_t channels, float* out) noexcept {
  merge_row_body(states, weights, row, channels, out);
}
KVMELD_TARGET_AVX2 KVMELD_NOINLINE inline void merge_row_avx2(std::span<const StateRows> states,
                                                              std::span<const float> weights,
                                                              std::size_t row, std::size_t channels,
                                                              float* out) noexcept {
  merge_row_body(states, weights, row, channels, out);
}
inline void merge_row(Isa isa, std::span<const StateRows> states, std::span<const float> weights,
                      std::size_t row, std::size_t channels, float* out) noexcept {
  isa == Isa::baseline ? merge_row_baseline(states, weights, row, channels, out)
                       : merge_row_avx2(states, weights, row, channels, out);
}

}  // namespace detail

// Attention over parts of a context, and how parts become the whole: outputs with their
// log-sum-exp.

namespace attention {

/// What queries saw in one part of a context, over memory that the caller owns. Contiguous.
///
/// `outputs` are softmax-weighted values of that part alone; `lse` the logarithm of the sum of
/// e^logit over it. The base of the logarithm is part of the type: a kernel that works in base 2
/// (FlashInfer, many others) and one that works in base e differ by a factor of 1.44, which nothing
/// in the numbers shows. A part without tokens is (0, −infinity), whatever its outputs hold.
template <attention::LseBase Base>
struct AttentionState {
  std::span<const float> outputs{};  ///< (row, head, channel)
  std::span<const float> lse{};      ///< (row, head)
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t channels = 0;
};

/// The same where it may be written.
template <attention::LseBase Base>
struct MutableAttentionState {
  std::span<float> outputs{};  ///< (row, head, channel)
  std::span<float> lse{};      ///< (row, head)
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t channels = 0;

  // NOLINT: implicit on purpose
  [[nodiscard]] operator attention::AttentionState<Base>() const noexcept {
    return {outputs, lse, rows, heads, channels};
  }
};

}  // namespace attention

namespace detail {

/// Sizes that fit each other, and numbers from which a merge can be made.
template <attention::LseBase Base>
[[nodiscard]] Status check_state_size(const attention::AttentionState<Base>& state,
                                      const char* name) {
  constexpr std::int64_t most = std::int64_t{1} << 48;
  const bool sane = state.rows >= 0 && state.heads >= 0 && state.channels >= 0 &&
                    state.rows <= most && state.heads <= most && state.channels <= most;
  if (!sane)
    return error(ErrorCode::invalid_argument, name, ": ", state.rows, " rows, ", state.heads,
                 " heads, ", state.channels, " channels");
  if (!equals_product(state.lse.size(), state.rows, state.heads, 1)) {
    return error(ErrorCode::invalid_argument, name, ": ", state.lse.size(), " sums for ",
                 state.rows, " rows of ", state.heads, " heads");
  }
  if (!equals_product(state.outputs.size(), state.rows, state.heads, state.channels)) {
    return error(ErrorCode::invalid_argument, name, ": ", state.outputs.size(), " outputs for ",
                 state.rows, " rows of ", state.heads, " heads of ", state.channels, " channels");
  }
  return {};
}
template <attention::LseBase Base>
[[nodiscard]] Status check_state_numbers(const attention::AttentionState<Base>& state,
                                         const char* name) {
  const std::int64_t bad =
      first_bad_row(state.outputs.data(), state.lse.data(),
                    static_cast<std::int64_t>(state.lse.size()), state.channels);
  if (bad < 0) return {};
  return error(ErrorCode::non_finite, name, ": row ", bad / state.heads, " head ",
               bad % state.heads, " holds NaN or infinity (log-sum-exp ",
               state.lse[static_cast<std::size_t>(bad)], "); an empty part is minus infinity");
}
template <attention::LseBase Base>
[[nodiscard]] Status check_state_pair(const attention::AttentionState<Base>& state,
                                      const char* name,
                                      const attention::MutableAttentionState<Base>& out) {
  KVMELD_TRY(check_state_size(state, name));
  if (state.rows != out.rows || state.heads != out.heads || state.channels != out.channels) {
    return error(ErrorCode::invalid_argument, name, ": (", state.rows, ", ", state.heads, ", ",
                 state.channels, ") does not fit an output of (", out.rows, ", ", out.heads, ", ",
                 out.channels, ")");
  }
  const bool clash = partly_overlap(state.outputs, out.outputs) ||
                     partly_overlap(state.lse, out.lse) || any_overlap(state.outputs, out.lse) ||
                     any_overlap(state.lse, out.outputs);
  if (clash)
    return error(ErrorCode::aliasing, name, ": its ", state.outputs.size(),
                 " outputs or sums lie across those of the result; be it, or lie apart");
  return {};
}

}  // namespace detail

namespace attention {

/// Attention over two parts as if they were one: the softmax of their log-sum-exps weighs their
/// outputs (Ye et al. 2024, Cascade Inference; Juravsky et al. 2024, Hydragen, arXiv:2402.05099).
///
/// Commutative to the bit. The empty state is the identity to the bit, also with itself.
/// Associative within (12 + L) · 2^-24 · M an output and 4 L · 2^-24 a log-sum-exp, where M is the
/// largest output and L − 1 the largest natural log-sum-exp by magnitude. Logarithms and
/// exponentials are the library's own, in f64: equal bytes on every backend. `out` may be `a` or
/// `b`. One pass over the outputs after one that checks them; where `exec` is a device, spans are
/// device memory, numbers are not checked, and the call returns once the work is enqueued. Errors,
/// with `out` untouched: `invalid_argument` (sizes), `non_finite`, `aliasing`.
template <ExecutionPolicy E, attention::LseBase Base>
[[nodiscard]] Status merge_attention_states(
    const E& exec, attention::AttentionState<Base> a,
    std::type_identity_t<attention::AttentionState<Base>> b,
    std::type_identity_t<attention::MutableAttentionState<Base>> out) {
  KVMELD_TRY(detail::check_state_size<Base>(out, "out"));
  KVMELD_TRY(detail::check_state_pair(a, "a", out));
  KVMELD_TRY(detail::check_state_pair(b, "b", out));
  if constexpr (!E::on_device) {
    KVMELD_TRY(detail::check_state_numbers(a, "a"));
    KVMELD_TRY(detail::check_state_numbers(b, "b"));
  }
  const auto rows = static_cast<std::int64_t>(out.lse.size());
  if (rows == 0) return {};
  return exec.bulk(rows, detail::MergeStatesWork<Base>{{a.outputs.data(), a.lse.data()},
                                                       {b.outputs.data(), b.lse.data()},
                                                       out.outputs.data(),
                                                       out.lse.data(),
                                                       out.channels});
}

/// The same in the calling thread. A state of another base does not fit: `convert_lse` says so and
/// does it.
template <attention::LseBase Base>
[[nodiscard]] Status merge_attention_states(
    attention::AttentionState<Base> a, std::type_identity_t<attention::AttentionState<Base>> b,
    std::type_identity_t<attention::MutableAttentionState<Base>> out) {
  const attention::AttentionState<Base> both[] = {a, b};
  return merge_attention_states<Base>(std::span<const attention::AttentionState<Base>>(both), out);
}

template <attention::LseBase Base>
[[nodiscard]] Status merge_attention_states(
    attention::MutableAttentionState<Base> a,
    std::type_identity_t<attention::AttentionState<Base>> b,
    std::type_identity_t<attention::MutableAttentionState<Base>> out) {
  return merge_attention_states<Base>(attention::AttentionState<Base>(a), b, out);
}

/// Attention over any number of parts as if they were one, in one pass; of two, the bytes of the
/// form above; of none, the empty state.
///
/// Weights are taken against the sum over all parts, so n parts cost one rounding of each weight
/// and n − 1 additions: within (n + 2) · 2^-24 · M of the exact merge of the given states. Sums in
/// the order of `states`. Errors as above.
template <attention::LseBase Base>
[[nodiscard]] Status merge_attention_states(
    std::span<const attention::AttentionState<Base>> states,
    std::type_identity_t<attention::MutableAttentionState<Base>> out) {
  const exec::FloatEnvironmentGuard guard;
  KVMELD_TRY(detail::check_state_size<Base>(out, "out"));
  std::vector<detail::StateRows> rows;
  rows.reserve(states.size());
  for (std::size_t i = 0; i < states.size(); ++i) {
    const std::string name = "state " + extend::decimal(i);
    KVMELD_TRY(detail::check_state_pair(states[i], name.c_str(), out));
    KVMELD_TRY(detail::check_state_numbers(states[i], name.c_str()));
    rows.push_back({states[i].outputs.data(), states[i].lse.data()});
  }
  std::vector<float> weights(rows.size());
  for (std::size_t row = 0; row < out.lse.size(); ++row) {
    const float lse = detail::state_weights<Base>(rows, row, weights);
    detail::merge_row(best_isa(), rows, weights, row, static_cast<std::size_t>(out.channels),
                      out.outputs.data());
    out.lse[row] = lse;
  }
  return {};
}

/// The same state with its log-sum-exp to another base: the only way from one to the other.
///
/// @param lse memory of the result's sums, as many as `state` has; may be the memory of the state's
/// own. The result shares the state's outputs. One rounding a sum. Errors, with `lse` untouched:
/// `invalid_argument` (sizes), `non_finite` (also a sum that is finite in its own base only, beyond
/// 2.3e38 natural), `aliasing` (neither the same nor apart).
template <attention::LseBase To, attention::LseBase From>
[[nodiscard]] Result<attention::AttentionState<To>> convert_lse(
    const attention::AttentionState<From>& state, std::span<float> lse) {
  KVMELD_TRY(detail::check_state_size(state, "state"));
  if (lse.size() != state.lse.size())
    return extend::error(ErrorCode::invalid_argument, "room for ", lse.size(), " sums of ",
                         state.lse.size());
  if (detail::partly_overlap(state.lse, lse))
    return extend::error(ErrorCode::aliasing, "the ", lse.size(),
                         " sums of the result lie across the state's");
  const exec::FloatEnvironmentGuard guard;
  const auto converted = [&](std::size_t i) {
    return static_cast<float>(static_cast<double>(state.lse[i]) * (From::natural / To::natural));
  };
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const float from = state.lse[i], to = converted(i);
    const bool empty = from == -__builtin_huge_valf();
    if (empty || (to > -__builtin_huge_valf() && to < __builtin_huge_valf())) continue;
    return extend::error(ErrorCode::non_finite, "sum ", i, " is ", from, ", which is ", to,
                         " in the other base");
  }
  for (std::size_t i = 0; i < lse.size(); ++i) lse[i] = converted(i);
  return attention::AttentionState<To>{state.outputs, lse, state.rows, state.heads, state.channels};
}

}  // namespace attention

/// Where queries and keys meet. A key's position is that of its source, wherever a render puts its
/// token afterwards: so each agent's part can be computed by itself, and merged.
enum class QueryFrame : std::uint8_t {
  pre_rope,  ///< un-rotated queries meet un-rotated keys: content alone decides, position does not
  /// Queries carry their position, as an engine computed them, and meet keys where their sources
  /// have them.
  post_rope,
  /// Un-rotated queries are rotated to their stated positions, and then as `post_rope`.
  at_positions,
};

/// Coordinator queries: `count` for each layer and KV head, over memory that the caller owns.
struct AttentionQueries {
  std::span<const float> values{};  ///< (query, layer, KV head, key channel)
  std::int64_t count = 0;
  QueryFrame frame = QueryFrame::pre_rope;
  std::span<const std::int64_t> positions{};  ///< (query) of `at_positions`
  float scale = 0.0F;        ///< logit = q·k · scale / temperature; 0: 1 / √channels
  float temperature = 1.0F;  ///< > 0
};

/// One cache that queries attend over.
struct AttendSource {
  KvCacheRef cache{};
  /// (token) of the cache's keys, in any order, each in [0, `max_position`]; used only where keys
  /// have to be rotated.
  std::span<const std::int64_t> positions{};
  TokenSet selected{};  ///< which of them take part; those that a layer does not hold do not, in
                        ///< that layer
};

namespace detail {

/// Refuses parameters that mean nothing.
inline Status check_queries(const AttentionQueries& queries) {
  if (queries.frame > QueryFrame::at_positions) {
    return error(ErrorCode::unknown_field, "attention: query frame ",
                 static_cast<int>(queries.frame), " is none that this build knows");
  }
  if (queries.count <= 0)
    return error(ErrorCode::invalid_argument, "attention: ", queries.count,
                 " queries; give one at least");
  const std::size_t placed =
      queries.frame == QueryFrame::at_positions ? static_cast<std::size_t>(queries.count) : 0;
  if (queries.positions.size() != placed) {
    return error(ErrorCode::invalid_argument, "attention: ", queries.positions.size(),
                 " positions for ", queries.count,
                 " queries; the frame at_positions takes one each, other frames none");
  }
  if (!(queries.scale >= 0.0F && queries.scale < 1e30F) ||
      !(queries.temperature > 1e-30F && queries.temperature < 1e30F)) {
    return error(ErrorCode::invalid_argument, "attention: scale ", queries.scale,
                 " and temperature ", queries.temperature,
                 "; the scale is at least 0 (0: 1 / sqrt(channels)), the temperature above 0");
  }
  return {};
}
/// Refuses queries that are not `width` finite numbers each.
inline Status check_query_numbers(const AttentionQueries& queries, std::size_t width) {
  if (queries.values.size() / static_cast<std::size_t>(queries.count) != width ||
      queries.values.size() % static_cast<std::size_t>(queries.count) != 0) {
    return error(ErrorCode::invalid_argument, "attention: ", queries.values.size(), " numbers for ",
                 queries.count, " queries; this model takes ", width,
                 " for each (layer, KV head, channel)");
  }
  if (!has_non_finite(best_isa(), queries.values.data(), queries.values.size())) return {};
  for (std::size_t i = 0; i < queries.values.size(); ++i) {
    if (!std::isfinite(queries.values[i])) {
      return error(ErrorCode::non_finite, "attention: query ", i / width,
                   " holds NaN or infinity at number ", i % width, " of ", width);
    }
  }
  return {};
}
/// Refuses caches of another model than the first, selections that do not ascend, and positions out
/// of range.
inline Status check_attended_source(std::span<const AttendSource> sources, std::size_t s) {
  const AttendSource& source = sources[s];
  if (!source.cache.valid())
    return error(ErrorCode::invalid_argument, "attention: cache ", s, " of ", sources.size(),
                 " has no geometry");
  KVMELD_TRY(check_on_host(source.cache, "attention"));
  const KvCacheRef& first = sources[0].cache;
  if (source.cache.shared_geometry() != first.shared_geometry())
    KVMELD_TRY(check_same(source.cache.geometry(), first.geometry()));
  std::int64_t last = -1;
  for (const std::int32_t t : source.selected.all
                                  ? std::span<const std::int32_t>()
                                  : std::span<const std::int32_t>(source.selected.present)) {
    if (t <= last || t >= source.cache.tokens()) {
      return error(ErrorCode::invalid_argument, "attention: cache ", s, " of ",
                   source.cache.tokens(), " tokens: token ", t, " is named behind token ", last);
    }
    last = t;
  }
  for (std::size_t t = 0; t < source.positions.size(); ++t) {
    if (source.positions[t] >= 0 && source.positions[t] <= max_position) continue;
    return error(ErrorCode::invalid_argument, "attention: cache ", s, ": position ",
                 source.positions[t], " of token ", t, " is not in [0, ", max_position, "]");
  }
  return {};
}
/// Refuses layers that queries cannot meet, or whose rows are not numbers as they lie.
inline Status check_attended_layer(const LayerShape& layer, std::size_t l) {
  if (layer.planes.empty()) return {};
  for (const PlaneShape& shape : layer.planes) {
    if (shape.plane == Plane::latent || shape.plane == Plane::rope_part) {
      return error(ErrorCode::unsupported, "attention: layer ", l, " is latent (MLA), ",
                   shape.channels,
                   " channels for all heads; queries meet it only through the model's "
                   "up-projection: expand keys and values first");
    }
    if (shape.hadamard != 0 || shape.scales != ScaleScheme::none) {
      return error(ErrorCode::unsupported, "attention: layer ", l, " keeps plane ", shape.plane,
                   " in a Hadamard basis of ", shape.hadamard,
                   " or with scales apart; seal it as f16 or q8_0 in the model's own basis");
    }
  }
  if (layer.planes.size() != 2 || layer.planes[0].plane != Plane::key ||
      layer.planes[1].plane != Plane::value || layer.planes[0].heads != layer.planes[1].heads) {
    return error(ErrorCode::unsupported, "attention: layer ", l, " has ", layer.planes.size(),
                 " planes; it takes keys and values of equal head count");
  }
  if (layer.planes[0].channels <= 0 || layer.planes[1].channels <= 0) {
    return error(ErrorCode::invalid_argument, "attention: layer ", l, " has heads of ",
                 layer.planes[0].channels, " key and ", layer.planes[1].channels,
                 " value channels");
  }
  return {};
}

}  // namespace detail

KVMELD_NAMESPACE_END
