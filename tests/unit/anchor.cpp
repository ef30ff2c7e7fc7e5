// Signatures, scans, evictions, weights, temperatures, costs, decisions and places of anchors:
// exact cases and every reason.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include <kvmeld/anchors/decision.hpp>
#include <kvmeld/anchors/detail/table.hpp>
#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/anchors/prompt.hpp>
#include <kvmeld/anchors/signature.hpp>
#include <kvmeld/exec.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::TokenId;
using kvmeld::anchors::ReuseReason;

std::vector<TokenId> text(std::size_t tokens, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<TokenId> out;
  for (std::size_t i = 0; i < tokens; ++i) out.push_back(static_cast<TokenId>(random.below(32000)));
  return out;
}
kvmeld::FragmentId id(std::uint8_t n) {
  kvmeld::FragmentId out;
  out.bytes[31] = n;
  return out;
}
constexpr double infinite = std::numeric_limits<double>::infinity();
const double no_number = std::nan("");

}  // namespace

TEST_CASE("SimHash: golden vectors, ties, insertions") {
  const kvmeld::anchors::SimHash hash;
  const std::vector<TokenId> few{1, 2, 3, 4, 5, 6, 7, 8};
  REQUIRE(*hash.sign({.tokens = few}) == 0x2740883041c11234);
  REQUIRE(*hash.sign({.tokens = text(4100, 1)}) == 0xf42121d47e8e9e82);
  REQUIRE(*hash.sign({}) == 0);
  // One gram: its own hash. Two grams: only bits that both have, since a tie gives 0.
  const kvmeld::anchors::SimHash pairs{.gram_tokens = 2};
  const std::vector<TokenId> one{7, 9}, two{7, 9, 11}, tail{9, 11};
  REQUIRE(*pairs.sign({.tokens = one}) == XXH3_64bits_withSeed(one.data(), 8, pairs.seed));
  REQUIRE(*pairs.sign({.tokens = two}) ==
          (*pairs.sign({.tokens = one}) & *pairs.sign({.tokens = tail})));
  REQUIRE(*pairs.sign({.tokens = std::span(one).first(1)}) ==
          XXH3_64bits_withSeed(one.data(), 4, pairs.seed));
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto original = text(4100, seed);
    auto longer = original;
    const std::size_t places[] = {0, 1, 2050, 4099, 4100};
    longer.insert(longer.begin() + static_cast<std::ptrdiff_t>(places[seed % 5]), 17);
    REQUIRE(kvmeld::anchors::similarity(*hash.sign({.tokens = original}),
                                        *hash.sign({.tokens = longer})) > 0.85);
    REQUIRE(kvmeld::anchors::similarity(*hash.sign({.tokens = original}),
                                        *hash.sign({.tokens = text(4100, seed + 100)})) < 0.85);
  }
  REQUIRE(kvmeld::anchors::SimHash{.gram_tokens = 0}.sign({.tokens = few}).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::SimHash{.gram_tokens = 17}.sign({.tokens = few}).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::SimHash{.first_tokens = 0}.sign({.tokens = few}).status().code() ==
          ErrorCode::invalid_argument);
}

TEST_CASE(
    "SimHash against a plain count of every bit: beyond 255 grams, of one gram repeated, of "
    "halves") {
  test::Random random(11);
  for (const std::int32_t gram : {1, 3}) {
    for (const std::size_t tokens : {1U, 2U, 3U, 4U, 5U, 254U, 255U, 256U, 257U, 258U, 510U, 511U,
                                     512U, 513U, 1000U, 4096U, 4097U, 9000U}) {
      // Words that are many, few, or one: a bit that every gram has is counted as often as there
      // are grams.
      for (const std::uint64_t words : {1U, 2U, 3U, 30000U}) {
        std::vector<TokenId> all;
        for (std::size_t i = 0; i < tokens; ++i)
          all.push_back(static_cast<TokenId>(random.below(words)));
        const kvmeld::anchors::SimHash hash{.seed = random.next(), .gram_tokens = gram};
        const std::size_t read = (std::min)(tokens, std::size_t{4096});
        const std::size_t size = (std::min)(read, static_cast<std::size_t>(gram));
        std::vector<int> ones(64, 0);
        int grams = 0;
        for (std::size_t i = 0; i + size <= read; ++i, ++grams) {
          const std::uint64_t bits =
              XXH3_64bits_withSeed(&all[i], size * sizeof(TokenId), hash.seed);
          for (std::size_t b = 0; b < 64; ++b) ones[b] += static_cast<int>(bits >> b & 1U);
        }
        std::uint64_t majority = 0;
        for (std::size_t b = 0; b < 64; ++b) majority |= std::uint64_t{2 * ones[b] > grams} << b;
        CAPTURE(gram, tokens, words);
        CHECK(*hash.sign({.tokens = all}) == majority);
      }
    }
  }
}

