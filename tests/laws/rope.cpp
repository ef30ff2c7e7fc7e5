// Rotations form a group of isometries, up to the roundings that are derived beside each law.
#include <cmath>
#include <cstring>
#include <vector>

#include <kvmeld/rope.hpp>

#include "support/identity_rope.hpp"
#include "support/law.hpp"

namespace {

using kvmeld::RopeTable;

struct Case {
  kvmeld::RopeSpec rope;
  int channels = 0;
  std::vector<float> key;
};

// Any pairing, scaling, head size up to 256 and placement of the rotary part.
Case draw() {
  Case c;
  const int pairs = *rc::gen::inRange(2, 129);
  const int before = *rc::gen::inRange(0, 9), behind = *rc::gen::inRange(0, 9);
  c.rope =
      identity_rope::spec(static_cast<kvmeld::RopeScaling>(*rc::gen::inRange(0, 7)), 2 * pairs);
  c.rope.base = *rc::gen::element(100.0, 10000.0, 500000.0, 1e6);
  c.rope.first_channel = before;
  c.rope.pairing =
      *rc::gen::element(kvmeld::RopePairing::interleaved, kvmeld::RopePairing::half_split);
  c.channels = before + 2 * pairs + behind;
  c.key = identity_rope::key(c.channels, *rc::gen::arbitrary<std::uint32_t>());
  return c;
}

std::vector<float> rotated(const Case& c, std::vector<float> row, std::int64_t shift) {
  const std::int64_t shifts[] = {shift};
  const auto table = RopeTable::build(c.rope, shifts, 5000);
  RC_ASSERT(table.ok());
  kvmeld::rotate_row(c.rope.pairing, c.rope.first_channel, c.rope.rotary_channels, table->row(0),
                     row.data());
  return row;
}

double norm(const std::vector<float>& a) {
  double sum = 0.0;
  for (const float x : a) sum += static_cast<double>(x) * static_cast<double>(x);
  return std::sqrt(sum);
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    sum += d * d;
  }
  return std::sqrt(sum);
}

std::int64_t draw_shift() { return *rc::gen::inRange<std::int64_t>(-200000, 200001); }

}  // namespace

// One turn leaves at most 2^-25 a table entry and 2^-24 for each of two roundings, so below 2.2e-7
// of the row's norm.
TEST_CASE("laws of rotation") {
  test::law("turning by a and back by a returns within two turns' roundings", [] {
    const Case c = draw();
    const std::int64_t a = draw_shift();
    RC_ASSERT(distance(rotated(c, rotated(c, c.key, a), -a), c.key) <= 4.4e-7 * norm(c.key));
  });
  test::law("turning by a and by b is turning by a + b within three turns' roundings", [] {
    const Case c = draw();
    const std::int64_t a = draw_shift(), b = draw_shift();
    RC_ASSERT(distance(rotated(c, rotated(c, c.key, a), b), rotated(c, c.key, a + b)) <=
              6.6e-7 * norm(c.key));
  });
  test::law("turning keeps the norm, whatever the scaling", [] {
    const Case c = draw();
    RC_ASSERT(std::abs(norm(rotated(c, c.key, draw_shift())) - norm(c.key)) <=
              2.2e-7 * norm(c.key));
  });
  test::law("scores depend on the distance alone", [] {
    const Case c = draw();
    const auto query = identity_rope::key(c.channels, 99);
    const std::int64_t a = *rc::gen::inRange<std::int64_t>(0, 2000),
                       b = *rc::gen::inRange<std::int64_t>(0, 2000);
    const std::int64_t by = draw_shift() / 2;
    const auto dot = [](const std::vector<float>& x, const std::vector<float>& y) {
      double sum = 0.0;
      for (std::size_t i = 0; i < x.size(); ++i)
        sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
      return sum;
    };
    const double near = dot(rotated(c, query, a), rotated(c, c.key, b));
    const double far = dot(rotated(c, query, a + by), rotated(c, c.key, b + by));
    RC_ASSERT(std::abs(near - far) <= 8.8e-7 * norm(query) * norm(c.key));
  });
  test::law("pairs are mutual, pass-through channels keep their bytes, lanes and rows agree", [] {
    const Case c = draw();
    const std::int64_t shifts[] = {draw_shift()};
    const auto table = RopeTable::build(c.rope, shifts, 5000);
    RC_ASSERT(table.ok());
    const auto row = rotated(c, c.key, shifts[0]);
    const int first = c.rope.first_channel, rotary = c.rope.rotary_channels;
    for (int i = 0; i < c.channels; ++i) {
      const auto pair = kvmeld::rope_pair(c.rope.pairing, first, rotary, i);
      const auto own = static_cast<std::size_t>(i);
      RC_ASSERT((pair.partner < 0) == (i < first || i >= first + rotary));
      if (pair.partner < 0) {
        RC_ASSERT(row[own] == c.key[own]);
        continue;
      }
      const auto back = kvmeld::rope_pair(c.rope.pairing, first, rotary, pair.partner);
      RC_ASSERT(back.partner == i);
      RC_ASSERT(back.index == pair.index);
      RC_ASSERT((pair.index >= 0 && pair.index < rotary / 2));
      const float lane =
          kvmeld::rotated_channel(c.rope.pairing, first, rotary, table->row(0), c.key.data(), i);
      RC_ASSERT(std::memcmp(&lane, &row[own], sizeof lane) == 0);
    }
  });
}
