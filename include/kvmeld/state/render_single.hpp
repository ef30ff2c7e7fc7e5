#pragma once

/// Output rows of one contribution: moved or turned, in runs where rows follow each other; and how
/// finished rows are written.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/cache/stream_copy.hpp>
#include <kvmeld/cache/turn_rows.hpp>
#include <kvmeld/state/plane_task.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// How rows are written, for all outputs of a run.
struct RowMode {
  Isa isa = Isa::baseline;
  bool streams = false;  ///< the output is larger than the caches
};

/// Bytes that are computed before they are streamed out: they stay in the first cache.
inline constexpr std::int64_t stage_bytes = 16 << 10;

[[nodiscard]] inline std::byte* row_address(const PlaneTask& task, std::int64_t slot,
                                            std::int64_t head) noexcept {
  return task.out.data + task.out.byte_offset(task.out.row_offset(slot, head));
}

/// Turns rows that follow each other on both sides, where the output streams straight from
/// registers or through a stage.
KVMELD_LAZY inline void turn_run(const PlaneTask& task, RowMode mode, const Turn& turn,
                                 const std::byte* in, std::byte* out, std::int64_t rows) noexcept {
  const std::int64_t bytes = row_bytes(task.out.shape);
#if KVMELD_X86_DISPATCH
  if (mode.streams && mode.isa != Isa::baseline && streams_whole(task.out.shape.type, turn, out)) {
    return stream_turned_rows(task.out.shape.type, mode.isa, turn, in, out, rows);
  }
#endif
  if (!mode.streams || bytes > stage_bytes)
    return turn_rows(task.out.shape.type, mode.isa, turn, in, bytes, out, bytes, rows);
  alignas(64) std::byte stage[stage_bytes];
  const std::int64_t most = stage_bytes / bytes;
  for (std::int64_t at = 0; at < rows; at += most) {
    const std::int64_t part = rows - at < most ? rows - at : most;
    turn_rows(task.out.shape.type, mode.isa, turn, in + at * bytes, bytes, stage, bytes, part);
    // read while this piece is written
    const std::int64_t next = at + 2 * most <= rows ? most * bytes : 0;
    for (std::int64_t line = 0; line < next; line += 64)
      __builtin_prefetch(in + at * bytes + next + line);
    stream_copy(out + at * bytes, stage, static_cast<std::size_t>(part * bytes));
  }
}

/// Writes one finished row wherever its channels lie.
inline void put_row(const PlaneTask& task, RowMode mode, std::int64_t slot, std::int64_t head,
                    const float* row) noexcept {
  const PlaneShape& shape = task.out.shape;
  if (task.out.contiguous_rows())
    return store_row(shape.type, mode.isa, row, shape.channels, row_address(task, slot, head));
  alignas(64) std::byte stored[max_channels * sizeof(double)];
  store_row(shape.type, mode.isa, row, shape.channels, stored);
  scatter_row(task.out, slot, head, stored);
}

[[nodiscard]] inline Turn turn_of(const PlaneTask& task, std::uint32_t shift) noexcept {
  return {task.table(shift), task.out.shape.channels, task.first_channel, task.rotary_channels,
          task.pairing};
}

/// Renders output `o`, which is a single contribution as it is or turned, or a run of such; returns
/// how many are done.
KVMELD_LAZY inline std::int64_t render_single(const PlaneTask& task, RowMode mode, std::int64_t o,
                                              std::int64_t last) noexcept {
  const PlaneShape& shape = task.out.shape;
  const RowInput& input = task.group.inputs[task.group.row_begin[o]];
  const std::int64_t slot = task.out.slots.slot(o);
  if (slot < 0) return 1;
  const bool turns = task.turns(input.shift);
  const std::byte* const in = task.input(input, 0);
  if (contiguous_heads(task.out)) {
    const std::int64_t left = last - o;
    const std::int64_t run = !task.packed ? 1 : task.group.run[o] < left ? task.group.run[o] : left;
    std::byte* const out = row_address(task, slot, 0);
    if (turns) {
      turn_run(task, mode, turn_of(task, input.shift), in, out, run * shape.heads);
    } else {
      const auto bytes = static_cast<std::size_t>(run * shape.heads * row_bytes(shape));
      mode.streams ? stream_copy(out, in, bytes) : (void)std::memcpy(out, in, bytes);
    }
    return run;
  }
  const std::int64_t bytes = row_bytes(shape);
  if (turns && task.out.contiguous_rows()) {
    turn_rows(shape.type, mode.isa, turn_of(task, input.shift), in, bytes,
              row_address(task, slot, 0), task.out.byte_offset(task.out.head_stride), shape.heads);
    return 1;
  }
  for (std::int64_t head = 0; head < shape.heads; ++head) {
    if (!turns) {
      scatter_row(task.out, slot, head, in + head * bytes);
      continue;
    }
    alignas(64) float row[max_channels];
    load_row(shape.type, mode.isa, in + head * bytes, shape.channels, row);
    turn_row(turn_of(task, input.shift), mode.isa, row);
    put_row(task, mode, slot, head, row);
  }
  return 1;
}

}  // namespace detail
KVMELD_NAMESPACE_END
