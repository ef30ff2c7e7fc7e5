// An order without a digest: replicas could not tell that they use different ones.
// error: kvmeld: this select, order or seam policy lacks 'void digest(Hasher&) const'
#include <kvmeld/merger.hpp>

struct Mine {
  static constexpr bool reproducible = true;
  kvmeld::Result<std::vector<std::uint32_t>> order(std::span<const kvmeld::Source> sources) const {
    return kvmeld::ById{}.order(sources);
  }
#ifdef KVMELD_BAD
  void digset(kvmeld::Hasher&) const {}
#else
  void digest(kvmeld::Hasher&) const {}
#endif
};

const auto merger = kvmeld::merger(Mine{});
