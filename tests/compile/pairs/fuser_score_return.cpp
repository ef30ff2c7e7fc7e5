// A fold whose `score` cannot report an error: the fold alone would do, and the score be left out
// in silence. error: kvmeld: this type is no FusePolicy: it needs 'Status score(const Scoring&,
// std::span<double>) const'
#include <kvmeld/policy.hpp>

#ifdef KVMELD_BAD
using Answer = void;
#else
using Answer = kvmeld::Status;
#endif

struct Mine {
  static constexpr bool reproducible = true;
  static constexpr bool rotation_equivariant = false;
  Answer score(const kvmeld::Scoring&, std::span<double>) const { return Answer(); }
  KVMELD_HD float init() const { return 0; }
  KVMELD_HD float absorb(float acc, float value, float) const { return acc < value ? value : acc; }
  KVMELD_HD float join(float a, float b) const { return a < b ? b : a; }
  KVMELD_HD float finish(float acc, float, int) const { return acc; }
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Fuser fuser{Mine{}};
