#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/cache/lane_copy.hpp>
#include <kvmeld/cache/plane_ref.hpp>
#include <kvmeld/cache/rope_rotate.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/cache/turn_rows.hpp>
#include <kvmeld/exec/row_work.hpp>
#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/tensor/rows.hpp>

// clang unrolls a loop of 32 constant trips before it vectorises it, at a cost of minutes a file.
#if defined(__clang__)
#define KVMELD_KEEP_LOOP _Pragma("clang loop unroll(disable)")
#else
#define KVMELD_KEEP_LOOP
#endif

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// One contribution as the row work reads it: where the row lies, its weight, and how far its key is turned first.
struct RowInput {
  std::uint32_t source = 0;
  std::uint32_t row = 0;    ///< index among the tokens that the layer group holds of that source
  float weight = 1.0F;
  std::uint32_t shift = 0;  ///< row of the rope table; 0: as it is
};

/// The outputs of the layers that hold the same tokens, as arrays that a device can copy as they lie.
struct RowGroup {
  const std::uint32_t* row_begin = nullptr;   ///< (outputs + 1)
  const RowInput* inputs = nullptr;
  const std::uint32_t* out_shift = nullptr;   ///< (outputs) turn after the fusion; 0: none
  const std::uint32_t* run = nullptr;         ///< (outputs) how many outputs from here on copy consecutive rows of one source, equally turned
};

/// One plane of one layer: where its rows come from and go to.
struct PlaneTask {
  MutablePlaneRef out;
  RowGroup group;
  const std::byte* const* sources = nullptr;  ///< base of this plane in each source
  const float* rope = nullptr;                ///< table rows, cosines then sines; null: rows are not turned
  std::int64_t rope_stride = 0;               ///< floats
  RopePairing pairing = RopePairing::half_split;
  std::int32_t first_channel = 0;
  std::int32_t rotary_channels = 0;
  bool packed = false;  ///< output tokens follow each other in memory in canonical order

  [[nodiscard]] KVMELD_HD const float* table(std::uint32_t shift) const noexcept { return rope + shift * rope_stride; }
  [[nodiscard]] KVMELD_HD bool turns(std::uint32_t shift) const noexcept { return rope != nullptr && shift != 0; }
  [[nodiscard]] KVMELD_HD const std::byte* input(const RowInput& in, std::int64_t head) const noexcept {
    return sources[in.source] + (static_cast<std::int64_t>(in.row) * out.shape.heads + head) * row_bytes(out.shape);
  }
};

