#pragma once

/// The host form of a render: the expressions of the lane form, over whole rows and runs of rows.
///
/// What does not depend on the fuser is compiled once a file; a fuser adds two small loops for each
/// instruction set.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/align/load_turned.hpp>
#include <kvmeld/cache/stream_copy.hpp>
#include <kvmeld/fuse/fold_rows.hpp>
#include <kvmeld/fuse/select_rows.hpp>
#include <kvmeld/state/render_pooled.hpp>
#include <kvmeld/state/render_single.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Zeros from channel n to the next whole block: what is sorted or mixed there must be a number.
KVMELD_LAZY inline void pad_row(float* row, std::int64_t n) noexcept {
  for (std::int64_t c = n; c % row_block != 0; ++c) row[c] = 0;
}

/// Heads of one output that are fused in one go, as one long row.
struct HeadSpan {
  std::int64_t first = 0;
  std::int64_t count = 1;
};

/// Heads of one contribution in f32, turned to the frame. row: (heads, channels)
inline void fetch_rows(const PlaneTask& task, RowMode mode, const RowInput& input, HeadSpan heads,
                       float* row) noexcept {
  const std::byte* const in = task.input(input, heads.first);
  if (task.turns(input.shift))
    return load_turned(task.out.shape.type, mode.isa, turn_of(task, input.shift), in, heads.count,
                       row);
  load_row(task.out.shape.type, mode.isa, in, heads.count * task.out.shape.channels, row);
}

/// Folds heads of an output: chunks of 64 contributions, joined as a binary counter carries.
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

/// Mixes one head of an output from all of its contributions side by side.
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

/// Renders the heads of one output: several in one go where they lie side by side and what is done
/// to each is the same. A head that weights leave a single contribution takes it as it is, or
/// turned once.
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
      if (!task.turns(shift)) {
        scatter_row(task.out, slot, heads.first, task.input(input, heads.first));
        continue;
      }
      fetch_rows(task, mode, {input.source, input.row, input.weight, shift}, heads, row);
    } else {
      fuse_heads(fuser, task, mode, inputs, heads, row);
      for (std::int64_t h = 0; h < heads.count && task.turns(out_shift); ++h)
        turn_row(turn_of(task, out_shift), mode.isa, row + h * shape.channels);
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
  if (mode.isa == Isa::baseline || count > chunk_inputs || task.turns(out_shift) ||
      task.head_weights != nullptr || !contiguous_heads(task.out)) {
    return false;
  }
  for (int i = 0; i < count; ++i) {
    if (task.turns(inputs[i].shift)) return false;
  }
  return fuses_in_registers(task.out.shape.type, static_cast<std::int64_t>(task.out.shape.heads) *
                                                     task.out.shape.channels);
}

/// Renders one output from several contributions, or from one that the fuser does not keep as it
/// is.
template <class F>
void render_fused(const F& fuser, const PlaneTask& task, RowMode mode, std::int64_t o) {
  const std::int64_t slot = task.out.slots.slot(o);
  if (slot < 0) return;
  const RowInput* const inputs = task.group.inputs + task.group.row_begin[o];
  const int count = static_cast<int>(task.group.row_begin[o + 1] - task.group.row_begin[o]);
  const std::uint32_t out_shift = task.group.out_shift[o];
  if (fuses_as_one(task, mode, inputs, count, out_shift)) {
    FoldInputs rows;
    rows.count = count;
    for (int i = 0; i < count; ++i) rows.add(i, task.input(inputs[i], 0), inputs[i].weight);
    const std::int64_t bytes = row_bytes(task.out.shape) * task.out.shape.heads;
    std::byte* const out = row_address(task, slot, 0);
    if (!mode.streams)
      return fuse_in_registers(fuser, task.out.shape.type, mode.isa, rows, 0, bytes, out);
    alignas(64) std::byte stage[stage_bytes];
    for (std::int64_t at = 0; at < bytes; at += stage_bytes) {
      const std::int64_t part = bytes - at < stage_bytes ? bytes - at : stage_bytes;
      fuse_in_registers(fuser, task.out.shape.type, mode.isa, rows, at, part, stage);
      stream_copy(out + at, stage, static_cast<std::size_t>(part));
    }
    return;
  }
  render_heads(fuser, task, mode, o, slot);
}

/// Renders one output by order statistics: slices of its contributions side by side, sorted channel
/// by channel.
template <class F>
void render_selected(const F& fuser, const PlaneTask& task, RowMode mode, std::int64_t o) {
  const std::int64_t slot = task.out.slots.slot(o);
  if (slot < 0) return;
  const PlaneShape& shape = task.out.shape;
  const RowInput* const inputs = task.group.inputs + task.group.row_begin[o];
  const int count = static_cast<int>(task.group.row_begin[o + 1] - task.group.row_begin[o]);
  bool turns = task.turns(task.group.out_shift[o]);
  for (int i = 0; i < count; ++i) turns = turns || task.turns(inputs[i].shift);
  alignas(64) float values[max_selected * selected_channels];
  const auto blocks = [](std::int64_t n) {
    return static_cast<int>((n + row_block - 1) / row_block);
  };
  // heads are one long row
  if (!turns && task.head_weights == nullptr && contiguous_heads(task.out)) {
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
    // nothing is stored, and what counts heads in channels could not
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

}  // namespace detail
KVMELD_NAMESPACE_END
