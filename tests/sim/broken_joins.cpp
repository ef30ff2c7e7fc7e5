// The simulation finds what it is for: replicas that are broken on purpose do not get far.
#include <cstdio>
#include <utility>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/testing.hpp>

#include "support/catch.hpp"

namespace {

using kvmeld::CausalContext;
using kvmeld::FragmentSet;
using kvmeld::Mark;
using kvmeld::replica::MemberId;
using kvmeld::testing::CheckOptions;
using kvmeld::testing::Report;
using kvmeld::testing::SimulatedStore;

// A replica that joins something else than it was sent.
template <class Change>
class Tampered : public kvmeld::replica::Replica {
 public:
  using Replica::Replica;

  kvmeld::Result<std::optional<kvmeld::replica::FrameView>> receive(
      MemberId from, std::span<const std::byte> bytes) {
    const auto frame = kvmeld::replica::decode_frame(bytes);
    if (!frame || frame->type != static_cast<std::uint8_t>(kvmeld::replica::ReplicaMessage::delta))
      return Replica::receive(from, bytes);
    const auto body = kvmeld::replica::messages::decode_body(frame->body);
    if (!body) return Replica::receive(from, bytes);
    const auto delta = kvmeld::replica::decode_set(body->rest);
    if (!delta) return Replica::receive(from, bytes);
    const auto changed = change_(*delta);
    return changed
               ? Replica::receive(from, *kvmeld::replica::encode_replica_frame(
                                            kvmeld::replica::ReplicaMessage::delta, body->merger,
                                            kvmeld::replica::encode_set(*changed)))
               : Replica::receive(from, bytes);
  }

 private:
  Change change_;
};

// Each third delta loses its first mark, and counts as seen in full.
struct DropsAMark {
  int deltas = 0;
  kvmeld::Result<FragmentSet> operator()(const FragmentSet& delta) {
    std::vector<FragmentSet::Entry> entries(delta.entries().begin(), delta.entries().end());
    CausalContext gone = delta.compacted();
    if (++deltas % 3 == 0 && !entries.empty() && !entries.front().metadata.marks.empty()) {
      gone.add(entries.front().metadata.marks.front().dot);
      entries.front().metadata.marks.erase(entries.front().metadata.marks.begin());
      if (entries.front().metadata.marks.empty()) entries.erase(entries.begin());
    }
    return FragmentSet::from_parts(delta.hash(), entries,
                                   {delta.removals().begin(), delta.removals().end()}, gone);
  }
};

// Removals take nothing out.
struct ForgetsRemovals {
  kvmeld::Result<FragmentSet> operator()(const FragmentSet& delta) const {
    std::vector<kvmeld::Removal> removals(delta.removals().begin(), delta.removals().end());
    for (kvmeld::Removal& removal : removals) removal.removed.clear();
    return FragmentSet::from_parts(delta.hash(), {delta.entries().begin(), delta.entries().end()},
                                   removals, delta.compacted());
  }
};

// Of several operations on one fragment only the last one counts.
struct LastWriterWins {
  kvmeld::Result<FragmentSet> operator()(const FragmentSet& delta) const {
    std::vector<FragmentSet::Entry> entries(delta.entries().begin(), delta.entries().end());
    CausalContext gone = delta.compacted();
    for (FragmentSet::Entry& entry : entries) {
      auto& marks = entry.metadata.marks;
      while (marks.size() > 1) {
        const auto oldest =
            std::min_element(marks.begin(), marks.end(),
                             [](const Mark& a, const Mark& b) { return a.time_ms < b.time_ms; });
        gone.add(oldest->dot);
        marks.erase(oldest);
      }
    }
    return FragmentSet::from_parts(delta.hash(), entries,
                                   {delta.removals().begin(), delta.removals().end()}, gone);
  }
};

// Says that every seventh record is written, and does not write it.
class LazyStore final : public kvmeld::replica::BlobStore {
 public:
  explicit LazyStore(SimulatedStore& under) : store(&under) {}

  kvmeld::Result<bool> put(const kvmeld::BlobKey& key, std::span<const std::byte> bytes) override {
    return store->put(key, bytes);
  }
  kvmeld::Result<kvmeld::Blob> get(const kvmeld::BlobKey& key) override { return store->get(key); }
  kvmeld::Result<bool> contains(const kvmeld::BlobKey& key) override {
    return store->contains(key);
  }
  kvmeld::Status erase(const kvmeld::BlobKey& key) override { return store->erase(key); }
  kvmeld::Status add_record(std::span<const std::byte> bytes) override {
    return ++records_added % 7 == 0 ? kvmeld::Status() : store->add_record(bytes);
  }
  kvmeld::Result<kvmeld::replica::RecordBatch> records(std::uint64_t cursor) override {
    return store->records(cursor);
  }
  kvmeld::Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) override {
    return store->replace_records(cursor, bytes);
  }

 private:
  SimulatedStore* store;
  int records_added = 0;
};
struct HasLazyStore {
  LazyStore lazy;
};
class Lazy : HasLazyStore, public kvmeld::replica::Replica {
 public:
  Lazy(SimulatedStore& store, Options options)
      : HasLazyStore{LazyStore(store)}, Replica(lazy, std::move(options)) {}
};

// An order that depends on where the bytes lie, so that every member has its own.
struct ByAddress {
  static constexpr bool reproducible = false;
  kvmeld::Result<std::vector<std::uint32_t>> order(std::span<const kvmeld::Source> sources) const {
    std::vector<std::uint32_t> out = kvmeld::detail::indices(sources.size());
    std::sort(out.begin(), out.end(), [&](std::uint32_t a, std::uint32_t b) {
      return sources[a].payload->bytes < sources[b].payload->bytes;
    });
    return out;
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("test.ByAddress"); }
};

void caught(const char* what, const Report& report) {
  std::printf("%-22s caught at seed %llu: %s\n", what, static_cast<unsigned long long>(report.seed),
              report.failure.c_str());
  CHECK_FALSE(report.ok());
}

}  // namespace

TEST_CASE("a broken join, a lazy store and an order of one's own are caught within 50 seeds") {
  CheckOptions quick;
  quick.seeds = 50;
  quick.simulation.healing_ms = 20'000;  // what will never agree need not be waited for
  using kvmeld::testing::check_convergence;
  caught("drops a mark", check_convergence<Tampered<DropsAMark>>(quick));
  caught("forgets removals", check_convergence<Tampered<ForgetsRemovals>>(quick));
  caught("last writer wins", check_convergence<Tampered<LastWriterWins>>(quick));
  caught("lazy store", check_convergence<Lazy>(quick));
  caught("order by address", check_convergence(kvmeld::merger(ByAddress{}), quick));
}
