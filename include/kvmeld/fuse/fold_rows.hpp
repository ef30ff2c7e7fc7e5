#pragma once

/// Folding rows on hosts: loops over whole blocks that vectorise, and a kernel whose accumulators
/// stay in registers.

#include <cstddef>
#include <cstdint>
#include <utility>

#include <kvmeld/config.hpp>
#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/tensor/row_lanes.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// What a fold reads at once: at most one chunk.
struct FoldInputs {
  const std::byte* rows[64] = {};
  float weights[64] = {};
  float total = 0;
  int count = 0;

  void add(int i, const std::byte* row, float weight) noexcept {
    rows[i] = row;
    weights[i] = weight;
    total += weight;
  }
};

/// Steps of a fold over whole rows, `n` channels, a multiple of `row_block`: a trip count known at
/// compile time is what g++ -O2 vectorises.
template <class F>
struct FoldRows {
  using Accumulator = decltype(std::declval<const F&>().init());

  const F& fuser;
  Isa isa;
  std::ptrdiff_t n;

  void start(Accumulator* acc) const {
    for (std::ptrdiff_t c = 0; c < n; ++c) acc[c] = fuser.init();
  }
  void absorb(Accumulator* acc, const float* row, float weight) const {
    isa == Isa::baseline ? absorb_baseline(acc, row, weight) : absorb_avx2(acc, row, weight);
  }
  /// acc = join(before, acc)
  KVMELD_NOINLINE void join(const Accumulator* __restrict before,
                            Accumulator* __restrict acc) const {
    for (std::ptrdiff_t c = 0; c < n; ++c) acc[c] = fuser.join(before[c], acc[c]);
  }
  void finish(const Accumulator* acc, float* row, float weight, int count) const {
    isa == Isa::baseline ? finish_baseline(acc, row, weight, count)
                         : finish_avx2(acc, row, weight, count);
  }

 private:
  KVMELD_ALWAYS_INLINE void absorb_blocks(Accumulator* __restrict acc, const float* __restrict row,
                                          float weight) const {
    for (std::ptrdiff_t b = 0; b < n; b += row_block) {
      KVMELD_KEEP_LOOP
      for (std::ptrdiff_t c = b; c < b + row_block; ++c)
        acc[c] = fuser.absorb(acc[c], row[c], weight);
    }
  }
  KVMELD_ALWAYS_INLINE void finish_blocks(const Accumulator* __restrict acc, float* __restrict row,
                                          float weight, int count) const {
    for (std::ptrdiff_t b = 0; b < n; b += row_block) {
      KVMELD_KEEP_LOOP
      for (std::ptrdiff_t c = b; c < b + row_block; ++c)
        row[c] = fuser.finish(acc[c], weight, count);
    }
  }
  KVMELD_NOINLINE void absorb_baseline(Accumulator* acc, const float* row, float weight) const {
    absorb_blocks(acc, row, weight);
  }
  KVMELD_NOINLINE void finish_baseline(const Accumulator* acc, float* row, float weight,
                                       int count) const {
    finish_blocks(acc, row, weight, count);
  }
  KVMELD_TARGET_AVX2 KVMELD_NOINLINE void absorb_avx2(Accumulator* acc, const float* row,
                                                      float weight) const {
    absorb_blocks(acc, row, weight);
  }
  KVMELD_TARGET_AVX2 KVMELD_NOINLINE void finish_avx2(const Accumulator* acc, float* row,
                                                      float weight, int count) const {
    finish_blocks(acc, row, weight, count);
  }
};

/// Whether `fuse_in_registers` takes rows of `n` elements.
[[nodiscard]] inline bool fuses_in_registers(ElementType type, std::int64_t n) noexcept {
  return KVMELD_X86_DISPATCH != 0 && n % row_block == 0 &&
         (type == ElementType::f32 || type == ElementType::f16 || type == ElementType::bf16);
}

/// Bytes ahead of the loads that are asked for where `inputs` rows are read side by side: rows of
/// consecutive tokens follow each other in a payload. Far enough to be in the next page, near
/// enough for all inputs together to stay in the first cache.
[[nodiscard]] constexpr std::ptrdiff_t prefetch_bytes(int inputs) noexcept {
  return inputs <= 4 ? 4096 : inputs >= 16 ? 1024 : 16384 / inputs / 64 * 64;
}
/// Bytes ahead of the stores that are asked for: a line is fetched before it is written.
inline constexpr std::ptrdiff_t written_ahead = 1024;

