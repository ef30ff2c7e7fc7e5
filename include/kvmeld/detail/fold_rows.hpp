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

/// The inputs of one step of a fold: at most one chunk.
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

/// Steps of a fold over whole rows of `n` channels, a multiple of `row_block`: g++ -O2 vectorises
/// only loops whose trip count is known at compile time.
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

/// Folds bytes [at, at + size) of one or more inputs' rows into `out`.
///
/// The first input initialises the accumulators: g++ would turn a loop of zeros before it into a
/// `rep stos`, which is slower than all the rest.
template <int bytes, class F, ElementType type>
struct FuseLanes {
  using Lanes = extend::Lanes32<type, bytes>;

  KVMELD_ALWAYS_INLINE static void run(F fuser, const FoldInputs& inputs, std::int64_t at,
                                       std::int64_t size, std::byte* out) {
    constexpr std::int64_t step = 32 * block_bytes(type);
    const int count = inputs.count;
    const float total = inputs.total;
    const std::ptrdiff_t ahead = prefetch_bytes(count);
    for (std::int64_t done = 0; done < size; done += step) {
      alignas(64) decltype(fuser.init()) acc[32];
      alignas(64) float x[32];
      Lanes::load(inputs.rows[0] + at + done, x);
      extend::prefetch_step<type, 0>(inputs.rows[0] + at + done + ahead);
      float weight = inputs.weights[0];
      KVMELD_KEEP_LOOP
      for (int c = 0; c < 32; ++c) acc[c] = fuser.absorb(fuser.init(), x[c], weight);
      for (int i = 1; i < count; ++i) {
        const std::byte* const in = inputs.rows[i] + at + done;
        Lanes::load(in, x);
        extend::prefetch_step<type, 0>(in + ahead);
        weight = inputs.weights[i];
        KVMELD_KEEP_LOOP
        for (int c = 0; c < 32; ++c) acc[c] = fuser.absorb(acc[c], x[c], weight);
      }
      KVMELD_KEEP_LOOP
      for (int c = 0; c < 32; ++c) x[c] = fuser.finish(acc[c], total, count);
      extend::prefetch_step<type, 1>(out + done + written_ahead);
      Lanes::store(x, out + done);
    }
  }
};

template <ElementType type, class F>
void fuse_in_registers(const F& fuser, Isa isa, const FoldInputs& inputs, std::int64_t at,
                       std::int64_t bytes, std::byte* out) {
  if (isa == Isa::avx512)
    return extend::Kernel<FuseLanes<64, F, type>>::avx512(fuser, inputs, at, bytes, out);
  extend::Kernel<FuseLanes<32, F, type>>::avx2(fuser, inputs, at, bytes, out);
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

/// Whether n is a power of two, so that a division by it equals a product with the exact
/// reciprocal, which is faster.
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

/// The same with vectors: min and max with the comparison of `exchange`. Up to seven rows are
/// sorted in registers; recursion over the comparators makes every index a constant.
template <int bytes, class F, std::size_t count>
struct SelectFew {
  using Floats = extend::Vec<float, bytes>;

  template <std::size_t at = 0>
  KVMELD_ALWAYS_INLINE static void sort(Floats (&v)[count]) noexcept {
    if constexpr (at < comparators<count>.size) {
      constexpr Comparator here = comparators<count>.all[at];
      const Floats x = v[here.a], y = v[here.b];
      v[here.a] = min_of(y, x);
      v[here.b] = max_of(x, y);
      sort<at + 1>(v);
    }
  }
  template <std::size_t at = 0>
  KVMELD_ALWAYS_INLINE static void load(const float* values, Floats (&v)[count]) noexcept {
    if constexpr (at < count) {
      v[at] = Floats::load(values + at * selected_channels);
      load<at + 1>(values, v);
    }
  }
  template <std::size_t at = 0>
  KVMELD_ALWAYS_INLINE static void add(const Floats (&v)[count], Ranks ranks,
                                       Floats& sum) noexcept {
    if constexpr (at < count) {
      constexpr int rank = at;
      if (rank == ranks.first) sum = v[at];
      if (rank > ranks.first && rank < ranks.last) sum = sum + v[at];
      add<at + 1>(v, ranks, sum);
    }
  }
  KVMELD_ALWAYS_INLINE static void run(F fuser, const float* values, std::ptrdiff_t channels,
                                       float* out) {
    const Ranks ranks = fuser.ranks(static_cast<int>(count));
    const auto many = static_cast<float>(ranks.last - ranks.first);
    const bool exact = is_power_of_two(ranks.last - ranks.first);
    const Floats divisor = Floats::spread(many), reciprocal = Floats::spread(1.0F / many);
    for (std::ptrdiff_t c = 0; c < channels; c += static_cast<std::ptrdiff_t>(Floats::lanes)) {
      Floats v[count], sum{};
      load(values + c, v);
      sort(v);
      add(v, ranks, sum);
      (exact ? sum * reciprocal : sum / divisor).store(out + c);
    }
  }
};
/// Sorts more rows in memory, where each comparator is applied to all blocks, so that the network
/// is walked once.
template <int bytes, class F>
struct SelectMany {
  using Floats = extend::Vec<float, bytes>;

  KVMELD_ALWAYS_INLINE static void run(F fuser, float* values, int count, int blocks, float* out) {
    for (SortingNetwork network(count); network.next();) {
      float* const a = values + network.i * selected_channels;
      float* const b = values + (network.i + network.d) * selected_channels;
      for (std::ptrdiff_t c = 0; c < blocks * row_block;
           c += static_cast<std::ptrdiff_t>(Floats::lanes)) {
        const Floats x = Floats::load(a + c), y = Floats::load(b + c);
        min_of(y, x).store(a + c);
        max_of(x, y).store(b + c);
      }
    }
    for (int b = 0; b < blocks; ++b)
      select_channels(fuser, values + b * row_block, count, out + b * row_block);
  }
};

template <std::size_t count, class F>
void select_few(const F& fuser, Isa isa, const float* values, std::ptrdiff_t channels, float* out) {
  isa == Isa::avx512 ? extend::Kernel<SelectFew<64, F, count>>::avx512(fuser, values, channels, out)
                     : extend::Kernel<SelectFew<32, F, count>>::avx2(fuser, values, channels, out);
}
template <class F>
void select_rows(const F& fuser, Isa isa, float* values, int count, int blocks, float* out) {
  if (isa == Isa::baseline) return select_baseline(fuser, values, count, blocks, out);
  if constexpr (requires { fuser.ranks(count); }) {
    const std::ptrdiff_t channels = blocks * row_block;
    if (count == 3) return select_few<3>(fuser, isa, values, channels, out);
    if (count == 4) return select_few<4>(fuser, isa, values, channels, out);
    if (count == 5) return select_few<5>(fuser, isa, values, channels, out);
    if (count == 6) return select_few<6>(fuser, isa, values, channels, out);
    if (count == 7) return select_few<7>(fuser, isa, values, channels, out);
  }
  isa == Isa::avx512 ? extend::Kernel<SelectMany<64, F>>::avx512(fuser, values, count, blocks, out)
                     : extend::Kernel<SelectMany<32, F>>::avx2(fuser, values, count, blocks, out);
}

#else

template <class F>
void select_rows(const F& fuser, Isa, float* values, int count, int blocks, float* out) {
  select_baseline(fuser, values, count, blocks, out);
}

#endif  // KVMELD_X86_DISPATCH

/// Recomputes the channels whose sum overflowed f32, one by one, as `mean_of` defines; element
/// types of a small range have none. values: as `select_rows` left them, in any order.
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
