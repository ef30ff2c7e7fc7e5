#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include <kvmeld/align/aligner.hpp>
#include <kvmeld/align/order.hpp>
#include <kvmeld/align/seam.hpp>
#include <kvmeld/align/select.hpp>
#include <kvmeld/fuse/fold.hpp>

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

  Select select;
  Order order;
  Aligner<Align> align;
  Fuser<Fuse> fuse;
  Seam seam;

  /// True where equal sets render to equal bytes on every machine; false as soon as one policy does not promise it.
  static constexpr bool reproducible =
      Select::reproducible && Order::reproducible && Align::reproducible && Fuse::reproducible && Seam::reproducible;

  /// Metadata that any of the five reads; `render_id` covers it.
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

  /// Names the five policies and their parameters: replicas compare it before they compare caches.
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
inline constexpr Slot slot_of = SelectPolicy<P> ? Slot::select : OrderPolicy<P> ? Slot::order : SeamPolicy<P> ? Slot::seam : Slot::none;
template <class P>
inline constexpr Slot slot_of<Aligner<P>> = Slot::align;
template <class P>
inline constexpr Slot slot_of<Fuser<P>> = Slot::fuse;

/// The part that fills a slot, or the default.
template <Slot S, class Default, class... Parts>
[[nodiscard]] constexpr auto pick(Default fallback, const Parts&... parts) {
  constexpr int count = (0 + ... + (slot_of<Parts> == S ? 1 : 0));
  static_assert(count <= 1, "kvmeld: merger(parts...) got two policies for one slot (select, order, align, fuse, seam)");
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

/// Sorts policies into the five slots of a `Merger` by what they model; a missing one takes its default.
///
/// A policy twice, or one that models none of the five concepts, does not compile and says so.
template <class... Parts>
[[nodiscard]] constexpr auto merger(Parts... parts) {
  static_assert(((detail::slot_of<Parts> != detail::Slot::none) && ...),
                "kvmeld: merger(parts...) got a type that is no SelectPolicy, OrderPolicy, SeamPolicy, Aligner<...> or Fuser<...>; "
                "wrap alignment and fusion policies: Aligner{policy}, Fuser{policy}");
  using detail::Slot;
  auto select = detail::pick<Slot::select>(SelectAll{}, parts...);
  auto order = detail::pick<Slot::order>(ByKeyNorm{}, parts...);
  auto align = detail::pick<Slot::align>(Aligner<Concat>{}, parts...);
  auto fuse = detail::pick<Slot::fuse>(Fuser<WeightedMean>{}, parts...);
  auto seam = detail::pick<Slot::seam>(SeamNone{}, parts...);
  return Merger<decltype(select), decltype(order), typename decltype(align)::policy_type, typename decltype(fuse)::policy_type,
                decltype(seam)>{std::move(select), std::move(order), std::move(align), std::move(fuse), std::move(seam)};
}

KVMELD_NAMESPACE_END
