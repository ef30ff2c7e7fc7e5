// Turning keys: exact cases, the row form against plain double loops, and its bytes against the
// lane form.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <kvmeld/rope.hpp>

#include "support/catch.hpp"
#include "support/identity_rope.hpp"

namespace {

using kvmeld::RopePairing;
using kvmeld::RopeScaling;
using kvmeld::RopeSpec;
using kvmeld::RopeTable;

RopeSpec rotary(int channels, double base = 10000.0, int first = 0,
                RopePairing pairing = RopePairing::half_split) {
  RopeSpec rope = RopeSpec::rotary(channels, base, pairing);
  rope.first_channel = first;
  return rope;
}

RopeTable table_of(const RopeSpec& rope, const std::vector<std::int64_t>& shifts) {
  auto table = RopeTable::build(rope, shifts);
  REQUIRE(table.ok());
  return *std::move(table);
}

std::vector<float> shifted(const RopeSpec& rope, std::vector<float> row, std::int64_t shift) {
  const RopeTable table = table_of(rope, {shift});
  kvmeld::rotate_row(rope.pairing, rope.first_channel, rope.rotary_channels, table.row(0),
                     row.data());
  return row;
}

// The textbook's rotation in double, frequencies and all; unscaled specs only.
std::vector<double> plainly_shifted(const RopeSpec& rope, const std::vector<double>& row,
                                    double shift) {
  std::vector<double> out = row;
  const int half = rope.rotary_channels / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = shift * std::pow(rope.base, -2.0 * i / rope.rotary_channels);
    const bool adjacent = rope.pairing == RopePairing::interleaved;
    const auto a = static_cast<std::size_t>(rope.first_channel + (adjacent ? 2 * i : i));
    const auto b = static_cast<std::size_t>(rope.first_channel + (adjacent ? 2 * i + 1 : i + half));
    out[a] = row[a] * std::cos(angle) - row[b] * std::sin(angle);
    out[b] = row[a] * std::sin(angle) + row[b] * std::cos(angle);
  }
  return out;
}

std::vector<double> widen(const std::vector<float>& row) { return {row.begin(), row.end()}; }

double distance(const std::vector<float>& a, const std::vector<double>& b) {
  double off = 0.0, size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    off += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(off / size);
}

double norm(const std::vector<float>& row) {
  double sum = 0.0;
  for (const float x : row) sum += static_cast<double>(x) * static_cast<double>(x);
  return std::sqrt(sum);
}

bool same_bytes(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Nearest f16 (normal range), ties to even, as a store to an f16 cache rounds.
float through_f16(float x) {
  if (x == 0.0f) return x;
  int exponent = 0;
  const double fraction = std::frexp(static_cast<double>(x), &exponent);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11));
}

std::vector<float> through_f16(std::vector<float> row) {
  for (float& x : row) x = through_f16(x);
  return row;
}

std::vector<float> normal_key(int channels, unsigned seed) {
  std::mt19937 bits(seed);
  std::vector<float> row(static_cast<std::size_t>(channels));
  // sum of uniforms: near enough to normal, and the same in every standard library
  for (float& x : row) {
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) sum += static_cast<double>(bits()) / 4294967296.0;
    x = static_cast<float>(sum);
  }
  return row;
}

}  // namespace

TEST_CASE("rotation reproduces the exact cases") {
  const RopeSpec rope = rotary(4);
  const std::vector<float> k = {1, 2, 3, 4};
  const double at3[] = {-1.4133525208, 1.8791180667, -2.8288574817, 4.0581911354};
  const double at7[] = {-1.2170575418, 1.7153306112, 2.9186933617, 4.1300896957};
  const auto row3 = shifted(rope, k, 3), row7 = shifted(rope, k, 7), row34 = shifted(rope, row3, 4);
  for (std::size_t i = 0; i < 4; ++i) {
    // two roundings of values below 4
    CHECK(std::abs(static_cast<double>(row3[i]) - at3[i]) <= 4e-7);
    CHECK(std::abs(static_cast<double>(row7[i]) - at7[i]) <= 4e-7);
    CHECK(std::abs(static_cast<double>(row34[i]) - at7[i]) <= 1e-6);
  }
}

