#pragma once

/// The two sides of a reconciliation, and its stages.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/bytes.hpp>
#include <kvmeld/replica/detail/reconcile_sketch.hpp>
#include <kvmeld/replica/wire.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

// How a stage of a reconciliation is cut into cells, and how many power sums it spends on them.

namespace detail {

/// How the side with fewer elements describes those of a cell.
enum class CellForm : std::uint8_t {
  sketch = 0,  ///< power sums of short hashes: 4 bytes for each element that differs
  list = 1,    ///< the short hashes: 3 bytes for each element
};

inline constexpr std::uint32_t max_cells = 1U << 16U;
inline constexpr std::uint32_t max_capacity = 256;   ///< power sums of a cell
inline constexpr std::uint32_t max_attempts = 6;     ///< salts tried on a cell
inline constexpr std::uint32_t sketch_attempts = 2;  ///< of which the first ones may be sketches

/// How a stage is cut. Whoever sees both sides' counts and counters decides it.
struct CellPlan {
  CellForm form = CellForm::list;
  std::uint32_t cells = 1;
  std::uint32_t capacity = 1;  ///< power sums in a cell's first sketch
};

/// Share of the expected power sums that first sketches have. Of many cells too few, for
/// `CellSpread` says how many are missing, and sums that were not needed are lost; but tags have
/// bytes to spare, which saves messages.
[[nodiscard]] constexpr double first_share(bool tags, std::uint32_t cells) noexcept {
  return cells < 8 ? 1.0 : tags ? 0.85 : 0.75;
}

/// Estimates how much differs from the counts of cells: how many more elements one side has than
/// the other in a cell varies as much as elements differ, since each differing one adds or
/// subtracts one (a difference of Poisson variables).
struct CellSpread {
  double cells = 0, sum = 0, squares = 0;

  void add(std::uint64_t ours, std::uint64_t theirs) noexcept {
    const double more = static_cast<double>(ours) - static_cast<double>(theirs);
    cells += 1;
    sum += more;
    squares += more * more;
  }
  /// Power sums with which about two of three cells are solved, from the counts and from what the
  /// plan went by.
  [[nodiscard]] double capacity(const CellPlan& plan, bool tags) const noexcept {
    constexpr double counters = 32;  // what the plan's estimate weighs, in cells
    const double planned = (plan.capacity - 2.0) / first_share(tags, plan.cells);
    const double variance = cells < 2 ? 0 : (squares - sum * sum / cells) * cells / (cells - 1);
    const double mean = (std::max)(0.0, (counters * planned + variance) / (counters + cells));
    return mean + 0.4 * std::sqrt(mean) + 1.5;
  }
};

/// The cheaper form, for sets of `fewer` and `more` elements of which about `estimate` are on one
/// side only.
[[nodiscard]] inline CellPlan plan_cells(std::uint64_t fewer, std::uint64_t more, double estimate,
                                         bool tags) {
  const auto least = static_cast<double>(more - fewer);
  const double differing = (std::max)({estimate, least, 1.0});
  // Bytes beside the names: a list costs the same whatever differs, a sketch as much as does. The
  // estimate is uncertain, and only the list is dear where it was too high.
  const double sketch_bytes = 5.2 * differing + 2.0 * (differing - least);
  CellPlan plan;
  double cells = 1;
  if (3.2 * static_cast<double>(fewer) <= 0.8 * sketch_bytes) {
    cells = static_cast<double>(fewer + more) / 256.0;
  } else {
    // work grows with its square; a cell costs 10 bytes beside its sums
    constexpr double per_cell = 24;
    plan.form = CellForm::sketch;
    cells = differing / per_cell;
  }
  plan.cells = static_cast<std::uint32_t>(
      (std::min)((std::max)(cells, 1.0), static_cast<double>(max_cells)));
  if (plan.form == CellForm::sketch) {
    const double sums = differing / plan.cells * first_share(tags, plan.cells) + 2.0;
    plan.capacity = static_cast<std::uint32_t>((std::min)(sums, static_cast<double>(max_capacity)));
  }
  return plan;
}

}  // namespace detail

// What one side of a reconciliation knows: its elements in order of their hashes, cut into cells,
// and what was found so far.

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
  return extend::mix_bits(hash + 0xBB67AE8584CAA73BU);
}

