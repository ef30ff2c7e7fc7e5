#pragma once

/// Rows blended from a base and weighted offsets.

#include <cstddef>
#include <cstdint>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/render_rows.hpp>
#include <kvmeld/policies/mean.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

namespace detail {

/// `Sum` under a name of its own, so that the overload of `render_fused` below is found for blends.
/// Same bytes, same lane form.
struct BlendSum : Sum {
  void digest(Hasher& hasher) const { hasher.text("kvmeld.BlendSum"); }
};

#if KVMELD_X86_DISPATCH

/// What one output is summed from. Not cleared: a row is short.
struct BlendInputs {
  const std::byte* rows[extend::chunk_inputs];
  float weights[extend::chunk_inputs];
  int count;
  std::ptrdiff_t ahead;  ///< bytes ahead of the loads that are asked for

  explicit BlendInputs(int n) noexcept : count(n), ahead(extend::prefetch_bytes(n)) {}
};

/// Two vectors of elements at a time, of each instruction set.
struct BlendAvx2 {
  using Vector = extend::FloatLanes;
  static constexpr std::int64_t step = 16;

  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void load(const std::byte* in, Vector& a,
                                                           Vector& b) noexcept {
    extend::Lanes16<type>::load(in, a, b);
  }
  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static void store(Vector a, Vector b,
                                                            std::byte* out) noexcept {
    extend::Lanes16<type>::store(a, b, out);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static Vector load(const float* in) noexcept {
    return extend::load_lanes(in);
  }
  KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE static Vector fma(Vector a, Vector b, Vector c) noexcept {
    return extend::fma_lanes(a, b, c);
  }
};
struct BlendAvx512 {
  using Vector = extend::WideFloats;
  static constexpr std::int64_t step = 32;

