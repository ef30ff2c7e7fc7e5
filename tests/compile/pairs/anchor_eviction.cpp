// An eviction that yields a signed number. error: kvmeld: this type is no EvictionPolicy: it needs
// 'std::size_t victim(std::span<const AnchorUse>) const'
#include <kvmeld/anchors/pool.hpp>

#ifdef KVMELD_BAD
using Index = int;
#else
using Index = std::size_t;
#endif

struct Mine {
  [[nodiscard]] Index victim(std::span<const kvmeld::anchors::AnchorUse>) const { return 0; }
  void digest(kvmeld::Hasher&) const {}
};

using Pool = kvmeld::anchors::AnchorPool<kvmeld::anchors::SimHash, Mine>;
std::size_t size_of(const Pool& pool) { return pool.size(); }
