// A fuser with a misspelled optional member: a weight that nobody would ask for.
// error: kvmeld: this policy has a member that is nearly 'weight'
#include <kvmeld/policies/mean.hpp>

struct Mine : kvmeld::WeightedMean {
#ifdef KVMELD_BAD
  float wieght(const kvmeld::Source&) const { return 2; }
#else
  float weight(const kvmeld::Source&) const { return 2; }
#endif
};

// Words that mean something of its own: a setting, and a function.
struct Own : kvmeld::WeightedMean {
  bool normalize = true;
  static float normalise(float x) { return x; }
};

const kvmeld::Fuser fuser{Mine{}};
const kvmeld::Fuser own{Own{}};
