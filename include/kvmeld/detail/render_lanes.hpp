#pragma once

/// The lane form of rendering: rows fused by 32 lanes, as on a device.

#include <cstddef>
#include <cstdint>
#include <utility>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/extend/render_rows.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/rope.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// The accumulator type of a fold; other forms have none.
template <class F>
struct AccumulatorOf {
  using type = NoState;
};
template <FoldForm F>
struct AccumulatorOf<F> {
  using type = decltype(std::declval<const F&>().init());
};

/// Renders output tokens by 32 lanes, with the expressions and the order of the host form.
/// @tparam F models `FoldForm`, `SelectForm` or `MixForm`.
template <class F>
struct RenderLanes {
  using Accumulator = typename AccumulatorOf<F>::type;

  F fuser;

  /// One lane's part of output `o` of one plane, all heads.
  KVMELD_HD void token(const PlaneTask& task, std::int64_t o, int lane) const {
    const std::uint32_t begin = task.group.row_begin[o];
    const std::int64_t slot = task.out.slots.slot(o);
    if (task.group.row_begin[o + 1] == begin || slot < 0) return;
    for (std::int32_t head = 0; head < task.out.shape.heads; ++head) {
      HeadInputs all = task.head_inputs(o, head);
      std::uint32_t rotate_after = task.group.out_shift[o];
      RowInput only{};
      if (task.keeps(all, keeps_single<F>())) {
        const int at = all.first_used();
        only = all.inputs[at];
        if (all.count > 1) {
          only.shift = task.group.direct[begin + static_cast<std::uint32_t>(at)];
          rotate_after = 0;
        }
        all = {&only, nullptr, 1};
        if (!task.rotates(only.shift)) {
          lane_scatter(task.out, task.out.row_offset(slot, head), task.input(only, head), lane);
          continue;
        }
      }
      lane_head(task, all, head, rotate_after, slot, lane);
    }
  }

 private:
  /// One head's row as a fuser of the mix form reads it: channels are loaded, and rotated, when
  /// they are asked for.
  struct LaneRows {
    const RenderLanes* lanes;
    const PlaneTask* task;
    const HeadInputs* inputs;
    std::int32_t head_index;
    int contributions;

    [[nodiscard]] KVMELD_HD int count() const { return contributions; }
    [[nodiscard]] KVMELD_HD int channels() const { return task->out.shape.channels; }
    [[nodiscard]] KVMELD_HD int layer() const { return task->layer; }
    [[nodiscard]] KVMELD_HD int head() const { return head_index; }
    [[nodiscard]] KVMELD_HD Plane plane() const { return task->out.shape.plane; }
    [[nodiscard]] KVMELD_HD float weight(int contribution) const {
      return inputs->weight(at(contribution));
    }
    [[nodiscard]] KVMELD_HD float value(int contribution, int channel) const {
      RopePair pair = pair_at(*task, channel);
      const bool second = pair.partner >= 0 && pair.partner < channel;
      const std::int32_t first = second ? pair.partner : channel;
      if (second) pair = pair_at(*task, first);
      float a = 0;
      float b = 0;
      lanes->lane_load(*task, inputs->inputs[at(contribution)], head_index, first, pair, a, b);
      return second ? b : a;
    }

   private:
    /// The index of this head's i-th contribution among the output's contributions.
    [[nodiscard]] KVMELD_HD int at(int contribution) const {
      if (inputs->weights == nullptr) return contribution;
      int i = 0;
      for (int seen = 0;; ++i) {
        if (inputs->used(i) && seen++ == contribution) return i;
      }
    }
  };

  /// One lane's part of one head.
  KVMELD_HD void lane_head(const PlaneTask& task, const HeadInputs& inputs, std::int32_t head,
                           std::uint32_t out_shift, std::int64_t slot, int lane) const {
    if constexpr (MixForm<F>) {
      const LaneRows rows{this, &task, &inputs, head, inputs.used_count()};
      if (rows.contributions > 1 || !keeps_single<F>()) {
        const auto prepared = fuser.prepare(rows);
        return put_head(task, head, out_shift, slot, lane,
                        [&](std::int32_t channel, RopePair pair, float& a, float& b) {
                          a = fuser.channel(rows, prepared, channel);
                          if (pair.partner >= 0) b = fuser.channel(rows, prepared, pair.partner);
                        });
      }
    }
    put_head(task, head, out_shift, slot, lane,
             [&](std::int32_t channel, RopePair pair, float& a, float& b) {
               lane_fuse(task, inputs, head, channel, pair, a, b);
             });
  }

  /// Stores the result of `fused` for each channel, or rope pair, of this lane.
  template <class Fused>
  KVMELD_HD void put_head(const PlaneTask& task, std::int32_t head, std::uint32_t out_shift,
                          std::int64_t slot, int lane, const Fused& fused) const {
    if (block_elements(task.out.shape.type) > 1)
      return put_blocks(task, head, out_shift, slot, lane, fused);
    const std::int64_t offset = task.out.row_offset(slot, head);
    for (std::int32_t c = lane; c < task.out.shape.channels; c += lanes_per_row) {
      const RopePair pair = pair_at(task, c);
      if (pair.partner >= 0 && pair.partner < c) continue;  // handled with its first channel
      float a = 0;
      float b = 0;
      fused(c, pair, a, b);
      if (pair.partner >= 0 && task.rotates(out_shift)) rotation(task, out_shift, pair, a, b);
      store_element(task.out.shape.type, task.out.data, offset + task.out.channel_offset(c), a);
      if (pair.partner >= 0)
        store_element(task.out.shape.type, task.out.data,
                      offset + task.out.channel_offset(pair.partner), b);
    }
  }

