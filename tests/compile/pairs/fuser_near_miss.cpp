// A fuser with a misspelled optional member: a weight that nobody would ask for.
// error: kvmeld: this policy has a member that is nearly 'weight'
#include <kvmeld/fuse/fold.hpp>

struct Mine : kvmeld::WeightedMean {
#ifdef KVMELD_BAD
  float wieght(const kvmeld::Source&) const { return 2; }
#else
  float weight(const kvmeld::Source&) const { return 2; }
#endif
};

const kvmeld::Fuser fuser{Mine{}};
