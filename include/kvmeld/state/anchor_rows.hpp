#pragma once

/// Rows of a blend on hosts: base and offsets summed and turned in one pass over registers.

#include <cstddef>
#include <cstdint>

#include <kvmeld/fuse/fold.hpp>
#include <kvmeld/state/render_rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// `Sum` under a name of its own, so that the overload of `render_fused` below is found for blends. Same bytes, same lane form.
struct BlendSum : Sum {
  void digest(Hasher& hasher) const { hasher.text("kvmeld.BlendSum"); }
};

#if KVMELD_X86_DISPATCH

// Sums one token's rows of all heads and turns the sums by half-split pairs, 32 pairs at a time. A macro, because a function that calls
// another for a wider instruction set must itself be compiled for it. GROUP: elements that the lanes of a type reorder among themselves;
// the table is brought into the same order, so that no shuffle is spent on rows.
#define KVMELD_BLEND_LANES(NAME, TARGET, LANES, GROUP)                                                                          \
  template <ElementType type>                                                                                                   \
  TARGET KVMELD_NOINLINE void NAME(const FoldInputs& inputs, const Turn& turn, std::int64_t heads, std::byte* out) {            \
    constexpr Sum fuser;                                                                                                        \
    const std::int64_t half = turn.rotary_channels / 2;                                                                         \
    const std::int64_t size = block_bytes(type);                                                                                \
    alignas(64) float cosines[max_channels / 2];                                                                                \
    alignas(64) float sines[max_channels / 2];                                                                                  \
    for (std::int64_t i = 0; i < half; ++i) {                                                                                   \
      const std::int64_t in_group = i % GROUP;                                                                                  \
      const std::int64_t from = !Lanes16<type>::even_odd  ? i                                                                   \
                                : in_group < GROUP / 2    ? i - in_group + 2 * in_group                                         \
                                                          : i - in_group + 2 * (in_group - GROUP / 2) + 1;                      \
      cosines[i] = turn.table[from];                                                                                            \
      sines[i] = turn.table[half + from];                                                                                       \
    }                                                                                                                           \
    for (std::int64_t head = 0; head < heads; ++head) {                                                                         \
      for (std::int64_t i = 0; i < half; i += 32) {                                                                             \
        const std::int64_t at = (head * 2 * half + i) * size;                                                                   \
        const std::int64_t other = at + half * size;                                                                            \
        alignas(64) float a[32], b[32], x[32], y[32];                                                                           \
        LANES<type>::load(inputs.rows[0] + at, x);                                                                              \
        LANES<type>::load(inputs.rows[0] + other, y);                                                                           \
        __builtin_prefetch(inputs.rows[0] + at + prefetch_bytes);                                                               \
        __builtin_prefetch(inputs.rows[0] + other + prefetch_bytes);                                                            \
        float weight = inputs.weights[0];                                                                                       \
        KVMELD_KEEP_LOOP                                                                                                        \
        for (int c = 0; c < 32; ++c) a[c] = fuser.absorb(fuser.init(), x[c], weight);                                           \
        KVMELD_KEEP_LOOP                                                                                                        \
        for (int c = 0; c < 32; ++c) b[c] = fuser.absorb(fuser.init(), y[c], weight);                                           \
        for (int k = 1; k < inputs.count; ++k) {                                                                                \
          LANES<type>::load(inputs.rows[k] + at, x);                                                                            \
          LANES<type>::load(inputs.rows[k] + other, y);                                                                         \
          __builtin_prefetch(inputs.rows[k] + at + prefetch_bytes);                                                             \
          __builtin_prefetch(inputs.rows[k] + other + prefetch_bytes);                                                          \
          weight = inputs.weights[k];                                                                                           \
          KVMELD_KEEP_LOOP                                                                                                      \
          for (int c = 0; c < 32; ++c) a[c] = fuser.absorb(a[c], x[c], weight);                                                 \
          KVMELD_KEEP_LOOP                                                                                                      \
          for (int c = 0; c < 32; ++c) b[c] = fuser.absorb(b[c], y[c], weight);                                                 \
        }                                                                                                                       \
        const float* const cos = cosines + i;                                                                                   \
        const float* const sin = sines + i;                                                                                     \
        KVMELD_KEEP_LOOP                                                                                                        \
        for (int c = 0; c < 32; ++c) x[c] = fma(a[c], cos[c], -(b[c] * sin[c]));                                                \
        KVMELD_KEEP_LOOP                                                                                                        \
        for (int c = 0; c < 32; ++c) y[c] = fma(a[c], sin[c], b[c] * cos[c]);                                                   \
        LANES<type>::store(x, out + at);                                                                                        \
        LANES<type>::store(y, out + other);                                                                                     \
      }                                                                                                                         \
    }                                                                                                                           \
  }
