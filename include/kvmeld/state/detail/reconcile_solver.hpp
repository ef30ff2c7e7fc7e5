#pragma once

/// The side with more elements: solves the cells that the other side describes.

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/detail/reconcile_teller.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// What solving a cell came to. `found` fills `cell.mine` and `lacking`, which tells the other side
/// its own part.
struct CellSolution {
  CellAnswer answer = CellAnswer::again;
  std::size_t lacks = 0;                     ///< elements of the other side
  std::vector<std::uint32_t> lacking{};      ///< their locator
  std::vector<std::uint8_t> lacking_bits{};  ///< or a bit for each element of their list
};

KVMELD_LAZY [[nodiscard]] CellSolution solve_sketch(const ReconcileStage& stage,
                                                    ReconcileCell& cell) {
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

KVMELD_LAZY [[nodiscard]] CellSolution solve_list(const ReconcileStage& stage,
                                                  ReconcileCell& cell) {
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

KVMELD_LAZY void read_sums(ByteReader& in, const ReconcileStage& stage, ReconcileCell& cell,
                           std::uint32_t count) {
  const auto bytes = in.bytes(count * sizeof(std::uint32_t));
  if (!in.ok()) return;
  const std::size_t first = cell.described.size();
  cell.described.resize(first + count);
  const auto fresh = std::span(cell.described).subspan(first);
  std::memcpy(fresh.data(), bytes.data(), bytes.size());
  sketch_add(short_hashes(stage.cell(cell.index), cell), first, fresh);
}

KVMELD_LAZY void read_elements(ByteReader& in, const ReconcileStage& stage, ReconcileCell& cell) {
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
KVMELD_LAZY [[nodiscard]] bool ask_again(ByteReader& in, ByteWriter& out, ReconcileCell& cell) {
  if (!next_attempt(cell)) in.fail(ErrorCode::corrupt);
  out.value(CellAnswer::again);
  return in.ok();
}

/// Solves a cell as described so far. False when it is settled.
KVMELD_LAZY [[nodiscard]] bool solve_cell(ByteReader& in, ByteWriter& out, ReconcileStage& stage,
                                          std::span<const ReconcileItem> items,
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
KVMELD_LAZY [[nodiscard]] bool hear_cell(ByteReader& in, ByteWriter& out, ReconcileStage& stage,
                                         std::span<const ReconcileItem> items,
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
KVMELD_LAZY void solve(ByteReader& in, ByteWriter& out, ReconcileStage& stage,
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

KVMELD_NAMESPACE_END
