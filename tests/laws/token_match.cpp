// Matching is symmetric, exact where it says so, keeps every token, and does not depend on the
// order of insertion.

#include <cmath>

#include <kvmeld/kvmeld.hpp>

#include "support/edits.hpp"
#include "support/law.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::EditOptions;
using kvmeld::MatchMode;
using kvmeld::TokenMatch;
using test::Ids;

Ids draw_ids(int longest, int vocabulary) {
  return *rc::gen::container<Ids>(
      *rc::gen::inRange<std::size_t>(0, static_cast<std::size_t>(longest) + 1),
      rc::gen::inRange(0, vocabulary));
}
test::Random draw_random() { return test::Random(*rc::gen::arbitrary<std::uint64_t>()); }

std::vector<kvmeld::Source> sources(const std::vector<test::Sealed>& spans) {
  static const kvmeld::Metadata none;
  std::vector<kvmeld::Source> out;
  for (const test::Sealed& s : spans)
    out.push_back({&s.fragment, &s.fragment.payloads()[0], &none, {}});
  return out;
}

}  // namespace

TEST_CASE("laws of edit scripts") {
  test::law(
      "distance and script are the table's, by diagonals, by bits, and by bits in blocks; the "
      "inverse is the script back",
      [] {
        const int vocabulary = *rc::gen::element(2, 4, 50);
        Ids a = draw_ids(150, vocabulary), b = draw_ids(150, vocabulary);
        auto random = draw_random();
        if (*rc::gen::arbitrary<bool>())
          b = test::edited(a, *rc::gen::inRange(0, 12), static_cast<std::uint64_t>(vocabulary),
                           random);
        const auto script = kvmeld::edit_script(a, b);
        RC_ASSERT(script.ok());
        RC_ASSERT(script->exact);
        RC_ASSERT(script->distance == test::distance_table(a, b).back().back());
        RC_ASSERT(test::pairs(*script) == test::reference_script(a, b));
        RC_ASSERT(test::holds(*script, a, b));
        RC_ASSERT(kvmeld::edit_script(b, a)->inverse() == *script);
        kvmeld::detail::EditWavefront<> wavefront;
        kvmeld::detail::EditBits<> bits;
        std::vector<kvmeld::MatchRun> by_diagonals, by_bits;
        RC_ASSERT(wavefront.align(a, b, 150, by_diagonals) == script->distance);
        for (const std::size_t kept : {std::size_t{0}, std::size_t{700}, std::size_t{1} << 20U}) {
          RC_ASSERT(bits.align(a, b, by_bits, kept) == script->distance);
          RC_ASSERT(by_bits == by_diagonals);
        }
      });
  test::law(
      "by seeds, a script holds, is no shorter than the shortest, and its inverse is the script "
      "back",
      [] {
        const int vocabulary = *rc::gen::element(2, 30, 5000);
        const Ids a = draw_ids(400, vocabulary);
        auto random = draw_random();
        const Ids b = test::edited(a, *rc::gen::inRange(0, 40),
                                   static_cast<std::uint64_t>(vocabulary), random);
        const EditOptions options{.exact_tokens = *rc::gen::inRange(0, 60),
                                  .seed_tokens = *rc::gen::inRange(1, 20)};
        const auto script = kvmeld::edit_script(a, b, options), exact = kvmeld::edit_script(a, b);
        RC_ASSERT(script.ok());
        RC_ASSERT(test::holds(*script, a, b));
        RC_ASSERT(script->distance >= exact->distance);
        RC_ASSERT(script->distance <= std::max(std::ssize(a), std::ssize(b)));
        RC_ASSERT(!script->exact || *script == *exact);
        RC_ASSERT(kvmeld::edit_script(b, a, options)->inverse() == *script);
      });
}

TEST_CASE("laws of neighbours") {
  test::law(
      "partners are those of plain loops, one-to-one, and the other way round the inverse", [] {
        const auto channels = *rc::gen::inRange<std::int32_t>(1, 40);
        auto random = draw_random();
        const bool coarse = *rc::gen::arbitrary<bool>();  // few distinct rows: ties
        const auto rows = [&](std::size_t count) {
          std::vector<float> out(count * static_cast<std::size_t>(channels));
          for (float& x : out) x = coarse ? static_cast<float>(random.below(2)) : random.value();
          return out;
        };
        const auto n = *rc::gen::inRange<std::size_t>(0, 40),
                   m = *rc::gen::inRange<std::size_t>(0, 40);
        const auto a = rows(n), b = rows(m);
        const float threshold = *rc::gen::element(-1.0F, 0.0F, 0.5F, 0.9F);
        const auto partner = kvmeld::mutual_neighbours(a, b, channels, threshold),
                   back = kvmeld::mutual_neighbours(b, a, channels, threshold);
        RC_ASSERT(partner.ok());
        RC_ASSERT(partner->size() == n);
        std::vector<std::int32_t> inverse(m, -1);
        for (std::size_t i = 0; i < n; ++i) {
          const std::int32_t j = (*partner)[i];
          if (j < 0) continue;
          RC_ASSERT(inverse[static_cast<std::size_t>(j)] == -1);
          inverse[static_cast<std::size_t>(j)] = static_cast<std::int32_t>(i);
        }
        RC_ASSERT(inverse == *back);
        if (coarse) return;  // cosines that tie in exact arithmetic may differ by an ulp
        const auto cosine = [&](std::size_t i, std::size_t j) {
          double ab = 0, aa = 0, bb = 0;
          for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
            const double x = static_cast<double>(a[i * static_cast<std::size_t>(channels) + c]),
                         y = static_cast<double>(b[j * static_cast<std::size_t>(channels) + c]);
            ab += x * y;
            aa += x * x;
            bb += y * y;
          }
          return ab / std::sqrt(aa * bb);
        };
        for (std::size_t i = 0; i < n && channels > 1; ++i) {
          std::size_t best = 0, from = i;
          for (std::size_t j = 0; j < m; ++j) best = cosine(i, j) > cosine(i, best) ? j : best;
          for (std::size_t k = 0; m > 0 && k < n; ++k)
            from = cosine(k, best) > cosine(from, best) ? k : from;
          const bool mutual =
              m > 0 && from == i && cosine(i, best) >= static_cast<double>(threshold);
          RC_ASSERT((*partner)[i] == (mutual ? static_cast<std::int32_t>(best) : -1));
        }
      });
}

