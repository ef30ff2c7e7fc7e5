#pragma once

/// The concepts of the five policies, and the alignment between fragments.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/metadata.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// One fragment as policies see it: its content, the encoding that ordering reads, and its
/// metadata.
struct Source {
  const Fragment* fragment = nullptr;
  const Payload* payload = nullptr;  ///< payload 0
  const Metadata* metadata = nullptr;
  TokenSet selected{};  ///< the tokens that the select policy kept
  Dot place{};          ///< its place in an order by provenance (`InForce::place`)

  [[nodiscard]] std::int64_t selected_count() const noexcept {
    return selected.all ? fragment->token_count()
                        : static_cast<std::int64_t>(selected.present.size());
  }
  /// Index in the fragment of the i-th selected token.
  [[nodiscard]] std::int64_t selected_token(std::int64_t i) const noexcept {
    return selected.all ? i : selected.present[static_cast<std::size_t>(i)];
  }
  /// The id of a token where it determines the content; −1 in a latent fragment and for
  /// placeholders.
  [[nodiscard]] TokenId token_id(std::int64_t token) const noexcept {
    return fragment->token_id(token);
  }
};

/// Some layers of a model; every layer unless told otherwise.
struct LayerMask {
  std::vector<std::uint8_t> layers{};  ///< nonzero where the layer is selected; empty: all are

  [[nodiscard]] bool all() const noexcept { return layers.empty(); }
  [[nodiscard]] bool contains(std::size_t layer) const noexcept {
    return layers.empty() || (layer < layers.size() && layers[layer] != 0);
  }
};

/// One input token of an output token.
struct Contribution {
  std::uint32_t source = 0;  ///< index into the ordered sources
  std::uint32_t token = 0;   ///< index of the token in that fragment
  float weight = 1.0F;       ///< linear; the fuser says whether weights are normalised

  bool operator==(const Contribution&) const = default;
};

/// The contributions of every output token in some layers, as compressed sparse rows.
struct AlignmentGroup {
  LayerMask layers{};
  /// Output o has contributions row_begin[o] … row_begin[o + 1] − 1.
  std::vector<std::uint32_t> row_begin{0};
  std::vector<Contribution> contributions{};
  /// (layer of the group, ascending; head; contribution): multiplies the contributions' weights,
  /// head by head, and 0 leaves the contribution out of that head's row. Keys and values share it.
  /// Empty: all heads alike.
  std::vector<float> head_weights{};
  /// (layers of the model) where each layer's heads begin in `head_weights`; `plan` fills it.
  std::vector<std::uint32_t> head_rows{};

  /// Ends the row of the current output token.
  void end_row() { row_begin.push_back(static_cast<std::uint32_t>(contributions.size())); }
  [[nodiscard]] std::span<const Contribution> row(std::size_t output) const noexcept {
    return extend::span_of(contributions)
        .subspan(row_begin[output], row_begin[output + 1] - row_begin[output]);
  }
};

/// What every aligner produces: for each output token its position, its id, and which input tokens
/// contribute.
///
/// An output token without contribution is a hole for the engine to compute.
struct Alignment {
  std::vector<std::int64_t> positions{};  ///< of each output token, ascending
  std::vector<TokenId> tokens{};  ///< of each output token; −1: not known, latent, or a placeholder
  std::vector<AlignmentGroup> groups{};  ///< disjoint layer masks that together cover the layers
};

/// An output token that `render` leaves to the engine.
struct Hole {
  std::int64_t output = 0;    ///< index among the plan's output tokens
  std::int64_t position = 0;  ///< where the engine computes it
  TokenId token = -1;         ///< −1: a latent token, which no engine can recompute

  bool operator==(const Hole&) const = default;
};

/// The requirements that all five policies share: a value with a name and parameters.
///
/// Semantic requirements: `digest` feeds the policy's name and every parameter that changes its
/// result; `reproducible` is true only if equal inputs give equal bytes on every machine. A policy
/// that reads metadata declares `static constexpr MetadataFields metadata`.
template <class P>
concept Policy = std::copyable<P> && requires(const P& policy, Hasher& hasher) {
  policy.digest(hasher);
  { P::reproducible } -> std::convertible_to<bool>;
};

