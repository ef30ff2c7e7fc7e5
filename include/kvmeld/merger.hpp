#pragma once

/// A merger: selection, order, alignment, fusion and seams as one value; and the target it renders
/// into.

#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/policies/mean.hpp>
#include <kvmeld/policies/order.hpp>
#include <kvmeld/policies/select.hpp>
#include <kvmeld/policy.hpp>

KVMELD_NAMESPACE_BEGIN

/// Five policies that say how a set becomes a cache: a plain value, fixed at compile time.
///
/// @tparam Select which tokens of each fragment enter, `SelectAll` by default.
/// @tparam Order  the canonical order of the spans, `ByKeyNorm` by default.
/// @tparam Align  which input tokens make an output token, `Concat` by default.
/// @tparam Fuse   how contributions of one output token are reduced, `WeightedMean` by default.
/// @tparam Seam   which output tokens the engine recomputes, `SeamNone` by default.
template <class Select, class Order, class Align, class Fuse, class Seam>
struct Merger {
  static_assert(SelectPolicy<Select>, "kvmeld: the select slot needs a SelectPolicy");
  static_assert(OrderPolicy<Order>, "kvmeld: the order slot needs an OrderPolicy");
  static_assert(SeamPolicy<Seam>, "kvmeld: the seam slot needs a SeamPolicy");

  static_assert(detail::NearMisses<Select>::none && detail::NearMisses<Order>::none &&
                detail::NearMisses<Seam>::none);

  Select select{};
  Order order{};
  Aligner<Align> align{};
  Fuser<Fuse> fuse{};
  Seam seam{};

  /// True where equal sets render to equal bytes on every machine; false if one policy does not
  /// guarantee it.
  static constexpr bool reproducible = Select::reproducible && Order::reproducible &&
                                       Align::reproducible && Fuse::reproducible &&
                                       Seam::reproducible;

  /// The metadata that any of the five policies reads; `render_id` covers it.
  static constexpr MetadataFields metadata = [] {
    MetadataFields all = MetadataFields::none;
    const auto add = [&]<class P>(std::type_identity<P>) {
      if constexpr (requires { P::metadata; }) all = all | P::metadata;
    };
    add(std::type_identity<Select>{});
    add(std::type_identity<Order>{});
    add(std::type_identity<Align>{});
    add(std::type_identity<Fuse>{});
    add(std::type_identity<Seam>{});
    return all;
  }();

  /// A digest of the five policies and their parameters: replicas compare it before they compare
  /// caches.
  [[nodiscard]] Digest128 digest() const {
    Hasher hasher;
    hasher.text("kvmeld.merger.v1");
    select.digest(hasher);
    order.digest(hasher);
    align.policy().digest(hasher);
    fuse.policy().digest(hasher);
    seam.digest(hasher);
    return hasher.digest();
  }
};

namespace detail {

enum class Slot : int { none = -1, select, order, align, fuse, seam };

template <class P>
inline constexpr Slot slot_of = SelectPolicy<P>  ? Slot::select
                                : OrderPolicy<P> ? Slot::order
                                : SeamPolicy<P>  ? Slot::seam
                                                 : Slot::none;
template <class P>
inline constexpr Slot slot_of<Aligner<P>> = Slot::align;
template <class P>
inline constexpr Slot slot_of<Fuser<P>> = Slot::fuse;

template <class P>
inline constexpr bool names_order = requires {
  &P::order;
};
template <class P>
inline constexpr bool names_mark = requires {
  &P::mark;
};
/// Whether a type is intended as a select, order or seam policy: it has such a policy's member, and
/// is not a fuser or aligner passed without `Fuser{}` or `Aligner{}`.
template <class P>
inline constexpr bool meant_as_part = (names_select<P> || names_order<P> ||
                                       names_mark<P>)&&!SelectForm<P> &&
                                      !AlignPolicy<P>;

/// Says which member a select, order or seam policy lacks.
template <class P>
struct PartMembers {
  static constexpr bool meant = slot_of<P> == Slot::none && meant_as_part<P>;
  static_assert(!meant || std::copyable<P>,
                "kvmeld: this select, order or seam policy cannot be copied");
  static_assert(
      !meant || requires(const P& policy, Hasher& hasher) { policy.digest(hasher); },
      "kvmeld: this select, order or seam policy lacks 'void digest(Hasher&) const'");
  static_assert(
      !meant ||
          requires {
            { P::reproducible } -> std::convertible_to<bool>;
          },
      "kvmeld: this select, order or seam policy lacks 'static constexpr bool reproducible'");
  static_assert(
      !meant || !names_select<P> ||
          requires(const P& p, const Source& source) {
            { p.select(source) } -> std::same_as<Result<TokenSet>>;
          },
      "kvmeld: a select policy's 'select' is 'Result<TokenSet> select(const Source&) const'");
  static_assert(
      !meant || !names_order<P> ||
          requires(const P& p, std::span<const Source> sources) {
            { p.order(sources) } -> std::same_as<Result<std::vector<std::uint32_t>>>;
          },
      "kvmeld: an order policy's 'order' is "
      "'Result<std::vector<std::uint32_t>> order(std::span<const Source>) const'");
  static_assert(
      !meant || !names_mark<P> ||
          requires(const P& p, std::span<const Source> ordered, const Alignment& alignment,
                   std::span<std::uint8_t> recompute) {
            { p.mark(ordered, alignment, recompute) } -> std::same_as<Status>;
          },
      "kvmeld: a seam policy's 'mark' is "
      "'Status mark(std::span<const Source>, const Alignment&, std::span<std::uint8_t>) const'");
  static constexpr bool known = (slot_of<P> != Slot::none || meant) && NearMisses<P>::none;
};
template <class P>
struct PartMembers<Aligner<P>> {
  static constexpr bool known = true;
};
template <class P>
struct PartMembers<Fuser<P>> {
  static constexpr bool known = true;
};

/// The policy among `parts` for one of the five stages, or the default.
template <Slot S, class Default, class... Parts>
[[nodiscard]] constexpr auto pick(Default fallback, const Parts&... parts) {
  constexpr int count = (0 + ... + (slot_of<Parts> == S ? 1 : 0));
  static_assert(
      count <= 1,
      "kvmeld: merger(parts...) got two policies for one slot (select, order, align, fuse, seam)");
  if constexpr (count == 1) {
    constexpr std::size_t index = [] {
      constexpr Slot slots[] = {slot_of<Parts>...};
      std::size_t i = 0;
      while (slots[i] != S) ++i;
      return i;
    }();
    return std::get<index>(std::tie(parts...));
  } else {
    return fallback;
  }
}

}  // namespace detail

