// A select policy that does not say whether it is reproducible.
// error: kvmeld: this select, order or seam policy lacks 'static constexpr bool reproducible'
#include <kvmeld/merger.hpp>

struct Mine {
#ifndef KVMELD_BAD
  static constexpr bool reproducible = true;
#endif
  kvmeld::Result<kvmeld::TokenSet> select(const kvmeld::Source&) const {
    return kvmeld::TokenSet{};
  }
  void digest(kvmeld::Hasher&) const {}
};

const auto merger = kvmeld::merger(Mine{});
