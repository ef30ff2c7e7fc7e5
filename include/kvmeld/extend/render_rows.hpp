#pragma once

/// The rendering of a plan's rows: copied, rotated, fused or pooled.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/detail/fold_rows.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/rope.hpp>

KVMELD_NAMESPACE_BEGIN

// Stored rows as f32, rotated while they are in registers. Comparing and attending to un-rotated
// keys spends most time here.

namespace detail {

#if KVMELD_X86_DISPATCH

/// The expressions of `rotate_pair` for whole rows of half-split pairs. in: (head, channel); out:
/// (head, channel)
template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_NOINLINE void load_rotated_avx512(const Rotation& rotation,
                                                              const std::byte* in,
                                                              std::int64_t heads,
                                                              float* out) noexcept {
  constexpr std::ptrdiff_t size = block_bytes(type);
  const std::ptrdiff_t half = rotation.rotary_channels / 2;
  const float* const sin = rotation.table + half;
  for (std::int64_t h = 0; h < heads; ++h, in += 2 * half * size, out += 2 * half) {
    for (std::ptrdiff_t i = 0; i < half; i += 16) {
      const WideFloats a = load_sixteen<type>(in + i * size),
                       b = load_sixteen<type>(in + (half + i) * size);
      const WideFloats c = load_wide(rotation.table + i), s = load_wide(sin + i);
      store_wide(fma_wide(a, c, -(b * s)), out + i);
      store_wide(fma_wide(a, s, b * c), out + half + i);
    }
  }
}

#endif  // KVMELD_X86_DISPATCH

/// Reads the contiguous heads of one token as f32 and rotates them: the bytes of `load_row` and
/// `rotate_row`.
inline void load_rotated([[maybe_unused]] ElementType type, Isa isa, const Rotation& rotation,
                         const std::byte* in, std::int64_t heads, float* out) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512 && rotation.pairing == RopePairing::half_split &&
      rotation.rotary_channels == rotation.channels && rotation.channels % 32 == 0) {
    if (type == ElementType::f32)
      return load_rotated_avx512<ElementType::f32>(rotation, in, heads, out);
    if (type == ElementType::f16)
      return load_rotated_avx512<ElementType::f16>(rotation, in, heads, out);
    if (type == ElementType::bf16)
      return load_rotated_avx512<ElementType::bf16>(rotation, in, heads, out);
  }
#endif
  load_row(type, isa, in, static_cast<std::ptrdiff_t>(heads) * rotation.channels, out);
  for (std::int64_t h = 0; h < heads; ++h)
    rotate_channels(rotation, isa, out + h * rotation.channels);
}

}  // namespace detail

// The inputs and outputs of a render, as arrays that can be copied to a device unchanged.

namespace extend {

/// One contribution as the row work reads it: its row, its weight, and the shift by which its key
/// is rotated first.
struct RowInput {
  std::uint32_t source = 0;
  std::uint32_t row = 0;  ///< index among the tokens that the layer group holds of that source
  float weight = 1.0F;
  std::uint32_t shift = 0;  ///< row of the rope table; 0: not rotated
};

}  // namespace extend

namespace detail {

/// The outputs of the layers that hold the same tokens, as arrays that can be copied to a device
/// unchanged.
struct RowGroup {
  const std::uint32_t* row_begin = nullptr;  ///< (outputs + 1)
  const RowInput* inputs = nullptr;
  const std::uint32_t* out_shift = nullptr;  ///< (outputs) shift after the fusion; 0: none
  /// (outputs) number of outputs from here on that copy consecutive rows of one source with one
  /// shift.
  const std::uint32_t* run = nullptr;
  /// (inputs) shift directly to the output, for a head that keeps a single one; null without head
  /// weights.
  const std::uint32_t* direct = nullptr;
};

/// The contributions to one head of an output: all of the output's, or those with a nonzero head
/// weight.
struct HeadInputs {
  const RowInput* inputs = nullptr;
  const float* weights = nullptr;  ///< 0: not of this head; null: the weights of the inputs
  int count = 0;                   ///< of the output

