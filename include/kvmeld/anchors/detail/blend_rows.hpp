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

/// Two vectors of elements at a time.
template <ElementType type, int bytes>
struct BlendPair {
  extend::Vec<float, bytes> a, b;

  KVMELD_TARGET_AVX2 static BlendPair load(const std::byte* in) noexcept {
    BlendPair pair;
    extend::Lanes16<type>::load(in, pair.a.raw, pair.b.raw);
    return pair;
  }
  KVMELD_TARGET_AVX2 void store(std::byte* out) const noexcept {
    extend::Lanes16<type>::store(a.raw, b.raw, out);
  }
};
template <ElementType type>
struct BlendPair<type, 64> {
  extend::Vec<float, 64> a, b;

  KVMELD_TARGET_AVX512 static BlendPair load(const std::byte* in) noexcept {
    alignas(64) float x[32];
    extend::Avx512Lanes32<type>::load(in, x);
    return {{extend::load_wide(x)}, {extend::load_wide(x + 16)}};
  }
  KVMELD_TARGET_AVX512 void store(std::byte* out) const noexcept {
    if constexpr (type == ElementType::bf16) {
      *reinterpret_cast<extend::unaligned_vector_t<unsigned, 64>*>(out) =
          (round(a.raw) >> 16) | (round(b.raw) & 0xffff0000U);
    } else {
      alignas(64) float x[32];
      extend::store_wide(a.raw, x);
      extend::store_wide(b.raw, x + 16);
      extend::Avx512Lanes32<type>::store(x, out);
    }
  }
  /// To nearest even. A NaN that bf16 and finite factors give is quiet and has no low bits, so that
  /// it stays what it is.
  [[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE static extend::WideWords round(
      extend::WideFloats x) noexcept {
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
};

/// Adds a step of one row to a pair of sums.
template <ElementType type, int bytes>
KVMELD_ALWAYS_INLINE void add_row(const std::byte* in, const extend::Vec<float, bytes>& weight,
                                  std::ptrdiff_t ahead, BlendPair<type, bytes>& sum) noexcept {
  const auto x = BlendPair<type, bytes>::load(in);
  extend::prefetch_step<type, 0>(in + ahead);
  sum.a = multiply_add(weight, x.a, sum.a);
  sum.b = multiply_add(weight, x.b, sum.b);
}

// Rows are summed by the expressions of `Sum`. `fixed` is a count known at compile time, whose
// pointers and weights stay in registers over the row, or 0.

/// Sums the rows of one token's heads, rotated by half-split pairs.
template <int bytes, ElementType type, int fixed>
struct BlendRotated {
  using Floats = extend::Vec<float, bytes>;
  using Pair = BlendPair<type, bytes>;
  static constexpr std::int64_t lanes = Floats::lanes, step = 2 * lanes;

  /// Cosines and sines in the order in which vectors hold even and odd elements.
  KVMELD_ALWAYS_INLINE static void reorder(const float* in, std::int64_t n, float* out) noexcept {
    for (std::int64_t i = 0; i < n; i += step) {
      KVMELD_KEEP_LOOP
      for (int c = 0; c < lanes; ++c) out[i + c] = in[i + 2 * c];
      KVMELD_KEEP_LOOP
      for (int c = 0; c < lanes; ++c) out[i + lanes + c] = in[i + 2 * c + 1];
    }
  }
  KVMELD_ALWAYS_INLINE static void run(const BlendInputs& inputs, const extend::Rotation& rotation,
                                       std::int64_t heads, std::byte* out) noexcept {
    constexpr std::int64_t size = block_bytes(type);
    const std::int64_t half = rotation.rotary_channels / 2;
    const float* cosines = rotation.table;
    const float* sines = rotation.table + half;
    alignas(64) float table[extend::max_channels];
    if constexpr (extend::Lanes16<type>::even_odd) {
      reorder(rotation.table, 2 * half, table);
      cosines = table;
      sines = table + half;
    }
    const int count = inputs.count;
    const std::ptrdiff_t ahead = inputs.ahead;
    const std::byte* const row0 = inputs.rows[0];
    const std::byte* const row1 = inputs.rows[fixed == 2 ? 1 : 0];
    const Floats weight0 = Floats::spread(inputs.weights[0]),
                 weight1 = Floats::spread(inputs.weights[fixed == 2 ? 1 : 0]);
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t i = 0; i < half; i += step) {
        const std::int64_t at = (head * 2 * half + i) * size;
        const std::int64_t other = at + half * size;
        Pair x{}, y{};
        if constexpr (fixed == 2) {
          add_row(row0 + at, weight0, ahead, x);
          add_row(row0 + other, weight0, ahead, y);
          add_row(row1 + at, weight1, ahead, x);
          add_row(row1 + other, weight1, ahead, y);
        } else {
          for (int k = 0; k < count; ++k) {
            const Floats weight = Floats::spread(inputs.weights[k]);
            add_row(inputs.rows[k] + at, weight, ahead, x);
            add_row(inputs.rows[k] + other, weight, ahead, y);
          }
        }
        const Floats c = Floats::load(cosines + i), c2 = Floats::load(cosines + i + lanes);
        const Floats s = Floats::load(sines + i), s2 = Floats::load(sines + i + lanes);
        extend::prefetch_step<type, 1>(out + at + extend::written_ahead);
        extend::prefetch_step<type, 1>(out + other + extend::written_ahead);
        Pair{multiply_add(x.a, c, -(y.a * s)), multiply_add(x.b, c2, -(y.b * s2))}.store(out + at);
        Pair{multiply_add(x.a, s, y.a * c), multiply_add(x.b, s2, y.b * c2)}.store(out + other);
      }
    }
  }
};

/// Sums rows as they lie.
template <int bytes, ElementType type, int fixed>
struct BlendPlain {
  using Floats = extend::Vec<float, bytes>;
  static constexpr std::int64_t step =
      2 * static_cast<std::int64_t>(Floats::lanes) * block_bytes(type);

