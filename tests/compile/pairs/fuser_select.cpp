// A fuser whose only member is misspelled has no form at all, and reads which there are. error:
// kvmeld: this type is no FusePolicy: it needs one of 'float select(OrderedValues) const',
// 'mixing() const', 'Status score(const Scoring&
#include <kvmeld/policy.hpp>

#ifdef KVMELD_BAD
#define SELECT selct
#else
#define SELECT select
#endif

struct Smallest {
  static constexpr bool reproducible = true;
  KVMELD_HD float SELECT(kvmeld::OrderedValues values) const { return values[0]; }
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Fuser fuser{Smallest{}};
