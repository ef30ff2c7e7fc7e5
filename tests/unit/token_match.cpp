// Edit scripts and matched tokens: closed-form cases, every pair of short strings against plain
// loops, and what is refused.

#include <cmath>
#include <map>
#include <numeric>

#include <kvmeld/kvmeld.hpp>

#include "support/edits.hpp"
#include "support/rendering.hpp"

using namespace kvmeld;
using test::Ids;
using test::Pairs;

namespace {

const auto one_layer = test::geometry({.layers = 1, .heads = 1, .channels = 32});

Fragment with_ids(const Ids& ids, std::uint64_t seed) {
  const auto made = test::sealed(one_layer, std::ssize(ids), seed, {.tokens = ids});
  REQUIRE(made.fragment.valid());
  return made.fragment;
}
// Sources in the order given; keeps what they point to.
struct Sources {
  std::vector<Fragment> fragments;
  Metadata none;
  std::vector<Source> list;

  explicit Sources(std::vector<Fragment> given) : fragments(std::move(given)) {
    for (const Fragment& f : fragments) list.push_back({&f, &f.payloads()[0], &none, {}});
  }
};
// Rows as text: "source.token" of every contribution, one word an output token.
std::string rows(const Result<Alignment>& alignment) {
  INFO(alignment.status().message());
  REQUIRE(alignment.ok());
  std::string text;
  for (std::size_t o = 0; o < alignment->positions.size(); ++o) {
    if (o > 0) text += ' ';
    const char* between = "";
    for (const Contribution& c : alignment->groups[0].row(o)) {
      text += between + std::to_string(c.source) + '.' + std::to_string(c.token);
      between = "+";
    }
  }
  return text;
}
void refused(const Result<Alignment>& alignment, ErrorCode code,
             const std::vector<std::string>& words) {
  REQUIRE_FALSE(alignment.ok());
  CHECK(alignment.error().code() == code);
  for (const std::string& word : words) {
    INFO(alignment.error().message());
    CHECK(alignment.error().message().find(word) != std::string::npos);
  }
}
const TokenMatch edits{.mode = MatchMode::edit_distance};

// Fragments of one head of two channels without rotation; layer 0 holds the keys given.
Fragment with_keys(const std::vector<std::vector<float>>& keys, std::uint64_t seed = 1,
                   Ids ids = {}, const std::vector<std::int64_t>& hidden = {}) {
  static const auto flat = test::geometry({.layers = 1, .heads = 1, .channels = 2, .rotary = 0});
  test::TestCache cache(flat, std::ssize(keys), test::Layout::slot_list, hidden);
  cache.fill(seed);
  for (std::size_t t = 0; t < keys.size(); ++t) {
    if (!cache.holds(0, static_cast<std::int64_t>(t))) continue;
    for (std::size_t c = 0; c < 2; ++c)
      cache.set(0, static_cast<std::int64_t>(t), 0, static_cast<std::int64_t>(c), keys[t][c]);
  }
  const auto made = seal(cache.ref(), {.tokens = ids});
  REQUIRE(made.ok());
  return *made;
}

}  // namespace

