#pragma once

#include <concepts>
#include <span>
#include <type_traits>
#include <utility>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fuse/head_rows.hpp>
#include <kvmeld/fuse/ordered_values.hpp>
#include <kvmeld/fuse/score.hpp>

KVMELD_NAMESPACE_BEGIN

/// Reduces a row channel by channel as a fold: `init()` starts an accumulator; `absorb(acc, value,
/// weight)` takes one contribution; `join(a, b)` merges accumulators of different chunks;
/// `finish(acc, total_weight, count)` yields the channel.
///
/// Contributions are absorbed in fixed chunks of 64 and the chunks joined by a fixed tree, so bytes
/// do not depend on threads. All four run on host and device (`KVMELD_HD`), in f32; a product may
/// reach an addition only through `kvmeld::fma`. `rotation_equivariant` is true only if rotating
/// all inputs alike rotates the output (a weighted mean is; a maximum is not).
template <class F>
concept FoldForm = std::is_trivially_copyable_v<F> &&
    requires(const F& fuser, decltype(std::declval<const F&>().init()) acc, float value,
             float weight, int count) {
  { F::rotation_equivariant } -> std::convertible_to<bool>;
  { fuser.absorb(acc, value, weight) } -> std::same_as<decltype(fuser.init())>;
  { fuser.join(acc, acc) } -> std::same_as<decltype(fuser.init())>;
  { fuser.finish(acc, weight, count) } -> std::same_as<float>;
};

/// Reduces a row channel by channel from all of a channel's values in order: `select(values)`
/// yields the channel.
///
/// Runs on host and device (`KVMELD_HD`); weights do not reach it; keys are compared un-rotated. At
/// most 64 contributions. Where `select` is `mean_of(values, ranks(values.size()))`, a member
/// `Ranks ranks(int count) const` lets hosts do whole vectors of it.
template <class F>
concept SelectForm = std::is_trivially_copyable_v<F> &&
    requires(const F& fuser, OrderedValues values) {
  { fuser.select(values) } -> std::same_as<float>;
};

/// Mixes the contributions of one head's row, all of them at once: `prepare(rows)` works out what
/// the channels share, a trivially copyable value; `channel(rows, prepared, c)` yields channel c.
/// Both are templates over the rows' type (see `HeadRows`).
///
/// Run on host and device (`KVMELD_HD`), in f32; a product may reach an addition only through
/// `kvmeld::fma`. A device runs `prepare` in every lane. Optional: `void mix(Isa, const HeadRows&,
/// float* out) const`, the host's whole rows with the same bytes; `std::span<const float>
/// parameters() const` with `F with_parameters(const float*) const`, which devices copy. Where
/// `rotation_equivariant` is false, keys come un-rotated. At most 64 contributions, and
/// `max_mixed_values` values, a row.
template <class F>
concept MixForm = std::is_trivially_copyable_v<F> &&
    requires(const F& fuser, const HeadRows& rows, int channel) {
  { F::rotation_equivariant } -> std::convertible_to<bool>;
  { fuser.channel(rows, fuser.prepare(rows), channel) } -> std::same_as<float>;
};

/// Weighs the contributions of each output token that has two or more, once, when the plan is made:
/// `score` finds the aligner's weights in `weights` and leaves its own there, which keys and values
/// of all layers then share.
///
/// A weight of 0 drops the contribution, so that one survivor is copied byte by byte. Runs on the
/// host; an error refuses the plan.
template <class F>
concept ScoreForm = requires(const F& fuser, const Scoring& scoring, std::span<double> weights) {
  { fuser.score(scoring, weights) } -> std::same_as<Status>;
};

/// Weighs whole fragments: `weight(source)` yields a float, or `Result<float>`, that multiplies the
/// aligner's weights.
template <class F>
concept WeightForm = requires(const F& fuser, const Source& source) {
  { fuser.weight(source) } -> std::convertible_to<Result<float>>;
};

namespace detail {

// Names that a type has, whatever their signatures: what was meant, and must then fit.
template <class F>
inline constexpr bool names_fold = requires {
  &F::init;
}
|| requires { &F::absorb; }
|| requires { &F::finish; };
template <class F>
inline constexpr bool names_select = requires {
  &F::select;
};
template <class F>
inline constexpr bool names_score = requires {
  &F::score;
};

template <class F>
inline constexpr bool names_mix = requires {
  &F::mixing;
};

template <class F>
inline constexpr bool mixes = false;
template <class F>
requires requires(const F& fuser) {
  { fuser.mixing() } -> MixForm;
}
inline constexpr bool mixes<F> = true;

template <class F>
inline constexpr bool fold_fits = !names_fold<F> || (FoldForm<F> && Policy<F>);
template <class F>
inline constexpr bool select_fits = !names_select<F> || (SelectForm<F> && Policy<F>);
template <class F>
inline constexpr bool score_fits = !names_score<F> || (ScoreForm<F> && Policy<F>);
template <class F>
inline constexpr bool mix_fits = !names_mix<F> || (mixes<F> && Policy<F>);
template <class F>
inline constexpr int row_forms = int{FoldForm<F>} + int{SelectForm<F>} + int{mixes<F>};
template <class F>
inline constexpr bool has_form = (row_forms<F> > 0 || ScoreForm<F> || WeightForm<F>)&&Policy<F>;

}  // namespace detail