TEST_CASE("laws of matched fragments") {
  test::law(
      "every selected token is kept once, and each fragment's tokens stay in order by edit "
      "distance",
      [] {
        const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
        auto random = draw_random();
        const Ids base = draw_ids(20, 6);
        std::vector<test::Sealed> spans;
        const auto count = *rc::gen::inRange<std::uint64_t>(0, 8);
        for (std::uint64_t i = 0; i < count; ++i) {
          const Ids ids = test::edited(base, *rc::gen::inRange(0, 6), 6, random);
          spans.push_back(test::sealed(g, std::ssize(ids), i, {.tokens = ids}));
        }
        auto list = sources(spans);
        for (kvmeld::Source& s : list) {
          if (*rc::gen::arbitrary<bool>()) continue;
          s.selected.all = false;
          for (std::int32_t t = 0; t < s.fragment->token_count(); ++t) {
            if (random.below(3) > 0) s.selected.present.push_back(t);
          }
        }
        for (const MatchMode mode : {MatchMode::edit_distance, MatchMode::neighbours}) {
          const auto alignment = TokenMatch{.mode = mode, .threshold = 0.2F}.align(list, 7);
          RC_ASSERT(alignment.ok());
          RC_ASSERT(test::keeps_every_token(*alignment, list));
          if (mode == MatchMode::neighbours) continue;
          std::vector<std::int64_t> last(list.size(), -1);
          for (const kvmeld::Contribution& c : alignment->groups[0].contributions) {
            RC_ASSERT(std::int64_t{c.token} > last[c.source]);
            last[c.source] = c.token;
          }
          for (std::size_t o = 0; o < alignment->tokens.size(); ++o) {
            for (const kvmeld::Contribution& c : alignment->groups[0].row(o))
              RC_ASSERT(list[c.source].token_id(c.token) == alignment->tokens[o]);
          }
        }
      });
  test::law("the order of insertion leaves every rendered byte alone", [] {
    const auto g = test::geometry(
        {.type = *rc::gen::element(kvmeld::ElementType::f32, kvmeld::ElementType::bf16),
         .channels = 32});
    auto random = draw_random();
    const Ids base = draw_ids(12, 5);
    std::vector<test::Sealed> spans;
    const auto count = *rc::gen::inRange<std::uint64_t>(1, 6);
    for (std::uint64_t i = 0; i < count; ++i) {
      const Ids ids = test::edited(base, *rc::gen::inRange(0, 4), 5, random);
      const auto n = std::ssize(ids);
      const auto positions =
          test::gapped_positions(n, static_cast<std::int64_t>(random.below(100)));
      spans.push_back(test::sealed(g, n, random.next(), {.tokens = ids, .positions = positions}));
      RC_ASSERT(spans.back().fragment.valid());
    }
    std::vector<kvmeld::TokenEmbeddings> embeddings;
    for (const test::Sealed& s : test::by_id(spans)) {
      kvmeld::TokenEmbeddings e{s.fragment.id(), 2, {}};
      for (const kvmeld::TokenId id : s.fragment.tokens())
        e.values.insert(e.values.end(), {static_cast<float>(id) - 2, 1});
      embeddings.push_back(std::move(e));
    }
    const auto digest = [&](const TokenMatch& match, const std::vector<std::size_t>& order) {
      kvmeld::FragmentSet set;
      for (const std::size_t i : order) RC_ASSERT(set.insert(spans[i].fragment, {i, 0}).ok());
      kvmeld::Target target;
      target.geometry = *g;
      target.first_position = 3;
      const auto plan = kvmeld::plan(set, kvmeld::merger(kvmeld::Aligner{match}), target);
      RC_ASSERT(plan.ok());
      test::TestCache out(plan->shared_geometry(), plan->tokens());
      std::vector<std::byte> workspace(plan->workspace_bytes());
      const auto report =
          kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.out(), {.content_digest = true});
      RC_ASSERT(report.ok());
      return *report->content_digest;
    };
    const TokenMatch matches[] = {
        {.mode = MatchMode::edit_distance},
        {.mode = MatchMode::edit_distance, .edit = {.exact_tokens = 0, .seed_tokens = 2}},
        {.mode = MatchMode::neighbours, .threshold = 0.1F},
        {.mode = MatchMode::neighbours, .threshold = 0.9F, .embeddings = embeddings}};
    std::vector<std::size_t> order(spans.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (const TokenMatch& match : matches) {
      const auto want = digest(match, order);
      for (int round = 0; round < 3; ++round) {
        for (std::size_t k = order.size(); k > 1; --k)
          std::swap(order[k - 1], order[random.below(k)]);
        RC_ASSERT(digest(match, order) == want);
      }
    }
  });
}