TEST_CASE("EmbeddingHash and XxHash") {
  const kvmeld::anchors::EmbeddingHash hash;
  std::vector<float> v(256), w(256);
  test::Random random(3);
  for (std::size_t i = 0; i < v.size(); ++i) {
    v[i] = random.value();
    w[i] = random.value();
  }
  REQUIRE(*hash.sign({.embedding = v}) == 0xb3a5afc5617dd80e);
  std::vector<float> scaled = v, near = v;
  for (float& x : scaled) x *= 8;
  for (std::size_t i = 0; i < v.size(); ++i) near[i] += 0.1F * w[i];
  REQUIRE(*hash.sign({.embedding = v}) == *hash.sign({.embedding = scaled}));
  REQUIRE(kvmeld::anchors::similarity(*hash.sign({.embedding = v}),
                                      *hash.sign({.embedding = near})) > 0.85);
  REQUIRE(kvmeld::anchors::similarity(*hash.sign({.embedding = v}), *hash.sign({.embedding = w})) <
          0.75);
  REQUIRE(*hash.sign({.embedding = std::vector<float>(8, 0.0F)}) == 0);  // on every plane
  REQUIRE(hash.sign({}).status().code() == ErrorCode::invalid_argument);
  v[7] = std::nanf("");
  REQUIRE(hash.sign({.embedding = v}).status().code() == ErrorCode::non_finite);

  // Angles: the share of bits that differ is angle / π, within four standard deviations of 64
  // throws.
  for (const double angle : {0.3, 1.0, 2.0}) {
    double differing = 0;
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      std::vector<float> a(64), b(64);
      double dot = 0, aa = 0;
      for (std::size_t i = 0; i < 64; ++i)
        a[i] = random.value(), b[i] = random.value(), dot += static_cast<double>(a[i] * b[i]),
        aa += static_cast<double>(a[i] * a[i]);
      double bb = 0;
      for (std::size_t i = 0; i < 64; ++i)
        b[i] -= static_cast<float>(dot / aa) * a[i], bb += static_cast<double>(b[i] * b[i]);
      for (std::size_t i = 0; i < 64; ++i)
        b[i] = static_cast<float>(std::cos(angle) * static_cast<double>(a[i]) +
                                  std::sin(angle) * std::sqrt(aa / bb) * static_cast<double>(b[i]));
      const kvmeld::anchors::EmbeddingHash seeded{seed};
      differing += std::popcount(*seeded.sign({.embedding = a}) ^ *seeded.sign({.embedding = b}));
    }
    REQUIRE(differing / (50 * 64) == Approx(angle / 3.14159265).margin(0.035));
  }

  const auto a = text(50, 1);
  auto b = a;
  REQUIRE(*kvmeld::anchors::XxHash{}.sign({.tokens = a}) ==
          *kvmeld::anchors::XxHash{}.sign({.tokens = b}));
  b.back() ^= 1;
  REQUIRE(*kvmeld::anchors::XxHash{}.sign({.tokens = a}) !=
          *kvmeld::anchors::XxHash{}.sign({.tokens = b}));
  REQUIRE(*kvmeld::anchors::XxHash{}.sign({.tokens = std::vector<TokenId>{1, 2, 3}}) ==
          0x6bbf7429332bea48);
}

TEST_CASE("similarity is 1 − Hamming / 64") {
  REQUIRE(kvmeld::anchors::similarity(0x1FF, 0) == 0.859375);
  REQUIRE(kvmeld::anchors::similarity(0x3FF, 0) == 0.84375);
  REQUIRE(kvmeld::anchors::max_distance(0.85) == 9);
  REQUIRE(kvmeld::anchors::max_distance(0.75) == 16);
  REQUIRE(kvmeld::anchors::max_distance(1.0) == 0);
  REQUIRE(kvmeld::anchors::max_distance(0.0) == 64);
  REQUIRE(kvmeld::anchors::max_distance(1.01) == -1);
  REQUIRE(kvmeld::anchors::max_distance(no_number) == -1);
}