namespace detail {

// Optional members of a policy do nothing where they are misspelled, and the compiler does not
// notice. These are the likely misspellings. Where a word may mean something else, such as
// `normalize`, only a constant counts as a misspelling, not a function or a data member.
template <class P>
inline constexpr bool near_metadata = requires {
  P::meta_data;
}
|| requires { P::metadat; }
|| requires { P::metadta; }
|| requires { P::metdata; }
|| requires { P::metadatas; }
|| requires { P::Metadata; }
|| requires { P::metadata_fields; }
|| requires { P::kMetadata; };
template <class P>
inline constexpr bool near_reproducible = requires {
  P::reproducable;
}
|| requires { P::reproduceable; }
|| requires { P::reproducibile; }
|| requires { P::reproducibe; }
|| requires { P::is_reproducible; }
|| requires { P::kReproducible; };
template <class P>
inline constexpr bool near_keeps_single = requires {
  P::keep_single;
}
|| requires { P::keeps_singles; }
|| requires { P::keep_singles; }
|| requires { P::keepsSingle; }
|| requires { P::keeps_sinlge; }
|| requires { P::kKeepsSingle; };
template <class P>
inline constexpr bool near_equivariant = requires {
  P::rotation_equivarient;
}
|| requires { P::rotation_equivalent; }
|| requires { P::rotational_equivariant; }
|| requires { requires std::is_const_v<decltype(P::equivariant)>; }
|| requires { P::is_rotation_equivariant; };
template <class P>
inline constexpr bool near_normalises = requires {
  P::normalizes;
}
|| requires { requires std::is_const_v<decltype(P::normalise)>; }
|| requires { requires std::is_const_v<decltype(P::normalize)>; }
|| requires { requires std::is_const_v<decltype(P::normalised)>; }
|| requires { requires std::is_const_v<decltype(P::normalized)>; };
template <class P>
inline constexpr bool near_weight = requires {
  &P::wieght;
}
|| requires { &P::weigth; }
|| requires { &P::wheight; }
|| requires { &P::weihgt; };
template <class P>
inline constexpr bool near_digest = requires {
  &P::digset;
}
|| requires { &P::digets; }
|| requires { &P::disgest; }
|| requires { &P::dgiest; };

/// Fails to compile for a policy with a misspelled optional member.
template <class P>
struct NearMisses {
  static_assert(!near_metadata<P>,
                "kvmeld: this policy has a member that is nearly 'metadata': as it is, "
                "render ids leave out what it reads; name it 'metadata'");
  static_assert(!near_reproducible<P>,
                "kvmeld: this policy has a member that is nearly 'reproducible'; name it "
                "'static constexpr bool reproducible'");
  static_assert(!near_keeps_single<P>,
                "kvmeld: this policy has a member that is nearly 'keeps_single': as it is, "
                "nothing reads it; name it 'keeps_single'");
  static_assert(!near_equivariant<P>,
                "kvmeld: this policy has a member that is nearly 'rotation_equivariant'; "
                "name it 'static constexpr bool rotation_equivariant'");
  static_assert(!near_normalises<P>,
                "kvmeld: this policy has a member that is nearly 'normalises': as it is, "
                "nothing reads it; name it 'normalises'");
  static_assert(!near_weight<P>,
                "kvmeld: this policy has a member that is nearly 'weight': as it is, every "
                "fragment weighs 1; name it 'weight'");
  static_assert(!near_digest<P>,
                "kvmeld: this policy has a member that is nearly 'digest'; name it "
                "'void digest(Hasher&) const'");
  static constexpr bool none = true;
};

}  // namespace detail

/// Which tokens of each fragment enter the context.
template <class P>
concept SelectPolicy = Policy<P> && requires(const P& policy, const Source& source) {
  { policy.select(source) } -> std::same_as<Result<TokenSet>>;
};

/// The canonical order of the spans. Semantic requirement: a total order over distinct fragments,
/// whatever their input order.
template <class P>
concept OrderPolicy = Policy<P> && requires(const P& policy, std::span<const Source> sources) {
  { policy.order(sources) } -> std::same_as<Result<std::vector<std::uint32_t>>>;
};

/// Which input tokens make which output token, and at which position.
template <class P>
concept AlignPolicy = Policy<P> &&
    requires(const P& policy, std::span<const Source> ordered, std::int64_t first_position) {
  { policy.align(ordered, first_position) } -> std::same_as<Result<Alignment>>;
};