  KVMELD_ALWAYS_INLINE static void run(const BlendInputs& inputs, std::int64_t size,
                                       std::byte* out) noexcept {
    const int count = inputs.count;
    const std::ptrdiff_t ahead = inputs.ahead;
    const std::byte* const row0 = inputs.rows[0];
    const std::byte* const row1 = inputs.rows[fixed == 2 ? 1 : 0];
    const Floats weight0 = Floats::spread(inputs.weights[0]),
                 weight1 = Floats::spread(inputs.weights[fixed == 2 ? 1 : 0]);
    for (std::int64_t at = 0; at < size; at += step) {
      BlendPair<type, bytes> x{};
      if constexpr (fixed == 2) {
        add_row(row0 + at, weight0, ahead, x);
        add_row(row1 + at, weight1, ahead, x);
      } else {
        for (int k = 0; k < count; ++k)
          add_row(inputs.rows[k] + at, Floats::spread(inputs.weights[k]), ahead, x);
      }
      extend::prefetch_step<type, 1>(out + at + extend::written_ahead);
      x.store(out + at);
    }
  }
};

/// Sums, and turns where `turn` is not null, all heads of one output.
template <ElementType type, int fixed>
void blend_rows(Isa isa, const BlendInputs& inputs, const extend::Rotation* rotation,
                std::int64_t heads, std::int64_t bytes, std::byte* out) {
  using extend::Kernel;
  const bool wide = isa == Isa::avx512;
  if (rotation != nullptr) {
    return wide ? Kernel<BlendRotated<64, type, fixed>>::avx512(inputs, *rotation, heads, out)
                : Kernel<BlendRotated<32, type, fixed>>::avx2(inputs, *rotation, heads, out);
  }
  wide ? Kernel<BlendPlain<64, type, fixed>>::avx512(inputs, bytes, out)
       : Kernel<BlendPlain<32, type, fixed>>::avx2(inputs, bytes, out);
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
