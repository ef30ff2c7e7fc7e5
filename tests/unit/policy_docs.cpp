// The policies of docs/custom_policy.md, compiled and run on every executor; the last case checks
// that the page shows them word for word.
#include <algorithm>
#include <string>
#include <vector>

#include "support/page_snippets.hpp"
#include "support/rendering.hpp"

namespace {

// example-begin: aligner
/// Takes `block` tokens of each span in turn, so that no agent's text stands far behind.
struct Interleave {
  static constexpr bool reproducible = true;
  std::int64_t block = 16;

  kvmeld::Result<kvmeld::Alignment> align(std::span<const kvmeld::Source> ordered,
                                          std::int64_t first_position) const {
    if (block < 1)
      return {kvmeld::ErrorCode::invalid_argument,
              "Interleave: a block of " + std::to_string(block) + " tokens"};
    kvmeld::Alignment out;
    kvmeld::AlignmentGroup& group = out.groups.emplace_back();  // one group: all layers alike
    std::int64_t longest = 0;
    for (const kvmeld::Source& source : ordered)
      longest = std::max(longest, source.selected_count());
    for (std::int64_t begin = 0; begin < longest; begin += block) {
      for (std::uint32_t s = 0; s < ordered.size(); ++s) {
        for (std::int64_t i = begin; i < std::min(begin + block, ordered[s].selected_count());
             ++i) {
          const std::int64_t token = ordered[s].selected_token(i);
          out.positions.push_back(first_position++);
          out.tokens.push_back(ordered[s].token_id(token));
          group.contributions.push_back({s, static_cast<std::uint32_t>(token), 1.0F});
          // a row with several contributions is fused, one with none is a hole for the engine
          group.end_row();
        }
      }
    }
    return out;
  }
  void digest(kvmeld::Hasher& hasher) const {
    hasher.text("example.Interleave");
    hasher.value(block);
  }
};
// example-end

// example-begin: select-form
/// Half way between the smallest and the largest value of a channel.
struct Midrange {
  static constexpr bool reproducible = true;

  KVMELD_HD float select(kvmeld::OrderedValues values) const {
    return (values[0] + values[values.size() - 1]) / 2;
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("example.Midrange"); }
};
// example-end

// example-begin: score
/// Keeps the two contributions whose keys lie closest together, and drops the others.
struct ClosestPair {
  static constexpr bool reproducible = true;

  kvmeld::Status score(const kvmeld::Scoring& scoring, std::span<double> weights) const {
    if (scoring.count() > 64) {
      return {kvmeld::ErrorCode::unsupported,
              "ClosestPair: " + std::to_string(scoring.count()) + " contributions, at most 64"};
    }
    std::size_t a = 0, b = 1;
    for (std::size_t i = 0; i < scoring.count(); ++i) {
      for (std::size_t j = i + 1; j < scoring.count(); ++j) {
        // equally close: the smaller fragment ids
        if (scoring.distance(i, j) < scoring.distance(a, b)) a = i, b = j;
      }
    }
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = i == a || i == b ? 1 : 0;
    return {};
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("example.ClosestPair"); }
};
// example-end

// example-begin: weight
/// A weighted mean by how much each agent has read.
struct ByLength {
  static constexpr bool reproducible = true;

  float weight(const kvmeld::Source& source) const {
    return static_cast<float>(source.fragment->token_count());
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("example.ByLength"); }
};
// example-end

// example-begin: mix
/// The whole row of the largest norm, head by head.
struct Loudest {
  static constexpr bool reproducible = true;

  struct Rows {
    static constexpr bool rotation_equivariant = true;  // a rotation changes no norm

