// Rounds of refresh in a set that converges: agents in different rounds join, and a round that is
// late or lost leaves the round before.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include <kvmeld/refresh.hpp>

#include "support/law.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Dot;
using kvmeld::Fragment;
using kvmeld::FragmentId;
using kvmeld::FragmentSet;
using kvmeld::Presence;

const auto g = test::geometry({.type = kvmeld::ElementType::f16, .layers = 1, .heads = 1});

Fragment variant(const Fragment& own, std::uint64_t seed) {
  test::TestCache rows(g, own.token_count());
  rows.fill(seed);
  const auto made = kvmeld::refresh::seal(own, rows.ref(), {}, kvmeld::Digest128{seed, seed + 1});
  RC_ASSERT(made.ok());
  return *made;
}

/// What a few agents did, as sets of one operation each.
struct History {
  std::vector<FragmentSet> operations;
  std::vector<Fragment> fragments;  // of all rounds
  std::map<FragmentId, std::vector<FragmentId>> successors;
  std::map<FragmentId, Dot> inserted;
  std::map<FragmentId, Dot> unheard;  // the smallest mark of those whose insertion is not known
};

/// Agents say something, and refresh it in rounds of which each takes part in some; now and then
/// two of them refresh the same.
History history(test::Random& random) {
  History out;
  std::map<std::uint64_t, std::uint64_t> next;
  FragmentSet all;
  const auto operation = [&](std::uint64_t agent, const auto& apply) {
    FragmentSet after = all;
    apply(after, Dot{agent, next[agent]++});
    out.operations.push_back(after.delta_since(all.context()));
    all = after;
  };
  const auto insert = [&](std::uint64_t agent, const Fragment& fragment) {
    operation(agent, [&](FragmentSet& one, const Dot& dot) {
      RC_ASSERT(one.insert(fragment, dot).ok());
      const auto at = out.inserted.try_emplace(fragment.id(), dot).first;
      at->second = std::min(at->second, dot);
    });
    out.fragments.push_back(fragment);
  };
  std::vector<std::pair<std::uint64_t, Fragment>> newest;
  const std::uint64_t agents = 2 + random.below(3);
  for (std::uint64_t agent = 0; agent < agents; ++agent) {
    for (std::uint64_t i = 0; i <= random.below(2); ++i) {
      const auto tokens = test::token_ids(2, static_cast<kvmeld::TokenId>(10 * agent + 3 * i));
      newest.emplace_back(agent, test::sealed(g, 2, 7 * agent + i, {.tokens = tokens}).fragment);
      insert(agent, newest.back().second);
    }
  }
  for (std::uint64_t round = 1; round <= 3; ++round) {
    for (auto& [agent, fragment] : newest) {
      const std::uint64_t hands = random.below(8) == 0 ? 2 : random.below(4) == 0 ? 0 : 1;
      for (std::uint64_t hand = 0; hand < hands; ++hand) {
        const std::uint64_t by = hand == 0 ? agent : (agent + 1) % agents;
        const Fragment again = variant(fragment, 1000 * round + 10 * by + hand);
        insert(by, again);
        operation(by, [&](FragmentSet& one, const Dot& dot) {
          RC_ASSERT(one.supersede(fragment.id(), again.id(), dot).ok());
        });
        out.successors[fragment.id()].push_back(again.id());
        if (random.below(12) == 0) {  // and back: a circle
          operation(by, [&](FragmentSet& one, const Dot& dot) {
            RC_ASSERT(one.supersede(again.id(), fragment.id(), dot).ok());
          });
          out.successors[again.id()].push_back(fragment.id());
        }
        if (hand == 0 && random.below(4) != 0) fragment = again;
      }
    }
  }
  return out;
}

/// Where an id leads, by loops: every id to its smallest successor that counts, and a circle to its
/// smallest.
FragmentId end_of(const History& history, const std::set<FragmentId>& counts, FragmentId at) {
  std::vector<FragmentId> met;
  for (;;) {
    if (const auto circle = std::find(met.begin(), met.end(), at); circle != met.end())
      return *std::min_element(circle, met.end());
    met.push_back(at);
    std::set<FragmentId> next;
    if (const auto all = history.successors.find(at); all != history.successors.end())
      for (const FragmentId& id : all->second)
        if (counts.count(id) != 0) next.insert(id);
    if (next.empty()) return at;
    at = *next.begin();
  }
}

