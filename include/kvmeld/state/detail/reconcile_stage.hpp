#pragma once

/// What one side of a reconciliation knows: its elements in order of their hashes, cut into cells,
/// and what was found so far.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/state/detail/reconcile_estimate.hpp>
#include <kvmeld/state/detail/reconcile_plan.hpp>
#include <kvmeld/state/reconcile_item.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

struct ReconcileElement {
  std::uint64_t hash = 0;
  std::uint32_t item = 0;
};

/// A differing element that the other side holds: its name, and the hash that follows from it.
struct TheirElement {
  std::uint64_t hash = 0;
  FragmentId id;
};

/// A part of the elements that is not settled yet.
struct ReconcileCell {
  enum class Waits : std::uint8_t { elements, sums, names, verdict };

  std::uint32_t index = 0;
  CellForm form = CellForm::list;
  Waits waits = Waits::elements;
  std::uint32_t attempt = 0;
  std::uint32_t capacity = 0;
  std::uint32_t extensions = 0;  ///< of the sketch
  std::uint32_t expected = 0;    ///< further power sums, or names
  std::uint64_t their_count = 0;
  std::uint64_t their_fingerprint = 0;
  std::vector<std::uint32_t> described{};  ///< both sides' power sums added, or their list
  std::vector<std::uint32_t> mine{};       ///< elements that only this side holds
  std::vector<TheirElement> theirs{};
};

[[nodiscard]] constexpr std::uint64_t element_fingerprint(std::uint64_t hash) noexcept {
  return mix_bits(hash + 0xBB67AE8584CAA73BU);
}

/// The short hash of an element; another one at each attempt.
[[nodiscard]] constexpr std::uint32_t short_hash(std::uint64_t hash,
                                                 std::uint32_t attempt) noexcept {
  const auto low = static_cast<std::uint32_t>(
      attempt == 0 ? hash : mix_bits(hash + attempt * 0x9E3779B97F4A7C15U));
  return low == 0 ? 1 : low;  // a sketch sees no zero
}

/// One of the two stages of a session: over the ids, then over the tags of the ids that both hold.
struct ReconcileStage {
  bool tags = false;
  std::uint64_t salt = 0;
  std::vector<ReconcileElement> elements{};  ///< by hash, after `cut`
  std::uint64_t fingerprint = 0;             ///< of all elements
  std::uint64_t their_count = 0;
  std::uint64_t their_fingerprint = 0;
  CellPlan plan{};
  std::vector<std::uint32_t> starts{};  ///< first element of each cell, and the end
  std::vector<ReconcileCell> open{};
  std::uint32_t opened = 0;
  CellSpread spread{};
  std::uint64_t seen_count = 0, seen_fingerprint = 0;  ///< of their cells
  std::vector<std::uint32_t> mine{};                   ///< items that only this side holds
  std::vector<TheirElement> theirs{};
  std::uint64_t balance = 0;  ///< fingerprints of `theirs` less those of `mine`

  [[nodiscard]] std::size_t name_bytes() const noexcept {
    return tags ? sizeof(std::uint64_t) : sizeof(FragmentId);
  }
  [[nodiscard]] std::uint32_t cell_of(std::uint64_t hash) const noexcept {
    return static_cast<std::uint32_t>(((hash >> 32U) * plan.cells) >> 32U);
  }
  [[nodiscard]] std::span<const ReconcileElement> cell(std::uint32_t index) const noexcept {
    return std::span(elements).subspan(starts[index], starts[index + 1] - starts[index]);
  }
  [[nodiscard]] bool settled() const noexcept { return open.empty() && opened == plan.cells; }
  /// What was found explains what the other side announced of all its elements.
  [[nodiscard]] bool agrees() const noexcept {
    return fingerprint + balance == their_fingerprint &&
           elements.size() - mine.size() + theirs.size() == their_count;
  }
};

/// The order of ids, without a loop over bytes.
[[nodiscard]] inline bool id_before(const FragmentId& a, const FragmentId& b) noexcept {
  return std::memcmp(a.bytes.data(), b.bytes.data(), sizeof(FragmentId)) < 0;
}

[[nodiscard]] inline std::uint64_t id_hash(const FragmentId& id, std::uint64_t salt) noexcept {
  return XXH3_64bits_withSeed(id.bytes.data(), id.bytes.size(), salt);
}