/// An aligner that also maps fragments of other models into the target's geometry, before anything
/// is aligned.
///
/// `accepts(from, to)` is cheap and refuses with the reason. `transform(fragment, p, to)` yields
/// payload p of the fragment in geometry `to`, in canonical order: keys without position and
/// `positions` all 0, or rotated to ascending `positions`. `plan` calls it once a fragment of
/// another geometry.
template <class P>
concept TransformForm = requires(const P& policy, const Geometry& geometry,
                                 const Fragment& fragment, std::size_t payload) {
  { policy.accepts(geometry, geometry) } -> std::same_as<Status>;
  { policy.transform(fragment, payload, geometry) } -> std::same_as<Result<Payload>>;
};

/// Which output tokens the engine recomputes after the merge: `recompute[o]` is set to nonzero.
template <class P>
concept SeamPolicy = Policy<P> &&
    requires(const P& policy, std::span<const Source> ordered, const Alignment& alignment,
             std::span<std::uint8_t> recompute) {
  { policy.mark(ordered, alignment, recompute) } -> std::same_as<Status>;
};

/// The contributions to one output token as a fuser's `score` sees them, ascending by fragment id
/// (then by token), so that ties go to the smaller id by going to the smaller index.
///
/// Distances are squared and Euclidean, of keys (of a latent cache: of latents and their rope
/// parts) without position, over all heads and all layers that hold every contribution; 0 where no
/// layer does. f64, the same bits everywhere.
struct Scoring {
  std::span<const double> distances{};  ///< (count, count) symmetric, zeros on the diagonal
  /// (count) squared norms; NaN unless the fuser declares `static constexpr bool reads_norms =
  /// true`.
  std::span<const double> norms{};

  /// Contributions, at least 2.
  [[nodiscard]] std::size_t count() const noexcept { return norms.size(); }
  [[nodiscard]] double distance(std::size_t i, std::size_t j) const noexcept {
    return distances[i * count() + j];
  }
  /// Cosine of the keys of two contributions; 0 where one of them is zero, or norms are not read.
  [[nodiscard]] double cosine(std::size_t i, std::size_t j) const noexcept {
    const double size = math::sqrt(norms[i]) * math::sqrt(norms[j]);
    return size > 0 ? (norms[i] + norms[j] - distance(i, j)) / 2 / size : 0.0;
  }
};

/// The contributions of one head's row, as a fuser of the mix form reads them on a host: f32,
/// ascending as the aligner gave them.
///
/// Device lanes read through another type with the same functions, which loads and rotates a
/// channel when it is asked for.
struct HeadRows {
  /// (contribution, channel); zeros from the last channel to the next multiple of 32.
  const float* values = nullptr;
  std::ptrdiff_t stride = 0;       ///< floats between contributions
  const float* weights = nullptr;  ///< (contribution) above 0
  std::int32_t contributions = 0;
  std::int32_t width = 0;  ///< channels
  std::int32_t layer_index = 0;
  std::int32_t head_index = 0;
  Plane plane_kind = Plane::key;

  [[nodiscard]] KVMELD_HD int count() const noexcept { return contributions; }
  [[nodiscard]] KVMELD_HD int channels() const noexcept { return width; }
  [[nodiscard]] KVMELD_HD int layer() const noexcept { return layer_index; }
  [[nodiscard]] KVMELD_HD int head() const noexcept { return head_index; }
  [[nodiscard]] KVMELD_HD Plane plane() const noexcept { return plane_kind; }
  [[nodiscard]] KVMELD_HD float weight(int contribution) const noexcept {
    return weights[contribution];
  }
  [[nodiscard]] KVMELD_HD float value(int contribution, int channel) const noexcept {
    return values[contribution * stride + channel];
  }
};

inline constexpr int max_mixed = 64;  ///< contributions of a row
/// Contributions times channels (a multiple of 32) of a row.
inline constexpr int max_mixed_values = 16384;

// Values of one channel in ascending order, and the sorting network that every backend uses.

/// The values that all contributions of one output token have in one channel, smallest first.
struct OrderedValues {
  const float* first = nullptr;
  std::ptrdiff_t stride = 1;  ///< floats from one value to the next
  int count = 0;

