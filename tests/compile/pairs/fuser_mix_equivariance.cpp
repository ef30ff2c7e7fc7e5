// A mixer that does not say whether rotation passes through it is refused: its keys would be read
// in an unknown frame. error: kvmeld: this type is no FusePolicy: what 'mixing() const' yields
// needs 'prepare(rows) const', 'float channel(rows, prepared, int) const' and 'static constexpr
// bool rotation_equivariant'
#include <kvmeld/policy.hpp>

#ifdef KVMELD_BAD
#define STATED equivariant
#else
#define STATED rotation_equivariant
#endif

struct First {
  static constexpr bool reproducible = true;
  struct Mix {
    static constexpr bool STATED = true;
    template <class Rows>
    KVMELD_HD int prepare(const Rows&) const {
      return 0;
    }
    template <class Rows>
    KVMELD_HD float channel(const Rows& rows, int i, int c) const {
      return rows.value(i, c);
    }
  };
  Mix mixing() const { return {}; }
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Fuser fuser{First{}};