  [[nodiscard]] KVMELD_HD bool used(int i) const noexcept {
    return weights == nullptr || weights[i] != 0.0F;
  }
  [[nodiscard]] KVMELD_HD float weight(int i) const noexcept {
    return weights == nullptr ? inputs[i].weight : weights[i];
  }
  [[nodiscard]] KVMELD_HD int used_count() const noexcept {
    if (weights == nullptr) return count;
    int used_inputs = 0;
    for (int i = 0; i < count; ++i) used_inputs += weights[i] != 0.0F ? 1 : 0;
    return used_inputs;
  }
  [[nodiscard]] KVMELD_HD int first_used() const noexcept {
    int i = 0;
    while (i + 1 < count && !used(i)) ++i;
    return i;
  }
};

}  // namespace detail

namespace extend {

/// One plane of one layer: the sources and the destination of its rows.
struct PlaneTask {
  MutablePlaneRef out;
  detail::RowGroup group;
  const std::byte* const* sources = nullptr;  ///< base of this plane in each source
  const float* rope = nullptr;   ///< table rows, cosines then sines; null: rows are not rotated
  std::int64_t rope_stride = 0;  ///< floats
  RopePairing pairing = RopePairing::half_split;
  std::int32_t first_channel = 0;
  std::int32_t rotary_channels = 0;
  /// (head, input) weights that replace those of the inputs, 0: not of this head; null: none.
  const float* head_weights = nullptr;
  std::int64_t input_count = 0;  ///< of the group
  /// The source that is the local cache; a head to which only it contributes copies it unchanged.
  std::uint32_t local_source = 0xffffffff;
  std::int32_t layer = 0;
  bool packed = false;  ///< output tokens are contiguous in memory in canonical order

  /// Whether a head takes its only contribution unchanged; `keeps_single`: the fuser always does.
  [[nodiscard]] KVMELD_HD bool keeps(const detail::HeadInputs& row,
                                     bool keeps_single) const noexcept {
    return row.used_count() == 1 &&
           (keeps_single ||
            (row.weights != nullptr && row.inputs[row.first_used()].source == local_source));
  }
  [[nodiscard]] KVMELD_HD detail::HeadInputs head_inputs(std::int64_t output,
                                                         std::int64_t head) const noexcept {
    const std::uint32_t begin = group.row_begin[output];
    return {group.inputs + begin,
            head_weights == nullptr ? nullptr : head_weights + head * input_count + begin,
            static_cast<int>(group.row_begin[output + 1] - begin)};
  }
  [[nodiscard]] KVMELD_HD const float* table(std::uint32_t shift) const noexcept {
    return rope + shift * rope_stride;
  }
  [[nodiscard]] KVMELD_HD bool rotates(std::uint32_t shift) const noexcept {
    return rope != nullptr && shift != 0;
  }
  [[nodiscard]] KVMELD_HD const std::byte* input(const RowInput& in,
                                                 std::int64_t head) const noexcept {
    return sources[in.source] +
           (static_cast<std::int64_t>(in.row) * out.shape.heads + head) * row_bytes(out.shape);
  }
};

inline constexpr std::int32_t max_channels = 1024;  ///< of a head; rows are on the stack

inline constexpr int chunk_inputs = 64;  ///< contributions that are absorbed in sequence

}  // namespace extend

namespace detail {

inline constexpr int max_levels = 12;  ///< of the tree that joins chunks: 64 << 11 contributions

}  // namespace detail

// Output rows of one contribution, copied or rotated, in runs where rows are contiguous; and the
// writing of finished rows.

namespace extend {

/// How rows are written, for all outputs of a run.
struct RowMode {
  Isa isa = Isa::baseline;
  bool streams = false;  ///< the output is larger than the caches
};

/// Bytes that are computed before they are streamed out, few enough to stay in the L1 cache.
inline constexpr std::int64_t stage_bytes = 16 << 10;

/// The address of a head in a slot of the output.
[[nodiscard]] inline std::byte* row_address(const PlaneTask& task, std::int64_t slot,
                                            std::int64_t head) noexcept {
  return task.out.data + task.out.byte_offset(task.out.row_offset(slot, head));
}

}  // namespace extend

