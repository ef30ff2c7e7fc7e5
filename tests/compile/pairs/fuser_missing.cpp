// A fuser without `join`, by which chunks are put together. error: kvmeld: this type is no
// FusePolicy: it needs 'init() const', 'absorb(acc, float, float) const', 'join(acc, acc) const'
#include <kvmeld/policy.hpp>

struct Mine {
  static constexpr bool reproducible = true;
  static constexpr bool rotation_equivariant = false;
  KVMELD_HD float init() const { return 0; }
  KVMELD_HD float absorb(float acc, float value, float) const { return acc < value ? value : acc; }
#ifndef KVMELD_BAD
  KVMELD_HD float join(float a, float b) const { return a < b ? b : a; }
#endif
  KVMELD_HD float finish(float acc, float, int) const { return acc; }
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Fuser fuser{Mine{}};
