#pragma once

/// The form of a render that devices run: one channel, or one rope pair, a lane.

#include <cstddef>
#include <cstdint>
#include <utility>

#include <kvmeld/cache/lane_copy.hpp>
#include <kvmeld/cache/rope_rotate.hpp>
#include <kvmeld/exec/row_work.hpp>
#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/state/plane_task.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// What a fold keeps of a channel; other forms keep nothing.
template <class F>
struct AccumulatorOf {
  using type = NoState;
};
template <FoldForm F>
struct AccumulatorOf<F> {
  using type = decltype(std::declval<const F&>().init());
};

/// Renders output tokens by 32 lanes, with the expressions and in the order of the host's rows.
/// @tparam F models `FoldForm` or `SelectForm`.
template <class F>
struct RenderLanes {
  using Accumulator = typename AccumulatorOf<F>::type;

  F fuser;

  /// One lane's part of output `o` of one plane, all heads.
  KVMELD_HD void token(const PlaneTask& task, std::int64_t o, int lane) const {
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
        if (pair.partner >= 0)
          store_element(task.out.shape.type, task.out.data, offset + task.out.channel_offset(pair.partner), b);
      }
    }
  }

 private:
  /// One channel, or one rope pair, of the fused row: the tree of `host_fuse`, channel by channel.
  KVMELD_HD void lane_fuse(const PlaneTask& task, const RowInput* inputs, int count, std::int32_t head,
                           std::int32_t channel, RopePair pair, float& a_out, float& b_out) const {
    if (count == 1 && keeps_single<F>()) {
      lane_load(task, inputs[0], head, channel, pair, a_out, b_out);
      return;
    }
    if constexpr (SelectForm<F>) {
      lane_select(task, inputs, count, head, channel, pair, a_out, b_out);
    } else {
      lane_fold(task, inputs, count, head, channel, pair, a_out, b_out);
    }
  }

  /// The same for order statistics: all values of the channel, sorted by the host's network.
  KVMELD_HD void lane_select(const PlaneTask& task, const RowInput* inputs, int count, std::int32_t head, std::int32_t channel, RopePair pair,
                             float& a_out, float& b_out) const {
    float a[max_selected];
    float b[max_selected];
    for (int i = 0; i < count; ++i) {
      b[i] = 0;
      lane_load(task, inputs[i], head, channel, pair, a[i], b[i]);
    }
    sort_values(a, count);
    a_out = fuser.select(OrderedValues{a, 1, count});
    if (pair.partner < 0) return;
    sort_values(b, count);
    b_out = fuser.select(OrderedValues{b, 1, count});
  }

  KVMELD_HD void lane_fold(const PlaneTask& task, const RowInput* inputs, int count, std::int32_t head, std::int32_t channel, RopePair pair,
                           float& a_out, float& b_out) const {
    const bool paired = pair.partner >= 0;
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
  KVMELD_HD float lane_absorb(const PlaneTask& task, const RowInput* inputs, int begin, int end, std::int32_t head,
                              std::int32_t channel, RopePair pair, Accumulator& a_acc, Accumulator& b_acc) const {
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

  KVMELD_HD void lane_load(const PlaneTask& task, const RowInput& in, std::int32_t head, std::int32_t channel,
                           RopePair pair, float& a, float& b) const {
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
    return task.rope == nullptr ? RopePair{}
                                : rope_pair(task.pairing, task.first_channel, task.rotary_channels, channel);
  }

  /// Types stored in blocks: a lane makes whole blocks, because the elements of one share a scale.
  KVMELD_HD void lane_blocks(const PlaneTask& task, const RowInput* inputs, int count, std::uint32_t out_shift,
                             std::int64_t slot, int lane) const {
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
        lane_fuse(task, inputs, count, head, second ? pair.partner : first + k,
                  second ? RopePair{first + k, pair.index} : pair, a, b);
        if (pair.partner >= 0 && task.turns(out_shift)) turn(task, out_shift, pair, a, b);
        values[k] = second ? b : a;
      }
      store_q8_0(values, task.out.data + task.out.byte_offset(task.out.row_offset(slot, head) + first));
    }
  }
};

}  // namespace detail
KVMELD_NAMESPACE_END