/// The short hash of an element; another one at each attempt.
[[nodiscard]] constexpr std::uint32_t short_hash(std::uint64_t hash,
                                                 std::uint32_t attempt) noexcept {
  const auto low = static_cast<std::uint32_t>(
      attempt == 0 ? hash : extend::mix_bits(hash + attempt * 0x9E3779B97F4A7C15U));
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
inline void sort_by_hash(std::vector<ReconcileElement>& elements) {
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
inline void cut(ReconcileStage& stage) {
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

[[nodiscard]] inline std::vector<std::uint32_t> short_hashes(
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
[[nodiscard]] inline bool next_attempt(ReconcileCell& cell) {
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
inline void settle(ReconcileStage& stage, const ReconcileCell& cell) {
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

// Names of differing elements on the wire: ids of 32 bytes, or hashes of 8 where both sides hold
// the id.

namespace detail {

/// Names of elements of a cell, in order of their hashes.
inline void write_names(extend::ByteWriter& out, const ReconcileStage& stage,
                        std::span<const ReconcileItem> items, const ReconcileCell& cell) {
  const auto elements = stage.cell(cell.index);
  for (const std::uint32_t i : cell.mine) {
    if (stage.tags) {
      out.value(elements[i].hash);
    } else {
      out.bytes(std::as_bytes(std::span(items[elements[i].item].id.bytes)));
    }
  }
}

/// Reads them; false where this side holds one of them, so that somebody's short hashes have met.
[[nodiscard]] inline bool read_names(extend::ByteReader& in, const ReconcileStage& stage,
                                     std::span<const ReconcileItem> items, ReconcileCell& cell,
                                     std::size_t count) {
  const auto elements = stage.cell(cell.index);
  bool strange = true;
  const auto bytes = in.bytes(count * stage.name_bytes());
  cell.theirs.resize(bytes.size() / stage.name_bytes());
  for (std::size_t i = 0; i < cell.theirs.size(); ++i) {
    TheirElement& their = cell.theirs[i];
    const std::byte* const name = bytes.data() + i * stage.name_bytes();
    if (stage.tags) {
      std::memcpy(&their.hash, name, sizeof(their.hash));
    } else {
      std::memcpy(their.id.bytes.data(), name, sizeof(FragmentId));
      their.hash = id_hash(their.id, stage.salt);
    }
    if (stage.cell_of(their.hash) != cell.index ||
        (i != 0 && their.hash <= cell.theirs[i - 1].hash))
      in.fail(ErrorCode::corrupt);
    const auto held =
        std::lower_bound(elements.begin(), elements.end(), their.hash,
                         [](const ReconcileElement& e, std::uint64_t h) { return e.hash < h; });
    if (held != elements.end() && held->hash == their.hash &&
        (stage.tags || items[held->item].id == their.id))
      strange = false;
  }
  return strange;
}

}  // namespace detail

// The side with fewer elements: describes its cells, and names what the other side found that it
// lacks.

namespace detail {

/// What the solving side says of a cell.
enum class CellAnswer : std::uint8_t {
  settled = 0,  ///< both sides know all
  found = 1,    ///< names of its own elements, and which of the other's it lacks
  more = 2,     ///< further power sums wanted: too many elements differ
  again = 3,    ///< short hashes met; another attempt wanted
  list = 4,     ///< a list would be cheaper than more sums
};

/// Fewest further power sums that may be asked for: ever more, so that messages stay few.
[[nodiscard]] constexpr std::uint64_t least_extension(bool tags,
                                                      const ReconcileCell& cell) noexcept {
  return 2 + std::uint64_t{cell.capacity} * (cell.extensions + (tags ? 2U : 1U)) / 12;
}
constexpr void extend(ReconcileCell& cell, std::uint32_t sums) noexcept {
  cell.capacity += sums;
  ++cell.extensions;
}

/// Power sums `[first, first + count)` of a cell.
inline void write_sums(extend::ByteWriter& out, const ReconcileStage& stage,
                       const ReconcileCell& cell, std::uint32_t first, std::uint32_t count) {
  std::vector<std::uint32_t> sums(count);
  sketch_add(short_hashes(stage.cell(cell.index), cell), first, sums);
  out.bytes(std::as_bytes(std::span<const std::uint32_t>(sums)));
}

inline void write_elements(extend::ByteWriter& out, const ReconcileStage& stage,
                           const ReconcileCell& cell) {
  if (cell.form == CellForm::sketch) return write_sums(out, stage, cell, 0, cell.capacity);
  for (const std::uint32_t low : short_hashes(stage.cell(cell.index), cell)) {
    out.value(static_cast<std::uint16_t>(low));
    out.value(static_cast<std::uint8_t>(low >> 16U));
  }
}

/// Reads which of this side's elements the other one lacks, into `cell.mine`. False where short
/// hashes have met.
[[nodiscard]] inline bool read_lacking(extend::ByteReader& in, const ReconcileStage& stage,
                                       ReconcileCell& cell) {
  const auto elements = stage.cell(cell.index);
  if (cell.form == CellForm::list) {
    const auto bits = in.bytes((elements.size() + 7) / 8);
    if (!in.ok()) return false;
    for (std::uint32_t i = 0; i < 8 * bits.size(); ++i) {
      if (((bits[i / 8] >> (i % 8)) & std::byte{1}) == std::byte{0}) continue;
      if (i >= elements.size()) in.fail(ErrorCode::corrupt);
      cell.mine.push_back(i);
    }
    return true;
  }
  const std::size_t degree = in.count(sizeof(std::uint32_t));
  if (degree > elements.size()) in.fail(ErrorCode::corrupt);
  const auto bytes = in.bytes(degree * sizeof(std::uint32_t));
  if (!in.ok()) return false;
  std::vector<std::uint32_t> locator(degree);
  if (degree != 0) std::memcpy(locator.data(), bytes.data(), bytes.size());
  if (degree != 0) cell.mine = sketch_roots(locator, short_hashes(elements, cell));
  return cell.mine.size() == degree;
}

/// One cell's answer in, what follows from it out. False when the cell is settled, or the bytes are
/// bad.
[[nodiscard]] inline bool tell_cell(extend::ByteReader& in, extend::ByteWriter& out,
                                    ReconcileStage& stage, std::span<const ReconcileItem> items,
                                    ReconcileCell& cell) {
  using Waits = ReconcileCell::Waits;
  const auto answer = static_cast<CellAnswer>(in.value<std::uint8_t>());
  const bool told = cell.waits == Waits::verdict;
  if (!in.ok()) return false;
  if (answer == CellAnswer::settled) {
    settle(stage, cell);
    return false;
  }
  bool repeat = answer == CellAnswer::again;
  if (!told && answer == CellAnswer::found) {
    const std::size_t count = in.count(stage.name_bytes());
    bool good = read_names(in, stage, items, cell, count);
    good = read_lacking(in, stage, cell) && good;
    if (!in.ok()) return false;
    if (cell.mine.empty()) {  // the other side has compared fingerprints already
      if (!good) in.fail(ErrorCode::corrupt);
      settle(stage, cell);
      return false;
    }
    out.value(static_cast<std::uint8_t>(good ? 1 : 0));
    if (good) {
      write_names(out, stage, items, cell);
      cell.waits = Waits::verdict;
      return true;
    }
    repeat = true;
  } else if (!told && answer == CellAnswer::more && cell.form == CellForm::sketch) {
    const std::uint64_t count = in.varint();
    if (count > max_capacity - cell.capacity || count < least_extension(stage.tags, cell))
      in.fail(ErrorCode::corrupt);
    if (!in.ok()) return false;
    write_sums(out, stage, cell, cell.capacity, static_cast<std::uint32_t>(count));
    extend(cell, static_cast<std::uint32_t>(count));
    return true;
  } else if (!told && answer == CellAnswer::list && cell.form == CellForm::sketch) {
    cell.form = CellForm::list;
    write_elements(out, stage, cell);
    return true;
  }
  if (!repeat || !next_attempt(cell)) {
    in.fail(ErrorCode::corrupt);
    return false;
  }
  write_elements(out, stage, cell);
  return true;
}

/// Opens cells until `window` are open.
inline void tell_next(extend::ByteWriter& out, ReconcileStage& stage, std::size_t window) {
  const std::size_t room = window > stage.open.size() ? window - stage.open.size() : 0;
  const auto fresh =
      static_cast<std::uint32_t>((std::min)(room, std::size_t{stage.plan.cells - stage.opened}));
  out.varint(fresh);
  for (std::uint32_t i = 0; i < fresh; ++i) {
    ReconcileCell cell{
        .index = stage.opened++, .form = stage.plan.form, .capacity = stage.plan.capacity};
    const auto elements = stage.cell(cell.index);
    out.varint(elements.size());
    out.value(cell_fingerprint(elements));
    write_elements(out, stage, cell);
    stage.open.push_back(std::move(cell));
  }
}

/// Reads the answers to all open cells, and writes what follows from them; settled cells leave.
inline void tell(extend::ByteReader& in, extend::ByteWriter& out, ReconcileStage& stage,
                 std::span<const ReconcileItem> items) {
  keep_open(stage, 0,
            [&](ReconcileCell& cell) { return in.ok() && tell_cell(in, out, stage, items, cell); });
}

}  // namespace detail

// The side with more elements: solves the cells that the other side describes.

namespace detail {

/// What solving a cell came to. `found` fills `cell.mine` and `lacking`, which tells the other side
/// its own part.
struct CellSolution {
  CellAnswer answer = CellAnswer::again;
  std::size_t lacks = 0;                     ///< elements of the other side
  std::vector<std::uint32_t> lacking{};      ///< their locator
  std::vector<std::uint8_t> lacking_bits{};  ///< or a bit for each element of their list
};

[[nodiscard]] inline CellSolution solve_sketch(const ReconcileStage& stage, ReconcileCell& cell) {
  const auto elements = stage.cell(cell.index);
  const std::uint64_t ours = elements.size(), theirs = cell.their_count;
  const std::uint64_t least = ours > theirs ? ours - theirs : theirs - ours;
  CellSolution out;
  std::optional<std::vector<std::uint32_t>> locator;
  if (least < cell.capacity) locator = sketch_solve(cell.described);
  if (!locator) {
    const std::uint64_t missing =
        least < cell.capacity ? 0 : (std::min)(least - cell.capacity, std::uint64_t{max_capacity});
    const double wanted = (std::min)(stage.spread.capacity(stage.plan, stage.tags),
                                     static_cast<double>(max_capacity)) -
                          cell.capacity;
    const auto expected = static_cast<std::uint64_t>((std::max)(wanted, 0.0));
    const std::uint32_t count = static_cast<std::uint32_t>(
        (std::max)({least_extension(stage.tags, cell), missing + 2, expected}));
    const bool dear = cell.capacity + count > max_capacity || 5 * std::uint64_t{count} > 3 * theirs;
    cell.expected = count;
    out.answer = dear ? CellAnswer::list : CellAnswer::more;
    return out;
  }
  const auto shorts = short_hashes(elements, cell);
  cell.mine = sketch_roots(*locator, shorts);
  const std::size_t degree = locator->size();
  if (cell.mine.size() > degree || degree - cell.mine.size() > theirs ||
      ours - cell.mine.size() + (degree - cell.mine.size()) != theirs)
    return out;
  out.answer = CellAnswer::found;
  out.lacks = degree - cell.mine.size();
  if (out.lacks == 0) return out;
  for (const std::uint32_t i : cell.mine) sketch_divide(*locator, shorts[i]);
  out.lacking = *std::move(locator);
  return out;
}

[[nodiscard]] inline CellSolution solve_list(const ReconcileStage& stage, ReconcileCell& cell) {
  const auto keyed = [](std::span<const std::uint32_t> shorts) {
    std::vector<std::uint64_t> out(shorts.size());
    for (std::size_t i = 0; i < shorts.size(); ++i) out[i] = (std::uint64_t{shorts[i]} << 32U) | i;
    std::sort(out.begin(), out.end());
    return out;
  };
  const auto meet = [](const std::vector<std::uint64_t>& keys) {
    return std::adjacent_find(keys.begin(), keys.end(), [](std::uint64_t a, std::uint64_t b) {
             return a >> 32U == b >> 32U;
           }) != keys.end();
  };
  const auto ours = keyed(short_hashes(stage.cell(cell.index), cell));
  const auto theirs = keyed(cell.described);
  CellSolution out;
  if (meet(ours) || meet(theirs)) return out;
  out.answer = CellAnswer::found;
  out.lacking_bits.resize((theirs.size() + 7) / 8);
  auto their = theirs.begin();
  const auto lack = [&](std::uint64_t key) {
    const auto i = static_cast<std::uint32_t>(key);
    out.lacking_bits[i / 8] = static_cast<std::uint8_t>(out.lacking_bits[i / 8] | (1U << (i % 8)));
    ++out.lacks;
  };
  for (const std::uint64_t our : ours) {
    for (; their != theirs.end() && *their >> 32U < our >> 32U; ++their) lack(*their);
    if (their != theirs.end() && *their >> 32U == our >> 32U) {
      ++their;
    } else {
      cell.mine.push_back(static_cast<std::uint32_t>(our));
    }
  }
  for (; their != theirs.end(); ++their) lack(*their);
  std::sort(cell.mine.begin(), cell.mine.end());
  return out;
}

inline void read_sums(extend::ByteReader& in, const ReconcileStage& stage, ReconcileCell& cell,
                      std::uint32_t count) {
  const auto bytes = in.bytes(count * sizeof(std::uint32_t));
  if (!in.ok()) return;
  const std::size_t first = cell.described.size();
  cell.described.resize(first + count);
  const auto fresh = std::span(cell.described).subspan(first);
  std::memcpy(fresh.data(), bytes.data(), bytes.size());
  sketch_add(short_hashes(stage.cell(cell.index), cell), first, fresh);
}

inline void read_elements(extend::ByteReader& in, const ReconcileStage& stage,
                          ReconcileCell& cell) {
  cell.described.clear();
  if (cell.form == CellForm::sketch) return read_sums(in, stage, cell, cell.capacity);
  if (cell.their_count > in.remaining() / 3) return in.fail(ErrorCode::truncated);
  cell.described.resize(static_cast<std::size_t>(cell.their_count));
  for (std::uint32_t& low : cell.described) {
    low = in.value<std::uint16_t>();
    low |= std::uint32_t{in.value<std::uint8_t>()} << 16U;
  }
}

/// Another try at a cell. False: this was the last one.
[[nodiscard]] inline bool ask_again(extend::ByteReader& in, extend::ByteWriter& out,
                                    ReconcileCell& cell) {
  if (!next_attempt(cell)) in.fail(ErrorCode::corrupt);
  out.value(CellAnswer::again);
  return in.ok();
}

/// Solves a cell as described so far. False when it is settled.
[[nodiscard]] inline bool solve_cell(extend::ByteReader& in, extend::ByteWriter& out,
                                     ReconcileStage& stage, std::span<const ReconcileItem> items,
                                     ReconcileCell& cell) {
  using Waits = ReconcileCell::Waits;
  if (!in.ok()) return false;
  if (explains(stage, cell)) {  // nothing differs
    out.value(CellAnswer::settled);
    return false;
  }
  const CellSolution solution =
      cell.form == CellForm::sketch ? solve_sketch(stage, cell) : solve_list(stage, cell);
  if (solution.answer == CellAnswer::more) {
    out.value(CellAnswer::more);
    out.varint(cell.expected);
    extend(cell, cell.expected);
    cell.waits = Waits::sums;
    return true;
  }
  if (solution.answer == CellAnswer::list) {
    out.value(CellAnswer::list);
    cell.form = CellForm::list;
    cell.waits = Waits::elements;
    return true;
  }
  if (solution.answer == CellAnswer::again || (solution.lacks == 0 && !explains(stage, cell)))
    return ask_again(in, out, cell);
  out.value(CellAnswer::found);
  out.varint(cell.mine.size());
  write_names(out, stage, items, cell);
  if (cell.form == CellForm::sketch) {
    out.varint(solution.lacks);
    out.bytes(std::as_bytes(std::span<const std::uint32_t>(solution.lacking)));
  } else {
    out.bytes(std::as_bytes(std::span<const std::uint8_t>(solution.lacking_bits)));
  }
  cell.expected = static_cast<std::uint32_t>(solution.lacks);
  cell.waits = Waits::names;
  if (solution.lacks == 0) settle(stage, cell);
  return solution.lacks != 0;
}

/// What the other side said of one open cell in, the answer out. False when the cell is settled, or
/// the bytes are bad.
[[nodiscard]] inline bool hear_cell(extend::ByteReader& in, extend::ByteWriter& out,
                                    ReconcileStage& stage, std::span<const ReconcileItem> items,
                                    ReconcileCell& cell) {
  using Waits = ReconcileCell::Waits;
  if (cell.waits == Waits::sums) {
    read_sums(in, stage, cell, cell.expected);
    return solve_cell(in, out, stage, items, cell);
  }
  if (cell.waits == Waits::names) {
    const auto good = in.value<std::uint8_t>();
    if (good > 1) in.fail(ErrorCode::corrupt);
    if (!in.ok()) return false;
    if (good == 1) {
      const bool strange = read_names(in, stage, items, cell, cell.expected);
      if (!in.ok()) return false;
      if (!strange || !explains(stage, cell)) return ask_again(in, out, cell);
      out.value(CellAnswer::settled);
      settle(stage, cell);
      return false;
    }
    if (!next_attempt(cell)) in.fail(ErrorCode::corrupt);
  }
  read_elements(in, stage, cell);
  return solve_cell(in, out, stage, items, cell);
}

/// Reads what the other side says of all open cells and of those that it opens, and writes the
/// answers.
inline void solve(extend::ByteReader& in, extend::ByteWriter& out, ReconcileStage& stage,
                  std::span<const ReconcileItem> items) {
  const bool idle = stage.open.empty();
  keep_open(stage, 0, [&](ReconcileCell& cell) { return hear_cell(in, out, stage, items, cell); });
  const std::uint64_t fresh = in.varint();
  if (fresh > stage.plan.cells - stage.opened || (idle && fresh == 0)) in.fail(ErrorCode::corrupt);
  const std::size_t first = stage.open.size();
  for (std::uint64_t i = 0; i < fresh && in.ok(); ++i) {
    ReconcileCell& cell = stage.open.emplace_back(ReconcileCell{
        .index = stage.opened++, .form = stage.plan.form, .capacity = stage.plan.capacity});
    cell.their_count = in.varint();
    cell.their_fingerprint = in.value<std::uint64_t>();
    if (cell.their_count > stage.their_count - stage.seen_count) in.fail(ErrorCode::corrupt);
    if (!in.ok()) return;
    stage.seen_count += cell.their_count;
    stage.seen_fingerprint += cell.their_fingerprint;
    stage.spread.add(stage.cell(cell.index).size(), cell.their_count);
    read_elements(in, stage, cell);
  }
  keep_open(stage, first,
            [&](ReconcileCell& cell) { return solve_cell(in, out, stage, items, cell); });
}

}  // namespace detail

// What each message of a reconciliation holds, and what follows from it.

namespace detail {

/// Messages. Who starts sends `hello`; the other one plans the stage over the ids. The side that is
/// found to have fewer elements describes `cells`, the other one `answers`, and closes. Then `tags`
/// begins the stage over the tags, as `hello` did, or `equal` says that they do not differ.
/// Integers are little-endian, counts varints.
enum class ReconcileKind : std::uint8_t {
  none = 0,
  hello = 1,  ///< salt u64, count, fingerprint u64, 48 counters
  /// Own count, form u8, number of cells, power sums of a cell; where the planner has fewer
  /// elements, `cells`.
  plan = 2,
  /// What open cells wait for; number of cells opened, of each count, fingerprint u64, elements.
  cells = 3,
  answers = 4,  ///< of each open cell, `CellAnswer` u8 and what goes with it
  /// The last answers, fingerprint u64 of the closing side; after the ids, fingerprint u64 of their
  /// tags.
  close = 5,
  tags = 6,   ///< fingerprint u64, 30 counters
  equal = 7,  ///< nothing
};

/// One side's part, without the frames around its messages.
class ReconcileSession {
 public:
  ReconcileSession(std::span<const ReconcileItem> items, const ReconcileLimits& limits)
      : items_(items), limits_(limits) {}

  [[nodiscard]] bool done() const noexcept { return waits_ == Waits::nothing; }
  /// What `start` or `take` has written; none where there is nothing to say.
  [[nodiscard]] ReconcileKind said() const noexcept { return said_; }

  [[nodiscard]] Status start(std::uint64_t salt, extend::ByteWriter& out) {
    KVMELD_TRY(begin(salt));
    out.value(salt);
    out.varint(items_.size());
    out.value(stage_.fingerprint);
    estimate_.write(out, id_counters);
    say(ReconcileKind::hello, Waits::plan);
    return {};
  }

  [[nodiscard]] Status take(ReconcileKind kind, extend::ByteReader& in, extend::ByteWriter& out) {
    using Kind = ReconcileKind;
    said_ = Kind::none;
    if (kind == Kind::hello && waits_ == Waits::hello) return take_hello(in, out);
    if (kind == Kind::tags && waits_ == Waits::tags) return take_tags(in, out);
    if (kind == Kind::plan && waits_ == Waits::plan) return take_plan(in, out);
    if (kind == Kind::cells && waits_ == Waits::cells) return take_cells(in, out);
    if (kind == Kind::answers && waits_ == Waits::answers) return take_answers(in, out);
    if (kind == Kind::close && (waits_ == Waits::answers || waits_ == Waits::plan))
      return take_close(in, out);
    if (kind == Kind::equal && waits_ == Waits::tags) {
      waits_ = Waits::nothing;
      return {};
    }
    return extend::error(ErrorCode::corrupt, "reconciliation message of kind ",
                         static_cast<unsigned>(kind), " out of turn");
  }

  /// What differs, once `done`; frees the rest.
  [[nodiscard]] ReconcileDifference finish() {
    if (stage_.tags) found_.different = ids_of(stage_.mine);
    std::sort(found_.theirs_only.begin(), found_.theirs_only.end(), id_before);
    stage_ = {};
    return std::move(found_);
  }

 private:
  enum class Waits : std::uint8_t { hello, plan, cells, answers, tags, nothing };
  static constexpr unsigned id_counters = 48, tag_counters = 30;

  void say(ReconcileKind kind, Waits waits) noexcept {
    said_ = kind;
    waits_ = waits;
  }
  [[nodiscard]] Status begin(std::uint64_t salt) {
    if (items_.size() > limits_.items) return too_many("a set", items_.size());
    for (std::size_t i = 1; i < items_.size(); ++i) {
      if (!id_before(items_[i - 1].id, items_[i].id)) {
        return extend::error(ErrorCode::invalid_argument, "item ", i, " does not follow item ",
                             i - 1, " by its id");
      }
    }
    stage_.salt = salt;
    stage_.elements.resize(items_.size());
    for (std::size_t i = 0; i < items_.size(); ++i)
      stage_.elements[i] = {id_hash(items_[i].id, salt), static_cast<std::uint32_t>(i)};
    count_elements();
    return {};
  }
  [[nodiscard]] Status too_many(std::string_view who, std::uint64_t items) const {
    return extend::error(ErrorCode::quota_exceeded, who, " of ", items, " items, the limit is ",
                         limits_.items);
  }
  void count_elements() {
    estimate_ = {};
    stage_.fingerprint = cell_fingerprint(stage_.elements);
    for (const ReconcileElement& e : stage_.elements) estimate_.add(e.hash);
  }

  [[nodiscard]] Status take_hello(extend::ByteReader& in, extend::ByteWriter& out) {
    const auto salt = in.value<std::uint64_t>();
    KVMELD_TRY(begin(salt));
    stage_.their_count = in.varint();
    return make_plan(in, out, id_counters);
  }
  [[nodiscard]] Status take_tags(extend::ByteReader& in, extend::ByteWriter& out) {
    begin_tags();
    return make_plan(in, out, tag_counters);
  }
  [[nodiscard]] Status make_plan(extend::ByteReader& in, extend::ByteWriter& out,
                                 unsigned counters) {
    if (stage_.their_count > limits_.items) return too_many("a peer", stage_.their_count);
    stage_.their_fingerprint = in.value<std::uint64_t>();
    const double estimate = estimate_.read(in, stage_.their_count, counters);
    KVMELD_TRY(in.status("reconciliation summary"));
    const std::uint64_t ours = stage_.elements.size(), theirs = stage_.their_count;
    if (theirs == ours && stage_.their_fingerprint == stage_.fingerprint) return close(out);
    stage_.plan =
        plan_cells((std::min)(ours, theirs), (std::max)(ours, theirs), estimate, stage_.tags);
    cut(stage_);
    out.varint(ours);
    out.value(stage_.plan.form);
    out.varint(stage_.plan.cells);
    out.varint(stage_.plan.capacity);
    say(ReconcileKind::plan, ours <= theirs ? Waits::answers : Waits::cells);
    if (ours <= theirs) tell_next(out, stage_, window());
    return {};
  }
  [[nodiscard]] Status take_plan(extend::ByteReader& in, extend::ByteWriter& out) {
    stage_.their_count = in.varint();
    const auto form = in.value<std::uint8_t>();
    const std::uint64_t cells = in.varint();
    const std::uint64_t capacity = in.varint();
    KVMELD_TRY(in.status("reconciliation plan"));
    const std::uint64_t ours = stage_.elements.size(), fewer = (std::min)(ours, stage_.their_count);
    if (stage_.their_count > limits_.items) return too_many("a peer", stage_.their_count);
    if (form > 1 || cells == 0 || cells > max_cells || capacity == 0 || capacity > max_capacity ||
        (form == 0 && cells * capacity > 64 + 4 * fewer) ||
        (stage_.tags && stage_.their_count != ours)) {
      return extend::error(ErrorCode::corrupt, "reconciliation plan of ", cells, " cells of form ",
                           form, " and capacity ", capacity, " for ", fewer, " elements");
    }
    stage_.plan = {static_cast<CellForm>(form), static_cast<std::uint32_t>(cells),
                   static_cast<std::uint32_t>(capacity)};
    cut(stage_);
    if (stage_.their_count <= ours) {
      their_sum_ = true;
      return take_cells(in, out);
    }
    tell_next(out, stage_, window());
    say(ReconcileKind::cells, Waits::answers);
    return {};
  }

  /// Cells that may be open at once, so that naming all that they hold, or twice what they are
  /// expected to, stays within a message.
  [[nodiscard]] std::size_t window() const noexcept {
    const bool sketch = stage_.plan.form == CellForm::sketch;
    const std::uint64_t names =
        sketch ? 2 * stage_.plan.capacity
               : (stage_.elements.size() + stage_.their_count) / stage_.plan.cells;
    return (std::max)(std::size_t{1},
                      limits_.message_bytes / static_cast<std::size_t>(16 + 40 * names));
  }

  [[nodiscard]] Status take_cells(extend::ByteReader& in, extend::ByteWriter& out) {
    solve(in, out, stage_, items_);
    KVMELD_TRY(in.status("reconciliation cells"));
    if (stage_.settled()) return close(out);
    say(ReconcileKind::answers, Waits::cells);
    return {};
  }
  [[nodiscard]] Status take_answers(extend::ByteReader& in, extend::ByteWriter& out) {
    tell(in, out, stage_, items_);
    KVMELD_TRY(in.status("reconciliation answers"));
    if (stage_.settled())
      return extend::error(ErrorCode::corrupt, "answers settle all ", stage_.plan.cells,
                           " cells and do not close");
    tell_next(out, stage_, window());
    say(ReconcileKind::cells, Waits::answers);
    return {};
  }
  /// This side is through; its fingerprint lets the other one check what it has.
  [[nodiscard]] Status close(extend::ByteWriter& out) {
    if (their_sum_) stage_.their_fingerprint = stage_.seen_fingerprint;
    KVMELD_TRY(check());
    out.value(stage_.fingerprint);
    say(ReconcileKind::close, stage_.tags ? Waits::nothing : Waits::tags);
    if (!stage_.tags) {
      keep_common();
      out.value(cell_fingerprint(stage_.elements));
    }
    return {};
  }
  [[nodiscard]] Status take_close(extend::ByteReader& in, extend::ByteWriter& out) {
    const std::size_t before = out.size();
    tell(in, out, stage_, items_);
    const bool planned = waits_ == Waits::answers;  // else the other side saw equal fingerprints
    if (!planned) stage_.their_count = stage_.elements.size();
    stage_.their_fingerprint = in.value<std::uint64_t>();
    const std::uint64_t tags = stage_.tags ? 0 : in.value<std::uint64_t>();
    KVMELD_TRY(in.status("reconciliation close"));
    if (out.size() != before || (planned && !stage_.settled())) {
      return extend::error(ErrorCode::corrupt, stage_.open.size(),
                           " cells are open where all should be settled");
    }
    KVMELD_TRY(check());
    if (stage_.tags) {
      waits_ = Waits::nothing;
      return {};
    }
    keep_common();
    if (tags == cell_fingerprint(stage_.elements)) {
      say(ReconcileKind::equal, Waits::nothing);
      return {};
    }
    begin_tags();
    out.value(stage_.fingerprint);
    estimate_.write(out, tag_counters);
    say(ReconcileKind::tags, Waits::plan);
    return {};
  }
  [[nodiscard]] Status check() const {
    if (stage_.agrees() && (!stage_.tags || stage_.mine.size() == stage_.theirs.size())) return {};
    return extend::error(ErrorCode::corrupt, "reconciliation found ", stage_.mine.size(), " and ",
                         stage_.theirs.size(),
                         " differing elements, and they do not explain the fingerprints");
  }

  /// After the ids: the elements of both sides stay, hashed with their tags.
  void keep_common() {
    std::vector<bool> alone(items_.size());
    for (const std::uint32_t i : stage_.mine) alone[i] = true;
    found_.mine_only = ids_of(stage_.mine);
    for (const TheirElement& their : stage_.theirs) found_.theirs_only.push_back(their.id);
    std::erase_if(stage_.elements, [&](const ReconcileElement& e) { return alone[e.item]; });
    for (ReconcileElement& e : stage_.elements)
      e.hash = extend::mix_bits(e.hash + extend::mix_bits(items_[e.item].tag + stage_.salt));
  }
  void begin_tags() {
    ReconcileStage next;
    next.tags = true;
    next.salt = stage_.salt;
    next.elements = std::move(stage_.elements);
    next.their_count = next.elements.size();
    stage_ = std::move(next);
    their_sum_ = false;
    count_elements();
  }
  [[nodiscard]] std::vector<FragmentId> ids_of(std::vector<std::uint32_t>& numbers) const {
    std::sort(numbers.begin(), numbers.end());
    std::vector<FragmentId> ids;
    ids.reserve(numbers.size());
    for (const std::uint32_t i : numbers) ids.push_back(items_[i].id);
    return ids;
  }

  std::span<const ReconcileItem> items_;
  ReconcileLimits limits_;
  Waits waits_ = Waits::hello;
  ReconcileKind said_ = ReconcileKind::none;
  bool their_sum_ = false;  // the peer's fingerprint is what those of its cells come to
  ReconcileStage stage_;
  DifferenceEstimate estimate_;
  ReconcileDifference found_;
};

}  // namespace detail

}  // namespace replica

KVMELD_NAMESPACE_END