TEST_CASE("a quarter turn maps (a, b) to (-b, a), and four are the identity, exactly") {
  for (const auto pairing : {RopePairing::interleaved, RopePairing::half_split}) {
    for (const int channels : {2, 8, 80, 96, 128, 256}) {
      std::vector<float> quarter(static_cast<std::size_t>(channels), 0.0f);
      for (std::size_t i = quarter.size() / 2; i < quarter.size(); ++i) quarter[i] = 1.0f;
      const std::vector<float> source = identity_rope::key(channels, 5);
      std::vector<float> row = source;
      kvmeld::rotate_row(pairing, 0, channels, quarter.data(), row.data());
      for (int c = 0; c < channels; ++c) {
        const auto partner = static_cast<std::size_t>(kvmeld::pair_of(pairing, 0, channels, c));
        const auto own = static_cast<std::size_t>(c);
        CHECK(row[own] == (c < static_cast<int>(partner) ? -source[partner] : source[partner]));
      }
      for (int i = 0; i < 3; ++i)
        kvmeld::rotate_row(pairing, 0, channels, quarter.data(), row.data());
      CHECK(same_bytes(row, source));
    }
  }
}

TEST_CASE("the documented expression is the one computed, to the bit") {
  // Another order of the same sum passes every tolerance, and changes the bytes that replicas
  // compare.
  for (const float angle : {0.1f, 1.0f, 2.5f, -4.0f}) {
    const float c = std::cos(angle), z = std::sin(angle);
    for (const float x : {1.1f, -0.3f, 7.7e-3f})
      for (const float y : {2.3f, -1.7e3f, 0.9f}) {
        float a = x, b = y;
        kvmeld::rotate_pair(a, b, c, z);
        const float product_a = y * z, product_b = y * c;
        CHECK(a == std::fma(x, c, -product_a));
        CHECK(b == std::fma(x, z, product_b));
      }
  }
}

TEST_CASE(
    "every head size and placement agrees with plain loops, and other channels pass through") {
  struct Head {
    int channels, first, rotary;
  };
  const std::int64_t shift = GENERATE(-513, 1, 1000, 100000);
  for (const auto pairing : {RopePairing::interleaved, RopePairing::half_split}) {
    for (const Head head : {Head{64, 0, 64}, Head{80, 0, 80}, Head{80, 0, 20}, Head{96, 0, 96},
                            Head{128, 0, 128}, Head{128, 0, 64}, Head{192, 128, 64},
                            Head{256, 0, 256}, Head{256, 3, 250}, Head{2, 0, 2}, Head{9, 5, 4}}) {
      const RopeSpec rope = rotary(head.rotary, 5e5, head.first, pairing);
      REQUIRE(kvmeld::validate(rope, head.channels).ok());
      const auto key = normal_key(head.channels, 7);
      const auto row = shifted(rope, key, shift);
      // Table entry and two products: 3 roundings of 2^-24 on a norm that is kept; angles of 1e5
      // add 1e5 * 2^-50.
      CHECK(distance(row, plainly_shifted(rope, widen(key), static_cast<double>(shift))) <= 1.2e-7);
      for (int c = 0; c < head.channels; ++c) {
        if (c >= head.first && c < head.first + head.rotary) continue;
        CHECK(kvmeld::pair_of(pairing, head.first, head.rotary, c) == -1);
        CHECK(row[static_cast<std::size_t>(c)] == key[static_cast<std::size_t>(c)]);
      }
    }
  }
}

TEST_CASE("row forms of each instruction set and the lane form give the same bytes") {
  struct Collect {
    std::vector<std::vector<unsigned char>> pieces;
    void bytes(const void* data, std::size_t size) {
      const auto* first = static_cast<const unsigned char*>(data);
      pieces.emplace_back(first, first + size);
    }
  } sink;
  rope_identity(sink);
  // The rows come last, four forms of each: 8 heads, 2 pairings, 9 shifts.
  constexpr std::size_t rows = 8 * 2 * 9;
  REQUIRE(sink.pieces.size() > rows * 4);
  const std::size_t first = sink.pieces.size() - rows * 4;
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t form = 1; form < 4; ++form)
      CHECK(sink.pieces[first + 4 * r] == sink.pieces[first + 4 * r + form]);
}

TEST_CASE("shifts start at the source, because hops decay") {
  const RopeSpec rope = rotary(128, 5e5);
  const auto f16_key = through_f16(normal_key(128, 11));
  const auto exact = plainly_shifted(rope, widen(f16_key), 1000.0);
  CHECK(distance(shifted(rope, f16_key, 1000), exact) <= 5e-8);
  CHECK(distance(through_f16(shifted(rope, f16_key, 1000)), exact) <= 3e-4);
  auto hops = f16_key, f16_hops = f16_key;
  for (int i = 0; i < 100; ++i) {
    hops = shifted(rope, hops, 10);
    f16_hops = through_f16(shifted(rope, f16_hops, 10));
  }
  CHECK(distance(hops, exact) <= 3e-6);
  CHECK(distance(f16_hops, exact) >= 5e-3);
}

