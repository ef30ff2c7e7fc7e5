#pragma once

/// Moving a cache's tokens to new places by a position map: no arithmetic, no rotation, only rows
/// that find their slot.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvmeld/cache/check_view.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/lane_copy.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/exec/row_work.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a gather left to the engine.
struct GatherReport {
  std::int64_t tokens = 0;  ///< output tokens that the map names, holes included
  /// Output tokens that are to be recomputed in at least one layer, ascending.
  std::vector<std::int64_t> holes{};
};

namespace detail {

/// The entry types of a position map.
template <class Int>
concept PositionIndex = std::same_as<Int, std::int32_t> || std::same_as<Int, std::int64_t>;

/// One plane of one layer on both sides.
struct GatherTask {
  PlaneRef in;
  MutablePlaneRef out;
  bool heads_together = false;   ///< a token's heads are one run of memory on both sides
  bool tokens_together = false;  ///< and so are consecutive tokens
};

/// Moves rows: row r is one output token of one (layer, plane), all heads. Models `RowWork`.
template <PositionIndex Int>
struct GatherWork {
  using State = NoState;

  const GatherTask* tasks = nullptr;
  const Int* map = nullptr;  // (outputs) input token, or −1
  std::int64_t outputs = 0;

  [[nodiscard]] KVMELD_HD NoState partial(std::int64_t, int) const noexcept { return {}; }
  [[nodiscard]] KVMELD_HD static NoState join(NoState, NoState) noexcept { return {}; }
  KVMELD_HD void finish(std::int64_t row, int lane, NoState) const noexcept {
    const GatherTask& task = tasks[row / outputs];
    const std::int64_t o = row % outputs;
    if (map[o] < 0) return;
    const std::int64_t from = task.in.slots.slot(map[o]);
    const std::int64_t to = task.out.slots.slot(o);
    if (from < 0 || to < 0) return;
    if (task.heads_together) {
      lane_copy(task.in.data + task.in.byte_offset(task.in.row_offset(from, 0)),
                task.out.data + task.out.byte_offset(task.out.row_offset(to, 0)),
                row_bytes(task.out.shape) * task.out.shape.heads, lane);
      return;
    }
    for (std::int32_t head = 0; head < task.out.shape.heads; ++head) {
      lane_move(task.in, task.in.row_offset(from, head), task.out, task.out.row_offset(to, head),
                lane);
    }
  }

  // Host form: whole runs at once.
  void host_rows(Isa, std::int64_t begin, std::int64_t end) const noexcept {
    while (begin < end) {
      const GatherTask& task = tasks[begin / outputs];
      const std::int64_t first = begin % outputs;
      const std::int64_t last = end - begin < outputs - first ? first + (end - begin) : outputs;
      begin += last - first;
      for (std::int64_t o = first; o < last;) o += host_output(task, o, last);
    }
  }

