// A signature whose function has another name. error: kvmeld: this type is no SignaturePolicy: it
// needs 'Result<std::uint64_t> sign(const SignatureInput&) const'
#include <kvmeld/anchors/pool.hpp>

#ifdef KVMELD_BAD
#define SIGN signature
#else
#define SIGN sign
#endif

struct Mine {
  [[nodiscard]] kvmeld::Result<std::uint64_t> SIGN(
      const kvmeld::anchors::SignatureInput& input) const {
    return std::uint64_t{input.tokens.size()};
  }
  void digest(kvmeld::Hasher&) const {}
};

using Pool = kvmeld::anchors::AnchorPool<Mine, kvmeld::anchors::LRU>;
std::size_t size_of(const Pool& pool) { return pool.size(); }
