// An eviction that yields a signed number. error: kvmeld: this type is no EvictionPolicy: it needs
// 'std::size_t victim(std::span<const AnchorUse>) const'
#include <kvmeld/anchor/anchor_pool.hpp>

#ifdef KVMELD_BAD
using Index = int;
#else
using Index = std::size_t;
#endif

struct Mine {
  [[nodiscard]] Index victim(std::span<const kvmeld::AnchorUse>) const { return 0; }
  void digest(kvmeld::Hasher&) const {}
};

using Pool = kvmeld::AnchorPool<kvmeld::SimHash, Mine>;
std::size_t size_of(const Pool& pool) { return pool.size(); }
