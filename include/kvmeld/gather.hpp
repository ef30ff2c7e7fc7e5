#pragma once

/// Gathers rows of an engine's cache into contiguous memory, and reads and writes single rows.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/check_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

// Copying a cache's tokens to new slots by a position map, without arithmetic or rotation.

/// What a gather left to the engine.
struct GatherReport {
  std::int64_t tokens = 0;  ///< output tokens that the map names, holes included
  /// Output tokens that the engine must recompute in at least one layer, ascending.
  std::vector<std::int64_t> holes{};
};

namespace detail {

/// The entry types of a position map.
template <class Int>
concept PositionIndex = std::same_as<Int, std::int32_t> || std::same_as<Int, std::int64_t>;

}  // namespace detail

namespace extend {

/// One plane of one layer in the input and in the output.
struct GatherTask {
  PlaneRef in;
  MutablePlaneRef out;
  bool heads_together = false;   ///< a token's heads are one run of memory on both sides
  bool tokens_together = false;  ///< consecutive tokens are one run of memory on both sides, too
};

/// Moves rows: row r is one output token of one (layer, plane), all heads. Models `RowWork`.
template <detail::PositionIndex Int>
struct GatherWork {
  using State = detail::NoState;

  const GatherTask* tasks = nullptr;
  const Int* map = nullptr;  // (outputs) input token, or −1
  std::int64_t outputs = 0;

  [[nodiscard]] KVMELD_HD detail::NoState partial(std::int64_t, int) const noexcept { return {}; }
  [[nodiscard]] KVMELD_HD static detail::NoState join(detail::NoState, detail::NoState) noexcept {
    return {};
  }
  KVMELD_HD void finish(std::int64_t row, int lane, detail::NoState) const noexcept {
    const GatherTask& task = tasks[row / outputs];
    const std::int64_t o = row % outputs;
    if (map[o] < 0) return;
    const std::int64_t from = task.in.slots.slot(map[o]);
    const std::int64_t to = task.out.slots.slot(o);
    if (from < 0 || to < 0) return;
    if (task.heads_together) {
      detail::lane_copy(task.in.data + task.in.byte_offset(task.in.row_offset(from, 0)),
                        task.out.data + task.out.byte_offset(task.out.row_offset(to, 0)),
                        row_bytes(task.out.shape) * task.out.shape.heads, lane);
      return;
    }
    for (std::int32_t head = 0; head < task.out.shape.heads; ++head) {
      detail::lane_move(task.in, task.in.row_offset(from, head), task.out,
                        task.out.row_offset(to, head), lane);
    }
  }

  // Host form: copies whole runs at once.
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
  /// Copies output `o`, or a run of outputs that starts at it; returns how many are done.
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
          detail::move_element(task.in, in, task.out, task.out.row_offset(to, head), c);
      }
    }
    return 1;
  }
};

/// The work that copies rows of one plane to another; both views outlive it.
[[nodiscard]] inline GatherTask gather_task(const PlaneRef& in,
                                            const MutablePlaneRef& out) noexcept {
  return {in, out, contiguous_heads(in) && contiguous_heads(out),
          detail::contiguous_tokens(in) && detail::contiguous_tokens(out)};
}

/// The checks of host and device gathers that need no slot tables.
template <detail::PositionIndex Int>
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
template <detail::PositionIndex Int, class Readable>
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

}  // namespace extend

