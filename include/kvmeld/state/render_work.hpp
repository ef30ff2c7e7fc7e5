#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/cache/plane_ref.hpp>
#include <kvmeld/cache/rope_rotate.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/cache/turn_rows.hpp>
#include <kvmeld/exec/row_work.hpp>
#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/state/plane_task.hpp>
#include <kvmeld/state/render_lanes.hpp>
#include <kvmeld/tensor/rows.hpp>

// clang unrolls a loop of 32 constant trips before it vectorises it, at a cost of minutes a file.
#if defined(__clang__)
#define KVMELD_KEEP_LOOP _Pragma("clang loop unroll(disable)")
#else
#define KVMELD_KEEP_LOOP
#endif

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Renders rows: row r is one output token of one (layer, plane), all heads.
///
/// gather → turn to the frame → reduce → turn to the output position → store, in f32, nothing stored between.
/// @tparam F models `FusePolicy`.
template <class F>
struct RenderWork {
  using State = NoState;
  using Accumulator = decltype(std::declval<const F&>().init());

  F fuser;
  const PlaneTask* tasks = nullptr;
  std::int64_t task_count = 0;
  std::int64_t outputs = 0;

  // Lane form: elementwise, so there is nothing to reduce between lanes.
  [[nodiscard]] KVMELD_HD NoState partial(std::int64_t, int) const noexcept { return {}; }
  [[nodiscard]] KVMELD_HD static NoState join(NoState, NoState) noexcept { return {}; }
  KVMELD_HD void finish(std::int64_t row, int lane, NoState) const {
    RenderLanes<F>{fuser}.token(tasks[row / outputs], row % outputs, lane);
  }

  // Host form: the same expressions over whole rows.
  template <Isa isa>
  KVMELD_ALWAYS_INLINE void host_rows(std::int64_t begin, std::int64_t end) const {
    while (begin < end) {
      const PlaneTask& task = tasks[begin / outputs];
      const std::int64_t first = begin % outputs;
      const std::int64_t last = end - begin < outputs - first ? first + (end - begin) : outputs;
      begin += last - first;
      for (std::int64_t o = first; o < last;) o += host_output<isa>(task, o, last);
    }
  }

 private:
  /// Renders output `o`, or a run of copies from it on; returns how many outputs are done.
  template <Isa isa>
  KVMELD_ALWAYS_INLINE std::int64_t host_output(const PlaneTask& task, std::int64_t o, std::int64_t last) const {
    const std::uint32_t first_input = task.group.row_begin[o];
    const int count = static_cast<int>(task.group.row_begin[o + 1] - first_input);
    if (count == 0) return 1;
    const PlaneShape& shape = task.out.shape;
    const RowInput* inputs = task.group.inputs + first_input;
    const bool single = count == 1 && keeps_single<F>();
    if (single && !task.turns(inputs[0].shift) && task.packed) {
      const std::int64_t run = task.group.run[o] < last - o ? task.group.run[o] : last - o;
      std::memcpy(task.out.data + task.out.byte_offset(task.out.row_offset(task.out.slots.slot(o), 0)), task.input(inputs[0], 0),
                  static_cast<std::size_t>(run * shape.heads * row_bytes(shape)));
      return run;
    }
    const std::int64_t slot = task.out.slots.slot(o);
    if (slot < 0) return 1;
    const std::int64_t bytes = row_bytes(shape);
    std::byte* const out = task.out.data + task.out.byte_offset(task.out.row_offset(slot, 0));
    if (single && task.turns(inputs[0].shift) && task.out.contiguous_rows()) {
      const Turn turn{task.table(inputs[0].shift), shape.channels, task.first_channel, task.rotary_channels, task.pairing};
      if (!task.packed) {
        turn_rows<isa>(shape.type, turn, task.input(inputs[0], 0), bytes, out, task.out.byte_offset(task.out.head_stride), shape.heads);
        return 1;
      }
      const std::int64_t run = task.group.run[o] < last - o ? task.group.run[o] : last - o;
      turn_rows<isa>(shape.type, turn, task.input(inputs[0], 0), bytes, out, bytes, run * shape.heads);
      return run;
    }
    const std::uint32_t out_shift = task.group.out_shift[o];
    bool turns = task.turns(out_shift);
    for (int i = 0; i < count; ++i) turns = turns || task.turns(inputs[i].shift);
    if (!single && !turns && count <= chunk_inputs && contiguous_heads(task.out)) {
      fuse_unturned<isa>(task, inputs, count, out);
      return 1;
    }
    for (std::int32_t head = 0; head < shape.heads; ++head) {
      if (single && !task.turns(inputs[0].shift)) {
        scatter_row(task.out, slot, head, task.input(inputs[0], head));
        continue;
      }
      alignas(64) float row[max_channels];
      if (single) {
        load_row<isa>(shape.type, task.input(inputs[0], head), shape.channels, row);
        rotate_row(task.pairing, task.first_channel, task.rotary_channels, task.table(inputs[0].shift), row);
      } else {
        host_fuse<isa>(task, inputs, count, head, row);
        if (task.turns(out_shift)) rotate_row(task.pairing, task.first_channel, task.rotary_channels, task.table(out_shift), row);
      }
      if (task.out.contiguous_rows()) {
        store_row<isa>(shape.type, row, shape.channels, task.out.data + task.out.byte_offset(task.out.row_offset(slot, head)));
      } else {
        alignas(64) std::byte stored[max_channels * sizeof(double)];
        store_row<isa>(shape.type, row, shape.channels, stored);
        scatter_row(task.out, slot, head, stored);
      }
    }
    return 1;
  }