  /// One channel, or one rope pair, of the fused row: the tree of the host's fold, channel by
  /// channel.
  KVMELD_HD void lane_fuse(const PlaneTask& task, const HeadInputs& inputs, std::int32_t head,
                           std::int32_t channel, RopePair pair, float& a_out, float& b_out) const {
    if (inputs.count == 1 && keeps_single<F>()) {
      lane_load(task, inputs.inputs[0], head, channel, pair, a_out, b_out);
      return;
    }
    if constexpr (SelectForm<F>) {
      lane_select(task, inputs, head, channel, pair, a_out, b_out);
    } else if constexpr (FoldForm<F>) {
      lane_fold(task, inputs, head, channel, pair, a_out, b_out);
    }
  }

  /// The same for order statistics: all values of the channel, sorted by the host's network.
  KVMELD_HD void lane_select(const PlaneTask& task, const HeadInputs& inputs, std::int32_t head,
                             std::int32_t channel, RopePair pair, float& a_out,
                             float& b_out) const {
    float a[max_selected];
    float b[max_selected];
    int count = 0;
    for (int i = 0; i < inputs.count; ++i) {
      if (!inputs.used(i)) continue;
      b[count] = 0;
      lane_load(task, inputs.inputs[i], head, channel, pair, a[count], b[count]);
      ++count;
    }
    sort_values(a, count);
    a_out = fuser.select(OrderedValues{a, 1, count});
    if (pair.partner < 0) return;
    sort_values(b, count);
    b_out = fuser.select(OrderedValues{b, 1, count});
  }

  KVMELD_HD void lane_fold(const PlaneTask& task, const HeadInputs& inputs, std::int32_t head,
                           std::int32_t channel, RopePair pair, float& a_out, float& b_out) const {
    const bool paired = pair.partner >= 0;
    const int count = inputs.count;
    const int used = inputs.used_count();
    // one chunk needs no tree, whose levels a device would spill to memory
    if (count <= chunk_inputs) {
      Accumulator a = fuser.init();
      Accumulator b = fuser.init();
      const float weight = lane_absorb(task, inputs, 0, count, head, channel, pair, a, b);
      a_out = fuser.finish(a, weight, used);
      if (paired) b_out = fuser.finish(b, weight, used);
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
    a_out = fuser.finish(a_total, weight, used);
    if (paired) b_out = fuser.finish(b_total, weight, used);
  }

  /// Absorbs one chunk, in order; returns its weight.
  KVMELD_HD float lane_absorb(const PlaneTask& task, const HeadInputs& inputs, int begin, int end,
                              std::int32_t head, std::int32_t channel, RopePair pair,
                              Accumulator& a_acc, Accumulator& b_acc) const {
    float weight = 0;
    for (int i = begin; i < end; ++i) {
      if (!inputs.used(i)) continue;
      float a = 0;
      float b = 0;
      const float w = inputs.weight(i);
      lane_load(task, inputs.inputs[i], head, channel, pair, a, b);
      a_acc = fuser.absorb(a_acc, a, w);
      if (pair.partner >= 0) b_acc = fuser.absorb(b_acc, b, w);
      weight += w;
    }
    return weight;
  }

  KVMELD_HD void lane_load(const PlaneTask& task, const RowInput& in, std::int32_t head,
                           std::int32_t channel, RopePair pair, float& a, float& b) const {
    const std::byte* row = task.input(in, head);
    a = load_element(task.out.shape.type, row, channel);
    if (pair.partner < 0) return;
    b = load_element(task.out.shape.type, row, pair.partner);
    if (task.rotates(in.shift)) rotation(task, in.shift, pair, a, b);
  }

  KVMELD_HD static void rotation(const PlaneTask& task, std::uint32_t shift, RopePair pair,
                                 float& a, float& b) {
    const float* table = task.table(shift);
    rotate_pair(a, b, table[pair.index], table[task.rotary_channels / 2 + pair.index]);
  }

  [[nodiscard]] KVMELD_HD static RopePair pair_at(const PlaneTask& task, std::int32_t channel) {
    return task.rope == nullptr
               ? RopePair{}
               : rope_pair(task.pairing, task.first_channel, task.rotary_channels, channel);
  }

  /// Block types: a lane computes whole blocks, because the elements of a block share a scale.
  template <class Fused>
  KVMELD_HD void put_blocks(const PlaneTask& task, std::int32_t head, std::uint32_t out_shift,
                            std::int64_t slot, int lane, const Fused& fused) const {
    const std::int32_t blocks = task.out.shape.channels / static_cast<std::int32_t>(row_block);
    for (std::int32_t i = lane; i < blocks; i += lanes_per_row) {
      const std::int32_t first = i * static_cast<std::int32_t>(row_block);
      float values[row_block];
      for (std::int32_t k = 0; k < row_block; ++k) {
        // A pair is computed at its first channel, also where its channels are in different blocks.
        const RopePair pair = pair_at(task, first + k);
        const bool second = pair.partner >= 0 && pair.partner < first + k;
        float a = 0;
        float b = 0;
        fused(second ? pair.partner : first + k, second ? RopePair{first + k, pair.index} : pair, a,
              b);
        if (pair.partner >= 0 && task.rotates(out_shift)) rotation(task, out_shift, pair, a, b);
        values[k] = second ? b : a;
      }
      store_q8_0(values,
                 task.out.data + task.out.byte_offset(task.out.row_offset(slot, head) + first));
    }
  }
};

}  // namespace detail

KVMELD_NAMESPACE_END
