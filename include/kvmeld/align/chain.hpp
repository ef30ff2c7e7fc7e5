#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/align/aligner.hpp>

KVMELD_NAMESPACE_BEGIN

/// Brings fragments of another geometry into the target's, before they are aligned.
///
/// Semantic requirements: `accepts` is cheap; `transform` yields the payload in the target's geometry, element types and canonical
/// order, for the positions that it states.
template <class P>
concept TransformPolicy = Policy<P> && requires(const P& policy, const Fragment& fragment, std::size_t payload, const Geometry& geometry) {
  { policy.accepts(geometry, geometry) } -> std::same_as<Status>;
  { policy.transform(fragment, payload, geometry) } -> std::same_as<Result<Payload>>;
};

/// Several alignment policies as one: `Chain{Projection{map}, TokenMatch{}}` maps fragments of another model, then lets matched
/// tokens share an output token.
///
/// Transforms come from the one part that has them, the alignment from the last. Tokens whose ids the transforming part does not
/// keep are shown to the last part without ids, as those of a latent fragment. One pass: rows are projected when the plan is made and
/// then read once.
template <class... Parts>
class Chain {
  static_assert(sizeof...(Parts) > 0, "kvmeld: a Chain needs at least one part");
  using Last = std::tuple_element_t<sizeof...(Parts) - 1, std::tuple<Parts...>>;
  static constexpr std::size_t transforms = (std::size_t{0} + ... + (TransformPolicy<Parts> ? 1 : 0));
  static constexpr std::size_t which = [] {
    constexpr bool has[] = {TransformPolicy<Parts>...};
    std::size_t i = 0;
    while (i + 1 < sizeof...(Parts) && !has[i]) ++i;
    return i;
  }();

 public:
  static_assert(AlignPolicy<Last>, "kvmeld: the last part of a Chain aligns, so it must be an AlignPolicy");
  static_assert(transforms <= 1, "kvmeld: two parts of a Chain transform; compose their maps into one: compose(a, b)");
  static_assert(transforms + 1 >= sizeof...(Parts), "kvmeld: a part of a Chain before the last neither aligns nor transforms: only the last part aligns");
  static_assert(sizeof...(Parts) == 1 || transforms == 0 || which + 1 < sizeof...(Parts),
                "kvmeld: a part of a Chain before the last does nothing: parts that transform come before the one that aligns");

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
    requires(transforms == 1)
  {
    return std::get<which>(parts_).accepts(from, to);
  }
  [[nodiscard]] Result<Payload> transform(const Fragment& fragment, std::size_t payload, const Geometry& to) const
    requires(transforms == 1)
  {
    return std::get<which>(parts_).transform(fragment, payload, to);
  }
  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered, std::int64_t first_position) const {
    const Last& last = std::get<sizeof...(Parts) - 1>(parts_);
    if constexpr (transforms == 1 && which + 1 < sizeof...(Parts)) {
      const auto& part = std::get<which>(parts_);
      if constexpr (requires(const Fragment& fragment) { part.keeps_token_ids(fragment); }) {
        std::vector<Source> seen(ordered.begin(), ordered.end());
        std::vector<std::unique_ptr<Fragment>> without;
        for (Source& source : seen) {
          if (source.fragment->tokens().empty() || part.keeps_token_ids(*source.fragment)) continue;
          auto body = std::make_shared<Fragment::Body>(*source.fragment->body());
          body->tokens.clear();
          const auto index = static_cast<std::size_t>(source.payload - source.fragment->payloads().data());
          source.fragment = without.emplace_back(std::make_unique<Fragment>(std::move(body))).get();
          source.payload = &source.fragment->payloads()[index];
        }
        return last.align(seen, first_position);
      }
    }
    return last.align(ordered, first_position);
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
