#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// Reduces the contributions of one output row, channel by channel, as a fold.
///
/// `init()` starts an accumulator; `absorb(acc, value, weight)` takes one contribution; `join(a, b)` merges accumulators of
/// different chunks; `finish(acc, total_weight, count)` yields the channel. Contributions are absorbed in fixed chunks of 64
/// and the chunks joined by a fixed tree, so bytes do not depend on threads. All four run on host and device
/// (`KVMELD_HD`), in f32; a product may reach an addition only through `kvmeld::fma`.
///
/// Semantic requirements: `rotation_equivariant` is true only if rotating all inputs alike rotates the output (a weighted
/// mean is; a maximum is not). Optional: `static constexpr bool keeps_single` (one contribution is its own result),
/// `static constexpr bool normalises` (`finish` divides by the total weight: plans refuse rows where it is not in (2^-100, 2^100)),
/// `float weight(const Source&) const` (multiplies the aligner's weights).
template <class F>
concept FusePolicy =
    Policy<F> && std::is_trivially_copyable_v<F> &&
    requires(const F& fuser, decltype(std::declval<const F&>().init()) acc, float value, float weight, int count) {
      { F::rotation_equivariant } -> std::convertible_to<bool>;
      { fuser.absorb(acc, value, weight) } -> std::same_as<decltype(fuser.init())>;
      { fuser.join(acc, acc) } -> std::same_as<decltype(fuser.init())>;
      { fuser.finish(acc, weight, count) } -> std::same_as<float>;
    };

/// Names a policy as the fuse slot of a merger: `Fuser{WeightedMean{}}`.
///
/// @tparam P models `FusePolicy`.
template <class P>
class Fuser {
 public:
  static_assert(FusePolicy<P>,
                "kvmeld: this type is no FusePolicy: it needs 'init() const', 'absorb(acc, float, float) const', 'join(acc, acc) const', "
                "'float finish(acc, float, int) const', 'void digest(Hasher&) const', and 'static constexpr bool' "
                "'rotation_equivariant' and 'reproducible'");
  using policy_type = P;

  Fuser() = default;
  constexpr explicit Fuser(P policy) : policy_(std::move(policy)) {}

  [[nodiscard]] constexpr const P& policy() const noexcept { return policy_; }

 private:
  P policy_{};
};

template <class P>
Fuser(P) -> Fuser<P>;

namespace detail {

template <class F>
[[nodiscard]] KVMELD_HD constexpr bool keeps_single() noexcept {
  if constexpr (requires { F::keeps_single; }) {
    return F::keeps_single;
  } else {
    return false;
  }
}

/// a * b, rounded: no compiler may contract it into a later addition.
[[nodiscard]] KVMELD_HD inline float rounded_product(float a, float b) noexcept { return fma(a, b, 0.0F); }

/// a / b from b's reciprocal: one multiplication and two fma correct it to the nearest float (Markstein's step), where a
/// division instruction a channel would cost more than all the rest of a mean.
[[nodiscard]] KVMELD_HD inline float divide(float a, float reciprocal, float b) noexcept {
  const float q = a * reciprocal;
  return fma(fma(-q, b, a), reciprocal, q);
}

}  // namespace detail

KVMELD_NAMESPACE_END