namespace detail {

/// Rotates rows that are contiguous in source and target, where the output is streamed directly
/// from registers or through a staging buffer.
inline void rotate_run(const PlaneTask& task, RowMode mode, const Rotation& rotation,
                       const std::byte* in, std::byte* out, std::int64_t rows) noexcept {
  const std::int64_t bytes = row_bytes(task.out.shape);
#if KVMELD_X86_DISPATCH
  if (mode.streams && mode.isa != Isa::baseline &&
      streams_whole(task.out.shape.type, rotation, out)) {
    return stream_rotated_rows(task.out.shape.type, mode.isa, rotation, in, out, rows);
  }
#endif
  if (!mode.streams || bytes > stage_bytes)
    return rotate_stored_rows(task.out.shape.type, mode.isa, rotation, in, bytes, out, bytes, rows);
  alignas(64) std::byte stage[stage_bytes];
  const std::int64_t most = stage_bytes / bytes;
  for (std::int64_t at = 0; at < rows; at += most) {
    const std::int64_t part = rows - at < most ? rows - at : most;
    rotate_stored_rows(task.out.shape.type, mode.isa, rotation, in + at * bytes, bytes, stage,
                       bytes, part);
    // prefetched while this stage is written
    const std::int64_t next = at + 2 * most <= rows ? most * bytes : 0;
    for (std::int64_t line = 0; line < next; line += 64)
      __builtin_prefetch(in + at * bytes + next + line);
    stream_copy(out + at * bytes, stage, static_cast<std::size_t>(part * bytes));
  }
}

/// Writes one finished row, whatever the layout of its channels.
inline void put_row(const PlaneTask& task, RowMode mode, std::int64_t slot, std::int64_t head,
                    const float* row) noexcept {
  const PlaneShape& shape = task.out.shape;
  if (task.out.contiguous_rows())
    return store_row(shape.type, mode.isa, row, shape.channels, row_address(task, slot, head));
  alignas(64) std::byte stored[max_channels * sizeof(double)];
  store_row(shape.type, mode.isa, row, shape.channels, stored);
  scatter_row(task.out, slot, head, stored);
}

}  // namespace detail

namespace extend {

/// The rotation of a task's rows by one of its plan's shifts.
[[nodiscard]] inline Rotation rotation_of(const PlaneTask& task, std::uint32_t shift) noexcept {
  return {task.table(shift), task.out.shape.channels, task.first_channel, task.rotary_channels,
          task.pairing};
}

}  // namespace extend

namespace detail {

/// Renders output `o`, or a run of outputs, that has a single contribution, copied or rotated;
/// returns how many are done.
inline std::int64_t render_single(const PlaneTask& task, RowMode mode, std::int64_t o,
                                  std::int64_t last) noexcept {
  const PlaneShape& shape = task.out.shape;
  const RowInput& input = task.group.inputs[task.group.row_begin[o]];
  const std::int64_t slot = task.out.slots.slot(o);
  if (slot < 0) return 1;
  const bool rotates = task.rotates(input.shift);
  const std::byte* const in = task.input(input, 0);
  if (contiguous_heads(task.out)) {
    const std::int64_t left = last - o;
    const std::int64_t run = !task.packed ? 1 : task.group.run[o] < left ? task.group.run[o] : left;
    std::byte* const out = row_address(task, slot, 0);
    if (rotates) {
      rotate_run(task, mode, rotation_of(task, input.shift), in, out, run * shape.heads);
    } else {
      const auto bytes = static_cast<std::size_t>(run * shape.heads * row_bytes(shape));
      mode.streams ? stream_copy(out, in, bytes) : (void)std::memcpy(out, in, bytes);
    }
    return run;
  }
  const std::int64_t bytes = row_bytes(shape);
  if (rotates && task.out.contiguous_rows()) {
    rotate_stored_rows(shape.type, mode.isa, rotation_of(task, input.shift), in, bytes,
                       row_address(task, slot, 0), task.out.byte_offset(task.out.head_stride),
                       shape.heads);
    return 1;
  }
  for (std::int64_t head = 0; head < shape.heads; ++head) {
    if (!rotates) {
      scatter_row(task.out, slot, head, in + head * bytes);
      continue;
    }
    alignas(64) float row[max_channels];
    load_row(shape.type, mode.isa, in + head * bytes, shape.channels, row);
    rotate_channels(rotation_of(task, input.shift), mode.isa, row);
    put_row(task, mode, slot, head, row);
  }
  return 1;
}

}  // namespace detail

