// What faiss_range_search.py calls of kvmeld: tables of signatures that are scanned, with and
// without their index.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <kvmeld/anchors/detail/table.hpp>

namespace {

struct Signatures {
  kvmeld::anchors::AnchorTable table;
  std::vector<std::uint32_t> low, high;
  std::vector<kvmeld::anchors::HammingHit> hits;
};

}  // namespace

extern "C" {

void* kvmeld_signatures(const std::uint64_t* signatures, std::size_t count) {
  auto* const made = new Signatures;
  made->table.append({signatures, count}, {std::make_shared<const kvmeld::anchors::Anchor>(),
                                           std::make_shared<kvmeld::anchors::detail::UseCell>()});
  for (std::size_t i = 0; i < count; ++i) {
    made->low.push_back(static_cast<std::uint32_t>(signatures[i]));
    made->high.push_back(static_cast<std::uint32_t>(signatures[i] >> 32U));
  }
  return made;
}
/// As a pool looks signatures up.
std::size_t kvmeld_look_up(void* of, std::uint64_t query, int distance) {
  auto& s = *static_cast<Signatures*>(of);
  s.hits.clear();
  s.table.scan(query, distance, s.hits);
  return s.hits.size();
}
/// One signature after the other.
std::size_t kvmeld_scan(void* of, std::uint64_t query, int distance) {
  auto& s = *static_cast<Signatures*>(of);
  s.hits.clear();
  kvmeld::anchors::hamming_scan(
      {s.low.data(), s.high.data(), static_cast<std::uint32_t>(s.low.size())}, query, distance,
      s.hits);
  return s.hits.size();
}
void kvmeld_hits(const void* of, std::uint32_t* numbers) {
  for (const kvmeld::anchors::HammingHit& hit : static_cast<const Signatures*>(of)->hits)
    *numbers++ = hit.index;
}
void kvmeld_free(void* of) { delete static_cast<Signatures*>(of); }
}
