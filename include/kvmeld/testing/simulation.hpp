#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/cache/verify_fragment.hpp>
#include <kvmeld/session/replica.hpp>
#include <kvmeld/state/merger.hpp>
#include <kvmeld/state/render.hpp>
#include <kvmeld/testing/corpus.hpp>
#include <kvmeld/testing/faults.hpp>
#include <kvmeld/testing/history.hpp>
#include <kvmeld/testing/liar.hpp>
#include <kvmeld/testing/random.hpp>
#include <kvmeld/testing/report.hpp>
#include <kvmeld/testing/simulated_network.hpp>
#include <kvmeld/testing/simulated_store.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// What a simulation is made of; the defaults are those of the library's own test.
struct Options {
  std::size_t fewest_replicas = 2;
  std::size_t most_replicas = 6;
  std::optional<bool> shared_store{};  ///< all members write to one store; none: the seed decides
  std::int64_t active_ms = 6'000;      ///< simulated time in which agents work and things go wrong
  std::int64_t healing_ms = 120'000;   ///< simulated time after which everybody must agree
  double operations_per_second = 8;    ///< of all agents together
  Faults faults{};
  /// Each seed leaves out some kinds of faults, so that the others meet in more ways.
  bool swarm = true;
  std::vector<Fragment> corpus{};             ///< what agents insert; empty: small ones are made
  void (*trace)(const char* line) = nullptr;  ///< is told every event
};

/// One run of several members over a simulated network, clock and disk, which a seed determines
/// wholly.
///
/// Agents insert, supersede, remove, evict and fetch while messages, processes, disks and a lying
/// peer fail; then faults end, and within a bounded time every member must hold the same set,
/// whole, with the same rendered bytes, from which nothing that was acknowledged is missing. What
/// must be there is worked out from a plain log (`History`).
///
/// @tparam Node a `Replica<SimulatedStore>`, or what behaves like one: tests of the simulation
/// itself break it on purpose.
template <class Node = Replica<SimulatedStore>>
class Simulation {
 public:
  explicit Simulation(std::uint64_t seed, Options options = {});
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// Runs once. Every replica renders with each of the mergers given, and with two of the
  /// library's.
  template <class... Mergers>
  [[nodiscard]] Report run(const Mergers&... mergers);

 private:
  struct Member {
    MemberId id = 0;
    std::unique_ptr<SimulatedStore> store;
    std::unique_ptr<Node> replica;  // null: the process does not run
    std::uint64_t epoch = 0;
    bool gone = false;       // has left for good
    bool upgraded = false;   // renders with the newer merger
    std::int64_t clock = 0;  // ahead of the simulated time
    std::int64_t next_tick = 0;
    std::int64_t starts_at = 0;
    std::int64_t slow_until = 0;
    std::int64_t full_until = 0;
    std::int64_t unavailable_until = 0;
    std::uint64_t max_records = 0;
    CausalContext rotten;  // what rotten records of its disk held
    std::vector<SimulatedDisk> snapshots;

    [[nodiscard]] bool up() const noexcept { return replica != nullptr; }
  };

  // simulation_run.hpp: from the first event to the report
  void set_up();
  void step(std::int64_t ms);
  void deliver(const Delivery& delivery);
  void tick(Member& member);
  void flush(Member& member);

  // simulation_process.hpp: processes, disks, words
  void start(Member& member);
  void crash(Member& member, const char* why);
  void lose(const SimulatedDisk& disk);
  void set_members();
  template <class... Parts>
  void say(const Parts&... parts);
  void fail(std::string sentence);
  [[nodiscard]] static std::string describe(std::span<const std::byte> bytes);
  [[nodiscard]] static CausalContext context_of(const SimulatedDisk& disk);
  [[nodiscard]] std::vector<Member*> up();
  [[nodiscard]] Member* any_up();
  [[nodiscard]] const Fragment* fragment(const FragmentId& id) const;
  [[nodiscard]] std::vector<MemberId> all_members() const;

  // simulation_faults.hpp: what agents do and what goes wrong
  void operate();
  void record(Operation operation, const Result<Provenance>& done, const Digest256& before,
              const Member& member);
  void disturb(std::int64_t ms);
  void disturb(Member& member, std::int64_t ms);
  void join();
  void leave();
  void upgrade();

  // simulation_check.hpp: what must hold at the end
  void heal();
  void account_losses();
  [[nodiscard]] bool agreed() const;
  void check_sets();
  void check_rest();
  void check_mergers();
  template <class M>
  void check_rendered(const M& merger);
  void sum_counters(const Node& replica);

  [[nodiscard]] bool once(double per_second, std::int64_t ms) {
    return random_.chance(per_second * static_cast<double>(ms) / 1000);
  }
  void count(Fault fault) { ++report_.faults[fault]; }

  Options options_;
  Random random_;
  Report report_;
  SimulatedNetwork network_;
  std::vector<Fragment> corpus_;
  std::vector<std::vector<BlobKey>> keys_;  // (fragments) manifest and chunks
  std::deque<Member> members_;              // those that have left included
  std::optional<Liar> liar_;
  History history_;
  CausalContext lost_;           // what lost disks and rotten records held
  std::set<BlobKey> lost_keys_;  // blobs that were lost or rotted
  std::shared_ptr<SimulatedDisk> shared_disk_;
  std::set<std::uint64_t> epochs_;
  std::uint64_t generations_ = 1;
  MemberId next_member_ = 0;
  std::size_t chunk_bytes_ = 0;
  std::size_t max_message_bytes_ = 0;
  std::uint64_t max_operations_ = std::uint64_t{1} << 17U;
  Digest128 merger_{};
  bool insider_ = false;  // the liar is a member
  bool healed_ = false;
  std::vector<std::size_t> to_upgrade_;  // members, in order
  std::int64_t next_upgrade_ = 0;
  std::int64_t partition_until_ = 0;
  std::int64_t next_snapshot_ = 0;
  std::int64_t now_ = 0;
};

}  // namespace testing
KVMELD_NAMESPACE_END

#include <kvmeld/testing/simulation_check.hpp>
#include <kvmeld/testing/simulation_faults.hpp>
#include <kvmeld/testing/simulation_process.hpp>
#include <kvmeld/testing/simulation_run.hpp>
