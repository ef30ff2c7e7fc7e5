#pragma once

/// Contiguous elements to f32 and back, inlined into row bodies or called in the right instruction set.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>
#include <kvmeld/tensor/isa.hpp>
#include <kvmeld/tensor/row_codecs.hpp>
#include <kvmeld/tensor/rows_x86.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Out-of-line row conversions. A row body that is always inlined carries no target of its own, so what needs one, or
/// would bloat every caller, is a call; its cost is a nanosecond or two a row.
template <Isa isa>
struct RowCalls {
  template <ElementType type>
  KVMELD_NOINLINE static void load(const std::byte* in, std::ptrdiff_t n, float* out) noexcept {
    load_elements<type>(in, n, out);
  }
  template <ElementType type>
  KVMELD_NOINLINE static void store(const float* in, std::ptrdiff_t n, std::byte* out) noexcept {
    store_elements<type>(in, n, out);
  }
};

#if KVMELD_X86_DISPATCH

template <>
struct RowCalls<Isa::avx2> {
  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_NOINLINE static void load(const std::byte* in, std::ptrdiff_t n, float* out) noexcept {
    KVMELD_LOAD_BLOCKS(Avx2Block<type>::load);
  }
  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_NOINLINE static void store(const float* in, std::ptrdiff_t n, std::byte* out) noexcept {
    KVMELD_STORE_BLOCKS(Avx2Block<type>::store);
  }
};

template <>
struct RowCalls<Isa::avx512> {
  template <ElementType type>
  KVMELD_TARGET_AVX512 KVMELD_NOINLINE static void load(const std::byte* in, std::ptrdiff_t n, float* out) noexcept {
    KVMELD_LOAD_BLOCKS(Avx512Block<type>::load);
  }
  template <ElementType type>
  KVMELD_TARGET_AVX512 KVMELD_NOINLINE static void store(const float* in, std::ptrdiff_t n, std::byte* out) noexcept {
    KVMELD_STORE_BLOCKS(Avx512Block<type>::store);
  }
};

#endif  // KVMELD_X86_DISPATCH

/// Reads `n` contiguous elements at any address as f32. `in` and `out` must not overlap.
///
/// f64 narrows to nearest even; i8 comes without scale; q8_0 starts at a block. An unknown type leaves `out` as it is:
/// plans refuse it long before. Bytes are the same for every `isa`.
template <Isa isa>
KVMELD_ALWAYS_INLINE void load_row(ElementType type, const std::byte* in, std::ptrdiff_t n, float* out) noexcept {
  switch (type) {
    case ElementType::f32:
      load_elements<ElementType::f32>(in, n, out);
      return;
    case ElementType::bf16:
      load_elements<ElementType::bf16>(in, n, out);
      return;
    case ElementType::f16:
      RowCalls<isa>::template load<ElementType::f16>(in, n, out);
      return;
    case ElementType::f64:
      RowCalls<isa>::template load<ElementType::f64>(in, n, out);
      return;
    case ElementType::f8_e4m3:
      RowCalls<isa>::template load<ElementType::f8_e4m3>(in, n, out);
      return;
    case ElementType::f8_e5m2:
      RowCalls<isa>::template load<ElementType::f8_e5m2>(in, n, out);
      return;
    case ElementType::i8:
      RowCalls<isa>::template load<ElementType::i8>(in, n, out);
      return;
    case ElementType::q8_0:
      RowCalls<isa>::template load<ElementType::q8_0>(in, n, out);
      return;
  }
}

/// Writes `n` f32 values as contiguous elements at any address, rounded to nearest even. The ranges must not overlap.
///
/// i8 rounds to nearest even and saturates, NaN becomes 0, and no scale is applied; q8_0 quantises as ggml's reference
/// does (`store_block<ElementType::q8_0>`) and pads a last partial block with zeros. Bytes are the same for every
/// `isa`.
template <Isa isa>
KVMELD_ALWAYS_INLINE void store_row(ElementType type, const float* in, std::ptrdiff_t n, std::byte* out) noexcept {
  switch (type) {
    case ElementType::f32:
      store_elements<ElementType::f32>(in, n, out);
      return;
    case ElementType::bf16:
      RowCalls<isa>::template store<ElementType::bf16>(in, n, out);
      return;
    case ElementType::f16:
      RowCalls<isa>::template store<ElementType::f16>(in, n, out);
      return;
    case ElementType::f64:
      RowCalls<isa>::template store<ElementType::f64>(in, n, out);
      return;
    case ElementType::f8_e4m3:
      RowCalls<isa>::template store<ElementType::f8_e4m3>(in, n, out);
      return;
    case ElementType::f8_e5m2:
      RowCalls<isa>::template store<ElementType::f8_e5m2>(in, n, out);
      return;
    case ElementType::i8:
      RowCalls<isa>::template store<ElementType::i8>(in, n, out);
      return;
    case ElementType::q8_0:
      RowCalls<isa>::template store<ElementType::q8_0>(in, n, out);
      return;
  }
}