TEST_CASE("a scan finds what a plain loop finds, in every form") {
  test::Random random(9);
  for (const std::uint32_t count : {0U, 1U, 15U, 16U, 17U, 100U, 8191U, 8192U, 20000U}) {
    std::vector<std::uint32_t> low(count), high(count);
    const std::uint64_t query = random.next();
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint64_t s = random.next();
      if (i % 5 == 0) {  // near, by up to 20 bits
        s = query;
        for (std::uint64_t flips = random.below(21); flips > 0; --flips)
          s ^= std::uint64_t{1} << random.below(64);
      }
      low[i] = static_cast<std::uint32_t>(s);
      high[i] = static_cast<std::uint32_t>(s >> 32);
    }
    const kvmeld::anchors::SignatureRef run{low.data(), high.data(), count};
    for (const int distance : {-1, 0, 3, 9, 10, 16, 33, 64, 99}) {
      std::vector<kvmeld::anchors::HammingHit> expected{{7, 7}};
      for (std::uint32_t i = 0; i < count; ++i) {
        const int d = std::popcount(run.signature(i) ^ query);
        if (d <= distance) expected.push_back({i + 1000, static_cast<std::uint32_t>(d)});
      }
      for (int isa = 0; isa <= static_cast<int>(kvmeld::anchors::best_scan_isa()); ++isa) {
        std::vector<kvmeld::anchors::HammingHit> hits{{7, 7}};
        kvmeld::anchors::hamming_scan(run, query, distance, hits, 1000, low.data(),
                                      static_cast<kvmeld::anchors::ScanIsa>(isa));
        REQUIRE(hits == expected);
      }
    }
  }
  std::vector<kvmeld::anchors::HammingHit> hits{{0, 5}, {1, 2}, {2, 5}, {3, 1}, {4, 2}};
  kvmeld::anchors::keep_nearest(hits, 3);
  REQUIRE(hits == std::vector<kvmeld::anchors::HammingHit>{{3, 1}, {1, 2}, {4, 2}});
}

TEST_CASE("evictions choose by use") {
  const std::vector<kvmeld::anchors::AnchorUse> uses{{1, 9, 5}, {2, 4, 1}, {3, 3, 7}, {4, 8, 0}};
  REQUIRE(kvmeld::anchors::LRU{}.victim(uses) == 2);
  REQUIRE(kvmeld::anchors::LFU{}.victim(uses) == 3);
  REQUIRE(kvmeld::anchors::WindowLFU{3}.victim(uses) == 1);  // the newest is spared
  REQUIRE(kvmeld::anchors::WindowLFU{1}.victim(uses) == 0);
  REQUIRE(kvmeld::anchors::WindowLFU{0}.victim(uses) == 0);
  REQUIRE(kvmeld::anchors::WindowLFU{100}.victim(uses) == 3);
  const std::vector<kvmeld::anchors::AnchorUse> ties{{2, 5, 1}, {1, 5, 1}, {3, 5, 1}};
  REQUIRE(kvmeld::anchors::LRU{}.victim(ties) == 1);
  REQUIRE(kvmeld::anchors::LFU{}.victim(ties) == 1);
  REQUIRE(kvmeld::anchors::WindowLFU{2}.victim(ties) == 1);
}