    template <class HeadRows>
    KVMELD_HD int prepare(const HeadRows& rows) const {  // once a row
      int loudest = 0;
      float most = -1;
      for (int i = 0; i < rows.count(); ++i) {
        float square = 0;
        for (int c = 0; c < rows.channels(); ++c)
          square = kvmeld::fma(rows.value(i, c), rows.value(i, c), square);
        if (square > most) most = square, loudest = i;
      }
      return loudest;
    }
    template <class HeadRows>
    KVMELD_HD float channel(const HeadRows& rows, int loudest, int c) const {  // once a channel
      return rows.value(loudest, c);
    }
  };
  Rows mixing() const { return {}; }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("example.Loudest"); }
};
// example-end

// example-begin: select-policy
/// Keeps the beginning of every fragment.
struct FirstTokens {
  static constexpr bool reproducible = true;
  std::int32_t tokens = 64;

  kvmeld::Result<kvmeld::TokenSet> select(const kvmeld::Source& source) const {
    if (source.fragment->token_count() <= tokens) return kvmeld::TokenSet{};  // all
    kvmeld::TokenSet kept{.all = false};
    for (std::int32_t t = 0; t < tokens; ++t) kept.present.push_back(t);
    return kept;
  }
  void digest(kvmeld::Hasher& hasher) const {
    hasher.text("example.FirstTokens");
    hasher.value(tokens);
  }
};
// example-end

// example-begin: order
/// The longest fragment first.
struct LongestFirst {
  static constexpr bool reproducible = true;

  kvmeld::Result<std::vector<std::uint32_t>> order(std::span<const kvmeld::Source> sources) const {
    std::vector<std::uint32_t> out(sources.size());
    for (std::uint32_t i = 0; i < out.size(); ++i) out[i] = i;
    std::sort(out.begin(), out.end(), [&](std::uint32_t a, std::uint32_t b) {
      const auto& x = *sources[a].fragment;
      const auto& y = *sources[b].fragment;
      // ids make it total
      return x.token_count() != y.token_count() ? x.token_count() > y.token_count()
                                                : x.id() < y.id();
    });
    return out;
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("example.LongestFirst"); }
};
// example-end

// example-begin: seam
/// Has the engine compute the first token of every span but the first.
struct FirstOfEach {
  static constexpr bool reproducible = true;

  kvmeld::Status mark(std::span<const kvmeld::Source> ordered, const kvmeld::Alignment& alignment,
                      std::span<std::uint8_t> recompute) const {
    for (const kvmeld::AlignmentGroup& group : alignment.groups) {
      for (std::size_t o = 0; o < recompute.size(); ++o) {
        for (const kvmeld::Contribution& c : group.row(o)) {
          if (c.source > 0 && c.token == ordered[c.source].selected_token(0)) recompute[o] = 1;
        }
      }
    }
    return {};
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("example.FirstOfEach"); }
};
// example-end

using namespace kvmeld;

// Keys without position, so that values can be compared as they were filled in.
const std::shared_ptr<Geometry> g =
    test::geometry({.layers = 2, .heads = 2, .channels = 32, .rotary = 0});

// Fragments of these lengths with ids 100, 101, … / 200, 201, … / 300, …
std::vector<test::Sealed> fragments(const std::vector<std::int64_t>& lengths) {
  std::vector<test::Sealed> out;
  TokenId first = 0;
  for (const std::int64_t length : lengths) {
    first += 100;
    std::vector<TokenId> tokens;
    for (std::int64_t t = 0; t < length; ++t) tokens.push_back(first + static_cast<TokenId>(t));
    out.push_back(test::sealed(g, length, static_cast<std::uint64_t>(first), {.tokens = tokens}));
  }
  return out;
}

template <class M>
std::vector<TokenId> ids(const std::vector<test::Sealed>& all, const M& merger) {
  const auto made = plan(test::set_of(all), merger, {.geometry = *g});
  REQUIRE(made.ok());
  return {made->token_ids().begin(), made->token_ids().end()};
}

// All rows of the three fragments' tokens of one index, fused as they come out of every executor.
template <class F>
test::Dense fused(const std::vector<test::Sealed>& all, const F& fuser) {
  return test::render_everywhere(test::set_of(all),
                                 merger(ById{}, Aligner{TokenMatch{}}, Fuser{fuser}),
                                 {.geometry = *g})
      ->dense();
}

}  // namespace