namespace detail {

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
/// Layouts may differ, geometries may not. Keys are not rotated: use `render` where positions
/// change. The map may name an input token twice. A row that the input does not hold leaves the
/// output's row as it is, and is reported. O(bytes). Errors, with the output untouched:
/// `geometry_mismatch`, `output_too_small`, `invalid_argument` (a map entry out of range),
/// `unsupported` (scales), `aliasing` (input and output overlap, or two output tokens share a row),
/// `memory_space`.
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

// Single rows of a cache as numbers, for inspection, tests and small edits, in every layout and
// element type.

/// Names one row of a cache: the channels of one head of one token.
struct CacheRow {
  std::size_t layer = 0;
  std::size_t plane = 0;   ///< index into the layer's planes: 0 keys, 1 values in most models
  std::int64_t token = 0;  ///< index into the view's tokens
  std::int32_t head = 0;
};

namespace detail {

/// The address of a row, or the reason why there is none.
template <class Byte>
[[nodiscard]] Result<std::int64_t> slot_of_row(const BasicKvCacheRef<Byte>& cache,
                                               const CacheRow& row, const char* who) {
  KVMELD_TRY(check_view_count(cache, who));
  const std::vector<LayerShape>& layers = cache.geometry().layers;
  if (row.layer >= layers.size()) {
    return error(ErrorCode::invalid_argument, who, ": layer ", row.layer, " of ", layers.size());
  }
  if (row.plane >= layers[row.layer].planes.size()) {
    return error(ErrorCode::invalid_argument, who, ": plane ", row.plane, " of ",
                 layers[row.layer].planes.size(), " in layer ", row.layer);
  }
  const BasicPlaneRef<Byte>& plane = cache.plane(row.layer, row.plane);
  KVMELD_TRY(check_plane(plane.shape, row.layer, row.plane));
  KVMELD_TRY(check_view_plane(cache, row.layer, row.plane, who));
  KVMELD_TRY(check_host_reaches(plane.space, who));
  if (row.token < 0 || row.token >= cache.tokens() || row.head < 0 ||
      row.head >= plane.shape.heads) {
    return error(ErrorCode::invalid_argument, who, ": token ", row.token, " of ", cache.tokens(),
                 ", head ", row.head, " of ", plane.shape.heads);
  }
  const std::int64_t slot = plane.slots.slot(row.token);
  if (slot < 0) {
    return error(ErrorCode::not_found, who, ": layer ", row.layer, " holds no row of token ",
                 row.token);
  }
  return slot;
}

}  // namespace detail

/// One row as f32, its scales applied. (channel)
///
/// O(channels + layers). Errors: `invalid_argument` (an index that the cache does not have, or
/// scales that are declared and not given), `not_found` (a hole: the layer does not hold the
/// token), `memory_space`, `geometry_mismatch` or `token_count_mismatch` (a view whose planes do
/// not match it).
[[nodiscard]] inline Result<std::vector<float>> read_row(const KvCacheRef& cache,
                                                         const CacheRow& row) {
  const auto slot = detail::slot_of_row(cache, row, "read_row");
  if (!slot) return slot.error();
  const PlaneRef& plane = cache.plane(row.layer, row.plane);
  const PlaneShape& shape = plane.shape;
  KVMELD_TRY(extend::check_scales(plane, "read_row"));
  std::vector<std::byte> bytes(static_cast<std::size_t>(extend::row_bytes(shape)));
  extend::gather_row(plane, *slot, row.head, bytes.data());
  std::vector<float> values(static_cast<std::size_t>(shape.channels));
  if (shape.channels > 0)
    extend::load_row(shape.type, Isa::baseline, bytes.data(), shape.channels, values.data());
  const std::int64_t groups = extend::row_scales(shape);
  for (std::int32_t c = 0; c < shape.channels && groups > 0; ++c) {
    values[static_cast<std::size_t>(c)] *=
        plane.scales.at(*slot, row.head, c / (shape.channels / groups));
  }
  return values;
}

/// Writes one row, each number rounded once to the plane's element type; −0 becomes +0, as in
/// `seal`. (channel)
///
/// O(channels + layers). Errors, with the row as it was: those of `read_row`;
/// `token_count_mismatch` where `values` are not one for each channel; `unsupported` for planes
/// with separate scales, which a view cannot write; `non_finite` for a number that is not finite or
/// exceeds the element type.
[[nodiscard]] inline Status write_row(const MutableKvCacheRef& cache, const CacheRow& row,
                                      std::span<const float> values) {
  using extend::error;
  const auto slot = detail::slot_of_row(cache, row, "write_row");
  if (!slot) return slot.error();
  const MutablePlaneRef& plane = cache.plane(row.layer, row.plane);
  const PlaneShape& shape = plane.shape;
  if (values.size() != static_cast<std::size_t>(shape.channels)) {
    return error(ErrorCode::token_count_mismatch, "write_row: ", values.size(), " numbers for ",
                 shape.channels, " channels");
  }
  if (shape.scales != ScaleScheme::none) {
    return error(ErrorCode::unsupported, "write_row: plane ", row.plane, " of layer ", row.layer,
                 " has its scales apart, which a view cannot write");
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(extend::row_bytes(shape)));
  const auto finite = [](float x) { return std::isfinite(x); };
  bool bad = !std::all_of(values.begin(), values.end(), finite);
  if (!bad && shape.channels > 0)
    extend::store_row(shape.type, Isa::baseline, values.data(), shape.channels, bytes.data());
  if (bad || !extend::is_finite(extend::normalise(shape.type, bytes.data(), bytes.size()))) {
    return error(ErrorCode::non_finite, "write_row: a number for token ", row.token, " of layer ",
                 row.layer, " plane ", row.plane, " is not finite in ", to_string(shape.type));
  }
  extend::scatter_row(plane, *slot, row.head, bytes.data());
  return {};
}

KVMELD_NAMESPACE_END