TEST_CASE("evictions against plain loops, over uses full of ties") {
  test::Random random(12);
  // The first of all that no other one precedes.
  const auto first = [](const std::vector<kvmeld::anchors::AnchorUse>& uses, const auto& precedes) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < uses.size(); ++i) {
      if (precedes(uses[i], uses[best])) best = i;
    }
    return best;
  };
  const auto longest_ago = [](const kvmeld::anchors::AnchorUse& a,
                              const kvmeld::anchors::AnchorUse& b) {
    return a.last_used != b.last_used ? a.last_used < b.last_used : a.inserted < b.inserted;
  };
  const auto least_often = [&](const kvmeld::anchors::AnchorUse& a,
                               const kvmeld::anchors::AnchorUse& b) {
    return a.uses != b.uses ? a.uses < b.uses : longest_ago(a, b);
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<kvmeld::anchors::AnchorUse> uses;
    const std::size_t n = 1 + random.below(12);
    for (std::size_t i = 0; i < n; ++i)
      uses.push_back({i + 1, n + random.below(3), random.below(3)});
    for (std::size_t i = n; i > 1; --i) std::swap(uses[i - 1], uses[random.below(i)]);
    CHECK(kvmeld::anchors::LRU{}.victim(uses) == first(uses, longest_ago));
    CHECK(kvmeld::anchors::LFU{}.victim(uses) == first(uses, least_often));
    const std::size_t window = random.below(n + 2);
    std::vector<kvmeld::anchors::AnchorUse> oldest = uses;
    std::sort(oldest.begin(), oldest.end(),
              [](const auto& a, const auto& b) { return a.inserted < b.inserted; });
    oldest.resize((std::min)(n, (std::max)(window, std::size_t{1})));
    const std::uint64_t want = oldest[first(oldest, least_often)].inserted;
    CHECK(uses[kvmeld::anchors::WindowLFU{window}.victim(uses)].inserted == want);
  }
}

TEST_CASE("distances are f64's: differences, squares and sums that f32 cannot hold") {
  const auto distance = [](std::vector<float> a, std::vector<float> b) {
    return kvmeld::anchors::l2_distance(a, b);
  };
  CHECK(distance({16777216}, {-1}) == 16777217);
  CHECK(distance({4097}, {0}) == 4097);
  CHECK(distance({4097, 4097}, {0, 0}) == std::sqrt(2.0 * 4097 * 4097));
  CHECK(distance({3e38F}, {-3e38F}) == 2 * static_cast<double>(3e38F));
  CHECK(distance({1e-30F}, {0}) == Approx(static_cast<double>(1e-30F)).epsilon(1e-15));
  test::Random random(13);
  for (const std::size_t channels : {1U, 7U, 64U, 4096U}) {
    std::vector<float> a, b;
    long double sum = 0;
    for (std::size_t c = 0; c < channels; ++c) {
      a.push_back(random.value());
      b.push_back(random.value() * 1000);
      const long double x = static_cast<long double>(a[c]) - static_cast<long double>(b[c]);
      sum += x * x;
    }
    // 4096 roundings of f64 in the sum, and some around it.
    const auto want = static_cast<double>(std::sqrt(sum));
    CHECK(std::abs(distance(a, b) - want) <= want * static_cast<double>(channels + 4) * 0x1p-53);
  }
}

TEST_CASE("weights, entropy and nucleus") {
  const auto w =
      kvmeld::anchors::softmax_weights(std::vector<double>{0, std::log(2), std::log(4)}, 1);
  REQUIRE(w[0] == Approx(4.0 / 7).epsilon(1e-14));
  REQUIRE(w[1] == Approx(2.0 / 7).epsilon(1e-14));
  REQUIRE(w[2] == Approx(1.0 / 7).epsilon(1e-14));
  REQUIRE(kvmeld::anchors::entropy(w) / std::log(2) == Approx(1.3787834935).epsilon(1e-10));
  REQUIRE(kvmeld::anchors::entropy(w) / std::log(3) == Approx(0.8699155298).epsilon(1e-10));
  REQUIRE(kvmeld::anchors::softmax_weights(std::vector<double>{0, 1}, 1)[0] ==
          Approx(0.7310585786));
  REQUIRE(kvmeld::anchors::softmax_weights(std::vector<double>{3, 3, 3, 3}, 1) ==
          std::vector<double>(4, 0.25));
  // underflow is 0, never NaN
  REQUIRE(kvmeld::anchors::softmax_weights(std::vector<double>{5000, 1, 5000}, 1) ==
          std::vector<double>{0, 1, 0});
  REQUIRE(kvmeld::anchors::softmax_weights(std::vector<double>{1e300, 1e300}, 1e-300) ==
          std::vector<double>{0.5, 0.5});
  REQUIRE(kvmeld::anchors::softmax_weights(std::vector<double>{2, 1, 1}, 0) ==
          std::vector<double>{0, 0.5, 0.5});
  REQUIRE(kvmeld::anchors::softmax_weights({}, 1).empty());
  REQUIRE(kvmeld::anchors::entropy(std::vector<double>{1, 0}) == 0);
  REQUIRE(kvmeld::anchors::entropy(std::vector<double>(8, 0.125)) == Approx(std::log(8)));
  const auto kept = [](std::vector<double> weights) {
    return kvmeld::anchors::nucleus(weights, 0.9);
  };
  REQUIRE(kept({.95, .03, .02}) == std::vector<std::uint32_t>{0});
  REQUIRE(kept({.6, .25, .1, .05}) == std::vector<std::uint32_t>{0, 1, 2});
  REQUIRE(kept({.15, .5, .05, .3}) == std::vector<std::uint32_t>{1, 3, 0});
  REQUIRE(kvmeld::anchors::nucleus(std::vector<double>{1, 0, 0}, 1.0) ==
          std::vector<std::uint32_t>{0});
  REQUIRE(kvmeld::anchors::l2_distance(std::vector<float>{0, 3}, std::vector<float>{4, 0}) == 5);
  REQUIRE(
      std::isnan(kvmeld::anchors::l2_distance(std::vector<float>{0}, std::vector<float>{4, 0})));
  REQUIRE(std::isnan(
      kvmeld::anchors::l2_distance(std::vector<float>{std::nanf("")}, std::vector<float>{1})));
  const auto by_token =
      kvmeld::anchors::token_weights(std::vector<double>{0, std::log(3), std::log(3), 0}, 2, 1);
  REQUIRE(by_token[0] == Approx(0.75));
  REQUIRE(by_token[1] == Approx(0.25));
  REQUIRE(by_token[2] == Approx(0.25));
  REQUIRE(by_token[3] == Approx(0.75));
}

