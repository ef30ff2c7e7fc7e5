#pragma once

/// The side with fewer elements: describes its cells, and names what the other side found that it
/// lacks.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/detail/reconcile_names.hpp>
#include <kvmeld/state/detail/reconcile_sketch.hpp>
#include <kvmeld/state/detail/reconcile_stage.hpp>

KVMELD_NAMESPACE_BEGIN

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
KVMELD_LAZY void write_sums(ByteWriter& out, const ReconcileStage& stage, const ReconcileCell& cell,
                            std::uint32_t first, std::uint32_t count) {
  std::vector<std::uint32_t> sums(count);
  sketch_add(short_hashes(stage.cell(cell.index), cell), first, sums);
  out.bytes(std::as_bytes(std::span<const std::uint32_t>(sums)));
}

KVMELD_LAZY void write_elements(ByteWriter& out, const ReconcileStage& stage,
                                const ReconcileCell& cell) {
  if (cell.form == CellForm::sketch) return write_sums(out, stage, cell, 0, cell.capacity);
  for (const std::uint32_t low : short_hashes(stage.cell(cell.index), cell)) {
    out.value(static_cast<std::uint16_t>(low));
    out.value(static_cast<std::uint8_t>(low >> 16U));
  }
}

/// Reads which of this side's elements the other one lacks, into `cell.mine`. False where short
/// hashes have met.
KVMELD_LAZY [[nodiscard]] bool read_lacking(ByteReader& in, const ReconcileStage& stage,
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
KVMELD_LAZY [[nodiscard]] bool tell_cell(ByteReader& in, ByteWriter& out, ReconcileStage& stage,
                                         std::span<const ReconcileItem> items,
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
KVMELD_LAZY void tell_next(ByteWriter& out, ReconcileStage& stage, std::size_t window) {
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
KVMELD_LAZY void tell(ByteReader& in, ByteWriter& out, ReconcileStage& stage,
                      std::span<const ReconcileItem> items) {
  keep_open(stage, 0,
            [&](ReconcileCell& cell) { return in.ok() && tell_cell(in, out, stage, items, cell); });
}

}  // namespace detail

KVMELD_NAMESPACE_END