  template <ElementType type>
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static void load(const std::byte* in, Vector& a,
                                                             Vector& b) noexcept {
    alignas(64) float x[32];
    extend::Avx512Lanes32<type>::load(in, x);
    a = extend::load_wide(x);
    b = extend::load_wide(x + 16);
  }
  template <ElementType type>
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static void store(Vector a, Vector b,
                                                              std::byte* out) noexcept {
    if constexpr (type == ElementType::bf16) {
      *reinterpret_cast<extend::unaligned_vector_t<unsigned, 64>*>(out) =
          (round(a) >> 16) | (round(b) & 0xffff0000U);
    } else {
      alignas(64) float x[32];
      extend::store_wide(a, x);
      extend::store_wide(b, x + 16);
      extend::Avx512Lanes32<type>::store(x, out);
    }
  }
  /// To nearest even. A NaN that bf16 and finite factors give is quiet and has no low bits, so that
  /// it stays what it is.
  [[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static extend::WideWords round(
      Vector x) noexcept {
    const auto bits = reinterpret_cast<extend::WideWords>(x);
#if defined(__clang__)
    const extend::WideWords up = bits + 0x7fffU;
    return (bits & 0x10000U) != 0U ? up + 1U : up;
#else  // g++ tests bits by two operations
    using Ints = extend::vector_t<int, 64>;
    const auto up = reinterpret_cast<Ints>(bits + 0x7fffU);
    const unsigned short odd =
        __builtin_ia32_ptestmd512(reinterpret_cast<Ints>(bits), Ints{} + 0x10000, 0xffff);
    return reinterpret_cast<extend::WideWords>(
        __builtin_ia32_paddd512_mask(up, Ints{} + 1, up, odd));
#endif
  }
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static Vector load(const float* in) noexcept {
    return extend::load_wide(in);
  }
  KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static Vector fma(Vector a, Vector b,
                                                              Vector c) noexcept {
    return extend::fma_wide(a, b, c);
  }
};

// Sums rows by the expressions of `Sum`: `rotated` those of one token's heads, rotated by
// half-split pairs; `plain` as they lie. `fixed` is a count known at compile time, whose pointers
// and weights stay in registers over the row, or 0. Macros, because a function that calls another
// for a wider instruction set must itself be compiled for it. Vectors by name, because compilers
// keep arrays of sums on the stack.
#define KVMELD_BLEND(NAME, TARGET, FORM)                                                           \
  template <ElementType type, int fixed>                                                           \
  TARGET KVMELD_NOINLINE void NAME##_rotated(const BlendInputs& inputs,                            \
                                             const extend::Rotation& rotation, std::int64_t heads, \
                                             std::byte* out) {                                     \
    using Form = FORM;                                                                             \
    using Vector = Form::Vector;                                                                   \
    constexpr std::int64_t size = block_bytes(type), lanes = Form::step / 2;                       \
    const std::int64_t half = rotation.rotary_channels / 2;                                        \
    const float* cosines = rotation.table;                                                         \
    const float* sines = rotation.table + half;                                                    \
    alignas(64) float table[extend::max_channels];                                                 \
    if constexpr (extend::Lanes16<type>::even_odd) { /* the order in which vectors hold the        \
                                                        elements */                                \
      for (std::int64_t i = 0; i < 2 * half; i += Form::step) {                                    \
        KVMELD_KEEP_LOOP                                                                           \
        for (int c = 0; c < lanes; ++c) table[i + c] = rotation.table[i + 2 * c];                  \
        KVMELD_KEEP_LOOP                                                                           \
        for (int c = 0; c < lanes; ++c) table[i + lanes + c] = rotation.table[i + 2 * c + 1];      \
      }                                                                                            \
      cosines = table;                                                                             \
      sines = table + half;                                                                        \
    }                                                                                              \
    const int count = inputs.count;                                                                \
    const std::ptrdiff_t ahead = inputs.ahead;                                                     \
    const std::byte* const row0 = inputs.rows[0];                                                  \
    const std::byte* const row1 = inputs.rows[fixed == 2 ? 1 : 0];                                 \
    const Vector weight0 = inputs.weights[0] - Vector{},                                           \
                 weight1 = inputs.weights[fixed == 2 ? 1 : 0] - Vector{};                          \
    for (std::int64_t head = 0; head < heads; ++head) {                                            \
      for (std::int64_t i = 0; i < half; i += Form::step) {                                        \
        const std::int64_t at = (head * 2 * half + i) * size;                                      \
        const std::int64_t other = at + half * size;                                               \
        Vector a{}, a2{}, b{}, b2{}, x, x2;                                                        \
        if constexpr (fixed == 2) {                                                                \
          KVMELD_BLEND_ADD(row0 + at, weight0, a, a2)                                              \
          KVMELD_BLEND_ADD(row0 + other, weight0, b, b2)                                           \
          KVMELD_BLEND_ADD(row1 + at, weight1, a, a2)                                              \
          KVMELD_BLEND_ADD(row1 + other, weight1, b, b2)                                           \
        } else {                                                                                   \
          for (int k = 0; k < count; ++k) {                                                        \
            const std::byte* const in = inputs.rows[k];                                            \
            const Vector weight = inputs.weights[k] - Vector{};                                    \
            KVMELD_BLEND_ADD(in + at, weight, a, a2)                                               \
            KVMELD_BLEND_ADD(in + other, weight, b, b2)                                            \
          }                                                                                        \
        }                                                                                          \
        const Vector c = Form::load(cosines + i), c2 = Form::load(cosines + i + lanes);            \
        const Vector s = Form::load(sines + i), s2 = Form::load(sines + i + lanes);                \
        KVMELD_BLEND_AHEAD(out + at + extend::written_ahead, 1)                                    \
        KVMELD_BLEND_AHEAD(out + other + extend::written_ahead, 1)                                 \
        Form::store<type>(Form::fma(a, c, -(b * s)), Form::fma(a2, c2, -(b2 * s2)), out + at);     \
        Form::store<type>(Form::fma(a, s, b * c), Form::fma(a2, s2, b2 * c2), out + other);        \
      }                                                                                            \
    }                                                                                              \
  }                                                                                                \
  template <ElementType type, int fixed>                                                           \
  TARGET KVMELD_NOINLINE void NAME##_plain(const BlendInputs& inputs, std::int64_t bytes,          \
                                           std::byte* out) {                                       \
    using Form = FORM;                                                                             \
    using Vector = Form::Vector;                                                                   \
    constexpr std::int64_t step = Form::step * block_bytes(type);                                  \
    const int count = inputs.count;                                                                \
    const std::ptrdiff_t ahead = inputs.ahead;                                                     \
    const std::byte* const row0 = inputs.rows[0];                                                  \
    const std::byte* const row1 = inputs.rows[fixed == 2 ? 1 : 0];                                 \
    const Vector weight0 = inputs.weights[0] - Vector{},                                           \
                 weight1 = inputs.weights[fixed == 2 ? 1 : 0] - Vector{};                          \
    for (std::int64_t at = 0; at < bytes; at += step) {                                            \
      Vector a{}, a2{}, x, x2;                                                                     \
      if constexpr (fixed == 2) {                                                                  \
        KVMELD_BLEND_ADD(row0 + at, weight0, a, a2)                                                \
        KVMELD_BLEND_ADD(row1 + at, weight1, a, a2)                                                \
      } else {                                                                                     \
        for (int k = 0; k < count; ++k)                                                            \
          KVMELD_BLEND_ADD(inputs.rows[k] + at, inputs.weights[k] - Vector{}, a, a2)               \
      }                                                                                            \
      KVMELD_BLEND_AHEAD(out + at + extend::written_ahead, 1)                                      \
      Form::store<type>(a, a2, out + at);                                                          \
    }                                                                                              \
  }
// Asks for what lies ahead of a step: one of f32 may be two lines.
#define KVMELD_BLEND_AHEAD(ADDRESS, WRITTEN) \
  __builtin_prefetch(ADDRESS, WRITTEN);      \
  if constexpr (block_bytes(type) == 4) __builtin_prefetch((ADDRESS) + 64, WRITTEN);
// Adds a step of one row to two sums.
#define KVMELD_BLEND_ADD(ADDRESS, WEIGHT, SUM, SUM2) \
  {                                                  \
    Form::load<type>(ADDRESS, x, x2);                \
    KVMELD_BLEND_AHEAD((ADDRESS) + ahead, 0)         \
    SUM = Form::fma(WEIGHT, x, SUM);                 \
    SUM2 = Form::fma(WEIGHT, x2, SUM2);              \
  }
KVMELD_BLEND(blend_avx2, KVMELD_TARGET_AVX2, BlendAvx2)
KVMELD_BLEND(blend_avx512, KVMELD_TARGET_AVX512, BlendAvx512)
#undef KVMELD_BLEND_ADD
#undef KVMELD_BLEND_AHEAD
#undef KVMELD_BLEND

/// Sums, and turns where `turn` is not null, all heads of one output.
template <ElementType type, int fixed>
void blend_rows(Isa isa, const BlendInputs& inputs, const extend::Rotation* rotation,
                std::int64_t heads, std::int64_t bytes, std::byte* out) {
  const bool wide = isa == Isa::avx512;
  if (rotation != nullptr)
    return wide ? blend_avx512_rotated<type, fixed>(inputs, *rotation, heads, out)
                : blend_avx2_rotated<type, fixed>(inputs, *rotation, heads, out);
  wide ? blend_avx512_plain<type, fixed>(inputs, bytes, out)
       : blend_avx2_plain<type, fixed>(inputs, bytes, out);
}
template <ElementType type>
void blend_rows(Isa isa, const BlendInputs& inputs, const extend::Rotation* rotation,
                std::int64_t heads, std::int64_t bytes, std::byte* out) {
  inputs.count == 2 ? blend_rows<type, 2>(isa, inputs, rotation, heads, bytes, out)
                    : blend_rows<type, 0>(isa, inputs, rotation, heads, bytes, out);
}

/// Whether all heads of an output can be summed, and rotated by `out_shift`, in registers.
[[nodiscard]] inline bool blends_in_registers(const extend::PlaneTask& task, extend::RowMode mode,
                                              int count, std::uint32_t out_shift) noexcept {
  const PlaneShape& shape = task.out.shape;
  if (mode.isa == Isa::baseline || count > extend::chunk_inputs || task.head_weights != nullptr ||
      !extend::contiguous_heads(task.out))
    return false;
  if (shape.type != ElementType::f16 && shape.type != ElementType::bf16 &&
      shape.type != ElementType::f32)
    return false;
  if (extend::row_bytes(shape) * shape.heads > extend::stage_bytes) return false;
  if (!task.rotates(out_shift)) return shape.heads * shape.channels % extend::row_block == 0;
  return task.pairing == RopePairing::half_split && task.rotary_channels == shape.channels &&
         shape.channels % 64 == 0;
}

#endif  // KVMELD_X86_DISPATCH

/// Renders one output of a blend: found before the template where the fuser is a blend's.
inline void render_fused(const BlendSum& fuser, const extend::PlaneTask& task, extend::RowMode mode,
                         std::int64_t o) {
#if KVMELD_X86_DISPATCH
  const extend::RowInput* const inputs = task.group.inputs + task.group.row_begin[o];
  const int count = static_cast<int>(task.group.row_begin[o + 1] - task.group.row_begin[o]);
  const std::uint32_t out_shift = task.group.out_shift[o];
  bool sums = blends_in_registers(task, mode, count, out_shift);
  for (int i = 0; sums && i < count; ++i) sums = !task.rotates(inputs[i].shift);
  if (sums) {
    const std::int64_t slot = task.out.slots.slot(o);
    if (slot < 0) return;
    BlendInputs rows(count);
    for (int i = 0; i < count; ++i) {
      rows.rows[i] = task.input(inputs[i], 0);
      rows.weights[i] = inputs[i].weight;
    }
    std::byte* const out = extend::row_address(task, slot, 0);
    const std::int64_t heads = task.out.shape.heads,
                       bytes = extend::row_bytes(task.out.shape) * heads;
    alignas(64) std::byte stage[extend::stage_bytes];
    std::byte* const to = mode.streams ? stage : out;
    const extend::Rotation rotation =
        task.rotates(out_shift) ? extend::rotation_of(task, out_shift) : extend::Rotation{};
    const extend::Rotation* const rotates = task.rotates(out_shift) ? &rotation : nullptr;
    switch (task.out.shape.type) {
      case ElementType::bf16:
        blend_rows<ElementType::bf16>(mode.isa, rows, rotates, heads, bytes, to);
        break;
      case ElementType::f16:
        blend_rows<ElementType::f16>(mode.isa, rows, rotates, heads, bytes, to);
        break;
      default:
        blend_rows<ElementType::f32>(mode.isa, rows, rotates, heads, bytes, to);
    }
    if (mode.streams) extend::stream_copy(out, stage, static_cast<std::size_t>(bytes));
    return;
  }
#endif
  render_fused<BlendSum>(fuser, task, mode, o);
}

}  // namespace detail

}  // namespace anchors

KVMELD_NAMESPACE_END