TEST_CASE("every decision has its reason") {
  const kvmeld::anchors::ReuseRule rule;
  const kvmeld::anchors::ReuseRequest request{.tokens = 5};
  using Candidates = std::vector<kvmeld::anchors::ReuseCandidate>;
  const kvmeld::anchors::ReuseCandidate good{id(1), 0.5, 9, true, true};
  const auto reason = [&](const Candidates& c, kvmeld::anchors::ReuseRequest r = {.tokens = 5},
                          kvmeld::anchors::ReuseRule by = {}) {
    return kvmeld::anchors::decide(by, r, c).reason;
  };

  const auto sole = kvmeld::anchors::decide(rule, request, Candidates{good});
  REQUIRE(sole.reuses());
  REQUIRE(sole.weights == std::vector<float>{1});
  REQUIRE(sole.entropy_nats == 0);
  REQUIRE(reason({good}, {.tokens = 0}) == ReuseReason::empty_segment);
  REQUIRE(reason({good}, {.tokens = -3}) == ReuseReason::empty_segment);
  for (const kvmeld::anchors::ReuseRule& bad :
       {kvmeld::anchors::ReuseRule{.similarity = 1.5}, kvmeld::anchors::ReuseRule{.gamma = -1},
        kvmeld::anchors::ReuseRule{.gamma = no_number},
        kvmeld::anchors::ReuseRule{.temperature = -1},
        kvmeld::anchors::ReuseRule{.temperature = infinite},
        kvmeld::anchors::ReuseRule{.temperature = no_number},
        kvmeld::anchors::ReuseRule{.min_anchors = 0}, kvmeld::anchors::ReuseRule{.nucleus_mass = 0},
        kvmeld::anchors::ReuseRule{.nucleus_mass = 1.5},
        kvmeld::anchors::ReuseRule{.short_list = 0}}) {
    REQUIRE(reason({good}, request, bad) == ReuseReason::invalid_rule);
  }
  REQUIRE(reason({good}, {.tokens = 5, .consumer = kvmeld::anchors::Consumer::never_approximate}) ==
          ReuseReason::exact_required);
  REQUIRE(reason({good}, {.tokens = 5, .last_position = 100, .trained_context = 100}) ==
          ReuseReason::beyond_trained_context);
  REQUIRE(reason({good}, {.tokens = 5, .last_position = 99, .trained_context = 100}) ==
          ReuseReason::reuse);
  REQUIRE(reason({}) == ReuseReason::below_threshold);
  REQUIRE(reason({{id(1), 0.5, 4, true, true}}) == ReuseReason::too_short);
  REQUIRE(reason({{id(1), 0.5, 5, false, true}}) == ReuseReason::no_offset);
  REQUIRE(reason({{id(1), 0.5, 5, true, false}}) == ReuseReason::partly_evicted);
  REQUIRE(reason({{id(1), no_number, 5, true, true},
                  {id(2), infinite, 5, true, true},
                  {id(3), -1, 5, true, true}}) == ReuseReason::distance_not_finite);
  // the others decide
  REQUIRE(reason({good, {id(2), no_number, 5, true, true}}) == ReuseReason::reuse);
  REQUIRE(reason({good}, request, {.min_anchors = 2}) == ReuseReason::too_few_anchors);
  // equal distances say nothing
  REQUIRE(reason({good, {id(2), 0.5, 5, true, true}}) == ReuseReason::uncertain);
  REQUIRE(reason({good, {id(2), 0.5, 5, true, true}}, request, {.gamma = 1}) == ReuseReason::reuse);
  // the other's weight underflows
  REQUIRE(reason({good, {id(2), 5000, 5, true, true}}) == ReuseReason::reuse);
  REQUIRE(kvmeld::anchors::decide(rule, request, Candidates{good, {id(2), 5000, 5, true, true}})
              .chosen == std::vector<std::uint32_t>{0});
  REQUIRE(reason({good}, {.tokens = 5, .cost = {2, 1}}) == ReuseReason::not_cheaper);
  REQUIRE(reason({good}, {.tokens = 5, .cost = {1, 1}}) == ReuseReason::not_cheaper);
  REQUIRE(reason({good}, {.tokens = 5, .cost = {no_number, 1}}) == ReuseReason::not_cheaper);
  REQUIRE(reason({good}, {.tokens = 5, .cost = {1, 2}}) == ReuseReason::reuse);

  // γ = .87 stands between: H(w) is .8699 of log |A| for distances 0, ln 2, ln 4.
  const Candidates three{{id(1), 0, 5, true, true},
                         {id(2), std::log(2), 5, true, true},
                         {id(3), std::log(4), 5, true, true}};
  REQUIRE(reason(three, request, {.gamma = 0.869}) == ReuseReason::uncertain);
  const auto taken = kvmeld::anchors::decide({.gamma = 0.87}, request, three);
  REQUIRE(taken.reuses());
  REQUIRE(taken.considered == 3);
  REQUIRE(taken.weights[0] == Approx(4.0 / 7));
  const auto heavy = kvmeld::anchors::decide({.gamma = 0.87, .nucleus_mass = 0.8}, request, three);
  REQUIRE(heavy.chosen == std::vector<std::uint32_t>{0, 1});
  REQUIRE(heavy.weights[0] == Approx(2.0 / 3));

  std::set<std::string_view> names;
  for (std::size_t r = 0; r < kvmeld::anchors::reuse_reasons; ++r)
    names.insert(to_string(static_cast<ReuseReason>(r)));
  REQUIRE(names.size() == kvmeld::anchors::reuse_reasons);
  REQUIRE(names.count("unknown") == 0);
  REQUIRE(to_string(ReuseReason::reuse) == "reuse");
  REQUIRE(to_string(ReuseReason::below_threshold) == "below_threshold");
  REQUIRE(to_string(ReuseReason::not_cheaper) == "not_cheaper");
}

