// A seam policy whose `mark` returns nothing.
// error: kvmeld: a seam policy's 'mark' is 'Status mark(std::span<const Source>, const Alignment&,
// std::span<std::uint8_t>) const'
#include <kvmeld/merger.hpp>

struct Mine {
  static constexpr bool reproducible = true;
#ifdef KVMELD_BAD
  void mark(std::span<const kvmeld::Source>, const kvmeld::Alignment&,
            std::span<std::uint8_t>) const {}
#else
  kvmeld::Status mark(std::span<const kvmeld::Source>, const kvmeld::Alignment&,
                      std::span<std::uint8_t>) const {
    return {};
  }
#endif
  void digest(kvmeld::Hasher&) const {}
};

const auto merger = kvmeld::merger(Mine{});
