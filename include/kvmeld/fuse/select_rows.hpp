#pragma once

/// Order statistics of rows on hosts: one sorting network for 32 channels at once.

#include <cstddef>

#include <kvmeld/config.hpp>
#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/fuse/ordered_values.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/row_codecs.hpp>
#include <kvmeld/tensor/row_lanes.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Orders 32 channels of two rows.
KVMELD_ALWAYS_INLINE void exchange_rows(float* __restrict a, float* __restrict b) noexcept {
  KVMELD_KEEP_LOOP
  for (int c = 0; c < 32; ++c) exchange(a[c], b[c]);
}

/// Selects 32 channels of sorted rows, `selected_channels` floats apart.
template <class F>
KVMELD_ALWAYS_INLINE void select_channels(const F& fuser, const float* __restrict values, int count, float* __restrict out) {
  if constexpr (requires { fuser.ranks(count); }) {  // `mean_of`, the channels innermost
    const Ranks ranks = fuser.ranks(count);
    alignas(64) float sum[32];
    for (int c = 0; c < 32; ++c) sum[c] = values[ranks.first * selected_channels + c];
    for (int i = ranks.first + 1; i < ranks.last; ++i) {
      for (int c = 0; c < 32; ++c) sum[c] += values[i * selected_channels + c];
    }
    const auto many = static_cast<float>(ranks.last - ranks.first);
    for (int c = 0; c < 32; ++c) out[c] = sum[c] / many;
  } else {
    for (int c = 0; c < 32; ++c) out[c] = fuser.select(OrderedValues{values + c, selected_channels, count});
  }
}

/// Sorts 32 channels of each of `blocks` blocks, then selects. values: (count, selected_channels); out: (32 · blocks)
template <class F>
KVMELD_NOINLINE void select_baseline(F fuser, float* values, int count, int blocks, float* out) {
  for (int b = 0; b < blocks; ++b, values += row_block, out += row_block) {
    for (SortingNetwork network(count); network.next();) {
      exchange_rows(values + network.i * selected_channels, values + (network.i + network.d) * selected_channels);
    }
    select_channels(fuser, values, count, out);
  }
}

#if KVMELD_X86_DISPATCH

// The same by vectors: min and max with the comparison of `exchange`. All blocks pass each comparator together, so that the
// network is walked once.
template <class F>
KVMELD_TARGET_AVX2 KVMELD_NOINLINE void select_avx2(F fuser, float* values, int count, int blocks, float* out) {
  for (SortingNetwork network(count); network.next();) {
    float* const a = values + network.i * selected_channels;
    float* const b = values + (network.i + network.d) * selected_channels;
    for (std::ptrdiff_t c = 0; c < blocks * row_block; c += 8) {
      const FloatLanes x = load_lanes(a + c), y = load_lanes(b + c);
      store_lanes(__builtin_ia32_minps256(y, x), a + c);
      store_lanes(__builtin_ia32_maxps256(x, y), b + c);
    }
  }
  for (int b = 0; b < blocks; ++b) select_channels(fuser, values + b * row_block, count, out + b * row_block);
}
template <class F>
KVMELD_TARGET_AVX512 KVMELD_NOINLINE void select_avx512(F fuser, float* values, int count, int blocks, float* out) {
  for (SortingNetwork network(count); network.next();) {
    float* const a = values + network.i * selected_channels;
    float* const b = values + (network.i + network.d) * selected_channels;
    for (std::ptrdiff_t c = 0; c < blocks * row_block; c += 16) {
      const WideFloats x = load_wide(a + c), y = load_wide(b + c);
      store_wide(y < x ? y : x, a + c);
      store_wide(y < x ? x : y, b + c);
    }
  }
  for (int b = 0; b < blocks; ++b) select_channels(fuser, values + b * row_block, count, out + b * row_block);
}
template <class F>
void select_rows(const F& fuser, Isa isa, float* values, int count, int blocks, float* out) {
  if (isa == Isa::avx512) return select_avx512(fuser, values, count, blocks, out);
  isa == Isa::baseline ? select_baseline(fuser, values, count, blocks, out) : select_avx2(fuser, values, count, blocks, out);
}

#else

template <class F>
void select_rows(const F& fuser, Isa, float* values, int count, int blocks, float* out) {
  select_baseline(fuser, values, count, blocks, out);
}

#endif  // KVMELD_X86_DISPATCH

}  // namespace detail
KVMELD_NAMESPACE_END