TEST_CASE("tables have unit magnitude and f32 accuracy for every scaling") {
  const std::vector<std::int64_t> shifts = {
      0, 1, -1, 1000, 131072, kvmeld::max_rope_shift, -kvmeld::max_rope_shift};
  for (int s = 0; s <= static_cast<int>(RopeScaling::explicit_factors); ++s) {
    RopeSpec rope = identity_rope::spec(static_cast<RopeScaling>(s), 96);
    rope.attention_factor = 1.1386;
    const auto table = RopeTable::build(rope, shifts, 5000);
    const auto frequencies = kvmeld::inverse_frequencies(rope, 5000);
    REQUIRE((table.ok() && frequencies.ok()));
    REQUIRE(table->pairs() == 48);
    REQUIRE(table->rows() == shifts.size());
    for (std::size_t r = 0; r < shifts.size(); ++r) {
      const float* row = table->row(r);
      CHECK(reinterpret_cast<std::uintptr_t>(row) % 64 == 0);
      CHECK(row == table->data() + r * table->row_stride());
      for (std::size_t i = 0; i < 48; ++i) {
        const double c = static_cast<double>(row[i]), z = static_cast<double>(row[48 + i]);
        const double angle = static_cast<double>(shifts[r]) * (*frequencies)[i];
        CHECK(std::abs(c - std::cos(angle)) <= 0x1p-25 + std::abs(angle) * 0x1p-50);
        CHECK(std::abs(z - std::sin(angle)) <= 0x1p-25 + std::abs(angle) * 0x1p-50);
        CHECK(std::abs(c * c + z * z - 1.0) <= 0x1p-23);
      }
    }
    const auto key = normal_key(96, 3);
    for (const std::int64_t shift : {1, 999, 40000}) {
      auto row = key;
      const auto one = RopeTable::build(rope, std::vector<std::int64_t>{shift}, 5000);
      kvmeld::rotate_row(rope.pairing, 0, 96, one->row(0), row.data());
      CHECK(std::abs(norm(row) / norm(key) - 1.0) <= 1.2e-7);
    }
  }
}

TEST_CASE("table rows of each instruction set are the same bytes") {
  for (const std::size_t pairs :
       {std::size_t{1}, std::size_t{7}, std::size_t{40}, std::size_t{64}}) {
    std::vector<double> frequencies(pairs);
    for (std::size_t i = 0; i < pairs; ++i)
      frequencies[i] = std::pow(5e5, -static_cast<double>(i) / static_cast<double>(pairs));
    for (const double shift : {0.0, 1.0, -37.0, 131071.0, 16777216.0}) {
      std::vector<float> base(2 * pairs), row(2 * pairs);
      kvmeld::detail::rope_row_filler(kvmeld::Isa::baseline)(shift, frequencies.data(), pairs,
                                                             base.data());
      for (int isa = 0; isa <= static_cast<int>(kvmeld::best_isa()); ++isa) {
        kvmeld::detail::rope_row_filler(static_cast<kvmeld::Isa>(isa))(shift, frequencies.data(),
                                                                       pairs, row.data());
        CHECK(same_bytes(row, base));
      }
    }
  }
}

TEST_CASE("tables refuse what they cannot hold") {
  const std::int64_t far[] = {1, kvmeld::max_rope_shift + 1};
  CHECK(RopeTable::build(rotary(64), far).error().code() == kvmeld::ErrorCode::invalid_argument);
  CHECK(RopeTable::build(rotary(63), {}).error().code() == kvmeld::ErrorCode::invalid_argument);
  const std::int64_t one[] = {1};
  CHECK(RopeTable::build(identity_rope::spec(RopeScaling::longrope, 64), one).error().code() ==
        kvmeld::ErrorCode::invalid_argument);
  const auto none = RopeTable::build(RopeSpec::none(), one);
  REQUIRE(none.ok());
  CHECK(none->pairs() == 0);
  CHECK(none->size_bytes() == 0);
  const auto empty = RopeTable::build(rotary(64), {});
  REQUIRE(empty.ok());
  CHECK(empty->rows() == 0);
}