/// What is read: ends that are not whole are struck out until all are.
std::map<FragmentId, Dot> expected(const History& history, const std::set<FragmentId>& whole,
                                   const std::set<FragmentId>& known) {
  std::set<FragmentId> counts = known;
  for (bool all = false; !all;) {
    all = true;
    std::set<FragmentId> struck;
    for (const FragmentId& id : counts)
      if (const FragmentId end = end_of(history, counts, id); whole.count(end) == 0)
        struck.insert(end);
    for (const FragmentId& id : struck) counts.erase(id);
    all = struck.empty();
  }
  std::map<FragmentId, Dot> out;
  std::map<FragmentId, std::optional<Dot>> places;
  for (const FragmentId& id : counts) {
    const FragmentId end = end_of(history, counts, id);
    const auto dot = history.inserted.find(id);
    const Dot unheard = history.unheard.count(end) != 0 ? history.unheard.at(end) : Dot{};
    auto& place = places[end];
    if (dot != history.inserted.end() && (!place || dot->second < *place)) place = dot->second;
    out[end] = place.value_or(unheard);
  }
  return out;
}

kvmeld::Digest128 content(const FragmentSet& set) {
  const auto part = kvmeld::renderable(set);
  RC_ASSERT(part.ok());
  const auto made = kvmeld::plan(*part, kvmeld::merger(kvmeld::ByDot{}), {.geometry = *g});
  if (!made.ok()) RC_FAIL(made.status().message());
  test::TestCache out(g, made->tokens());
  std::vector<std::byte> workspace(made->workspace_bytes());
  const auto report =
      kvmeld::run(kvmeld::exec::seq, *made, workspace, out.out(), {.content_digest = true});
  RC_ASSERT(report.ok());
  return *report->content_digest;
}

}  // namespace

TEST_CASE("laws of refresh") {
  test::law("sets of agents in different rounds join to one cache, in any order and in any parts",
            [] {
              test::Random random(*rc::gen::arbitrary<std::uint64_t>());
              const History made = history(random);
              FragmentSet all;
              for (const FragmentSet& one : made.operations) RC_ASSERT(all.join(one).ok());
              for (int times = 0; times < 3; ++times) {
                // several replicas that hear some, and then each other
                std::vector<FragmentSet> replicas(3);
                std::vector<std::size_t> order(made.operations.size());
                for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
                for (std::size_t k = order.size(); k > 1; --k)
                  std::swap(order[k - 1], order[random.below(k)]);
                for (const std::size_t i : order)
                  RC_ASSERT(replicas[random.below(3)].join(made.operations[i]).ok());
                RC_ASSERT(replicas[1].join(replicas[2]).ok());
                RC_ASSERT(replicas[0].join(replicas[1]).ok());
                RC_ASSERT(replicas[0] == all);
                RC_ASSERT(replicas[0].digest() == all.digest());
                RC_ASSERT(content(replicas[0]) == content(all));
              }
            });
  test::law("what is read is the last round whose bytes are here, in its first place", [] {
    test::Random random(*rc::gen::arbitrary<std::uint64_t>());
    const History made = history(random);
    FragmentSet set;
    for (const FragmentSet& one : made.operations)
      if (random.below(5) != 0) RC_ASSERT(set.join(one).ok());
    History heard = made;
    heard.successors.clear();
    std::set<FragmentId> known, whole;
    heard.inserted.clear();
    for (const auto& entry : set.entries()) {
      known.insert(entry.id);
      for (const kvmeld::Mark& mark : entry.metadata.marks) {
        if (!mark.superseded_by.empty()) {
          heard.successors[entry.id].push_back(mark.superseded_by);
        } else if (!entry.metadata.unattributed) {
          const auto at = heard.inserted.try_emplace(entry.id, mark.dot).first;
          at->second = std::min(at->second, mark.dot);
        }
      }
      if (heard.inserted.count(entry.id) == 0)
        heard.unheard[entry.id] = entry.metadata.marks.front().dot;
    }
    for (const FragmentId& id : known) {
      if (random.below(3) == 0) {
        RC_ASSERT(set.evict(id).ok());
      } else {
        whole.insert(id);
      }
    }
    const auto check = [&](Presence presence, const std::map<FragmentId, Dot>& want) {
      const auto got = in_force(set, presence);
      RC_ASSERT(got.size() == want.size());
      for (const kvmeld::InForce& read : got) {
        const auto at = want.find(read.entry->id);
        RC_ASSERT(at != want.end());
        RC_ASSERT(at->second == read.place);
      }
    };
    check(Presence::complete, expected(heard, whole, known));
    check(Presence::known, expected(heard, known, known));
    // a part of it reads the same
    const auto part = kvmeld::renderable(set);
    RC_ASSERT(part.ok());
    const auto all = in_force(set, Presence::complete), some = in_force(*part);
    RC_ASSERT(all.size() == some.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      RC_ASSERT(all[i].entry->id == some[i].entry->id);
      RC_ASSERT(all[i].place == some[i].place);
    }
  });
}
