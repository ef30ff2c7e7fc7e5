#pragma once

#include <utility>

#include <kvmeld/align/alignment.hpp>

KVMELD_NAMESPACE_BEGIN

/// Names a policy as the align slot of a merger: `Aligner{TokenMatch{}}`.
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

/// Puts the spans one after the other: every selected token is an output token of its own.
///
/// O(tokens).
struct Concat {
  static constexpr bool reproducible = true;

  KVMELD_LAZY [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
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
  KVMELD_LAZY void digest(Hasher& hasher) const { hasher.text("kvmeld.Concat"); }
};

KVMELD_NAMESPACE_END
