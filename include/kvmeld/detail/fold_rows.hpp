#pragma once

/// Rows folded by sums, weights, order statistics and selection.

#include <cstddef>
#include <cstdint>
#include <utility>

#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/policies/attention_state.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

// Folding rows on hosts: loops over whole blocks that vectorise, and a kernel whose accumulators
// stay in registers.

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

// Order statistics of rows on hosts: one sorting network for 32 channels at once.

namespace detail {

/// Orders 32 channels of two rows.
KVMELD_ALWAYS_INLINE void exchange_rows(float* __restrict a, float* __restrict b) noexcept {
  KVMELD_KEEP_LOOP
  for (int c = 0; c < 32; ++c) exchange(a[c], b[c]);
}

/// By a power of two a division is a product with the exact reciprocal: the same value in a
/// fraction of the time.
[[nodiscard]] KVMELD_ALWAYS_INLINE bool is_power_of_two(int n) noexcept {
  return (n & (n - 1)) == 0;
}

/// Selects 32 channels of sorted rows, `selected_channels` floats apart.
template <class F>
KVMELD_ALWAYS_INLINE void select_channels(const F& fuser, const float* __restrict values, int count,
                                          float* __restrict out) {
  if constexpr (requires { fuser.ranks(count); }) {  // `mean_of`, the channels innermost
    const Ranks ranks = fuser.ranks(count);
    alignas(64) float sum[32];
    for (int c = 0; c < 32; ++c) sum[c] = values[ranks.first * selected_channels + c];
    for (int i = ranks.first + 1; i < ranks.last; ++i) {
      for (int c = 0; c < 32; ++c) sum[c] += values[i * selected_channels + c];
    }
    const auto many = static_cast<float>(ranks.last - ranks.first);
    if (is_power_of_two(ranks.last - ranks.first)) {
      for (int c = 0; c < 32; ++c) out[c] = sum[c] * (1.0F / many);
    } else {
      for (int c = 0; c < 32; ++c) out[c] = sum[c] / many;
    }
  } else {
    for (int c = 0; c < 32; ++c)
      out[c] = fuser.select(OrderedValues{values + c, selected_channels, count});
  }
}

/// Sorts 32 channels of each of `blocks` blocks, then selects. values: (count, selected_channels);
/// out: (32 · blocks)
template <class F>
KVMELD_NOINLINE void select_baseline(F fuser, float* values, int count, int blocks, float* out) {
  for (int b = 0; b < blocks; ++b, values += row_block, out += row_block) {
    for (SortingNetwork network(count); network.next();) {
      exchange_rows(values + network.i * selected_channels,
                    values + (network.i + network.d) * selected_channels);
    }
    select_channels(fuser, values, count, out);
  }
}

#if KVMELD_X86_DISPATCH

/// Places of one comparator.
struct Comparator {
  std::size_t a = 0;
  std::size_t b = 0;
};
template <std::size_t count>
struct Comparators {
  Comparator all[32] = {};
  std::size_t size = 0;