TEST_CASE("a temperature from measured distances tells like from unlike where 1 tells nothing") {
  // Distances of tenths, as embeddings of one model have them: at temperature 1, the rule asks for
  // new anchors for ever.
  const std::vector<double> unlike{.31, .28, .33, .30, .29, .32, .30};
  std::vector<kvmeld::anchors::ReuseCandidate> near, far;
  for (std::uint8_t i = 0; i < 5; ++i) {
    near.push_back({id(i), i == 2 ? 0.05 : unlike[i], 9, true, true});
    far.push_back({id(i), unlike[i], 9, true, true});
  }
  REQUIRE(kvmeld::anchors::decide({}, {.tokens = 5}, near).reason == ReuseReason::uncertain);
  const kvmeld::anchors::ReuseRule measured{.temperature =
                                                kvmeld::anchors::spread_temperature(unlike)};
  const auto taken = kvmeld::anchors::decide(measured, {.tokens = 5}, near);
  REQUIRE(taken.reuses());
  REQUIRE(taken.weights[2] > 0.9F);
  REQUIRE(kvmeld::anchors::decide(measured, {.tokens = 5}, far).reason == ReuseReason::uncertain);
  // What it promises, for several γ and numbers of anchors: at `like` medians the rule stands
  // exactly on its edge. And it goes with the unit.
  for (const double gamma : {0.05, 0.3, 0.8}) {
    for (const std::size_t anchors : {std::size_t{2}, std::size_t{5}, std::size_t{64}}) {
      for (const double like : {0.0, 0.5, 0.9}) {
        const double t = kvmeld::anchors::spread_temperature(unlike, gamma, anchors, like);
        std::vector<double> distances(anchors, 0.30);  // the median
        distances[0] *= like;
        REQUIRE(kvmeld::anchors::entropy(kvmeld::anchors::softmax_weights(distances, t)) ==
                Approx(gamma * std::log(anchors)).epsilon(1e-9));
        std::vector<double> scaled;
        for (const double d : unlike) scaled.push_back(1000 * d);
        REQUIRE(kvmeld::anchors::spread_temperature(scaled, gamma, anchors, like) ==
                Approx(1000 * t));
      }
    }
  }
  REQUIRE(kvmeld::anchors::spread_temperature({}) == 1);
  REQUIRE(kvmeld::anchors::spread_temperature(std::vector<double>{0, 0, no_number, infinite, -1}) ==
          1);
  REQUIRE(kvmeld::anchors::spread_temperature(unlike, 0) == 0);
  REQUIRE(kvmeld::anchors::spread_temperature(unlike, no_number) == 1);
  REQUIRE(kvmeld::anchors::spread_temperature(unlike, 0.3, 5, 1.0) == 1);
  REQUIRE(kvmeld::anchors::spread_temperature(unlike, 5.0) ==
          kvmeld::anchors::spread_temperature(unlike, 0.99));
  REQUIRE(std::isfinite(kvmeld::anchors::spread_temperature(unlike, 1e-300)));

  kvmeld::anchors::AnchorTable table;
  for (const auto& vector : std::vector<std::vector<float>>{{0, 0}, {3, 4}, {}, {0, 1}}) {
    kvmeld::anchors::Anchor anchor;
    anchor.vector = vector;
    table.push_back(1,
                    {std::make_shared<const kvmeld::anchors::Anchor>(std::move(anchor)), nullptr});
  }
  REQUIRE(kvmeld::anchors::anchor_distances(table) == std::vector<double>{5, 1, std::sqrt(18.0)});
  REQUIRE(kvmeld::anchors::anchor_distances(table, 2) == std::vector<double>{5});
}