// Outputs that fold the same rows with different weights, such as pooled tokens: each row is read
// once for all of them.

namespace detail {

/// Channels of a head, rounded up to whole blocks.
[[nodiscard]] inline std::int64_t pooled_width(const PlaneTask& task) noexcept {
  return (task.out.shape.channels + row_block - 1) / row_block * row_block;
}

/// The number of outputs from `o` on, below `last`, that are folded together: they have the same
/// rows, and every head takes two or more. 0: none.
[[nodiscard]] inline std::int64_t pooled_outputs(const PlaneTask& task, std::int64_t o,
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

/// One head of several outputs: chunks of 64 contributions, joined in the order of a binary
/// counter, as `fold_heads` does for one output.
template <class F>
struct PooledHead {
  using Accumulator = typename FoldRows<F>::Accumulator;
  static constexpr std::int64_t most_outputs = max_channels / row_block;
  // a head's rows are a token apart, which hardware prefetchers do not follow
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
      if (task.rotates(input.shift)) {
        load_rotated(shape.type, isa, rotation_of(task, input.shift), task.input(input, head), 1,
                     row);
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
      if (task.rotates(shift)) rotate_channels(rotation_of(task, shift), mode.isa, row);
      put_row(task, mode, slot, head, row);
    }
  }
  return outputs;
}

}  // namespace detail

// The host form of a render: the expressions of the lane form, over whole rows and runs of rows.
//
// Code that does not depend on the fuser is compiled once for each file; a fuser adds two small
// loops for each instruction set.