 private:
  /// Moves output `o`, or a run of neighbours from it on; returns how many outputs are done.
  [[nodiscard]] std::int64_t host_output(const GatherTask& task, std::int64_t o,
                                         std::int64_t last) const noexcept {
    if (map[o] < 0) return 1;
    const std::int64_t from = task.in.slots.slot(map[o]);
    const std::int64_t to = task.out.slots.slot(o);
    if (from < 0 || to < 0) return 1;
    const PlaneShape& shape = task.out.shape;
    if (task.heads_together) {
      std::int64_t run = 1;
      while (task.tokens_together && o + run < last && map[o + run] == map[o] + run) ++run;
      std::memcpy(task.out.data + task.out.byte_offset(task.out.row_offset(to, 0)),
                  task.in.data + task.in.byte_offset(task.in.row_offset(from, 0)),
                  static_cast<std::size_t>(run * shape.heads * row_bytes(shape)));
      return run;
    }
    for (std::int32_t head = 0; head < shape.heads; ++head) {
      const std::int64_t in = task.in.row_offset(from, head);
      if (task.in.contiguous_rows()) {
        scatter_row(task.out, to, head, task.in.data + task.in.byte_offset(in));
      } else {
        for (std::int64_t c = 0; c < shape.channels; ++c)
          move_element(task.in, in, task.out, task.out.row_offset(to, head), c);
      }
    }
    return 1;
  }
};

[[nodiscard]] inline GatherTask gather_task(const PlaneRef& in,
                                            const MutablePlaneRef& out) noexcept {
  return {in, out, contiguous_heads(in) && contiguous_heads(out),
          contiguous_tokens(in) && contiguous_tokens(out)};
}

/// What host and device gathers refuse without looking at slot tables.
template <PositionIndex Int>
[[nodiscard]] Status check_gather(const KvCacheRef& in, std::span<const Int> map,
                                  const MutableKvCacheRef& out) {
  if (!in.valid() || !out.valid())
    return error(ErrorCode::invalid_argument, "gather: a view has no geometry");
  KVMELD_TRY(validate(in.geometry()));
  KVMELD_TRY(check_same(in.geometry(), out.geometry()));
  const auto outputs = static_cast<std::int64_t>(map.size());
  if (outputs > out.tokens()) {
    return error(ErrorCode::output_too_small, "the map names ", outputs,
                 " tokens, the output holds ", out.tokens());
  }
  for (std::size_t o = 0; o < map.size(); ++o) {
    if (map[o] < -1 || map[o] >= in.tokens()) {
      return error(ErrorCode::invalid_argument, "map entry ", o, " is ", map[o],
                   "; the input holds tokens 0 to ", in.tokens() - 1,
                   ", and -1 leaves a row alone");
    }
  }
  for (const MutablePlaneRef& plane : out.planes()) {
    if (plane.shape.scales != ScaleScheme::none) {
      return error(ErrorCode::unsupported,
                   "gather: planes with scales apart cannot be moved; their scales are not "
                   "writable through a view");
    }
  }
  return {};
}

/// Output tokens that the map leaves out, or that the input's slot lists and tables leave out in
/// some layer.
///
/// @param readable whether the host can read a plane's table.
template <PositionIndex Int, class Readable>
[[nodiscard]] std::vector<std::int64_t> gather_holes(const KvCacheRef& in, std::span<const Int> map,
                                                     const Readable& readable) {
  std::vector<const TokenSlots*> tables;
  for (std::size_t l = 0; l < in.geometry().layers.size(); ++l) {
    if (in.geometry().layers[l].planes.empty()) continue;
    const PlaneRef& plane = in.plane(l, 0);  // planes of one layer have the same holes
    if (plane.slots.kind == SlotKind::identity || !readable(plane)) continue;
    const bool known = std::any_of(tables.begin(), tables.end(), [&](const TokenSlots* t) {
      return t->table == plane.slots.table && t->kind == plane.slots.kind &&
             t->block_size == plane.slots.block_size;
    });
    if (!known) tables.push_back(&plane.slots);
  }
  std::vector<std::int64_t> holes;
  for (std::size_t o = 0; o < map.size(); ++o) {
    const auto absent = [&](const TokenSlots* slots) { return slots->slot(map[o]) < 0; };
    if (map[o] < 0 || std::any_of(tables.begin(), tables.end(), absent))
      holes.push_back(static_cast<std::int64_t>(o));
  }
  return holes;
}

template <class E, PositionIndex Int>
[[nodiscard]] Result<GatherReport> gather_on_host(const E& exec, const KvCacheRef& in,
                                                  std::span<const Int> map,
                                                  const MutableKvCacheRef& out) {
  KVMELD_TRY(check_gather(in, map, out));
  KVMELD_TRY(check_on_host(in, "gather"));
  KVMELD_TRY(check_on_host(out, "gather"));
  const auto outputs = static_cast<std::int64_t>(map.size());
  const MutableKvCacheRef written = out.first(outputs);
  if (overlaps(in, written))
    return error(ErrorCode::aliasing,
                 "gather: the output shares memory with the input; gather into another cache");
  std::vector<GatherTask> tasks;
  for (std::size_t p = 0; p < in.planes().size(); ++p) {
    KVMELD_TRY(check_writable(written.planes()[p]));
    tasks.push_back(gather_task(in.planes()[p], written.planes()[p]));
  }
  const auto rows = static_cast<std::int64_t>(tasks.size()) * outputs;
  if (rows > 0) KVMELD_TRY(exec.bulk(rows, GatherWork<Int>{tasks.data(), map.data(), outputs}));
  return GatherReport{outputs, gather_holes(in, map, [](const PlaneRef&) { return true; })};
}

}  // namespace detail

/// Fills output token i with input token `map[i]`, in every layer, byte for byte; −1 leaves the row
/// as it is.
///
/// Layouts may differ, geometries may not. Keys are not turned: where positions change, `render` is
/// what is wanted. An input token may be named twice. A row that the input does not hold is left
/// alone too, and reported. O(bytes). Errors, with the output untouched: `geometry_mismatch`,
/// `output_too_small`, `invalid_argument` (a map entry out of range), `unsupported` (scales),
/// `aliasing` (in place, or an output with two names for one row), `memory_space`.
template <ExecutionPolicy E>
requires(!E::on_device)
    [[nodiscard]] Result<GatherReport> gather(const E& exec, const KvCacheRef& in,
                                              std::span<const std::int32_t> map,
                                              const MutableKvCacheRef& out) {
  return detail::gather_on_host(exec, in, map, out);
}
template <ExecutionPolicy E>
requires(!E::on_device)
    [[nodiscard]] Result<GatherReport> gather(const E& exec, const KvCacheRef& in,
                                              std::span<const std::int64_t> map,
                                              const MutableKvCacheRef& out) {
  return detail::gather_on_host(exec, in, map, out);
}

KVMELD_NAMESPACE_END