TEST_CASE("an aligner, an order, a selection and a seam of one's own") {
  const std::vector<test::Sealed> all = fragments({3, 5});
  CHECK(ids(all, merger(LongestFirst{}, Aligner{Interleave{.block = 2}})) ==
        std::vector<TokenId>{200, 201, 100, 101, 202, 203, 102, 204});
  CHECK(ids(all, merger(LongestFirst{}, FirstTokens{.tokens = 2})) ==
        std::vector<TokenId>{200, 201, 100, 101});
  // example-begin: merger
  const auto policies =
      kvmeld::merger(FirstTokens{.tokens = 4}, LongestFirst{}, Aligner{Interleave{.block = 2}},
                     Fuser{Midrange{}}, FirstOfEach{});
  static_assert(decltype(policies)::reproducible);
  // example-end
  const auto made = plan(test::set_of(all), policies, {.geometry = *g});
  REQUIRE(made.ok());
  REQUIRE(made->holes().size() == 1);
  CHECK(made->holes()[0] == Hole{2, 2, 100});

  const auto refused =
      plan(test::set_of(all), merger(Aligner{Interleave{.block = 0}}), {.geometry = *g});
  CHECK(refused.error().message() == "Interleave: a block of 0 tokens");
  CHECK(merger(Aligner{Interleave{.block = 2}}).digest() !=
        merger(Aligner{Interleave{.block = 3}}).digest());
}

TEST_CASE("fusers of one's own, in each form") {
  const std::vector<test::Sealed> all = fragments({2, 2, 2});
  const test::Dense midrange = fused(all, Midrange{}), loudest = fused(all, Loudest{}),
                    lengths = fused(all, ByLength{});
  for (std::size_t p = 0; p < midrange.size(); ++p) {
    for (std::size_t row = 0; row < midrange[p].size() / 32; ++row) {
      std::size_t most = 0;
      double squares[3] = {};
      for (std::size_t i = 0; i < 3; ++i) {
        for (std::size_t c = 0; c < 32; ++c)
          squares[i] += all[i].values[p][row * 32 + c] * all[i].values[p][row * 32 + c];
        if (squares[i] > squares[most]) most = i;
      }
      for (std::size_t at = row * 32; at < row * 32 + 32; ++at) {
        const float x = static_cast<float>(all[0].values[p][at]),
                    y = static_cast<float>(all[1].values[p][at]),
                    z = static_cast<float>(all[2].values[p][at]);
        REQUIRE(midrange[p][at] ==
                static_cast<double>((std::min({x, y, z}) + std::max({x, y, z})) / 2));
        REQUIRE(loudest[p][at] == all[most].values[p][at]);
        REQUIRE(lengths[p][at] == Approx((x + y + z) / 3).margin(1e-6));
      }
    }
  }
}

TEST_CASE("a score of one's own leaves a liar out") {
  std::vector<test::Sealed> all = fragments({2, 2});
  // latent, with the first one's rows: these two are the pair
  all.push_back(test::sealed(g, 2, 100));
  const test::Dense pair = fused(all, ClosestPair{});
  CHECK(pair == all[0].values);

  const auto crowd = fragments(std::vector<std::int64_t>(65, 1));
  const auto refused =
      plan(test::set_of(crowd), merger(ById{}, Aligner{TokenMatch{}}, Fuser{ClosestPair{}}),
           {.geometry = *g});
  CHECK(refused.error().message() ==
        "output 0 at position 0: ClosestPair: 65 contributions, at most 64");
}

TEST_CASE("docs/custom_policy.md shows these policies, and example 03's, word for word") {
  test::check_page("docs/custom_policy.md",
                   {"tests/unit/policy_docs.cpp", "examples/custom_policy.cpp"});
}