KVMELD_BLEND_LANES(blend_avx2, KVMELD_TARGET_AVX2, Avx2Lanes32, 16)
KVMELD_BLEND_LANES(blend_avx512, KVMELD_TARGET_AVX512, Avx512Lanes32, 32)
#undef KVMELD_BLEND_LANES

inline void blend_rows(ElementType type, Isa isa, const FoldInputs& inputs, const Turn& turn, std::int64_t heads, std::byte* out) {
  const bool wide = isa == Isa::avx512;
  if (type == ElementType::bf16) return wide ? blend_avx512<ElementType::bf16>(inputs, turn, heads, out) : blend_avx2<ElementType::bf16>(inputs, turn, heads, out);
  if (type == ElementType::f16) return wide ? blend_avx512<ElementType::f16>(inputs, turn, heads, out) : blend_avx2<ElementType::f16>(inputs, turn, heads, out);
  wide ? blend_avx512<ElementType::f32>(inputs, turn, heads, out) : blend_avx2<ElementType::f32>(inputs, turn, heads, out);
}

/// Whether all heads of an output can be summed and turned in registers.
[[nodiscard]] inline bool blends_in_registers(const PlaneTask& task, RowMode mode, const RowInput* inputs, int count, std::uint32_t out_shift) noexcept {
  const PlaneShape& shape = task.out.shape;
  if (mode.isa == Isa::baseline || count > chunk_inputs || task.head_weights != nullptr || !task.turns(out_shift) || !contiguous_heads(task.out)) return false;
  if (task.pairing != RopePairing::half_split || task.rotary_channels != shape.channels || shape.channels % 64 != 0) return false;
  if (shape.type != ElementType::f16 && shape.type != ElementType::bf16 && shape.type != ElementType::f32) return false;
  if (row_bytes(shape) * shape.heads > stage_bytes) return false;
  for (int i = 0; i < count; ++i) {
    if (task.turns(inputs[i].shift)) return false;
  }
  return true;
}

#endif  // KVMELD_X86_DISPATCH

/// Renders one output of a blend: found before the template where the fuser is a blend's.
inline void render_fused(const BlendSum& fuser, const PlaneTask& task, RowMode mode, std::int64_t o) {
#if KVMELD_X86_DISPATCH
  const RowInput* const inputs = task.group.inputs + task.group.row_begin[o];
  const int count = static_cast<int>(task.group.row_begin[o + 1] - task.group.row_begin[o]);
  const std::uint32_t out_shift = task.group.out_shift[o];
  if (blends_in_registers(task, mode, inputs, count, out_shift)) {
    const std::int64_t slot = task.out.slots.slot(o);
    if (slot < 0) return;
    FoldInputs rows;
    rows.count = count;
    for (int i = 0; i < count; ++i) rows.add(i, task.input(inputs[i], 0), inputs[i].weight);
    std::byte* const out = row_address(task, slot, 0);
    const std::int64_t bytes = row_bytes(task.out.shape) * task.out.shape.heads;
    alignas(64) std::byte stage[stage_bytes];
    blend_rows(task.out.shape.type, mode.isa, rows, turn_of(task, out_shift), task.out.shape.heads, mode.streams ? stage : out);
    if (mode.streams) stream_copy(out, stage, static_cast<std::size_t>(bytes));
    return;
  }
#endif
  render_fused<BlendSum>(fuser, task, mode, o);
}

}  // namespace detail
KVMELD_NAMESPACE_END
