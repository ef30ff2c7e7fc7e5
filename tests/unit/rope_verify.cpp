// The self-check: passes the engine's own geometry, names what is wrong with any other.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <kvmeld/check_view.hpp>

#include "support/catch.hpp"
#include "support/identity_rope.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::RopeKind;
using kvmeld::RopePairing;
using kvmeld::RopeSpec;
using kvmeld::verify_rope;

constexpr int tokens = 3, heads = 2, channels = 96;
constexpr auto half = RopePairing::half_split, adjacent = RopePairing::interleaved;

RopeSpec declared(RopePairing pairing, double base = 10000.0) {
  return RopeSpec{.kind = RopeKind::rotary,
                  .pairing = pairing,
                  .first_channel = 8,
                  .rotary_channels = 64,
                  .base = base};
}

// An engine in miniature: turns unrotated keys to `position`, in double, with f32 angles as engines
// have them. (token, head, channel)
std::vector<float> engine_keys(RopePairing pairing, std::int64_t position, double scale = 1.0,
                               double base = 10000.0) {
  std::vector<float> keys;
  for (int t = 0; t < tokens; ++t)
    for (int h = 0; h < heads; ++h) {
      std::vector<float> row =
          identity_rope::key(channels, static_cast<std::uint32_t>(t * heads + h + 1));
      for (int i = 0; i < 32; ++i) {
        const float frequency = static_cast<float>(std::pow(base, -2.0 * i / 64.0));
        const double angle = static_cast<double>(static_cast<float>(position + t) * frequency);
        const auto a = static_cast<std::size_t>(8 + (pairing == adjacent ? 2 * i : i));
        const auto b = static_cast<std::size_t>(8 + (pairing == adjacent ? 2 * i + 1 : i + 32));
        const double x = static_cast<double>(row[a]), y = static_cast<double>(row[b]);
        row[a] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
        row[b] = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
      }
      for (const float x : row) keys.push_back(static_cast<float>(static_cast<double>(x) * scale));
    }
  return keys;
}