/// Copies one element to or from any address. Devices read and write words whole only where they are told that these are
/// aligned, as nearly all elements are.
template <std::size_t size>
KVMELD_HD inline void copy_element(void* to, const void* from, const std::byte* stored) noexcept {
  if (reinterpret_cast<std::uintptr_t>(stored) % size == 0) {
    __builtin_memcpy(__builtin_assume_aligned(to, size), __builtin_assume_aligned(from, size), size);
  } else {
    __builtin_memcpy(to, from, size);
  }
}

template <ElementType type>
[[nodiscard]] KVMELD_HD inline float load_one(const std::byte* base, std::ptrdiff_t index) noexcept {
  using Codec = ElementCodec<type>;
  typename Codec::Storage stored;
  const std::byte* at = base + index * static_cast<std::ptrdiff_t>(sizeof(stored));
  copy_element<sizeof(stored)>(&stored, at, at);
  return Codec::load(stored);
}

template <ElementType type>
KVMELD_HD inline void store_one(std::byte* base, std::ptrdiff_t index, float value) noexcept {
  using Codec = ElementCodec<type>;
  const typename Codec::Storage stored = Codec::store(value);
  std::byte* at = base + index * static_cast<std::ptrdiff_t>(sizeof(stored));
  copy_element<sizeof(stored)>(at, &stored, at);
}

/// One element as f32, with the bits that `load_row` gives; `index` counts elements from `base`, a block's start for
/// q8_0.
[[nodiscard]] KVMELD_HD inline float load_element(ElementType type, const std::byte* base,
                                                  std::ptrdiff_t index) noexcept {
  switch (type) {
    case ElementType::f64:
      return load_one<ElementType::f64>(base, index);
    case ElementType::f32:
      return load_one<ElementType::f32>(base, index);
    case ElementType::f16:
      return load_one<ElementType::f16>(base, index);
    case ElementType::bf16:
      return load_one<ElementType::bf16>(base, index);
    case ElementType::f8_e4m3:
      return load_one<ElementType::f8_e4m3>(base, index);
    case ElementType::f8_e5m2:
      return load_one<ElementType::f8_e5m2>(base, index);
    case ElementType::i8:
      return load_one<ElementType::i8>(base, index);
    case ElementType::q8_0: {
      const std::byte* block = base + index / 32 * static_cast<std::ptrdiff_t>(sizeof(q8_0_block));
      f16 scale;
      std::int8_t value;
      std::memcpy(&scale, block, sizeof(scale));
      std::memcpy(&value, block + sizeof(scale) + index % 32, sizeof(value));
      return to_float(scale) * static_cast<float>(value);
    }
  }
  return 0.0f;
}

/// Stores one element with the bits that `store_row` gives. Not for q8_0, whose elements share a scale: it writes
/// nothing.
KVMELD_HD inline void store_element(ElementType type, std::byte* base, std::ptrdiff_t index, float value) noexcept {
  switch (type) {
    case ElementType::f64:
      return store_one<ElementType::f64>(base, index, value);
    case ElementType::f32:
      return store_one<ElementType::f32>(base, index, value);
    case ElementType::f16:
      return store_one<ElementType::f16>(base, index, value);
    case ElementType::bf16:
      return store_one<ElementType::bf16>(base, index, value);
    case ElementType::f8_e4m3:
      return store_one<ElementType::f8_e4m3>(base, index, value);
    case ElementType::f8_e5m2:
      return store_one<ElementType::f8_e5m2>(base, index, value);
    case ElementType::i8:
      return store_one<ElementType::i8>(base, index, value);
    case ElementType::q8_0:
      return;
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