/// Reduces the contributions of one output row.
///
/// A policy has a row form: it is a `FoldForm` or a `SelectForm`, or has `mixing() const`, which
/// yields a `MixForm`; and may add `score` and `weight`. A policy of `score` or `weight` alone is a
/// weighted mean by them. Optional besides: `static constexpr bool keeps_single` (one contribution
/// is its own result), `static constexpr bool normalises` (`finish` divides by the total weight:
/// plans refuse rows where it is not in (2^-100, 2^100)), `Status check(std::int64_t contributions)
/// const` (whether a row of so many, as the row form gets them, can be fused), `Status fits(const
/// Geometry&) const` (whether caches of this geometry can be fused at all). The row form may have
/// `double bound(double peak, double weights, int channels) const`: what no channel, and no number
/// on the way to it, exceeds where no contribution exceeds `peak` and the magnitudes of their
/// weights add up to `weights`. Plans compute the rows of a fuser without it once more, to refuse
/// what the output's elements cannot hold.
template <class F>
concept FusePolicy = detail::has_form<F> && detail::fold_fits<F> && detail::select_fits<F> &&
    detail::score_fits<F> && detail::mix_fits<F> && detail::row_forms<F>
<= 1;

/// Names a policy as the fuse slot of a merger: `Fuser{WeightedMean{}}`.
///
/// @tparam P models `FusePolicy`.
template <class P>
class Fuser {
 public:
  static_assert(detail::fold_fits<P>,
                "kvmeld: this type is no FusePolicy: it needs 'init() const', 'absorb(acc, float, "
                "float) const', 'join(acc, acc) const', "
                "'float finish(acc, float, int) const', 'void digest(Hasher&) const', and 'static "
                "constexpr bool' "
                "'rotation_equivariant' and 'reproducible', and must be trivially copyable");
  static_assert(detail::select_fits<P>,
                "kvmeld: this type is no FusePolicy: it needs 'float select(OrderedValues) const', "
                "'void digest(Hasher&) const' and "
                "'static constexpr bool reproducible', and must be trivially copyable");
  static_assert(detail::score_fits<P>,
                "kvmeld: this type is no FusePolicy: it needs 'Status score(const Scoring&, "
                "std::span<double>) const', "
                "'void digest(Hasher&) const' and 'static constexpr bool reproducible'");
  static_assert(detail::mix_fits<P>,
                "kvmeld: this type is no FusePolicy: what 'mixing() const' yields needs "
                "'prepare(rows) const', 'float channel(rows, "
                "prepared, int) const' and 'static constexpr bool rotation_equivariant', and must "
                "be trivially copyable; the policy "
                "needs 'void digest(Hasher&) const' and 'static constexpr bool reproducible'");
  static_assert(
      detail::row_forms<P> <= 1,
      "kvmeld: this type is no FusePolicy: of a fold, 'select' and 'mixing' it may have one");
  static_assert(detail::has_form<P> || !detail::fold_fits<P> || !detail::select_fits<P> ||
                    !detail::score_fits<P> || !detail::mix_fits<P>,
                "kvmeld: this type is no FusePolicy: it needs one of 'float select(OrderedValues) "
                "const', 'mixing() const', 'Status "
                "score(const Scoring&, std::span<double>) const', 'float weight(const Source&) "
                "const', or the fold 'init', 'absorb', "
                "'join', 'finish'; and 'void digest(Hasher&) const' and 'static constexpr bool "
                "reproducible'");
  static_assert(detail::NearMisses<P>::none);
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

template <class F>
[[nodiscard]] constexpr bool normalises() noexcept {
  if constexpr (requires { F::normalises; }) {
    return F::normalises;
  } else {
    return false;
  }
}

/// a * b, rounded: no compiler may contract it into a later addition.
[[nodiscard]] KVMELD_HD inline float rounded_product(float a, float b) noexcept {
  return fma(a, b, 0.0F);
}

/// a / b from b's reciprocal: one multiplication and two fma correct it to the nearest float
/// (Markstein's step), where a division instruction a channel would cost more than all the rest of
/// a mean.
[[nodiscard]] KVMELD_HD inline float divide(float a, float reciprocal, float b) noexcept {
  const float q = a * reciprocal;
  return fma(fma(-q, b, a), reciprocal, q);
}

/// Σ w·x / Σ w: the row form of every policy that has none of its own, so that they share one
/// kernel.
struct MeanRows {
  static constexpr bool rotation_equivariant = true;
  static constexpr bool keeps_single = true;
  static constexpr bool normalises = true;

  [[nodiscard]] KVMELD_HD constexpr float init() const noexcept { return 0.0F; }
  [[nodiscard]] KVMELD_HD float absorb(float acc, float value, float weight) const noexcept {
    return fma(weight, value, acc);
  }
  [[nodiscard]] KVMELD_HD constexpr float join(float a, float b) const noexcept { return a + b; }
  [[nodiscard]] KVMELD_HD float finish(float acc, float total_weight, int) const noexcept {
    return divide(acc, 1.0F / total_weight, total_weight);
  }
  [[nodiscard]] static constexpr double bound(double peak, double, int) noexcept { return peak; }
};

/// What runs on rows: the policy itself, what it mixes by, or a weighted mean.
template <class F>
[[nodiscard]] constexpr auto row_form([[maybe_unused]] const F& fuser) {
  if constexpr (FoldForm<F> || SelectForm<F>) {
    return fuser;
  } else if constexpr (mixes<F>) {
    return fuser.mixing();
  } else {
    return MeanRows{};
  }
}

template <class F>
using RowForm = decltype(row_form(std::declval<const F&>()));

/// Whether rows may be fused as they lie where they are equally turned.
template <class F>
[[nodiscard]] constexpr bool rotation_equivariant() noexcept {
  if constexpr (SelectForm<F>) {
    return false;
  } else {
    return F::rotation_equivariant;
  }
}

}  // namespace detail

KVMELD_NAMESPACE_END