std::string refusal(const kvmeld::Result<kvmeld::RopeCheck>& result, ErrorCode code) {
  REQUIRE_FALSE(result.ok());
  CHECK(result.error().code() == code);
  return result.error().message();
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("the engine's own rope passes in both directions") {
  for (const auto pairing : {half, adjacent})
    for (const auto& [p, q] :
         {std::pair<std::int64_t, std::int64_t>{0, 64}, {0, 1000}, {5000, 100}, {100, 710 + 100}}) {
      const auto check = verify_rope(declared(pairing), heads, channels, engine_keys(pairing, p),
                                     engine_keys(pairing, q), p, q);
      REQUIRE(check.ok());
      CHECK(check->relative_error <= 1e-3);
      CHECK(check->error_without_rotation >= 0.2);
      CHECK(check->error_other_pairing >= 0.2);
      CHECK(check->shift == q - p);
      CHECK(std::abs(check->common_scale - 1.0) <= 1e-5);
    }
}

TEST_CASE("a wrong declaration is refused with the figures and what would fit") {
  const auto at_100 = engine_keys(half, 100), at_300 = engine_keys(half, 300);
  std::string why =
      refusal(verify_rope(declared(adjacent), heads, channels, at_100, at_300, 100, 300),
              ErrorCode::rope_mismatch);
  CHECK(has(why, "half_split pairing fits"));
  CHECK(has(why, "200 positions"));
  why = refusal(verify_rope(declared(half), heads, channels, engine_keys(adjacent, 100),
                            engine_keys(adjacent, 300), 100, 300),
                ErrorCode::rope_mismatch);
  CHECK(has(why, "interleaved pairing fits"));
  why = refusal(verify_rope(declared(half, 500000.0), heads, channels, at_100, at_300, 100, 300),
                ErrorCode::rope_mismatch);
  CHECK(has(why, "check base"));
  why = refusal(verify_rope(declared(half), heads, channels, at_300, at_100, 100, 300),
                ErrorCode::rope_mismatch);
  CHECK(has(why, "opposite direction"));
  why = refusal(verify_rope(declared(half), heads, channels, at_100, at_100, 100, 300),
                ErrorCode::rope_mismatch);
  CHECK(has(why, "do not move"));
  why = refusal(verify_rope(RopeSpec::none(), heads, channels, at_100, at_300, 100, 300),
                ErrorCode::rope_mismatch);
  CHECK(has(why, "declare the layer's rope"));
  why = refusal(verify_rope(declared(half), heads, channels, at_100,
                            engine_keys(half, 300, 1.1386294), 100, 300),
                ErrorCode::rope_mismatch);
  CHECK(has(why, "common scale of 1.138"));
  CHECK(has(why, "YaRN"));
}

TEST_CASE("wrong pairings look right near position 0, so small distances are refused") {
  // The first tokens hide the fault: the wrong pairing leaves no error at distance 0 and little at
  // 1 in the slow channels.
  const std::string why = refusal(verify_rope(declared(adjacent), heads, channels,
                                              engine_keys(half, 0), engine_keys(half, 63), 0, 63),
                                  ErrorCode::invalid_argument);
  CHECK(has(why, "63"));
  CHECK(has(why, "64"));
  refusal(verify_rope(declared(half), heads, channels, engine_keys(half, 5), engine_keys(half, 5),
                      5, 5),
          ErrorCode::invalid_argument);
}

TEST_CASE("a layer without rope passes when its keys stay") {
  const auto keys = engine_keys(half, 0);
  const auto check = verify_rope(RopeSpec::none(), heads, channels, keys, keys, 0, 64);
  REQUIRE(check.ok());
  CHECK(check->relative_error == 0.0);
}

TEST_CASE("keys that cannot tell are refused") {
  const auto good = engine_keys(half, 0);
  const auto moved = engine_keys(half, 64);
  const RopeSpec rope = declared(half);
  std::vector<float> zeros(good.size(), 0.0f), slow(good.size(), 0.0f);
  refusal(verify_rope(rope, heads, channels, zeros, zeros, 0, 64), ErrorCode::invalid_argument);
  refusal(verify_rope(rope, heads, channels, good, zeros, 0, 64), ErrorCode::invalid_argument);
  refusal(verify_rope(rope, heads, channels, {}, {}, 0, 64), ErrorCode::invalid_argument);
  // a channel that passes through
  for (std::size_t row = 0; row < slow.size(); row += channels) slow[row] = 1.0f;
  CHECK(has(
      refusal(verify_rope(rope, heads, channels, slow, slow, 0, 64), ErrorCode::invalid_argument),
      "tell nothing"));
  refusal(verify_rope(rope, 0, channels, good, moved, 0, 64), ErrorCode::invalid_argument);
  refusal(verify_rope(rope, heads, 64, good, moved, 0, 64), ErrorCode::invalid_argument);
  refusal(verify_rope(rope, heads, channels, good, moved, -1, 64), ErrorCode::invalid_argument);
  refusal(verify_rope(rope, heads, channels, good, moved, 0, 64, 0.0), ErrorCode::invalid_argument);
  refusal(verify_rope(rope, heads + 5, channels, good, moved, 0, 64),
          ErrorCode::token_count_mismatch);
  auto short_keys = moved;
  short_keys.pop_back();
  refusal(verify_rope(rope, heads, channels, good, short_keys, 0, 64),
          ErrorCode::token_count_mismatch);
  auto broken = moved;
  broken[17] = std::numeric_limits<float>::quiet_NaN();
  CHECK(has(refusal(verify_rope(rope, heads, channels, good, broken, 0, 64), ErrorCode::non_finite),
            "17"));
  broken[17] = std::numeric_limits<float>::infinity();
  refusal(verify_rope(rope, heads, channels, broken, moved, 0, 64), ErrorCode::non_finite);
}
