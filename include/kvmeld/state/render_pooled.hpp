#pragma once

/// Outputs that are folds of the same rows by weights of their own, as pooled tokens are: each row
/// is read once for all of them.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <kvmeld/align/load_turned.hpp>
#include <kvmeld/fuse/fold_rows.hpp>
#include <kvmeld/state/render_single.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Channels of a head, up to a whole number of blocks.
[[nodiscard]] inline std::int64_t pooled_width(const PlaneTask& task) noexcept {
  return (task.out.shape.channels + row_block - 1) / row_block * row_block;
}

/// Outputs from `o` on, below `last`, that are folded together: of the same rows, of which every
/// head takes two or more. 0: not even one.
KVMELD_LAZY [[nodiscard]] std::int64_t pooled_outputs(const PlaneTask& task, std::int64_t o,
                                                      std::int64_t last) noexcept {
  if (task.head_weights == nullptr) return 0;
  const std::uint32_t* const begin = task.group.row_begin;
  const RowInput* const inputs = task.group.inputs + begin[o];
  const std::uint32_t count = begin[o + 1] - begin[o];
  const std::int64_t most = (std::min)(last - o, max_channels / pooled_width(task));
  for (std::int64_t n = 0; n < most; ++n) {
    if (begin[o + n + 1] - begin[o + n] != count) return n;
    const RowInput* const others = task.group.inputs + begin[o + n];
    for (std::uint32_t i = 0; i < count; ++i) {
      if (inputs[i].row != others[i].row || inputs[i].source != others[i].source ||
          inputs[i].shift != others[i].shift)
        return n;
    }
    for (std::int64_t head = 0; head < task.out.shape.heads; ++head) {
      if (task.head_inputs(o + n, head).used_count() < 2) return n;
    }
  }
  return most;
}

/// One head of several outputs: chunks of 64 contributions, joined as a binary counter carries, all
/// as `fold_heads` does for one output.
template <class F>
struct PooledHead {
  using Accumulator = typename FoldRows<F>::Accumulator;
  static constexpr std::int64_t most_outputs = max_channels / row_block;
  // a head's rows lie a token apart: no processor asks for them by itself
  static constexpr int rows_ahead = 8;

  PooledHead(const F& f, const PlaneTask& t, Isa i, std::int64_t n)
      : fuser(f), task(t), isa(i), outputs(n), width(pooled_width(t)) {}

  const F& fuser;
  const PlaneTask& task;
  Isa isa;
  std::int64_t outputs;
  std::int64_t width;
  int top = 0;                                               ///< the level that holds the totals
  alignas(64) Accumulator levels[max_levels][max_channels];  // each (output, channel)
  float weights[max_levels][most_outputs];

  void fold(std::int64_t o, std::int64_t head) {
    const HeadInputs all = task.head_inputs(o, head);
    int chunks = 0;
    for (int begin = 0; begin < all.count; begin += chunk_inputs, ++chunks) {
      int level = 0;
      while (((chunks >> level) & 1) != 0) ++level;
      absorb(all, head, begin, begin + chunk_inputs < all.count ? begin + chunk_inputs : all.count,
             level);
      for (int k = level - 1; k >= 0; --k) join(k, level);
    }
    top = 0;
    while (((chunks >> top) & 1) == 0) ++top;
    for (int k = top + 1; k < max_levels; ++k) {
      if (((chunks >> k) & 1) != 0) join(k, top);
    }
  }

 private:
  void absorb(const HeadInputs& all, std::int64_t head, int begin, int end, int level) {
    const PlaneShape& shape = task.out.shape;
    const FoldRows<F> one{fuser, isa, width};
    FoldRows<F>{fuser, isa, outputs * width}.start(levels[level]);
    std::fill_n(weights[level], outputs, 0.0F);
    alignas(64) float row[max_channels];
    std::fill(row + shape.channels, row + width, 0.0F);
    for (int i = begin; i < end; ++i) {
      const RowInput& input = all.inputs[i];
      const std::byte* const next =
          task.input(all.inputs[i + rows_ahead < all.count ? i + rows_ahead : i], head);
      for (std::int64_t b = 0; b < row_bytes(shape); b += 64) __builtin_prefetch(next + b);
      if (task.turns(input.shift)) {
        load_turned(shape.type, isa, turn_of(task, input.shift), task.input(input, head), 1, row);
      } else {
        load_row(shape.type, isa, task.input(input, head), shape.channels, row);
      }
      for (std::int64_t p = 0; p < outputs; ++p) {
        const float weight = all.weights[p * all.count + i];
        if (weight == 0.0F) continue;
        one.absorb(levels[level] + p * width, row, weight);
        weights[level][p] += weight;
      }
    }
  }
  void join(int from, int to) {
    FoldRows<F>{fuser, isa, outputs * width}.join(levels[from], levels[to]);
    for (std::int64_t p = 0; p < outputs; ++p) weights[to][p] += weights[from][p];
  }
};

/// Renders outputs from `o` on as long as they fold the same rows; returns how many are done.
template <class F>
std::int64_t render_pooled(const F& fuser, const PlaneTask& task, RowMode mode, std::int64_t o,
                           std::int64_t last) {
  const std::int64_t outputs = pooled_outputs(task, o, last);
  if (outputs == 0) return 0;
  PooledHead<F> pooled(fuser, task, mode.isa, outputs);
  for (std::int64_t head = 0; head < task.out.shape.heads; ++head) {
    pooled.fold(o, head);
    for (std::int64_t p = 0; p < outputs; ++p) {
      const std::int64_t slot = task.out.slots.slot(o + p);
      if (slot < 0) continue;
      alignas(64) float row[max_channels];
      FoldRows<F>{fuser, mode.isa, pooled.width}.finish(
          pooled.levels[pooled.top] + p * pooled.width, row, pooled.weights[pooled.top][p],
          task.head_inputs(o + p, head).used_count());
      const std::uint32_t shift = task.group.out_shift[o + p];
      if (task.turns(shift)) turn_row(turn_of(task, shift), mode.isa, row);
      put_row(task, mode, slot, head, row);
    }
  }
  return outputs;
}

}  // namespace detail
KVMELD_NAMESPACE_END