  [[nodiscard]] KVMELD_HD constexpr int size() const noexcept { return count; }
  /// The i-th smallest, 0 ≤ i < size().
  [[nodiscard]] KVMELD_HD constexpr float operator[](int i) const noexcept {
    return first[i * stride];
  }
};

/// Ranks first, …, last − 1 of the values in order.
struct Ranks {
  int first = 0;
  int last = 0;
};

/// The mean of some ranks, at most 64, summed in ascending order; where the sum overflows f32, the
/// values are divided by 128 before they are summed.
[[nodiscard]] KVMELD_HD inline float mean_of(OrderedValues values, Ranks ranks) noexcept {
  const auto count = static_cast<float>(ranks.last - ranks.first);
  float sum = values[ranks.first];
  for (int i = ranks.first + 1; i < ranks.last; ++i) sum += values[i];
  if (sum - sum == 0.0F) return sum / count;
  sum = 0;
  for (int i = ranks.first; i < ranks.last; ++i) sum = fma(values[i], 0x1p-7F, sum);
  return sum / (count * 0x1p-7F);
}

namespace detail {

/// Largest number of contributions that are sorted: they are on the stack.
inline constexpr int max_selected = 64;
inline constexpr std::ptrdiff_t selected_channels = 256;  ///< of a row that a host sorts at once

/// Puts the smaller of two values first. Equal values are not exchanged, so that zeros of both
/// signs end in the same order on every backend.
KVMELD_HD KVMELD_ALWAYS_INLINE void exchange(float& a, float& b) noexcept {
  const float x = a, y = b;
  const bool swap = y < x;
  a = swap ? y : x;
  b = swap ? x : y;
}

/// The comparators of Batcher's merge exchange for any count (Knuth, The Art of Computer
/// Programming 3, 5.2.2 M), one after the other. Which places are compared does not depend on the
/// values, so that whole vectors of channels are sorted at once.
struct SortingNetwork {
  int count;
  int top = 1, p = 0, q = 0, r = 0, d = 0;
  int i = -1;

  KVMELD_HD KVMELD_ALWAYS_INLINE constexpr explicit SortingNetwork(int n) noexcept : count(n) {
    while (top * 2 < n) top *= 2;
    p = n < 2 ? 0 : top;
    q = top;
    d = p;
  }
  /// Moves to the next comparator, of places `i` and `i + d`; false after the last.
  KVMELD_HD KVMELD_ALWAYS_INLINE constexpr bool next() noexcept {
    for (++i; p > 0; i = 0) {
      for (; i < count - d; ++i) {
        if ((i & p) == r) return true;
      }
      if (q != p) {
        d = q - p;
        q /= 2;
        r = p;
      } else {
        p /= 2;
        q = top;
        r = 0;
        d = p;
      }
    }
    return false;
  }
};

/// Sorts one channel's values.
KVMELD_HD inline void sort_values(float* values, int count) noexcept {
  for (SortingNetwork network(count); network.next();)
    exchange(values[network.i], values[network.i + network.d]);
}

}  // namespace detail

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

/// Mixes the contributions of one head's row, all of them at once: `prepare(rows)` computes a
/// trivially copyable value that all channels share; `channel(rows, prepared, c)` yields channel c.
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
/// `score` receives the aligner's weights in `weights` and replaces them by its own, which keys and
/// values of all layers then share.
///
/// A weight of 0 drops the contribution; a single remaining one is copied byte by byte. Runs on the
/// host; an error fails the plan.
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

// Whether a type has the member names of a form, whatever their signatures: then the form is
// intended, and the signatures must match.
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
/// yields a `MixForm`; and may add `score` and `weight`. A policy that has only `score` or `weight`
/// is a mean with those weights. Other optional members: `static constexpr bool keeps_single` (one
/// contribution is its own result), `static constexpr bool normalises` (`finish` divides by the
/// total weight: plans refuse rows where it is not in (2^-100, 2^100)), `Status check(std::int64_t
/// contributions) const` (whether a row of so many contributions can be fused), `Status fits(const
/// Geometry&) const` (whether caches of this geometry can be fused at all). The row form may have
/// `double bound(double peak, double weights, int channels) const`: an upper bound of every channel
/// and every intermediate value, where no contribution exceeds `peak` and the magnitudes of their
/// weights add up to `weights`. Without it, plans compute the rows of a fuser once more, to refuse
/// results that the output's elements cannot hold.
template <class F>
concept FusePolicy = detail::has_form<F> && detail::fold_fits<F> && detail::select_fits<F> &&
    detail::score_fits<F> && detail::mix_fits<F> && detail::row_forms<F>
