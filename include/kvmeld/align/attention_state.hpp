#pragma once

/// Attention over parts of a context, and how parts become the whole: outputs with their
/// log-sum-exp.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvmeld/align/attention_state_merge.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec/row_work.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/float_environment.hpp>

KVMELD_NAMESPACE_BEGIN

/// What queries saw in one part of a context, over memory that the caller owns. Contiguous.
///
/// `outputs` are softmax-weighted values of that part alone; `lse` the logarithm of the sum of
/// e^logit over it. The base of the logarithm is part of the type: a kernel that works in base 2
/// (FlashInfer, many others) and one that works in base e differ by a factor of 1.44, which nothing
/// in the numbers shows. A part without tokens is (0, −infinity), whatever its outputs hold.
template <LseBase Base>
struct AttentionState {
  std::span<const float> outputs{};  ///< (row, head, channel)
  std::span<const float> lse{};      ///< (row, head)
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t channels = 0;
};

/// The same where it may be written.
template <LseBase Base>
struct MutableAttentionState {
  std::span<float> outputs{};  ///< (row, head, channel)
  std::span<float> lse{};      ///< (row, head)
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t channels = 0;

  // NOLINT: implicit on purpose
  [[nodiscard]] operator AttentionState<Base>() const noexcept {
    return {outputs, lse, rows, heads, channels};
  }
};

namespace detail {

/// Sizes that fit each other, and numbers from which a merge can be made.
template <LseBase Base>
[[nodiscard]] Status check_state_size(const AttentionState<Base>& state, const char* name) {
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
template <LseBase Base>
[[nodiscard]] Status check_state_numbers(const AttentionState<Base>& state, const char* name) {
  const std::int64_t bad =
      first_bad_row(state.outputs.data(), state.lse.data(),
                    static_cast<std::int64_t>(state.lse.size()), state.channels);
  if (bad < 0) return {};
  return error(ErrorCode::non_finite, name, ": row ", bad / state.heads, " head ",
               bad % state.heads, " holds NaN or infinity (log-sum-exp ",
               state.lse[static_cast<std::size_t>(bad)], "); an empty part is minus infinity");
}
template <LseBase Base>
[[nodiscard]] Status check_state_pair(const AttentionState<Base>& state, const char* name,
                                      const MutableAttentionState<Base>& out) {
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
template <ExecutionPolicy E, LseBase Base>
[[nodiscard]] Status merge_attention_states(const E& exec, AttentionState<Base> a,
                                            std::type_identity_t<AttentionState<Base>> b,
                                            std::type_identity_t<MutableAttentionState<Base>> out) {
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
template <LseBase Base>
[[nodiscard]] Status merge_attention_states(AttentionState<Base> a,
                                            std::type_identity_t<AttentionState<Base>> b,
                                            std::type_identity_t<MutableAttentionState<Base>> out) {
  const AttentionState<Base> both[] = {a, b};
  return merge_attention_states<Base>(std::span<const AttentionState<Base>>(both), out);
}
template <LseBase Base>
[[nodiscard]] Status merge_attention_states(MutableAttentionState<Base> a,
                                            std::type_identity_t<AttentionState<Base>> b,
                                            std::type_identity_t<MutableAttentionState<Base>> out) {
  return merge_attention_states<Base>(AttentionState<Base>(a), b, out);
}

/// Attention over any number of parts as if they were one, in one pass; of two, the bytes of the
/// form above; of none, the empty state.
///
/// Weights are taken against the sum over all parts, so n parts cost one rounding of each weight
/// and n − 1 additions: within (n + 2) · 2^-24 · M of the exact merge of the given states. Sums in
/// the order of `states`. Errors as above.
template <LseBase Base>
[[nodiscard]] Status merge_attention_states(std::span<const AttentionState<Base>> states,
                                            std::type_identity_t<MutableAttentionState<Base>> out) {
  const FloatEnvironmentGuard guard;
  KVMELD_TRY(detail::check_state_size<Base>(out, "out"));
  std::vector<detail::StateRows> rows;
  rows.reserve(states.size());
  for (std::size_t i = 0; i < states.size(); ++i) {
    const std::string name = "state " + detail::decimal(i);
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
template <LseBase To, LseBase From>
[[nodiscard]] Result<AttentionState<To>> convert_lse(const AttentionState<From>& state,
                                                     std::span<float> lse) {
  KVMELD_TRY(detail::check_state_size(state, "state"));
  if (lse.size() != state.lse.size())
    return detail::error(ErrorCode::invalid_argument, "room for ", lse.size(), " sums of ",
                         state.lse.size());
  if (detail::partly_overlap(state.lse, lse))
    return detail::error(ErrorCode::aliasing, "the ", lse.size(),
                         " sums of the result lie across the state's");
  const FloatEnvironmentGuard guard;
  const auto converted = [&](std::size_t i) {
    return static_cast<float>(static_cast<double>(state.lse[i]) * (From::natural / To::natural));
  };
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const float from = state.lse[i], to = converted(i);
    const bool empty = from == -__builtin_huge_valf();
    if (empty || (to > -__builtin_huge_valf() && to < __builtin_huge_valf())) continue;
    return detail::error(ErrorCode::non_finite, "sum ", i, " is ", from, ", which is ", to,
                         " in the other base");
  }
  for (std::size_t i = 0; i < lse.size(); ++i) lse[i] = converted(i);
  return AttentionState<To>{state.outputs, lse, state.rows, state.heads, state.channels};
}

KVMELD_NAMESPACE_END
