// Rows against single elements, every instruction set against the others, q8_0 against ggml's
// reference in plain loops.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <kvmeld/extend/rows.hpp>

#include "support/catch.hpp"
#include "support/identity_tensor.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace kvmeld;

namespace {

constexpr ElementType all_types[] = {ElementType::f64,  ElementType::f32,     ElementType::f16,
                                     ElementType::bf16, ElementType::f8_e4m3, ElementType::f8_e5m2,
                                     ElementType::i8,   ElementType::q8_0};

std::vector<std::byte> stored_by(const tensor_forms::Form& form, ElementType type,
                                 const std::vector<float>& row, std::size_t shift) {
  // One byte before, and one after, that no row function may touch.
  std::vector<std::byte> out(static_cast<std::size_t>(byte_size(type, std::ssize(row))) + shift + 1,
                             std::byte{0xa5});
  form.store(type, row.data(), std::ssize(row), out.data() + shift);
  REQUIRE(out.back() == std::byte{0xa5});
  out.pop_back();
  return {out.begin() + static_cast<std::ptrdiff_t>(shift), out.end()};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

#if KVMELD_X86_DISPATCH
// Sixteen floats in the order of memory through the vectors of kernels that read, compute and store
// in one loop.
KVMELD_TARGET_AVX2 void store_sixteen(const float* x, std::byte* out) {
  float even[8], odd[8];
  for (int i = 0; i < 8; ++i) {
    even[i] = x[2 * i];
    odd[i] = x[2 * i + 1];
  }
  extend::Lanes16<ElementType::bf16>::store(extend::load_lanes(even), extend::load_lanes(odd), out);
}
#endif

}  // namespace

#if KVMELD_X86_DISPATCH
TEST_CASE(
    "bf16 halves that are rounded side by side are those of single elements: all upper halves, "
    "ties, infinities and NaN") {
  std::uint32_t wrong = 0;
  for (std::uint32_t upper = 0; best_isa() != Isa::baseline && upper < 0x10000U; ++upper) {
    constexpr std::uint32_t lower[16] = {0,      1,      0x7ffe, 0x7fff, 0x8000, 0x8001,
                                         0x8002, 0xfffe, 0xffff, 0x4000, 0xc000, 0x8000,
                                         0x7fff, 0x8000, 0xffff, 0};
    float x[16];
    for (std::uint32_t i = 0; i < 16; ++i) {
      const std::uint32_t bits = (upper + (i > 10 ? 1U : 0U)) << 16U | lower[i];
      std::memcpy(&x[i], &bits, 4);
    }
    std::byte out[32];
    store_sixteen(x, out);
    for (std::ptrdiff_t i = 0; i < 16; ++i) {
      std::byte one[32];
      detail::store_element(ElementType::bf16, one, i, x[i]);
      wrong += std::memcmp(one + 2 * i, out + 2 * i, 2) != 0 ? 1U : 0U;
    }
  }
  CHECK(wrong == 0);
}
#endif

TEST_CASE("every instruction set stores and loads the bytes that single elements give") {
  for (const ElementType type : all_types) {
    for (std::size_t n = 0; n <= 300; n += n < 70 ? 1 : 23) {
      const std::vector<float> row = tensor_forms::floats(n, static_cast<std::uint32_t>(n) + 7);
      const std::vector<std::byte> want = stored_by(tensor_forms::baseline_form, type, row, 0);
      if (type != ElementType::q8_0) {
        std::vector<std::byte> one_by_one(want.size());
        for (std::size_t i = 0; i < n; ++i)
          detail::store_element(type, one_by_one.data(), static_cast<std::ptrdiff_t>(i), row[i]);
        REQUIRE(one_by_one == want);
      }
      std::vector<float> loaded(n);
      for (std::size_t i = 0; i < n; ++i)
        loaded[i] = detail::load_element(type, want.data(), static_cast<std::ptrdiff_t>(i));
      for (const tensor_forms::Form& form : tensor_forms::forms()) {
        INFO(to_string(type) << ", " << n << " elements, " << to_string(form.isa));
        for (const std::size_t shift : {0u, 1u, 3u}) {
          REQUIRE(stored_by(form, type, row, shift) == want);
          std::vector<std::byte> shifted(shift);
          shifted.insert(shifted.end(), want.begin(), want.end());
          std::vector<float> back(n + 1, 42.0f);
          form.load(type, shifted.data() + shift, static_cast<std::ptrdiff_t>(n), back.data());
          REQUIRE(back.back() == 42.0f);
          back.pop_back();
          REQUIRE(same_bits(back, loaded));
        }
      }
    }
  }
}

TEST_CASE("every code of the narrow types loads alike in every instruction set") {
  for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f8_e4m3,
                                 ElementType::f8_e5m2, ElementType::i8}) {
    const std::ptrdiff_t codes = block_bytes(type) == 2 ? 65536 : 256;
    std::vector<std::byte> stored(static_cast<std::size_t>(codes * block_bytes(type)));
    for (std::ptrdiff_t code = 0; code < codes; ++code) {
      const auto word = static_cast<std::uint16_t>(code);
      std::memcpy(stored.data() + code * block_bytes(type), &word,
                  static_cast<std::size_t>(block_bytes(type)));
    }
    std::vector<float> want(static_cast<std::size_t>(codes)), back(want.size());
    tensor_forms::baseline_form.load(type, stored.data(), codes, want.data());
    for (const tensor_forms::Form& form : tensor_forms::forms()) {
      form.load(type, stored.data(), codes, back.data());
      REQUIRE(same_bits(back, want));
    }
  }
}