/// Makes a `Merger` from policies in any order: each goes to the stage whose concept it models, and
/// a missing one takes its default.
///
/// Two policies of one stage, or one that models none of the five concepts, fail to compile with a
/// message.
template <class... Parts>
[[nodiscard]] constexpr auto merger(Parts... parts) {
  static_assert((detail::PartMembers<Parts>::known && ...),
                "kvmeld: merger(parts...) got a type that is no SelectPolicy, OrderPolicy, "
                "SeamPolicy, Aligner<...> or "
                "Fuser<...>: "
                "it has neither 'select' nor 'order' nor 'mark'; "
                "wrap alignment and fusion policies: Aligner{policy}, Fuser{policy}");
  using detail::Slot;
  auto select = detail::pick<Slot::select>(SelectAll{}, parts...);
  auto order = detail::pick<Slot::order>(ByKeyNorm{}, parts...);
  auto align = detail::pick<Slot::align>(Aligner<Concat>{}, parts...);
  auto fuse = detail::pick<Slot::fuse>(Fuser<WeightedMean>{}, parts...);
  auto seam = detail::pick<Slot::seam>(SeamNone{}, parts...);
  return Merger<decltype(select), decltype(order), typename decltype(align)::policy_type,
                typename decltype(fuse)::policy_type, decltype(seam)>{
      std::move(select), std::move(order), std::move(align), std::move(fuse), std::move(seam)};
}

/// A selection of KV heads in each layer; all of them by default.
struct HeadMask {
  /// (layer, head of its first plane) nonzero where the head is selected; empty: all are.
  std::vector<std::uint8_t> heads{};

  [[nodiscard]] bool all() const noexcept { return heads.empty(); }
};

/// Conditions under which a plan is valid but does less than the caller probably intended. A set of
/// bits.
enum class RenderWarnings : std::uint8_t {
  none = 0,
  /// A fuser other than the default (a `WeightedMean` of uniform weights) was given, but no
  /// rendered token has two contributions: the aligner pairs no tokens, as `Concat` never does, or
  /// the set holds only one fragment.
  nothing_fused = 1,
  /// A table of weights (`AgentWeights`, `FragmentWeights`) names no agent or fragment whose tokens
  /// are rendered, so all have the weight `otherwise`.
  weights_unmatched = 2,
};

[[nodiscard]] constexpr RenderWarnings operator|(RenderWarnings a, RenderWarnings b) noexcept {
  return static_cast<RenderWarnings>(static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b));
}
[[nodiscard]] constexpr RenderWarnings operator&(RenderWarnings a, RenderWarnings b) noexcept {
  return static_cast<RenderWarnings>(static_cast<std::uint8_t>(a) & static_cast<std::uint8_t>(b));
}

/// What a set is rendered into.
struct Target {
  Geometry geometry{};              ///< of the engine's cache; fragments of another are refused
  std::int64_t first_position = 0;  ///< of the first output token
  /// The rows of layers and heads that the masks leave out; row i belongs to output token i.
  std::optional<KvCacheRef> local{};
  LayerMask layers{};  ///< rendered from the set; the others are copied from `local`
  HeadMask heads{};    ///< within those layers, the heads that are rendered from the set
  /// The engine holds the prefix already: only spans are rendered, from `first_position` on.
  bool prefix_in_place = false;
  /// Context size of the engine in tokens, where frequencies depend on it; 0: unknown.
  std::int64_t context_length = 0;
  RenderWarnings refuse =
      RenderWarnings::none;  ///< warnings that `plan` returns as `invalid_argument`
};

/// What a render did, or a plan will do.
struct RenderReport {
  std::int64_t tokens = 0;                    ///< output tokens, holes included
  std::int64_t holes = 0;                     ///< output tokens left to the engine
  std::int64_t bytes = 0;                     ///< of K/V written
  Digest128 render_id{};                      ///< of the request
  std::optional<Digest128> content_digest{};  ///< of the result, where `RunOptions` requests it
  std::int64_t fused = 0;  ///< output tokens without holes that had two contributions or more
  RenderWarnings warnings = RenderWarnings::none;
  std::int64_t next_position = 0;  ///< the position at which the engine continues: one after the
                                   ///< last output token, or the first position where there is none
};

KVMELD_NAMESPACE_END
