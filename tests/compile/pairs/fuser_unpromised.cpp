// A fuser that does not say whether it is rotation-equivariant: nobody may guess.
// error: kvmeld: this type is no FusePolicy
// error: 'rotation_equivariant' and 'reproducible'
#include <kvmeld/policy.hpp>

struct Mine {
  static constexpr bool reproducible = true;
#ifndef KVMELD_BAD
  static constexpr bool rotation_equivariant = true;
#endif
  KVMELD_HD float init() const { return 0; }
  KVMELD_HD float absorb(float acc, float value, float weight) const {
    return kvmeld::fma(weight, value, acc);
  }
  KVMELD_HD float join(float a, float b) const { return a + b; }
  KVMELD_HD float finish(float acc, float, int) const { return acc; }
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Fuser fuser{Mine{}};