#if KVMELD_X86_DISPATCH

// Folds bytes [at, at + bytes) of one or more inputs' rows into `out`. A macro, because a function
// that calls another for a wider instruction set must itself be compiled for it.
//
// The first input starts the accumulators: g++ would make a loop of zeros before it a `rep stos`,
// slower than all the rest.
#define KVMELD_FUSE_LANES(NAME, TARGET, LANES)                                         \
  template <class F, ElementType type>                                                 \
  TARGET KVMELD_NOINLINE void NAME(F fuser, const FoldInputs& inputs, std::int64_t at, \
                                   std::int64_t bytes, std::byte* out) {               \
    constexpr std::int64_t step = 32 * block_bytes(type);                              \
    const int count = inputs.count;                                                    \
    const float total = inputs.total;                                                  \
    const std::ptrdiff_t ahead = prefetch_bytes(count);                                \
    for (std::int64_t done = 0; done < bytes; done += step) {                          \
      alignas(64) decltype(fuser.init()) acc[32];                                      \
      alignas(64) float x[32];                                                         \
      LANES<type>::load(inputs.rows[0] + at + done, x);                                \
      KVMELD_FUSE_AHEAD(inputs.rows[0] + at + done + ahead, 0)                         \
      float weight = inputs.weights[0];                                                \
      KVMELD_KEEP_LOOP                                                                 \
      for (int c = 0; c < 32; ++c) acc[c] = fuser.absorb(fuser.init(), x[c], weight);  \
      for (int i = 1; i < count; ++i) {                                                \
        const std::byte* const in = inputs.rows[i] + at + done;                        \
        LANES<type>::load(in, x);                                                      \
        KVMELD_FUSE_AHEAD(in + ahead, 0)                                               \
        weight = inputs.weights[i];                                                    \
        KVMELD_KEEP_LOOP                                                               \
        for (int c = 0; c < 32; ++c) acc[c] = fuser.absorb(acc[c], x[c], weight);      \
      }                                                                                \
      KVMELD_KEEP_LOOP                                                                 \
      for (int c = 0; c < 32; ++c) x[c] = fuser.finish(acc[c], total, count);          \
      KVMELD_FUSE_AHEAD(out + done + written_ahead, 1)                                 \
      LANES<type>::store(x, out + done);                                               \
    }                                                                                  \
  }
// Asks for what lies ahead of a step: one of f32 may be two lines.
#define KVMELD_FUSE_AHEAD(ADDRESS, WRITTEN) \
  __builtin_prefetch(ADDRESS, WRITTEN);     \
  if constexpr (block_bytes(type) == 4) __builtin_prefetch((ADDRESS) + 64, WRITTEN);
KVMELD_FUSE_LANES(fuse_avx2, KVMELD_TARGET_AVX2, Avx2Lanes32)
KVMELD_FUSE_LANES(fuse_avx512, KVMELD_TARGET_AVX512, Avx512Lanes32)
#undef KVMELD_FUSE_AHEAD
#undef KVMELD_FUSE_LANES

template <ElementType type, class F>
void fuse_in_registers(const F& fuser, Isa isa, const FoldInputs& inputs, std::int64_t at,
                       std::int64_t bytes, std::byte* out) {
  if (isa == Isa::avx512) return fuse_avx512<F, type>(fuser, inputs, at, bytes, out);
  fuse_avx2<F, type>(fuser, inputs, at, bytes, out);
}
template <class F>
void fuse_in_registers(const F& fuser, ElementType type, Isa isa, const FoldInputs& inputs,
                       std::int64_t at, std::int64_t bytes, std::byte* out) {
  if (type == ElementType::bf16)
    return fuse_in_registers<ElementType::bf16>(fuser, isa, inputs, at, bytes, out);
  if (type == ElementType::f16)
    return fuse_in_registers<ElementType::f16>(fuser, isa, inputs, at, bytes, out);
  fuse_in_registers<ElementType::f32>(fuser, isa, inputs, at, bytes, out);
}

#else

template <class F>
void fuse_in_registers(const F&, ElementType, Isa, const FoldInputs&, std::int64_t, std::int64_t,
                       std::byte*) {}

#endif  // KVMELD_X86_DISPATCH

}  // namespace detail
KVMELD_NAMESPACE_END
