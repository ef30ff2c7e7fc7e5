#pragma once
// Work and policies that tests run on hosts and devices alike.

#include <cstdint>

#include <kvmeld/exec.hpp>
#include <kvmeld/policy.hpp>

namespace test {

// Sums a row's channels.
struct RowSum {
  struct State {
    double sum;
    std::uint16_t lanes;
  };
  const float* rows;  // (row, channel)
  float* sums;
  int channels;

  KVMELD_HD State partial(std::int64_t row, int lane) const {
    State s{0, 1};
    for (int c = lane; c < channels; c += kvmeld::lanes_per_row)
      s.sum += static_cast<double>(rows[row * channels + c]);
    return s;
  }
  KVMELD_HD static State join(State a, State b) {
    return {a.sum + b.sum, static_cast<std::uint16_t>(a.lanes + b.lanes)};
  }
  KVMELD_HD void finish(std::int64_t row, int lane, State total) const {
    if (lane == 0) sums[row] = static_cast<float>(total.sum) + static_cast<float>(total.lanes);
  }
};

// Records in which order lanes meet; a state of 5 bytes, which devices exchange in words.
struct Bracket {
  struct State {
    std::uint8_t bytes[5];
  };
  std::uint64_t* out;  // (row, lane)

  KVMELD_HD static std::uint64_t mix(std::uint64_t x) {
    return ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9ULL) >> 24;
  }
  KVMELD_HD static State pack(std::uint64_t x) {
    State s{};
    for (int i = 0; i < 5; ++i) s.bytes[i] = static_cast<std::uint8_t>(x >> (8 * i));
    return s;
  }
  KVMELD_HD static std::uint64_t unpack(State s) {
    std::uint64_t x = 0;
    for (int i = 0; i < 5; ++i) x |= static_cast<std::uint64_t>(s.bytes[i]) << (8 * i);
    return x;
  }
  KVMELD_HD State partial(std::int64_t, int lane) const {
    return pack(mix(static_cast<std::uint64_t>(lane) + 1));
  }
  KVMELD_HD static State join(State a, State b) { return pack(mix(3 * unpack(a) + unpack(b))); }
  KVMELD_HD void finish(std::int64_t row, int lane, State total) const {
    out[row * kvmeld::lanes_per_row + lane] = unpack(total);
  }
};

// A user's fuser with an accumulator of its own: mean of squares, signed by the sum.
struct SignedPower {
  struct Sums {
    float sum;
    float squares;
  };
  static constexpr bool reproducible = true;
  static constexpr bool rotation_equivariant = false;

  KVMELD_HD Sums init() const { return {0, 0}; }
  KVMELD_HD Sums absorb(Sums a, float x, float w) const {
    return {kvmeld::fma(w, x, a.sum), kvmeld::fma(w * x, x, a.squares)};
  }
  KVMELD_HD Sums join(Sums a, Sums b) const { return {a.sum + b.sum, a.squares + b.squares}; }
  KVMELD_HD float finish(Sums a, float weight, int) const {
    return (a.sum < 0 ? -a.squares : a.squares) / weight;
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("test.SignedPower"); }
};

// One output token, at position 9, out of `count` contributions of unequal weight; and one out of a
// single one.
inline kvmeld::Alignment crowd(std::int64_t count, std::uint32_t tokens) {
  kvmeld::Alignment a;
  a.positions = {9, 12};
  a.tokens = {-1, -1};
  kvmeld::AlignmentGroup group;
  for (std::uint32_t i = 0; i < count; ++i) {
    group.contributions.push_back(
        {i / tokens % 2, i % tokens, 0.25F + 0.125F * static_cast<float>(i % 5)});
  }
  group.end_row();
  group.contributions.push_back({1, 2, 0.5F});
  group.end_row();
  a.groups.push_back(group);
  return a;
}

}  // namespace test