namespace detail {

/// Writes zeros from channel n to the end of its block, since sorting and mixing read whole blocks.
inline void pad_row(float* row, std::int64_t n) noexcept {
  for (std::int64_t c = n; c % row_block != 0; ++c) row[c] = 0;
}

/// Heads of one output that are fused together, as one long row.
struct HeadSpan {
  std::int64_t first = 0;
  std::int64_t count = 1;
};

/// Reads heads of one contribution as f32, rotated for the fusion. row: (heads, channels)
inline void fetch_rows(const PlaneTask& task, RowMode mode, const RowInput& input, HeadSpan heads,
                       float* row) noexcept {
  const std::byte* const in = task.input(input, heads.first);
  if (task.rotates(input.shift))
    return load_rotated(task.out.shape.type, mode.isa, rotation_of(task, input.shift), in,
                        heads.count, row);
  load_row(task.out.shape.type, mode.isa, in, heads.count * task.out.shape.channels, row);
}

/// Folds heads of an output: chunks of 64 contributions, joined in the order of a binary counter.
template <class F>
void fold_heads(const F& fuser, const PlaneTask& task, RowMode mode, const HeadInputs& inputs,
                HeadSpan heads, float* row) {
  const int count = inputs.count;
  const std::int64_t channels = heads.count * task.out.shape.channels;
  const FoldRows<F> fold{fuser, mode.isa, (channels + row_block - 1) / row_block * row_block};
  pad_row(row, channels);
  alignas(64) typename FoldRows<F>::Accumulator levels[max_levels][max_channels];
  float level_weight[max_levels];
  int chunks = 0;
  for (int begin = 0; begin < count; begin += chunk_inputs, ++chunks) {
    const int end = begin + chunk_inputs < count ? begin + chunk_inputs : count;
    // The chunk lands on the first free level; full levels below join into it first.
    int level = 0;
    while (((chunks >> level) & 1) != 0) ++level;
    fold.start(levels[level]);
    float weight = 0;
    for (int i = begin; i < end; ++i) {
      if (!inputs.used(i)) continue;
      fetch_rows(task, mode, inputs.inputs[i], heads, row);
      fold.absorb(levels[level], row, inputs.weight(i));
      weight += inputs.weight(i);
    }
    for (int k = level - 1; k >= 0; --k) {
      fold.join(levels[k], levels[level]);
      weight += level_weight[k];
    }
    level_weight[level] = weight;
  }
  int top = 0;
  while (((chunks >> top) & 1) == 0) ++top;
  float weight = level_weight[top];
  for (int k = top + 1; k < max_levels; ++k) {
    if (((chunks >> k) & 1) == 0) continue;
    fold.join(levels[k], levels[top]);
    weight += level_weight[k];
  }
  fold.finish(levels[top], row, weight, inputs.used_count());
}

/// Sorts heads of an output channel by channel, and selects.
template <class F>
void select_heads(const F& fuser, const PlaneTask& task, RowMode mode, const HeadInputs& inputs,
                  HeadSpan heads, float* fused) {
  const std::int64_t channels = heads.count * task.out.shape.channels;
  alignas(64) float row[max_channels];
  alignas(64) float values[max_selected * selected_channels];
  for (std::int64_t at = 0; at < channels; at += selected_channels) {
    const std::int64_t n = channels - at < selected_channels ? channels - at : selected_channels;
    int used = 0;
    for (int i = 0; i < inputs.count; ++i) {
      if (!inputs.used(i)) continue;
      float* const to = values + used++ * selected_channels;
      fetch_rows(task, mode, inputs.inputs[i], heads, channels == n ? to : row);
      if (channels != n) std::memcpy(to, row + at, static_cast<std::size_t>(n) * sizeof(float));
      pad_row(to, n);
    }
    const auto blocks = static_cast<int>((n + row_block - 1) / row_block);
    select_rows(fuser, mode.isa, values, used, blocks, fused + at);
    reselect(fuser, task.out.shape.type, mode.isa, values, used, blocks, fused + at);
  }
}

/// Mixes one head of an output from all of its contributions at once.
template <class F>
void mix_head(const F& fuser, const PlaneTask& task, RowMode mode, const HeadInputs& inputs,
              std::int64_t head, float* fused) {
  const PlaneShape& shape = task.out.shape;
  alignas(64) float values[max_mixed_values];
  float weights[max_mixed];
  HeadRows rows{values,
                (shape.channels + row_block - 1) / row_block * row_block,
                weights,
                0,
                shape.channels,
                task.layer,
                static_cast<std::int32_t>(head),
                shape.plane};
  for (int i = 0; i < inputs.count; ++i) {
    if (!inputs.used(i)) continue;
    float* const to = values + rows.contributions * rows.stride;
    fetch_rows(task, mode, inputs.inputs[i], {head, 1}, to);
    pad_row(to, shape.channels);
    weights[rows.contributions++] = inputs.weight(i);
  }
  if constexpr (requires { fuser.mix(mode.isa, rows, fused); }) {
    fuser.mix(mode.isa, rows, fused);
  } else {
    const auto prepared = fuser.prepare(rows);
    for (int c = 0; c < shape.channels; ++c) fused[c] = fuser.channel(rows, prepared, c);
  }
}

/// Channels that a fuser's form takes at once, or one head.
template <class F>
[[nodiscard]] constexpr std::int64_t channels_at_once() noexcept {
  return SelectForm<F> ? std::int64_t{selected_channels} : MixForm<F> ? 1 : max_channels;
}

/// Reduces heads of an output in the fuser's form.
template <class F>
void fuse_heads(const F& fuser, const PlaneTask& task, RowMode mode, const HeadInputs& inputs,
                HeadSpan heads, float* row) {
  if constexpr (SelectForm<F>) {
    select_heads(fuser, task, mode, inputs, heads, row);
  } else if constexpr (MixForm<F>) {
    mix_head(fuser, task, mode, inputs, heads.first, row);
  } else {
    fold_heads(fuser, task, mode, inputs, heads, row);
  }
}

/// Renders the heads of one output, several together where they are contiguous and are treated
/// alike. A head whose weights keep a single contribution copies it, or rotates it once.
template <class F>
void render_heads(const F& fuser, const PlaneTask& task, RowMode mode, std::int64_t o,
                  std::int64_t slot) {
  const PlaneShape& shape = task.out.shape;
  const std::uint32_t out_shift = task.group.out_shift[o];
  const bool apart = task.head_weights != nullptr || shape.channels % row_block != 0 ||
                     !contiguous_heads(task.out);
  const std::int64_t most =
      apart || shape.channels > channels_at_once<F>() ? 1 : channels_at_once<F>() / shape.channels;
  alignas(64) float row[max_channels];
  for (HeadSpan heads; heads.first < shape.heads; heads.first += heads.count) {
    heads.count = shape.heads - heads.first < most ? shape.heads - heads.first : most;
    const HeadInputs inputs = task.head_inputs(o, heads.first);
    if (inputs.weights != nullptr && task.keeps(inputs, keeps_single<F>())) {
      const int only = inputs.first_used();
      const RowInput& input = inputs.inputs[only];
      const std::uint32_t shift =
          task.group.direct[task.group.row_begin[o] + static_cast<std::uint32_t>(only)];
      if (!task.rotates(shift)) {
        scatter_row(task.out, slot, heads.first, task.input(input, heads.first));
        continue;
      }
      fetch_rows(task, mode, {input.source, input.row, input.weight, shift}, heads, row);
    } else {
      fuse_heads(fuser, task, mode, inputs, heads, row);
      for (std::int64_t h = 0; h < heads.count && task.rotates(out_shift); ++h)
        rotate_channels(rotation_of(task, out_shift), mode.isa, row + h * shape.channels);
    }
    if (apart) {
      put_row(task, mode, slot, heads.first, row);
    } else {
      store_row(shape.type, mode.isa, row, heads.count * shape.channels,
                row_address(task, slot, heads.first));
    }
  }
}

/// Whether all heads of an output can be fused as one long row in vector registers.
[[nodiscard]] inline bool fuses_as_one(const PlaneTask& task, RowMode mode, const RowInput* inputs,
                                       int count, std::uint32_t out_shift) noexcept {
  if (mode.isa == Isa::baseline || count > chunk_inputs || task.rotates(out_shift) ||
      task.head_weights != nullptr || !contiguous_heads(task.out)) {
    return false;
  }
  for (int i = 0; i < count; ++i) {
    if (task.rotates(inputs[i].shift)) return false;
  }
  return fuses_in_registers(task.out.shape.type, static_cast<std::int64_t>(task.out.shape.heads) *
                                                     task.out.shape.channels);
}

}  // namespace detail

