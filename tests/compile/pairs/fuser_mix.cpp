// A fuser of the mix form whose mixer lacks a member names the mixer's members. error: kvmeld: this
// type is no FusePolicy: what 'mixing() const' yields needs 'prepare(rows) const', 'float
// channel(rows, prepared, int) const'
#include <kvmeld/policy.hpp>

#ifdef KVMELD_BAD
#define CHANNEL chanel
#else
#define CHANNEL channel
#endif

struct First {
  static constexpr bool reproducible = true;
  struct Mix {
    static constexpr bool rotation_equivariant = true;
    template <class Rows>
    KVMELD_HD int prepare(const Rows&) const {
      return 0;
    }
    template <class Rows>
    KVMELD_HD float CHANNEL(const Rows& rows, int i, int c) const {
      return rows.value(i, c);
    }
  };
  Mix mixing() const { return {}; }
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Fuser fuser{First{}};
