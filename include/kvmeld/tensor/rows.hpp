#pragma once

/// Contiguous elements to f32 and back, in the right instruction set.

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

/// Row conversions of one instruction set, out of line: a row body that is inlined into several
/// instruction sets carries no target of its own, and each conversion is compiled once a file; the
/// call costs a nanosecond or two a row.
///
/// AVX-512 has none of its own: conversions keep up with the caches in AVX2, and a third copy costs
/// every user compile time.
template <bool vectors>
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
struct RowCalls<true> {
  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_NOINLINE static void load(const std::byte* in, std::ptrdiff_t n,
                                                      float* out) noexcept {
    KVMELD_LOAD_BLOCKS(Avx2Block<type>::load);
  }
  template <ElementType type>
  KVMELD_TARGET_AVX2 KVMELD_NOINLINE static void store(const float* in, std::ptrdiff_t n,
                                                       std::byte* out) noexcept {
    KVMELD_STORE_BLOCKS(Avx2Block<type>::store);
  }
};

#endif  // KVMELD_X86_DISPATCH

/// Reads `n` contiguous elements at any address as f32. `in` and `out` must not overlap.
///
/// f64 narrows to nearest even; i8 comes without scale; q8_0 starts at a block. An unknown type
/// leaves `out` as it is: plans refuse it long before. Bytes are the same for every `isa`.
template <Isa isa>
void load_row(ElementType type, const std::byte* in, std::ptrdiff_t n, float* out) noexcept {
  using Calls = RowCalls<isa != Isa::baseline>;
  switch (type) {
    case ElementType::f32:
      std::memcpy(out, in, sizeof(float) * static_cast<std::size_t>(n));
      return;
    case ElementType::bf16:
      Calls::template load<ElementType::bf16>(in, n, out);
      return;
    case ElementType::f16:
      Calls::template load<ElementType::f16>(in, n, out);
      return;
    case ElementType::f64:
      Calls::template load<ElementType::f64>(in, n, out);
      return;
    case ElementType::f8_e4m3:
      Calls::template load<ElementType::f8_e4m3>(in, n, out);
      return;
    case ElementType::f8_e5m2:
      Calls::template load<ElementType::f8_e5m2>(in, n, out);
      return;
    case ElementType::i8:
      Calls::template load<ElementType::i8>(in, n, out);
      return;
    case ElementType::q8_0:
      Calls::template load<ElementType::q8_0>(in, n, out);
      return;
  }
}

/// Writes `n` f32 values as contiguous elements at any address, rounded to nearest even. The ranges
/// must not overlap.
///
/// i8 rounds to nearest even and saturates, NaN becomes 0, and no scale is applied; q8_0 quantises
/// as ggml's reference does (`store_block<ElementType::q8_0>`) and pads a last partial block with
/// zeros. Bytes are the same for every `isa`.
template <Isa isa>
void store_row(ElementType type, const float* in, std::ptrdiff_t n, std::byte* out) noexcept {
  using Calls = RowCalls<isa != Isa::baseline>;
  switch (type) {
    case ElementType::f32:
      std::memcpy(out, in, sizeof(float) * static_cast<std::size_t>(n));
      return;
    case ElementType::bf16:
      Calls::template store<ElementType::bf16>(in, n, out);
      return;
    case ElementType::f16:
      Calls::template store<ElementType::f16>(in, n, out);
      return;
    case ElementType::f64:
      Calls::template store<ElementType::f64>(in, n, out);
      return;
    case ElementType::f8_e4m3:
      Calls::template store<ElementType::f8_e4m3>(in, n, out);
      return;
    case ElementType::f8_e5m2:
      Calls::template store<ElementType::f8_e5m2>(in, n, out);
      return;
    case ElementType::i8:
      Calls::template store<ElementType::i8>(in, n, out);
      return;
    case ElementType::q8_0:
      Calls::template store<ElementType::q8_0>(in, n, out);
      return;
  }
}

/// The same by an instruction set that is known at run time only.
inline void load_row(ElementType type, Isa isa, const std::byte* in, std::ptrdiff_t n,
                     float* out) noexcept {
  isa == Isa::baseline ? load_row<Isa::baseline>(type, in, n, out)
                       : load_row<Isa::avx2>(type, in, n, out);
}
inline void store_row(ElementType type, Isa isa, const float* in, std::ptrdiff_t n,
                      std::byte* out) noexcept {
  isa == Isa::baseline ? store_row<Isa::baseline>(type, in, n, out)
                       : store_row<Isa::avx2>(type, in, n, out);
}

/// Copies one element to or from any address. Devices read and write words whole only where they
/// are told that these are aligned, as nearly all elements are.
template <std::size_t size>
KVMELD_HD inline void copy_element(void* to, const void* from, const std::byte* stored) noexcept {
  if (reinterpret_cast<std::uintptr_t>(stored) % size == 0) {
    __builtin_memcpy(__builtin_assume_aligned(to, size), __builtin_assume_aligned(from, size),
                     size);
  } else {
    __builtin_memcpy(to, from, size);
  }
}

template <ElementType type>
[[nodiscard]] KVMELD_HD inline float load_one(const std::byte* base,
                                              std::ptrdiff_t index) noexcept {
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

/// One element as f32, with the bits that `load_row` gives; `index` counts elements from `base`, a
/// block's start for q8_0.
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

/// Stores one element with the bits that `store_row` gives. Not for q8_0, whose elements share a
/// scale: it writes nothing.
KVMELD_HD inline void store_element(ElementType type, std::byte* base, std::ptrdiff_t index,
                                    float value) noexcept {
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