namespace extend {

/// Renders one output from several contributions, or from one that the fuser does not keep as it
/// is.
template <class F>
void render_fused(const F& fuser, const PlaneTask& task, RowMode mode, std::int64_t o) {
  const std::int64_t slot = task.out.slots.slot(o);
  if (slot < 0) return;
  const RowInput* const inputs = task.group.inputs + task.group.row_begin[o];
  const int count = static_cast<int>(task.group.row_begin[o + 1] - task.group.row_begin[o]);
  const std::uint32_t out_shift = task.group.out_shift[o];
  if (detail::fuses_as_one(task, mode, inputs, count, out_shift)) {
    detail::FoldInputs rows;
    rows.count = count;
    for (int i = 0; i < count; ++i) rows.add(i, task.input(inputs[i], 0), inputs[i].weight);
    const std::int64_t bytes = row_bytes(task.out.shape) * task.out.shape.heads;
    std::byte* const out = row_address(task, slot, 0);
    if (!mode.streams)
      return detail::fuse_in_registers(fuser, task.out.shape.type, mode.isa, rows, 0, bytes, out);
    alignas(64) std::byte stage[stage_bytes];
    for (std::int64_t at = 0; at < bytes; at += stage_bytes) {
      const std::int64_t part = bytes - at < stage_bytes ? bytes - at : stage_bytes;
      detail::fuse_in_registers(fuser, task.out.shape.type, mode.isa, rows, at, part, stage);
      stream_copy(out + at, stage, static_cast<std::size_t>(part));
    }
    return;
  }
  detail::render_heads(fuser, task, mode, o, slot);
}

}  // namespace extend