/// Sorts by hash: into buckets by its first bits, then each of them.
KVMELD_LAZY void sort_by_hash(std::vector<ReconcileElement>& elements) {
  const unsigned bits = static_cast<unsigned>(std::bit_width(elements.size() / 8));
  const auto bucket = [bits](const ReconcileElement& e) {
    return bits == 0 ? std::size_t{0} : static_cast<std::size_t>(e.hash >> (64U - bits));
  };
  std::vector<std::uint32_t> ends((std::size_t{1} << bits) + 1);
  for (const ReconcileElement& e : elements) ++ends[bucket(e) + 1];
  for (std::size_t i = 1; i < ends.size(); ++i) ends[i] += ends[i - 1];
  std::vector<ReconcileElement> sorted(elements.size());
  for (const ReconcileElement& e : elements) sorted[ends[bucket(e)]++] = e;
  std::uint32_t begin = 0;
  for (std::size_t b = 0; b + 1 < ends.size(); begin = ends[b++]) {
    std::sort(sorted.begin() + begin, sorted.begin() + ends[b],
              [](const auto& x, const auto& y) { return x.hash < y.hash; });
  }
  elements.swap(sorted);
}

/// Cuts the elements into the plan's cells.
KVMELD_LAZY void cut(ReconcileStage& stage) {
  sort_by_hash(stage.elements);
  stage.starts.assign(stage.plan.cells + std::size_t{1}, 0);
  for (const ReconcileElement& e : stage.elements)
    ++stage.starts[stage.cell_of(e.hash) + std::size_t{1}];
  for (std::size_t i = 1; i < stage.starts.size(); ++i) stage.starts[i] += stage.starts[i - 1];
}

[[nodiscard]] inline std::uint64_t cell_fingerprint(
    std::span<const ReconcileElement> elements) noexcept {
  std::uint64_t sum = 0;
  for (const ReconcileElement& e : elements) sum += element_fingerprint(e.hash);
  return sum;
}

KVMELD_LAZY [[nodiscard]] std::vector<std::uint32_t> short_hashes(
    std::span<const ReconcileElement> elements, const ReconcileCell& cell) {
  std::vector<std::uint32_t> out(elements.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = short_hash(elements[i].hash, cell.attempt);
    if (cell.form == CellForm::list) out[i] &= 0xFFFFFFU;
  }
  return out;
}

/// Forgets what was found in a cell, for another try with other short hashes. False: there were
/// enough of them.
KVMELD_LAZY [[nodiscard]] bool next_attempt(ReconcileCell& cell) {
  if (++cell.attempt >= sketch_attempts) cell.form = CellForm::list;
  cell.described.clear();
  cell.mine.clear();
  cell.theirs.clear();
  cell.waits = ReconcileCell::Waits::elements;
  return cell.attempt < max_attempts;
}

/// The names found on both sides explain the difference of the cell's fingerprints.
[[nodiscard]] inline bool explains(const ReconcileStage& stage,
                                   const ReconcileCell& cell) noexcept {
  const auto elements = stage.cell(cell.index);
  std::uint64_t sum = cell_fingerprint(elements);
  for (const std::uint32_t i : cell.mine) sum -= element_fingerprint(elements[i].hash);
  for (const TheirElement& their : cell.theirs) sum += element_fingerprint(their.hash);
  return sum == cell.their_fingerprint &&
         elements.size() - cell.mine.size() + cell.theirs.size() == cell.their_count;
}

/// Calls `step` with the open cells from `first` on, in order; those for which it is false leave.
template <class Step>
void keep_open(ReconcileStage& stage, std::size_t first, const Step& step) {
  std::size_t kept = first;
  for (std::size_t i = first; i < stage.open.size(); ++i) {
    if (!step(stage.open[i])) continue;
    if (kept != i) stage.open[kept] = std::move(stage.open[i]);
    ++kept;
  }
  stage.open.resize(kept);
}

/// Takes a cell's findings over into the stage.
KVMELD_LAZY void settle(ReconcileStage& stage, const ReconcileCell& cell) {
  const auto elements = stage.cell(cell.index);
  for (const std::uint32_t i : cell.mine) {
    stage.mine.push_back(elements[i].item);
    stage.balance -= element_fingerprint(elements[i].hash);
  }
  for (const TheirElement& their : cell.theirs) {
    stage.theirs.push_back(their);
    stage.balance += element_fingerprint(their.hash);
  }
}

}  // namespace detail

KVMELD_NAMESPACE_END
