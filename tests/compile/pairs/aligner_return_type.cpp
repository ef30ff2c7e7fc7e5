// An aligner that returns the alignment itself and so cannot refuse.
// error: kvmeld: this type is no AlignPolicy: it needs 'Result<Alignment> align(
#include <kvmeld/policy.hpp>

struct Mine {
  static constexpr bool reproducible = true;
#ifdef KVMELD_BAD
  kvmeld::Alignment align(std::span<const kvmeld::Source>, std::int64_t) const { return {}; }
#else
  kvmeld::Result<kvmeld::Alignment> align(std::span<const kvmeld::Source>, std::int64_t) const {
    return kvmeld::Alignment{};
  }
#endif
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Aligner aligner{Mine{}};
