#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include <kvmeld/align/aligner.hpp>

KVMELD_NAMESPACE_BEGIN

/// Several alignment policies as one: `Chain{Projection{map}, TokenMatch{}}` maps fragments of
/// another model, then lets matched tokens share an output token.
///
/// Transforms come from the one part that has them (`TransformForm`), the alignment from the last,
/// which sees mapped fragments in the target's geometry, without token ids where the tokenizers
/// differ. One pass: rows are projected when the plan is made and then read once.
template <class... Parts>
class Chain {
  static_assert(sizeof...(Parts) > 0, "kvmeld: a Chain needs at least one part");
  using Last = std::tuple_element_t<sizeof...(Parts) - 1, std::tuple<Parts...>>;
  static constexpr std::size_t transforms = (std::size_t{0} + ... + (TransformForm<Parts> ? 1 : 0));
  static constexpr std::size_t which = [] {
    constexpr bool has[] = {TransformForm<Parts>...};
    std::size_t i = 0;
    while (i + 1 < sizeof...(Parts) && !has[i]) ++i;
    return i;
  }();

 public:
  static_assert(AlignPolicy<Last>,
                "kvmeld: the last part of a Chain aligns, so it must be an AlignPolicy");
  static_assert(
      transforms <= 1,
      "kvmeld: two parts of a Chain transform; compose their maps into one: compose(a, b)");
  static_assert(transforms + 1 >= sizeof...(Parts),
                "kvmeld: a part of a Chain before the last neither aligns nor transforms: only the "
                "last part aligns");
  static_assert(sizeof...(Parts) == 1 || transforms == 0 || which + 1 < sizeof...(Parts),
                "kvmeld: a part of a Chain before the last does nothing: parts that transform come "
                "before the one that aligns");

  static constexpr bool reproducible = (Parts::reproducible && ...);
  static constexpr MetadataFields metadata = [] {
    MetadataFields all = MetadataFields::none;
    const auto add = [&]<class P>(std::type_identity<P>) {
      if constexpr (requires { P::metadata; }) all = all | P::metadata;
    };
    (add(std::type_identity<Parts>{}), ...);
    return all;
  }();

  Chain() = default;
  constexpr explicit(sizeof...(Parts) == 1) Chain(Parts... parts) : parts_(std::move(parts)...) {}

  [[nodiscard]] constexpr const std::tuple<Parts...>& parts() const noexcept { return parts_; }

  [[nodiscard]] Status accepts(const Geometry& from, const Geometry& to) const
      requires(transforms == 1) {
    return std::get<which>(parts_).accepts(from, to);
  }
  [[nodiscard]] Result<Payload> transform(const Fragment& fragment, std::size_t payload,
                                          const Geometry& to) const requires(transforms == 1) {
    return std::get<which>(parts_).transform(fragment, payload, to);
  }
  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
                                        std::int64_t first_position) const {
    return std::get<sizeof...(Parts) - 1>(parts_).align(ordered, first_position);
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Chain");
    hasher.value(static_cast<std::uint64_t>(sizeof...(Parts)));
    std::apply([&](const Parts&... parts) { (parts.digest(hasher), ...); }, parts_);
  }

 private:
  std::tuple<Parts...> parts_;
};

template <class... Parts>
Chain(Parts...) -> Chain<Parts...>;

KVMELD_NAMESPACE_END
