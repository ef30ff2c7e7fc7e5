// A seam policy whose `mark` has another name: nothing says that it is one.
// error: it has neither 'select' nor 'order' nor 'mark'
#include <kvmeld/merger.hpp>

struct Mine {
  static constexpr bool reproducible = true;
#ifdef KVMELD_BAD
  kvmeld::Status makr(std::span<const kvmeld::Source>, const kvmeld::Alignment&,
                      std::span<std::uint8_t>) const {
    return {};
  }
#else
  kvmeld::Status mark(std::span<const kvmeld::Source>, const kvmeld::Alignment&,
                      std::span<std::uint8_t>) const {
    return {};
  }
#endif
  void digest(kvmeld::Hasher&) const {}
};

const auto merger = kvmeld::merger(Mine{});