TEST_CASE("a sweep over all floats narrows alike in every instruction set") {
  std::vector<float> row(1 << 16);
  for (std::uint64_t first = 0; first < 4096; first += 613) {
    for (std::size_t i = 0; i < row.size(); ++i)
      row[i] = detail::bits_float(static_cast<std::uint32_t>(i << 16 | first));
    for (std::size_t i = 0; i < row.size(); i += 3)
      row[i] = detail::bits_float(static_cast<std::uint32_t>(i << 16 | 0x8000) +
                                  static_cast<std::uint32_t>(first & 1));
    for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f8_e4m3,
                                   ElementType::f8_e5m2, ElementType::i8}) {
      const std::vector<std::byte> want = stored_by(tensor_forms::baseline_form, type, row, 0);
      for (const tensor_forms::Form& form : tensor_forms::forms())
        REQUIRE(stored_by(form, type, row, 0) == want);
    }
  }
}

#if defined(__x86_64__)
namespace {
__attribute__((target("f16c,avx"))) void hardware_f16(const float* in, std::size_t n,
                                                      std::uint16_t* out) {
  for (std::size_t i = 0; i < n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  }
}
__attribute__((target("f16c,avx"))) void hardware_f32(const std::uint16_t* in, std::size_t n,
                                                      float* out) {
  for (std::size_t i = 0; i < n; i += 8) {
    _mm256_storeu_ps(out + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
}
}  // namespace

TEST_CASE("f16 has the bits of the processor's own conversion, NaNs included") {
  if (best_isa() == Isa::baseline) return test::skip("a processor without AVX2");
  std::vector<float> row(1 << 16), back(row.size());
  std::vector<std::uint16_t> codes(row.size());
  unsigned wrong = 0;
  for (std::uint64_t first = 0; first < 65536; first += 4099) {
    for (std::size_t i = 0; i < row.size(); ++i)
      row[i] = detail::bits_float(static_cast<std::uint32_t>(i << 16 | first));
    hardware_f16(row.data(), row.size(), codes.data());
    for (std::size_t i = 0; i < row.size(); ++i) wrong += from_float<f16>(row[i]).bits != codes[i];
  }
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint16_t>(i);
  hardware_f32(codes.data(), codes.size(), back.data());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    wrong += detail::float_bits(to_float(f16{codes[i]})) != detail::float_bits(back[i]);
  }
  REQUIRE(wrong == 0);
}
#endif

TEST_CASE("q8_0 is ggml's reference quantisation") {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    std::vector<float> row = tensor_forms::floats(96, seed);
    for (float& x : row)
      x = std::isfinite(x) && std::abs(x) < 1e6f && std::abs(x) > 1e-6f ? x : 0.0f;
    if (seed == 0) row.assign(96, 0.0f);
    if (seed == 1) {
      for (std::size_t i = 0; i < 32; ++i)
        row[i] = static_cast<float>(i) - 15.5f;  // ties: 127 / 15.5 is not exact, but
      row[0] = 127.0f;                           // with 127 the scale is 1
    }
    const std::vector<std::byte> stored =
        stored_by(tensor_forms::forms()[2], ElementType::q8_0, row, 0);
    for (std::size_t block = 0; block < 3; ++block) {
      float largest = 0.0f;
      for (std::size_t i = 0; i < 32; ++i)
        largest = std::max(largest, std::abs(row[32 * block + i]));
      const volatile float scale = largest / 127.0f;
      const volatile float reciprocal = scale != 0.0f ? 1.0f / scale : 0.0f;
      q8_0_block got;
      std::memcpy(&got, stored.data() + 34 * block, sizeof(got));
      REQUIRE(got.scale == from_float<f16>(scale));
      for (std::size_t i = 0; i < 32; ++i) {
        const volatile float scaled = row[32 * block + i] * reciprocal;
        REQUIRE(got.values[i] == static_cast<int>(std::roundf(scaled)));
      }
    }
  }
}

TEST_CASE("q8_0 shows what it cannot hold") {
  std::vector<float> row(32, 1.0f), back(32);
  row[7] = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::byte> stored = stored_by(tensor_forms::baseline_form, ElementType::q8_0, row, 0);
  tensor_forms::baseline_form.load(ElementType::q8_0, stored.data(), 32, back.data());
  for (const float x : back) REQUIRE(std::isnan(x));
  row.assign(32, 0x1p-140f);  // 1 / (largest / 127) would overflow
  stored = stored_by(tensor_forms::baseline_form, ElementType::q8_0, row, 0);
  for (const std::byte b : stored) REQUIRE(b == std::byte{0});
}

TEST_CASE("i8 rounds half to even and saturates") {
  const std::vector<float> row = {0.5f, 1.5f,    -2.5f, 0.50000006f, 126.5f,       127.5f,
                                  1e9f, -128.5f, -1e9f, 0x1p-149f,   std::nanf("")};
  const int want[] = {0, 2, -2, 1, 126, 127, 127, -128, -128, 0, 0};
  for (const tensor_forms::Form& form : tensor_forms::forms()) {
    const std::vector<std::byte> stored = stored_by(form, ElementType::i8, row, 0);
    for (std::size_t i = 0; i < row.size(); ++i)
      REQUIRE(static_cast<std::int8_t>(stored[i]) == want[i]);
  }
}

TEST_CASE("rows and functions have the digest that was written down") {
  struct Fnv {
    std::uint64_t hash = 0xcbf29ce484222325u;
    void bytes(const void* data, std::size_t size) {
      for (std::size_t i = 0; i < size; ++i)
        hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
    }
  } sink;
  tensor_identity(sink);
  REQUIRE(sink.hash == 0x60ba5af3e35ce3b9u);  // the same for every compiler, option and processor
}
