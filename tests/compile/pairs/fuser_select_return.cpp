// A fuser whose `select` yields a double.
// error: kvmeld: this type is no FusePolicy: it needs 'float select(OrderedValues) const'
#include <kvmeld/policy.hpp>

#ifdef KVMELD_BAD
using Number = double;
#else
using Number = float;
#endif

struct Smallest {
  static constexpr bool reproducible = true;
  KVMELD_HD Number select(kvmeld::OrderedValues values) const { return values[0]; }
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Fuser fuser{Smallest{}};
