#pragma once

// Pairs of sets that differ in known ways, and a session between them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <kvmeld/replica/reconcile.hpp>

namespace test {

using ReconcileItems = std::vector<kvmeld::replica::ReconcileItem>;

/// How ids that differ do so.
enum class Differ { either_side, one_side, tags, mixed };

struct SetPair {
  ReconcileItems a, b;
  kvmeld::replica::ReconcileDifference from_a;  // what a side finds that holds `a`
  std::size_t differing() const {
    return from_a.mine_only.size() + from_a.theirs_only.size() + from_a.different.size();
  }
  kvmeld::replica::ReconcileDifference from_b() const {
    return {from_a.theirs_only, from_a.mine_only, from_a.different};
  }
};

/// An id as XXH3 makes them: hash tag, 16 random bytes, zeros. `prefix` of the random bytes are the
/// same in all ids.
inline kvmeld::FragmentId random_id(std::mt19937_64& random, std::size_t prefix = 0) {
  kvmeld::FragmentId id;
  id.bytes[0] = 1;
  for (std::size_t i = 1 + prefix; i < 17; ++i) id.bytes[i] = static_cast<std::uint8_t>(random());
  return id;
}

inline bool lower_id(const kvmeld::replica::ReconcileItem& x,
                     const kvmeld::replica::ReconcileItem& y) {
  return x.id < y.id;
}

/// `ids` ids of which `differing` differ; neighbours where `clustered`.
inline SetPair set_pair(std::size_t ids, std::size_t differing, Differ how, bool clustered,
                        std::uint64_t seed, std::size_t prefix = 0) {
  std::mt19937_64 random(seed);
  ReconcileItems all(ids);
  for (auto& item : all) item = {random_id(random, prefix), random()};
  std::sort(all.begin(), all.end(), lower_id);
  std::vector<bool> differs(ids);
  std::fill_n(differs.begin(), differing, true);
  if (clustered) {
    const auto rotation = static_cast<std::ptrdiff_t>(ids == 0 ? 0 : random() % ids);
    std::rotate(differs.begin(), differs.begin() + rotation, differs.end());
  } else {
    std::shuffle(differs.begin(), differs.end(), random);
  }
  SetPair out;
  for (std::size_t i = 0; i < ids; ++i) {
    kvmeld::replica::ReconcileItem item = all[i];
    const std::uint64_t choice = how == Differ::either_side ? random() % 2
                                 : how == Differ::one_side  ? 0
                                 : how == Differ::tags      ? 2
                                                            : random() % 3;
    if (!differs[i] || choice != 1) out.a.push_back(item);
    if (differs[i] && choice == 2) item.tag += 1 + random() % 3;
    if (!differs[i] || choice != 0) out.b.push_back(item);
    if (differs[i])
      (choice == 0   ? out.from_a.mine_only
       : choice == 1 ? out.from_a.theirs_only
                     : out.from_a.different)
          .push_back(item.id);
  }
  return out;
}

inline bool same(const kvmeld::replica::ReconcileDifference& x,
                 const kvmeld::replica::ReconcileDifference& y) {
  return x.mine_only == y.mine_only && x.theirs_only == y.theirs_only && x.different == y.different;
}

/// All messages of a session, first by the side that starts. Empty where it failed.
struct SessionTrace {
  std::vector<std::vector<std::byte>> messages;
  bool right = false;
  kvmeld::Status status;

  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& message : messages) sum += message.size();
    return sum;
  }
  std::size_t longest() const {
    std::size_t most = 0;
    for (const auto& message : messages) most = std::max(most, message.size());
    return most;
  }
};

inline SessionTrace reconcile(const SetPair& pair, std::uint64_t salt,
                              const kvmeld::replica::ReconcileLimits& limits = {}) {
  SessionTrace out;
  kvmeld::replica::Reconciliation a(pair.a, limits), b(pair.b, limits);
  auto first = a.start(salt);
  if (!first) {
    out.status = first.error();
    return out;
  }
  out.messages.push_back(*std::move(first));
  for (bool to_b = true;; to_b = !to_b) {
    auto reply = (to_b ? b : a).receive(out.messages.back());
    if (!reply) {
      out.status = reply.error();
      return out;
    }
    if (!reply->message) break;
    out.messages.push_back(*std::move(reply->message));
  }
  out.right =
      a.done() && b.done() && same(a.result(), pair.from_a) && same(b.result(), pair.from_b());
  return out;
}

}  // namespace test