TEST_CASE("every pair of strings of up to six binary digits: distance, script, inverse") {
  const auto strings = test::binary_strings(6);
  REQUIRE(strings.size() == 127);
  detail::EditWavefront<> wavefront;
  detail::EditBits<> bits;
  std::vector<MatchRun> by_diagonals, by_bits, by_blocks;
  std::size_t wrong = 0;
  for (const Ids& a : strings) {
    for (const Ids& b : strings) {
      const auto script = edit_script(a, b);
      REQUIRE(script.ok());
      const auto table = test::distance_table(a, b);
      wrong += script->distance != table.back().back() || !script->exact;
      wrong += test::pairs(*script) != test::reference_script(a, b);
      wrong += edit_script(b, a)->inverse() != *script;
      wrong += wavefront.align(a, b, 6, by_diagonals) != script->distance;
      wrong += bits.align(a, b, by_bits) != script->distance || by_bits != by_diagonals;
      // ⌈√n⌉ columns a block
      wrong += bits.align(a, b, by_blocks, 0) != script->distance || by_blocks != by_bits;
      if (script->distance > 0)
        wrong += wavefront.align(a, b, static_cast<std::int32_t>(script->distance) - 1,
                                 by_diagonals) != -1;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("010 against 101, and other pairs with ties") {
  const Ids a{0, 1, 0}, b{1, 0, 1};
  const auto ab = edit_script(a, b), ba = edit_script(b, a);
  CHECK(ab->distance == 2);
  // 010 is the smaller: its last token is deleted before anything is inserted
  CHECK(test::pairs(*ab) == Pairs{{0, 1}, {1, 2}});
  CHECK(test::pairs(*ba) == Pairs{{1, 0}, {2, 1}});
  CHECK(ba->inverse() == *ab);
  CHECK(ab->position_map() == std::vector<std::int64_t>{1, 2, -1});
  CHECK(ba->position_map() == std::vector<std::int64_t>{-1, 0, 1});
  // Substitution goes before deletion and insertion: 01 to 10 keeps nothing, as 2 edits either way.
  CHECK(edit_script(Ids{0, 1}, Ids{1, 0})->runs.empty());
  // Matches are read from the end: of three equal tokens the last is kept.
  CHECK(test::pairs(*edit_script(Ids{7}, Ids{7, 7, 7})) == Pairs{{0, 2}});
}

TEST_CASE("nothing, one token, equal and disjoint sequences") {
  CHECK(*edit_script({}, {}) == EditScript{});
  CHECK(edit_script({}, {})->similarity() == 1.0);
  const Ids four{1, 2, 3, 4};
  for (const bool swapped : {false, true}) {
    const auto none = swapped ? edit_script(four, {}) : edit_script({}, four);
    CHECK(none->distance == 4);
    CHECK(none->runs.empty());
    CHECK(none->similarity() == 0.0);
    CHECK(none->position_map().size() == (swapped ? 4U : 0U));
  }
  CHECK(edit_script(Ids{5}, Ids{5})->runs == std::vector<MatchRun>{{0, 0, 1}});
  CHECK(edit_script(Ids{5}, Ids{6})->distance == 1);
  CHECK(edit_script(four, four)->runs == std::vector<MatchRun>{{0, 0, 4}});
  CHECK(edit_script(four, Ids{5, 6, 7, 8, 9})->distance == 5);
  CHECK(edit_script(four, Ids{5, 6, 7, 8, 9})->matched() == 0);
  CHECK(edit_script(four, Ids{1, 2, 9, 4})->similarity() == 0.75);
  const Ids extreme{INT32_MIN, -1, 0, INT32_MAX};
  CHECK(edit_script(extreme, Ids{INT32_MIN, 0, INT32_MAX})->position_map() ==
        std::vector<std::int64_t>{0, -1, 1, 2});
}

TEST_CASE(
    "tokens at a boundary that were tokenised alone: the interior stays matched, the boundary is a "
    "hole") {
  // "a # # b": cut after the first "# ", each half has a "#" of its own; together they are one
  // token "##".
  const TokenId a = 1, hash = 2, two_hashes = 3, b = 4;
  const Ids apart{a, hash, hash, b}, together{a, two_hashes, b};
  const auto script = edit_script(apart, together);
  CHECK(script->distance == 2);
  CHECK(script->position_map() == std::vector<std::int64_t>{0, -1, -1, 2});
  CHECK(script->inverse().position_map() == std::vector<std::int64_t>{0, -1, 3});
  const Sources sources({with_ids(apart, 1), with_ids(together, 2)});
  CHECK(rows(edits.align(sources.list, 0)) == "0.0+1.0 0.1 0.2 1.1 0.3+1.2");  // nothing lost
}

TEST_CASE("pairs too large for a table: seeds, chains, and pieces give scripts that hold") {
  test::Random random(11);
  Ids base(3000);
  for (TokenId& t : base) t = static_cast<TokenId>(random.below(20000));
  const auto other = test::edited(base, 60, 20000, random);
  const auto exact = edit_script(base, other);
  CHECK(exact->exact);
  for (const std::int32_t seed : {1, 2, 16, 1024}) {
    for (const std::int64_t table : {0, 1, 100, 1000}) {
      const EditOptions options{.exact_tokens = table, .seed_tokens = seed};
      const auto script = edit_script(base, other, options);
      REQUIRE(script.ok());
      INFO("seeds of " << seed << " tokens, tables of " << table << " squared: " << script->distance
                       << " beside " << exact->distance);
      CHECK_FALSE(script->exact);
      CHECK(test::holds(*script, base, other));
      CHECK(script->distance >= exact->distance);
      CHECK(script->distance <= exact->distance + 4);
      CHECK(edit_script(other, base, options)->inverse() == *script);
    }
  }
  // Two blocks that changed places: the chain keeps one of them.
  Ids moved(base.begin() + 1000, base.end());
  moved.insert(moved.end(), base.begin(), base.begin() + 1000);
  const auto script = edit_script(base, moved, {.exact_tokens = 500});
  CHECK(test::holds(*script, base, moved));
  CHECK(script->matched() >= 2000);
  // No seed at all: repeated tokens, and nothing in common.
  const Ids zeros(9000, 0), ones(8000, 1), both = [] {
    Ids ids(9000);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<TokenId>(i % 2);
    return ids;
  }();
  CHECK(edit_script(zeros, ones, {.exact_tokens = 10})->distance == 9000);
  CHECK(edit_script(zeros, both, {.exact_tokens = 10})->distance == 4500);
  CHECK(test::holds(*edit_script(ones, both, {.exact_tokens = 10}), ones, both));
}

TEST_CASE("three fragments, one grid") {
  const Sources sources(
      {with_ids({1, 2, 3, 4}, 1), with_ids({1, 9, 3, 4, 5}, 2), with_ids({8, 9, 3, 5}, 3)});
  const auto alignment = edits.align(sources.list, 100);
  CHECK(rows(alignment) == "0.0+1.0 0.1 2.0 1.1+2.1 0.2+1.2+2.2 0.3+1.3 1.4+2.3");
  CHECK(alignment->tokens == Ids{1, 2, 8, 9, 3, 4, 5});
  CHECK(alignment->positions == std::vector<std::int64_t>{100, 101, 102, 103, 104, 105, 106});
  CHECK(rows(edits.align({}, 5)).empty());
  const Sources single({with_ids({4, 4}, 1)});
  CHECK(rows(edits.align(single.list, 5)) == "0.0 0.1");
  const Sources gaps({with_ids({}, 1), with_ids({1, 2}, 2), with_ids({}, 3), with_ids({2}, 4)});
  CHECK(rows(edits.align(gaps.list, 5)) == "1.0 1.1+3.0");
  const Sources strangers({with_ids({1, 2}, 1), with_ids({3, 4}, 2)});
  CHECK(rows(edits.align(strangers.list, 5)) == "0.0 0.1 1.0 1.1");  // as concatenation
}

TEST_CASE("only the selected tokens are matched") {
  Sources sources({with_ids({1, 2, 3, 4}, 1), with_ids({2, 3, 4, 5}, 2)});
  sources.list[0].selected = {.all = false, .present = {1, 3}};
  sources.list[1].selected = {.all = false, .present = {0, 2, 3}};
  CHECK(rows(edits.align(sources.list, 0)) == "0.1+1.0 0.3+1.2 1.3");
}

TEST_CASE("a thousand fragments of one text with edits of their own") {
  test::Random random(3);
  Ids base(40);
  std::iota(base.begin(), base.end(), 0);
  std::vector<Fragment> fragments;
  for (std::uint64_t i = 0; i < 1000; ++i)
    fragments.push_back(with_ids(test::edited(base, static_cast<int>(i % 3), 1000, random), i));
  const Sources sources(std::move(fragments));
  const auto alignment = edits.align(sources.list, 0);
  REQUIRE(alignment.ok());
  CHECK(test::keeps_every_token(*alignment, sources.list));
  CHECK(alignment->positions.size() >= 40);
  CHECK(alignment->positions.size() <= 40 + 1000);  // an edit adds at most one output token
}

TEST_CASE(
    "neighbours: each other's nearest by the direction of keys, at or above the threshold, once") {
  const Fragment a = with_keys({{1, 0}, {0, 2}, {-1, 0}}),
                 b = with_keys({{0, 3}, {5, 0.1F}, {1, -9}});
  const Sources sources({a, b});
  TokenMatch policy{.mode = MatchMode::neighbours, .threshold = 0.9F};
  CHECK(rows(policy.align(sources.list, 0)) == "0.0+1.1 0.1+1.0 0.2 1.2");
  policy.threshold = 1.0F;
  CHECK(rows(policy.align(sources.list, 0)) == "0.0 0.1+1.0 0.2 1.1 1.2");
  policy.threshold = -1.0F;  // (1, -9) is nearest to (1, 0), which has a nearer one
  CHECK(rows(policy.align(sources.list, 0)) == "0.0+1.1 0.1+1.0 0.2 1.2");
  CHECK(policy.align(sources.list, 0)->tokens == Ids{-1, -1, -1, -1});  // latent fragments
  const Sources opposed({with_keys({{1, 0}}), with_keys({{-1, 0}})});
  CHECK(rows(policy.align(opposed.list, 0)) == "0.0+1.0");
  policy.threshold = 0.0F;
  CHECK(rows(policy.align(opposed.list, 0)) == "0.0 1.0");
  // Equal cosines: the smaller index, on either side; the others stay alone. Zeros have no
  // direction: cosine 0.
  const Sources twins({with_keys({{1, 0}, {2, 0}, {0, 0}}), with_keys({{3, 0}, {4, 0}})});
  policy.threshold = 0.5F;
  CHECK(rows(policy.align(twins.list, 0)) == "0.0+1.0 0.1 0.2 1.1");
  // Ids count only for the id of the output token: −1 where they differ.
  const Sources named(
      {with_keys({{1, 0}, {0, 1}}, 1, {7, 8}), with_keys({{1, 0}, {0, 1}}, 2, {7, 9})});
  CHECK(policy.align(named.list, 0)->tokens == Ids{7, -1});
}

TEST_CASE("neighbours see through positions, and match nothing that the layer does not hold") {
  const auto g = test::geometry({.layers = 2, .heads = 2, .channels = 32});
  // Two caches of the same fresh keys, rotated to other positions.
  const std::vector<std::int64_t> early{0, 1, 2, 3}, late{100, 103, 104, 900};
  std::vector<Fragment> made;
  for (const auto* positions : {&early, &late}) {
    test::TestCache cache(g, 4);
    cache.fill(6);
    for (std::size_t p = 0; p < cache.planes(); p += 2) {
      for (std::int64_t t = 0; t < 4; ++t) {
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t c = 0; c < 16; ++c) {
            const double angle = static_cast<double>((*positions)[static_cast<std::size_t>(t)]) *
                                 std::pow(10000.0, -static_cast<double>(c) / 16);
            const double x = cache.get(p, t, h, c), y = cache.get(p, t, h, c + 16);
            cache.set(p, t, h, c, static_cast<float>(x * std::cos(angle) - y * std::sin(angle)));
            cache.set(p, t, h, c + 16,
                      static_cast<float>(x * std::sin(angle) + y * std::cos(angle)));
          }
        }
      }
    }
    const auto fragment = seal(cache.ref(), {.positions = *positions});
    REQUIRE(fragment.ok());
    made.push_back(*fragment);
  }
  const Sources sources(made);
  const TokenMatch policy{.mode = MatchMode::neighbours, .threshold = 0.999F};
  CHECK(rows(policy.align(sources.list, 0)) == "0.0+1.0 0.1+1.1 0.2+1.2 0.3+1.3");
  CHECK(rows(TokenMatch{.mode = MatchMode::neighbours, .threshold = 0.999F, .layer = 0}.align(
            sources.list, 0)) == "0.0+1.0 0.1+1.1 0.2+1.2 0.3+1.3");
  // The window lost the first token of one side.
  const Sources window({with_keys({{1, 0}, {0, 1}}), with_keys({{1, 0}, {0, 1}}, 2, {}, {1})});
  CHECK(rows(policy.align(window.list, 0)) == "0.0 1.0 0.1+1.1");
}

TEST_CASE("neighbours by the caller's embeddings; crossing matches") {
  const Fragment a = with_keys({{1, 0}, {1, 1}, {1, 2}}, 1), b = with_keys({{2, 0}, {1, 1}}, 2);
  const Sources sources({a, b});
  TokenMatch policy{.mode = MatchMode::neighbours, .threshold = 0.7F};
  policy.embeddings = {{a.id(), 3, {1, 0, 0, 0, 1, 0, 0, 0, 1}}, {b.id(), 3, {0, 0, 2, 3, 0, 0}}};
  if (b.id() < a.id()) std::swap(policy.embeddings[0], policy.embeddings[1]);
  CHECK(rows(policy.align(sources.list, 0)) == "0.0+1.1 0.1 0.2+1.0");

  const auto broken = [&](const auto& change, ErrorCode code,
                          const std::vector<std::string>& words) {
    auto changed = policy;
    change(changed.embeddings);
    refused(changed.align(sources.list, 0), code, words);
  };
  broken([](auto& e) { e[0].values.pop_back(); }, ErrorCode::token_count_mismatch,
         {"numbers", "tokens"});
  broken([](auto& e) { e[1].values.resize(e[1].values.size() + 3); },
         ErrorCode::token_count_mismatch, {"3 channels"});
  broken([](auto& e) { e[0].values[1] = NAN; }, ErrorCode::non_finite, {"token 0", "channel 1"});
  broken([](auto& e) { e[0].values[4] = INFINITY; }, ErrorCode::non_finite,
         {"token 1", "channel 1"});
  broken([](auto& e) { e[0].channels = 0; }, ErrorCode::invalid_argument, {"0 channels"});
  broken([](auto& e) { e.pop_back(); }, ErrorCode::invalid_argument, {"1 fragments"});
  broken(
      [](auto& e) {
        e[0].channels = 1;
        e[0].values.resize(e[0].values.size() / 3);
      },
      ErrorCode::geometry_mismatch, {"1 channels", "3"});
}

TEST_CASE("a free function pairs the caller's rows") {
  const std::vector<float> a{1, 0, 0, 1, 1, 1}, b{0, 2, 3, 0};
  CHECK(*mutual_neighbours(a, b, 2, 0.9F) == std::vector<std::int32_t>{1, 0, -1});
  CHECK(*mutual_neighbours(b, a, 2, 0.9F) == std::vector<std::int32_t>{1, 0});
  CHECK(mutual_neighbours({}, b, 2, 0.9F)->empty());
  CHECK(*mutual_neighbours(b, {}, 2, 0.9F) == std::vector<std::int32_t>{-1, -1});
  for (const float threshold : {-1.5F, 1.01F, std::nanf("")}) {
    CHECK(mutual_neighbours(a, b, 2, threshold).status().code() == ErrorCode::invalid_argument);
  }
  CHECK(mutual_neighbours(a, b, 0, 0.5F).status().code() == ErrorCode::invalid_argument);
  CHECK(mutual_neighbours(a, b, 4, 0.5F).status().code() == ErrorCode::token_count_mismatch);
}

TEST_CASE("two pictures behind the same placeholder ids are two things, one picture is one") {
  const auto pictures = test::geometry({.layers = 2, .heads = 1, .channels = 32});
  pictures->placeholders = {899, 900};
  const auto made = [&](const Ids& ids, std::uint64_t seed) {
    const auto sealed = test::sealed(pictures, std::ssize(ids), seed, {.tokens = ids});
    REQUIRE(sealed.fragment.valid());
    return sealed.fragment;
  };
  const TokenMatch prefix{.mode = MatchMode::common_prefix};
  const Sources two({made({1, 900, 900, 2}, 1), made({1, 900, 900, 2}, 2)});
  const auto apart = edits.align(two.list, 0);
  CHECK(rows(apart) == "0.0+1.0 0.1 0.2 1.1 1.2 0.3+1.3");
  // nothing that an engine could compute again
  CHECK(apart->tokens == std::vector<TokenId>{1, -1, -1, -1, -1, 2});
  CHECK(rows(prefix.align(two.list, 0)) == "0.0+1.0 0.1 0.2 0.3 1.1 1.2 1.3");
  CHECK(TokenMatch{}.align(two.list, 0)->tokens == std::vector<TokenId>{1, -1, -1, 2});
  CHECK(Concat{}.align(two.list, 0)->tokens == std::vector<TokenId>{1, -1, -1, 2, 1, -1, -1, 2});
  // rows of the same numbers
  const Sources one({made({1, 900, 900, 2}, 1), made({3, 900, 900, 4}, 1)});
  CHECK(rows(edits.align(one.list, 0)) == "0.0 1.0 0.1+1.1 0.2+1.2 0.3 1.3");
  const Sources begin({made({900, 900, 2}, 1), made({900, 900, 4}, 1)});
  CHECK(rows(prefix.align(begin.list, 0)) == "0.0+1.0 0.1+1.1 0.2 1.2");
  // of one picture, every patch is itself alone
  const Sources within({made({900, 900}, 1), made({5, 6}, 1)});
  CHECK(rows(edits.align(within.list, 0)) == "0.0 0.1 1.0 1.1");
  auto evicted = std::make_shared<Fragment::Body>(*one.fragments[1].body());
  evicted->payloads[0].bytes = nullptr;  // no rows, no proof
  const Sources gone({one.fragments[0], Fragment(evicted)});
  CHECK(rows(edits.align(gone.list, 0)) == "0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3");

  for (const Ids& bad : {Ids{5, 4}, Ids{4, 4}, Ids{-1}}) {
    Geometry refused_one = *pictures;
    refused_one.placeholders = bad;
    CHECK(validate(refused_one).code() == ErrorCode::invalid_argument);
  }
  Geometry plain = *pictures;
  plain.placeholders = {};
  CHECK(check_same(plain, *pictures).code() == ErrorCode::geometry_mismatch);
  const auto told = std::make_shared<const Geometry>(plain);
  CHECK(test::sealed(told, 2, 1).fragment.id() != test::sealed(pictures, 2, 1).fragment.id());
  const Digest128 cat{1, 2}, dog{3, 4};
  const Ids lead_in{900, 7};
  CHECK(lead_in_digest(lead_in, std::span(&cat, 1)) != lead_in_digest(lead_in, std::span(&dog, 1)));
}

TEST_CASE("what token matching refuses, with numbers") {
  const Sources latent({with_keys({{1, 0}, {0, 1}}), with_keys({{1, 0}}, 2)});
  refused(edits.align(latent.list, 0), ErrorCode::tokens_required,
          {"2 tokens without ids", "neighbours"});
  CHECK(TokenMatch{.mode = MatchMode::neighbours}.align(latent.list, 0).ok());
  const Sources mixed({with_ids({1, 2}, 1), with_ids({2, 3}, 2)});
  refused(TokenMatch{.mode = MatchMode::edit_distance, .edit = {.exact_tokens = -1}}.align(
              mixed.list, 0),
          ErrorCode::invalid_argument, {"-1"});
  refused(TokenMatch{.mode = MatchMode::edit_distance, .edit = {.exact_tokens = 1LL << 31}}.align(
              mixed.list, 0),
          ErrorCode::invalid_argument, {"2147483648"});
  for (const std::int32_t seed : {0, -3, 1025}) {
    refused(TokenMatch{.mode = MatchMode::edit_distance, .edit = {.seed_tokens = seed}}.align(
                mixed.list, 0),
            ErrorCode::invalid_argument, {std::to_string(seed)});
  }
  for (const float threshold : {-1.5F, 2.0F, std::nanf("")}) {
    refused(TokenMatch{.mode = MatchMode::neighbours, .threshold = threshold}.align(mixed.list, 0),
            ErrorCode::invalid_argument, {"threshold"});
  }
  refused(TokenMatch{.mode = MatchMode::neighbours, .layer = 1}.align(mixed.list, 0),
          ErrorCode::invalid_argument, {"layer 1", "1 layers"});
  refused(TokenMatch{.mode = static_cast<MatchMode>(4)}.align(mixed.list, 0),
          ErrorCode::unknown_field, {"mode 4"});
}