<= 1;

/// Marks a policy as the fuser of a merger: `Fuser{WeightedMean{}}`.
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

namespace extend {

/// Whether a row form returns a single contribution unchanged.
template <class F>
[[nodiscard]] KVMELD_HD constexpr bool keeps_single() noexcept {
  if constexpr (requires { F::keeps_single; }) {
    return F::keeps_single;
  } else {
    return false;
  }
}

}  // namespace extend

namespace detail {

template <class F>
[[nodiscard]] constexpr bool normalises() noexcept {
  if constexpr (requires { F::normalises; }) {
    return F::normalises;
  } else {
    return false;
  }
}

}  // namespace detail

namespace extend {

/// a * b, rounded: no compiler may contract it into a later addition.
[[nodiscard]] KVMELD_HD inline float rounded_product(float a, float b) noexcept {
  return fma(a, b, 0.0F);
}

}  // namespace extend

namespace detail {

/// a / b from b's reciprocal: one multiplication and two fma correct it to the nearest float
/// (Markstein's step). A division instruction for each channel would cost more than the rest of a
/// mean.
[[nodiscard]] KVMELD_HD inline float divide(float a, float reciprocal, float b) noexcept {
  const float q = a * reciprocal;
  return fma(fma(-q, b, a), reciprocal, q);
}

/// Σ w·x / Σ w: the row form of all policies without their own, so that they share one kernel.
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

}  // namespace detail

namespace extend {

/// The row form of a policy: the policy itself, its `mixing()`, or a weighted mean.
template <class F>
[[nodiscard]] constexpr auto row_form([[maybe_unused]] const F& fuser) {
  if constexpr (FoldForm<F> || SelectForm<F>) {
    return fuser;
  } else if constexpr (detail::mixes<F>) {
    return fuser.mixing();
  } else {
    return detail::MeanRows{};
  }
}

/// The row form of a fuser: the fuser itself, or a weighted mean where it has only weights or
/// scores.
template <class F>
using RowForm = decltype(row_form(std::declval<const F&>()));

/// Whether equally rotated rows may be fused without being un-rotated first.
template <class F>
[[nodiscard]] constexpr bool rotation_equivariant() noexcept {
  if constexpr (SelectForm<F>) {
    return false;
  } else {
    return F::rotation_equivariant;
  }
}

}  // namespace extend

/// Marks a policy as the aligner of a merger: `Aligner{TokenMatch{}}`.
///
/// @tparam P models `AlignPolicy`.
template <class P>
class Aligner {
 public:
  static_assert(AlignPolicy<P>,
                "kvmeld: this type is no AlignPolicy: it needs 'Result<Alignment> "
                "align(std::span<const Source>, std::int64_t) const', "
                "'void digest(Hasher&) const' and 'static constexpr bool reproducible'");
  static_assert(detail::NearMisses<P>::none);
  using policy_type = P;

  Aligner() = default;
  constexpr explicit Aligner(P policy) : policy_(std::move(policy)) {}

  [[nodiscard]] constexpr const P& policy() const noexcept { return policy_; }

 private:
  P policy_{};
};

template <class P>
Aligner(P) -> Aligner<P>;

/// Concatenates the spans: every selected token is an output token of its own.
///
/// O(tokens).
struct Concat {
  static constexpr bool reproducible = true;

  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
                                        std::int64_t first_position) const {
    Alignment out;
    out.groups.resize(1);
    AlignmentGroup& group = out.groups[0];
    for (std::size_t s = 0; s < ordered.size(); ++s) {
      for (std::int64_t i = 0; i < ordered[s].selected_count(); ++i) {
        const std::int64_t token = ordered[s].selected_token(i);
        out.positions.push_back(first_position++);
        out.tokens.push_back(ordered[s].token_id(token));
        group.contributions.push_back(
            {static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(token), 1.0F});
        group.end_row();
      }
    }
    return out;
  }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.Concat"); }
};

KVMELD_NAMESPACE_END