inline constexpr std::int32_t max_channels = 1024;  ///< of a head; rows live on the stack
inline constexpr int chunk_inputs = 64;             ///< contributions that are absorbed one after the other
inline constexpr int max_levels = 12;               ///< of the tree that joins chunks: 64 << 11 contributions

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
    const PlaneTask& task = tasks[row / outputs];
    const std::int64_t o = row % outputs;
    const std::uint32_t begin = task.group.row_begin[o];
    const int count = static_cast<int>(task.group.row_begin[o + 1] - begin);
    const std::int64_t slot = task.out.slots.slot(o);
    if (count == 0 || slot < 0) return;
    const RowInput* inputs = task.group.inputs + begin;
    const std::uint32_t out_shift = task.group.out_shift[o];
    const bool copies = count == 1 && keeps_single<F>() && !task.turns(inputs[0].shift);
    const std::int32_t heads = task.out.shape.heads;
    if (copies) {
      for (std::int32_t head = 0; head < heads; ++head) {
        lane_scatter(task.out, task.out.row_offset(slot, head), task.input(inputs[0], head), lane);
      }
      return;
    }
    if (block_elements(task.out.shape.type) > 1) {
      lane_blocks(task, inputs, count, out_shift, slot, lane);
      return;
    }
    for (std::int32_t head = 0; head < heads; ++head) {
      const std::int64_t offset = task.out.row_offset(slot, head);
      for (std::int32_t c = lane; c < task.out.shape.channels; c += lanes_per_row) {
        const RopePair pair = pair_at(task, c);
        if (pair.partner >= 0 && pair.partner < c) continue;  // its first channel does both
        float a = 0;
        float b = 0;
        lane_fuse(task, inputs, count, head, c, pair, a, b);
        if (pair.partner >= 0 && task.turns(out_shift)) turn(task, out_shift, pair, a, b);
        store_element(task.out.shape.type, task.out.data, offset + task.out.channel_offset(c), a);
        if (pair.partner >= 0) store_element(task.out.shape.type, task.out.data, offset + task.out.channel_offset(pair.partner), b);
      }
    }
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

  /// One channel, or one rope pair, of the fused row: the tree of `host_fuse`, channel by channel.
  KVMELD_HD void lane_fuse(const PlaneTask& task, const RowInput* inputs, int count, std::int32_t head, std::int32_t channel, RopePair pair,
                           float& a_out, float& b_out) const {
    const bool paired = pair.partner >= 0;
    if (count == 1 && keeps_single<F>()) {
      lane_load(task, inputs[0], head, channel, pair, a_out, b_out);
      return;
    }
    if (count <= chunk_inputs) {  // one chunk needs no tree, whose levels a device would keep in memory
      Accumulator a = fuser.init();
      Accumulator b = fuser.init();
      const float weight = lane_absorb(task, inputs, 0, count, head, channel, pair, a, b);
      a_out = fuser.finish(a, weight, count);
      if (paired) b_out = fuser.finish(b, weight, count);
      return;
    }
    Accumulator a_level[max_levels];
    Accumulator b_level[max_levels];
    float level_weight[max_levels];
    int chunks = 0;
    for (int begin = 0; begin < count; begin += chunk_inputs, ++chunks) {
      const int end = begin + chunk_inputs < count ? begin + chunk_inputs : count;
      int level = 0;
      while (((chunks >> level) & 1) != 0) ++level;
      Accumulator a_acc = fuser.init();
      Accumulator b_acc = fuser.init();
      float weight = lane_absorb(task, inputs, begin, end, head, channel, pair, a_acc, b_acc);
      for (int k = level - 1; k >= 0; --k) {
        a_acc = fuser.join(a_level[k], a_acc);
        b_acc = fuser.join(b_level[k], b_acc);
        weight += level_weight[k];
      }
      a_level[level] = a_acc;
      b_level[level] = b_acc;
      level_weight[level] = weight;
    }
    int top = 0;
    while (((chunks >> top) & 1) == 0) ++top;
    Accumulator a_total = a_level[top];
    Accumulator b_total = b_level[top];
    float weight = level_weight[top];
    for (int k = top + 1; k < max_levels; ++k) {
      if (((chunks >> k) & 1) == 0) continue;
      a_total = fuser.join(a_level[k], a_total);
      b_total = fuser.join(b_level[k], b_total);
      weight += level_weight[k];
    }
    a_out = fuser.finish(a_total, weight, count);
    if (paired) b_out = fuser.finish(b_total, weight, count);
  }

  /// Absorbs one chunk, in order; returns its weight.
  KVMELD_HD float lane_absorb(const PlaneTask& task, const RowInput* inputs, int begin, int end, std::int32_t head, std::int32_t channel,
                              RopePair pair, Accumulator& a_acc, Accumulator& b_acc) const {
    float weight = 0;
    for (int i = begin; i < end; ++i) {
      float a = 0;
      float b = 0;
      lane_load(task, inputs[i], head, channel, pair, a, b);
      a_acc = fuser.absorb(a_acc, a, inputs[i].weight);
      if (pair.partner >= 0) b_acc = fuser.absorb(b_acc, b, inputs[i].weight);
      weight += inputs[i].weight;
    }
    return weight;
  }

  KVMELD_HD void lane_load(const PlaneTask& task, const RowInput& in, std::int32_t head, std::int32_t channel, RopePair pair, float& a,
                           float& b) const {
    const std::byte* row = task.input(in, head);
    a = load_element(task.out.shape.type, row, channel);
    if (pair.partner < 0) return;
    b = load_element(task.out.shape.type, row, pair.partner);
    if (task.turns(in.shift)) turn(task, in.shift, pair, a, b);
  }

  KVMELD_HD static void turn(const PlaneTask& task, std::uint32_t shift, RopePair pair, float& a, float& b) {
    const float* table = task.table(shift);
    rotate_pair(a, b, table[pair.index], table[task.rotary_channels / 2 + pair.index]);
  }

  [[nodiscard]] KVMELD_HD static RopePair pair_at(const PlaneTask& task, std::int32_t channel) {
    return task.rope == nullptr ? RopePair{} : rope_pair(task.pairing, task.first_channel, task.rotary_channels, channel);
  }

  /// Types stored in blocks: a lane makes whole blocks, because the elements of one share a scale.
  KVMELD_HD void lane_blocks(const PlaneTask& task, const RowInput* inputs, int count, std::uint32_t out_shift, std::int64_t slot,
                             int lane) const {
    const std::int32_t blocks = task.out.shape.channels / static_cast<std::int32_t>(row_block);
    for (std::int32_t i = lane; i < blocks * task.out.shape.heads; i += lanes_per_row) {
      const std::int32_t head = i / blocks;
      const std::int32_t first = i % blocks * static_cast<std::int32_t>(row_block);
      float values[row_block];
      for (std::int32_t k = 0; k < row_block; ++k) {
        // A pair is computed at its first channel, wherever the block's edge falls.
        const RopePair pair = pair_at(task, first + k);
        const bool second = pair.partner >= 0 && pair.partner < first + k;
        float a = 0;
        float b = 0;
        lane_fuse(task, inputs, count, head, second ? pair.partner : first + k, second ? RopePair{first + k, pair.index} : pair, a, b);
        if (pair.partner >= 0 && task.turns(out_shift)) turn(task, out_shift, pair, a, b);
        values[k] = second ? b : a;
      }
      store_q8_0(values, task.out.data + task.out.byte_offset(task.out.row_offset(slot, head) + first));
    }
  }
};

}  // namespace detail
KVMELD_NAMESPACE_END

#undef KVMELD_KEEP_LOOP
