#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/metadata.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// One fragment as policies see it: its content, the encoding that ordering reads, and its
/// metadata.
struct Source {
  const Fragment* fragment = nullptr;
  const Payload* payload = nullptr;  ///< payload 0
  const Metadata* metadata = nullptr;
  TokenSet selected{};  ///< the tokens that the select policy kept

  KVMELD_LAZY [[nodiscard]] std::int64_t selected_count() const noexcept {
    return selected.all ? fragment->token_count()
                        : static_cast<std::int64_t>(selected.present.size());
  }
  /// Index in the fragment of the i-th selected token.
  [[nodiscard]] std::int64_t selected_token(std::int64_t i) const noexcept {
    return selected.all ? i : selected.present[static_cast<std::size_t>(i)];
  }
  /// What a token of the fragment is, where its id says so; −1 in a latent fragment and for
  /// placeholders.
  KVMELD_LAZY [[nodiscard]] TokenId token_id(std::int64_t token) const noexcept {
    return fragment->token_id(token);
  }
};

/// Some layers of a model; every layer unless told otherwise.
struct LayerMask {
  std::vector<std::uint8_t> layers{};  ///< nonzero where the layer is chosen; empty: all are

  KVMELD_LAZY [[nodiscard]] bool all() const noexcept { return layers.empty(); }
  KVMELD_LAZY [[nodiscard]] bool contains(std::size_t layer) const noexcept {
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
  KVMELD_LAZY void end_row() {
    row_begin.push_back(static_cast<std::uint32_t>(contributions.size()));
  }
  KVMELD_LAZY [[nodiscard]] std::span<const Contribution> row(std::size_t output) const noexcept {
    return detail::span_of(contributions)
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

/// What policies of every slot share: a value with a name and parameters.
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

// Members that a policy may leave out are not missed by the compiler where they are misspelled, and
// then do nothing. These are the spellings that were met or are likely. Of words that may well
// mean something else, `normalize` say, only a constant is one: not a function or a setting.
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

/// Refuses a policy with a member that is nearly one of those that the library looks for.
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
/// `positions` all 0, or turned to ascending `positions`. `plan` calls it once a fragment of
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

KVMELD_NAMESPACE_END
