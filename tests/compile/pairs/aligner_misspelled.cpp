// An aligner whose member is misspelled: the error names the concept and what the type needs.
// error: kvmeld: this type is no AlignPolicy: it needs 'Result<Alignment> align(std::span<const
// Source>, std::int64_t) const'
#include <kvmeld/policy.hpp>

struct Mine {
  static constexpr bool reproducible = true;
#ifdef KVMELD_BAD
  kvmeld::Result<kvmeld::Alignment> aling(std::span<const kvmeld::Source>, std::int64_t) const {
    return kvmeld::Alignment{};
  }
#else
  kvmeld::Result<kvmeld::Alignment> align(std::span<const kvmeld::Source>, std::int64_t) const {
    return kvmeld::Alignment{};
  }
#endif
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Aligner aligner{Mine{}};