  constexpr Comparators() noexcept {
    for (SortingNetwork network(static_cast<int>(count)); network.next(); ++size) {
      all[size] = {static_cast<std::size_t>(network.i),
                   static_cast<std::size_t>(network.i + network.d)};
    }
  }
};
template <std::size_t count>
inline constexpr Comparators<count> comparators{};

[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes min_lanes(FloatLanes a,
                                                                           FloatLanes b) noexcept {
  return __builtin_ia32_minps256(a, b);
}
[[nodiscard]] KVMELD_TARGET_AVX2 KVMELD_ALWAYS_INLINE FloatLanes max_lanes(FloatLanes a,
                                                                           FloatLanes b) noexcept {
  return __builtin_ia32_maxps256(a, b);
}
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats min_wide(WideFloats a,
                                                                            WideFloats b) noexcept {
#if defined(__clang__)
  return a < b ? a : b;
#else  // g++ compares and chooses
  return __builtin_ia32_minps512_mask(a, b, WideFloats{}, -1, 4);
#endif
}
[[nodiscard]] KVMELD_TARGET_AVX512 KVMELD_ALWAYS_INLINE WideFloats max_wide(WideFloats a,
                                                                            WideFloats b) noexcept {
#if defined(__clang__)
  return a > b ? a : b;
#else
  return __builtin_ia32_maxps512_mask(a, b, WideFloats{}, -1, 4);
#endif
}

// The same by vectors: min and max with the comparison of `exchange`. Up to seven rows are sorted
// in registers, a comparator after the other by recursion, so that every index is a constant; more
// of them in memory, where all blocks pass each comparator together, so that the network is walked
// once.
#define KVMELD_SELECT(NAME, TARGET, VECTOR, LOAD, STORE, MIN, MAX)                                \
  template <std::size_t count, std::size_t at = 0>                                                \
  TARGET KVMELD_ALWAYS_INLINE void sort_##NAME(VECTOR(&v)[count]) noexcept {                      \
    if constexpr (at < comparators<count>.size) {                                                 \
      constexpr Comparator here = comparators<count>.all[at];                                     \
      const VECTOR x = v[here.a], y = v[here.b];                                                  \
      v[here.a] = MIN(y, x);                                                                      \
      v[here.b] = MAX(x, y);                                                                      \
      sort_##NAME<count, at + 1>(v);                                                              \
    }                                                                                             \
  }                                                                                               \
  template <std::size_t count, std::size_t at = 0>                                                \
  TARGET KVMELD_ALWAYS_INLINE void load_##NAME(const float* values, VECTOR(&v)[count]) noexcept { \
    if constexpr (at < count) {                                                                   \
      v[at] = LOAD(values + at * selected_channels);                                              \
      load_##NAME<count, at + 1>(values, v);                                                      \
    }                                                                                             \
  }                                                                                               \
  template <std::size_t count, std::size_t at = 0>                                                \
  TARGET KVMELD_ALWAYS_INLINE void sum_##NAME(const VECTOR(&v)[count], Ranks ranks,               \
                                              VECTOR& sum) noexcept {                             \
    if constexpr (at < count) {                                                                   \
      constexpr int rank = at;                                                                    \
      if (rank == ranks.first) sum = v[at];                                                       \
      if (rank > ranks.first && rank < ranks.last) sum = sum + v[at];                             \
      sum_##NAME<count, at + 1>(v, ranks, sum);                                                   \
    }                                                                                             \
  }                                                                                               \
  template <std::size_t count, class F>                                                           \
  TARGET KVMELD_NOINLINE void select_few_##NAME(F fuser, const float* values,                     \
                                                std::ptrdiff_t channels, float* out) {            \
    constexpr std::ptrdiff_t lanes = sizeof(VECTOR) / sizeof(float);                              \
    const Ranks ranks = fuser.ranks(static_cast<int>(count));                                     \
    const auto many = static_cast<float>(ranks.last - ranks.first);                               \
    const bool exact = is_power_of_two(ranks.last - ranks.first);                                 \
    const VECTOR divisor = VECTOR{} + many, reciprocal = VECTOR{} + 1.0F / many;                  \
    for (std::ptrdiff_t c = 0; c < channels; c += lanes) {                                        \
      VECTOR v[count], sum{};                                                                     \
      load_##NAME(values + c, v);                                                                 \
      sort_##NAME(v);                                                                             \
      sum_##NAME(v, ranks, sum);                                                                  \
      STORE(exact ? sum* reciprocal : sum / divisor, out + c);                                    \
    }                                                                                             \
  }                                                                                               \
  template <class F>                                                                              \
  TARGET KVMELD_NOINLINE void select_many_##NAME(F fuser, float* values, int count, int blocks,   \
                                                 float* out) {                                    \
    constexpr std::ptrdiff_t lanes = sizeof(VECTOR) / sizeof(float);                              \
    for (SortingNetwork network(count); network.next();) {                                        \
      float* const a = values + network.i * selected_channels;                                    \
      float* const b = values + (network.i + network.d) * selected_channels;                      \
      for (std::ptrdiff_t c = 0; c < blocks * row_block; c += lanes) {                            \
        const VECTOR x = LOAD(a + c), y = LOAD(b + c);                                            \
        STORE(MIN(y, x), a + c);                                                                  \
        STORE(MAX(x, y), b + c);                                                                  \
      }                                                                                           \
    }                                                                                             \
    for (int b = 0; b < blocks; ++b)                                                              \
      select_channels(fuser, values + b * row_block, count, out + b * row_block);                 \
  }                                                                                               \
  template <class F>                                                                              \
  void select_##NAME(const F& fuser, float* values, int count, int blocks, float* out) {          \
    if constexpr (requires { fuser.ranks(count); }) {                                             \
      if (count == 3) return select_few_##NAME<3>(fuser, values, blocks * row_block, out);        \
      if (count == 4) return select_few_##NAME<4>(fuser, values, blocks * row_block, out);        \
      if (count == 5) return select_few_##NAME<5>(fuser, values, blocks * row_block, out);        \
      if (count == 6) return select_few_##NAME<6>(fuser, values, blocks * row_block, out);        \
      if (count == 7) return select_few_##NAME<7>(fuser, values, blocks * row_block, out);        \
    }                                                                                             \
    select_many_##NAME(fuser, values, count, blocks, out);                                        \
  }
KVMELD_SELECT(avx2, KVMELD_TARGET_AVX2, FloatLanes, load_lanes, store_lanes, min_lanes, max_lanes)
KVMELD_SELECT(avx512, KVMELD_TARGET_AVX512, WideFloats, load_wide, store_wide, min_wide, max_wide)
#undef KVMELD_SELECT

template <class F>
void select_rows(const F& fuser, Isa isa, float* values, int count, int blocks, float* out) {
  if (isa == Isa::avx512) return select_avx512(fuser, values, count, blocks, out);
  isa == Isa::baseline ? select_baseline(fuser, values, count, blocks, out)
                       : select_avx2(fuser, values, count, blocks, out);
}

#else

template <class F>
void select_rows(const F& fuser, Isa, float* values, int count, int blocks, float* out) {
  select_baseline(fuser, values, count, blocks, out);
}

#endif  // KVMELD_X86_DISPATCH

/// Selects again, one by one, the channels whose sum left f32, as `mean_of` says; elements of a
/// narrow range have none. values: as `select_rows` left them, in any order.
template <class F>
void reselect(const F& fuser, ElementType type, Isa isa, const float* values, int count, int blocks,
              float* out) {
  if (type != ElementType::f32 && type != ElementType::bf16 && type != ElementType::f64) return;
  const auto channels = static_cast<std::size_t>(blocks * row_block);
  if (!has_non_finite(isa, out, channels)) return;
  for (std::size_t c = 0; c < channels; ++c) {
    if (out[c] - out[c] == 0.0F) continue;
    float column[max_selected];
    for (int i = 0; i < count; ++i)
      column[i] = values[i * selected_channels + static_cast<std::ptrdiff_t>(c)];
    sort_values(column, count);
    out[c] = fuser.select(OrderedValues{column, 1, count});
  }
}

}  // namespace detail

KVMELD_NAMESPACE_END