  /// Fuses all heads of a token as one long row, in stretches that stay in the first cache: no input is turned.
  ///
  /// Whole blocks of `row_block` channels, the last one padded: a trip count known at compile time is what g++ -O2 vectorises.
  template <Isa isa>
  KVMELD_ALWAYS_INLINE void fuse_unturned(const PlaneTask& task, const RowInput* inputs, int count, std::byte* out) const {
    constexpr std::int64_t stretch = 256;
    const ElementType type = task.out.shape.type;
    const std::int64_t n = static_cast<std::int64_t>(task.out.shape.heads) * task.out.shape.channels;
    float weight = 0;
    for (int i = 0; i < count; ++i) weight += inputs[i].weight;
    alignas(64) float row[stretch] = {};
    alignas(64) Accumulator acc[stretch];
    for (std::int64_t at = 0; at < n; at += stretch) {
      const std::int64_t offset = task.out.byte_offset(at);
      const std::int64_t size = n - at < stretch ? n - at : stretch;
      for (std::int64_t b = 0; b < size; b += row_block) start_block(acc + b);
      for (int i = 0; i < count; ++i) {
        load_row<isa>(type, task.input(inputs[i], 0) + offset, size, row);
        const float w = inputs[i].weight;
        for (std::int64_t b = 0; b < size; b += row_block) absorb_block(acc + b, row + b, w);
      }
      for (std::int64_t b = 0; b < size; b += row_block) finish_block(acc + b, row + b, weight, count);
      store_row<isa>(type, row, size, out + offset);
    }
  }

  KVMELD_ALWAYS_INLINE void start_block(Accumulator* acc) const {
    KVMELD_KEEP_LOOP
    for (std::ptrdiff_t c = 0; c < row_block; ++c) acc[c] = fuser.init();
  }
  KVMELD_ALWAYS_INLINE void absorb_block(Accumulator* __restrict acc, const float* __restrict row, float weight) const {
    KVMELD_KEEP_LOOP
    for (std::ptrdiff_t c = 0; c < row_block; ++c) acc[c] = fuser.absorb(acc[c], row[c], weight);
  }
  KVMELD_ALWAYS_INLINE void finish_block(const Accumulator* __restrict acc, float* __restrict row, float weight, int count) const {
    KVMELD_KEEP_LOOP
    for (std::ptrdiff_t c = 0; c < row_block; ++c) row[c] = fuser.finish(acc[c], weight, count);
  }

  template <Isa isa>
  KVMELD_ALWAYS_INLINE void host_fuse(const PlaneTask& task, const RowInput* inputs, int count, std::int32_t head, float* out) const {
    const std::int32_t channels = task.out.shape.channels;
    alignas(64) float row[max_channels];
    alignas(64) Accumulator levels[max_levels][max_channels];
    float level_weight[max_levels];
    int chunks = 0;
    for (int begin = 0; begin < count; begin += chunk_inputs, ++chunks) {
      const int end = begin + chunk_inputs < count ? begin + chunk_inputs : count;
      // The chunk lands on the first free level; full levels below join into it first, as a binary counter carries.
      int level = 0;
      while (((chunks >> level) & 1) != 0) ++level;
      Accumulator* const acc = levels[level];
      for (std::int32_t c = 0; c < channels; ++c) acc[c] = fuser.init();
      float weight = 0;
      for (int i = begin; i < end; ++i) {
        load_row<isa>(task.out.shape.type, task.input(inputs[i], head), channels, row);
        if (task.turns(inputs[i].shift)) {
          rotate_row(task.pairing, task.first_channel, task.rotary_channels, task.table(inputs[i].shift), row);
        }
        const float w = inputs[i].weight;
        for (std::int32_t c = 0; c < channels; ++c) acc[c] = fuser.absorb(acc[c], row[c], w);
        weight += w;
      }
      for (int k = level - 1; k >= 0; --k) {
        for (std::int32_t c = 0; c < channels; ++c) acc[c] = fuser.join(levels[k][c], acc[c]);
        weight += level_weight[k];
      }
      level_weight[level] = weight;
    }
    int top = 0;
    while (((chunks >> top) & 1) == 0) ++top;
    Accumulator* const total = levels[top];
    float weight = level_weight[top];
    for (int k = top + 1; k < max_levels; ++k) {
      if (((chunks >> k) & 1) == 0) continue;
      for (std::int32_t c = 0; c < channels; ++c) total[c] = fuser.join(levels[k][c], total[c]);
      weight += level_weight[k];
    }
    for (std::int32_t c = 0; c < channels; ++c) out[c] = fuser.finish(total[c], weight, count);
  }
};

}  // namespace detail
KVMELD_NAMESPACE_END

#undef KVMELD_KEEP_LOOP