namespace detail {

/// Renders one output by order statistics: slices of its contributions, sorted channel by channel.
template <class F>
void render_selected(const F& fuser, const PlaneTask& task, RowMode mode, std::int64_t o) {
  const std::int64_t slot = task.out.slots.slot(o);
  if (slot < 0) return;
  const PlaneShape& shape = task.out.shape;
  const RowInput* const inputs = task.group.inputs + task.group.row_begin[o];
  const int count = static_cast<int>(task.group.row_begin[o + 1] - task.group.row_begin[o]);
  bool rotates = task.rotates(task.group.out_shift[o]);
  for (int i = 0; i < count; ++i) rotates = rotates || task.rotates(inputs[i].shift);
  alignas(64) float values[max_selected * selected_channels];
  const auto blocks = [](std::int64_t n) {
    return static_cast<int>((n + row_block - 1) / row_block);
  };
  // heads are one long row
  if (!rotates && task.head_weights == nullptr && contiguous_heads(task.out)) {
    const std::int64_t all = static_cast<std::int64_t>(shape.heads) * shape.channels;
    const std::ptrdiff_t ahead = prefetch_bytes(count);
    alignas(64) float fused[selected_channels];
    alignas(64) std::byte stage[selected_channels * sizeof(double)];
    for (std::int64_t at = 0; at < all; at += selected_channels) {
      const std::int64_t n = all - at < selected_channels ? all - at : selected_channels;
      const std::int64_t offset = byte_size(shape.type, at);
      for (int i = 0; i < count; ++i) {
        const std::byte* const in = task.input(inputs[i], 0) + offset;
        // the next tokens' rows
        for (std::int64_t b = 0; b < byte_size(shape.type, n); b += 64)
          __builtin_prefetch(in + ahead + b);
        load_row(shape.type, mode.isa, in, n, values + i * selected_channels);
        pad_row(values + i * selected_channels, n);
      }
      select_rows(fuser, mode.isa, values, count, blocks(n), fused);
      reselect(fuser, shape.type, mode.isa, values, count, blocks(n), fused);
      std::byte* const out = row_address(task, slot, 0) + offset;
      store_row(shape.type, mode.isa, fused, n, mode.streams ? stage : out);
      if (mode.streams) stream_copy(out, stage, static_cast<std::size_t>(byte_size(shape.type, n)));
    }
    return;
  }
  render_heads(fuser, task, mode, o, slot);
}

/// Renders rows [begin, end): row r is output `r % outputs` of task `r / outputs`.
template <class F>
void render_rows(const F& fuser, const PlaneTask* tasks, std::int64_t outputs, RowMode mode,
                 std::int64_t begin, std::int64_t end) {
  while (begin < end) {
    const PlaneTask& task = tasks[begin / outputs];
    const std::int64_t first = begin % outputs;
    const std::int64_t last = end - begin < outputs - first ? first + (end - begin) : outputs;
    begin += last - first;
    // there is nothing to store, and later code divides by the number of channels
    if (task.out.shape.channels == 0) continue;
    for (std::int64_t o = first; o < last;) {
      const std::uint32_t count = task.group.row_begin[o + 1] - task.group.row_begin[o];
      if (count == 1 && keeps_single<F>()) {
        o += render_single(task, mode, o, last);
      } else {
        if constexpr (SelectForm<F>) {
          if (count != 0) render_selected(fuser, task, mode, o);
        } else if constexpr (MixForm<F>) {
          const std::int64_t slot = count == 0 ? -1 : task.out.slots.slot(o);
          if (slot >= 0) render_heads(fuser, task, mode, o, slot);
        } else {
          if (const std::int64_t pooled =
                  count == 0 ? 0 : render_pooled(fuser, task, mode, o, last);
              pooled > 0) {
            o += pooled;
            continue;
          }
          if (count != 0) render_fused(fuser, task, mode, o);
        }
        ++o;
      }
    }
  }
  if (mode.streams) stream_fence();
}

#if defined(KVMELD_COMPILED)
KVMELD_INSTANCE void render_rows<MeanRows>(const MeanRows&, const PlaneTask*, std::int64_t, RowMode,
                                           std::int64_t, std::int64_t);
#endif

}  // namespace detail

KVMELD_NAMESPACE_END