TEST_CASE("costs are learned while a machine serves, and asked once both are known") {
  kvmeld::anchors::ReuseMeter meter;
  const std::vector<kvmeld::anchors::ReuseCandidate> good{{id(1), 0.5, 9, true, true}};
  const auto reason = [&](std::int64_t tokens) {
    return kvmeld::anchors::decide({}, {.tokens = tokens, .cost = meter.cost(tokens)}, good).reason;
  };
  REQUIRE(meter.cost(5).prefill_seconds == 0);
  meter.blended(100, 0.2);
  REQUIRE(meter.cost(5).blend_seconds == 0);
  REQUIRE(reason(5) == ReuseReason::reuse);
  meter.prefilled(10, 0.01);  // half of the blend's
  REQUIRE(meter.cost(5).blend_seconds == Approx(5 * 0.002));
  REQUIRE(meter.cost(5).prefill_seconds == Approx(5 * 0.001));
  REQUIRE(reason(5) == ReuseReason::not_cheaper);
  meter.prefilled(10, 0.17);
  REQUIRE(meter.prefill_seconds_per_token() == Approx(0.001 + 0.016 / 8));
  REQUIRE(reason(5) == ReuseReason::reuse);
  const double before = meter.blend_seconds_per_token();
  meter.blended(0, 1);
  meter.blended(-3, 1);
  meter.blended(5, 0);
  meter.blended(5, -1);
  meter.blended(5, no_number);
  meter.blended(5, infinite);
  REQUIRE(meter.blend_seconds_per_token() == before);
}

