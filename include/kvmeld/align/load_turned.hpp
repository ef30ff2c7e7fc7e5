#pragma once

/// Stored rows as f32 that are turned while they are in registers: what comparing and attending to
/// un-rotated keys spends its time on.

#include <cstddef>
#include <cstdint>

#include <kvmeld/cache/turn.hpp>
#include <kvmeld/cache/turn_rows.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fuse/wide_lanes.hpp>
#include <kvmeld/tensor/row_lanes.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

#if KVMELD_X86_DISPATCH

/// The expressions of `rotate_pair` for whole rows of half-split pairs. in: (head, channel); out:
/// (head, channel)
template <ElementType type>
KVMELD_TARGET_AVX512 KVMELD_NOINLINE void load_turned_avx512(const Turn& turn, const std::byte* in,
                                                             std::int64_t heads,
                                                             float* out) noexcept {
  constexpr std::ptrdiff_t size = block_bytes(type);
  const std::ptrdiff_t half = turn.rotary_channels / 2;
  const float* const sin = turn.table + half;
  for (std::int64_t h = 0; h < heads; ++h, in += 2 * half * size, out += 2 * half) {
    for (std::ptrdiff_t i = 0; i < half; i += 16) {
      const WideFloats a = load_sixteen<type>(in + i * size),
                       b = load_sixteen<type>(in + (half + i) * size);
      const WideFloats c = load_wide(turn.table + i), s = load_wide(sin + i);
      store_wide(fma_wide(a, c, -(b * s)), out + i);
      store_wide(fma_wide(a, s, b * c), out + half + i);
    }
  }
}

#endif  // KVMELD_X86_DISPATCH

/// Reads the heads of one token, which lie side by side, as f32 and turns them: the bytes of
/// `load_row` and `turn_row`.
KVMELD_LAZY void load_turned([[maybe_unused]] ElementType type, Isa isa, const Turn& turn,
                             const std::byte* in, std::int64_t heads, float* out) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512 && turn.pairing == RopePairing::half_split &&
      turn.rotary_channels == turn.channels && turn.channels % 32 == 0) {
    if (type == ElementType::f32) return load_turned_avx512<ElementType::f32>(turn, in, heads, out);
    if (type == ElementType::f16) return load_turned_avx512<ElementType::f16>(turn, in, heads, out);
    if (type == ElementType::bf16)
      return load_turned_avx512<ElementType::bf16>(turn, in, heads, out);
  }
#endif
  load_row(type, isa, in, static_cast<std::ptrdiff_t>(heads) * turn.channels, out);
  for (std::int64_t h = 0; h < heads; ++h) turn_row(turn, isa, out + h * turn.channels);
}

}  // namespace detail
KVMELD_NAMESPACE_END