TEST_CASE("a pool's version as arrays, searched in the form that devices run") {
  const auto shape = test::geometry({.layers = 1, .heads = 1, .channels = 2});
  test::Random random(8);
  kvmeld::anchors::AnchorTable table;
  for (std::int64_t i = 0; i < 300; ++i) {
    test::TestCache cache(shape, 1 + i % 7);
    kvmeld::anchors::Anchor anchor;
    anchor.base = *kvmeld::seal(cache.ref());
    table.push_back(random.next() & 0xFFFF,
                    {std::make_shared<const kvmeld::anchors::Anchor>(std::move(anchor)), nullptr});
  }
  const auto arrays = kvmeld::anchors::AnchorPoolArrays::of(table, 42);
  const kvmeld::anchors::AnchorPoolRef ref = arrays.ref();
  REQUIRE(ref.version == 42);
  REQUIRE(ref.size() == 300);
  std::vector<std::uint64_t> queries;
  std::vector<std::int32_t> tokens;
  for (int q = 0; q < 50; ++q) {
    queries.push_back(random.next() & 0xFFFF);
    tokens.push_back(static_cast<std::int32_t>(random.below(9)));  // 8 is longer than every anchor
  }
  for (const std::int32_t limit : {-1, 0, 2, 9, 64}) {
    std::vector<kvmeld::anchors::NearestAnchor> found(queries.size(), {1, 1}), host(queries.size());
    REQUIRE(kvmeld::exec::lanes
                .bulk(50, kvmeld::anchors::FindNearestAnchor{ref, queries.data(), tokens.data(),
                                                             limit, found.data()})
                .ok());
    REQUIRE(kvmeld::exec::seq
                .bulk(50, kvmeld::anchors::FindNearestAnchor{ref, queries.data(), tokens.data(),
                                                             limit, host.data()})
                .ok());
    REQUIRE(found == host);
    for (std::size_t q = 0; q < queries.size(); ++q) {
      kvmeld::anchors::NearestAnchor best;
      for (std::uint32_t i = 0; i < 300; ++i) {
        const int d = std::popcount(table.signature(i) ^ queries[q]);
        if (d <= limit && table.anchor(i)->base.token_count() >= tokens[q] &&
            static_cast<std::uint32_t>(d) < best.distance)
          best = {i, static_cast<std::uint32_t>(d)};
      }
      REQUIRE(found[q] == best);
    }
  }
}

TEST_CASE("places of slots and of the text behind them") {
  using kvmeld::anchors::place;
  using kvmeld::anchors::PlacedRun;
  using kvmeld::anchors::PlaceholderFill;
  using kvmeld::anchors::TemplatePlaceholder;
  const std::vector<TemplatePlaceholder> two{{5, 9}, {20, 24}};
  const auto placed = place(30, two, std::vector<PlaceholderFill>{{10, 3}, {2, 0}});
  REQUIRE(placed.ok());
  REQUIRE(*placed ==
          std::vector<PlacedRun>{
              {-1, 0, 0, 5}, {0, 3, 5, 10}, {-1, 9, 15, 11}, {1, 0, 26, 2}, {-1, 24, 28, 6}});
  std::vector<std::int64_t> shifts;
  for (const PlacedRun& run : *placed) shifts.push_back(run.shift());
  REQUIRE(shifts == std::vector<std::int64_t>{0, 2, 6, 26, 4});
  // Leading, adjacent, empty and trailing slots; a template that is nothing but slots.
  REQUIRE(*place(10, std::vector<TemplatePlaceholder>{{0, 0}, {0, 4}, {4, 4}, {8, 10}},
                 std::vector<PlaceholderFill>{{2, 0}, {0, 0}, {3, 7}, {1, 0}}, 100) ==
          std::vector<PlacedRun>{{0, 0, 100, 2}, {2, 7, 102, 3}, {-1, 4, 105, 4}, {3, 0, 109, 1}});
  REQUIRE(place(4, std::vector<TemplatePlaceholder>{{0, 4}}, std::vector<PlaceholderFill>{{0, 0}})
              ->empty());
  REQUIRE(*place(3, {}, {}) == std::vector<PlacedRun>{{-1, 0, 0, 3}});
  REQUIRE(place(30, two, std::vector<PlaceholderFill>{{1, 0}}).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(place(22, two, std::vector<PlaceholderFill>{{1, 0}, {1, 0}}).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(place(30, std::vector<TemplatePlaceholder>{{5, 9}, {8, 10}},
                std::vector<PlaceholderFill>{{1, 0}, {1, 0}})
              .status()
              .code() == ErrorCode::invalid_argument);
  REQUIRE(place(30, two, std::vector<PlaceholderFill>{{-1, 0}, {1, 0}}).status().code() ==
          ErrorCode::invalid_argument);
}
