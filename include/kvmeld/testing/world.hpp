#pragma once

/// The simulated world of the tests: faults, histories, store, network, and a Byzantine peer.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/metadata.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/replica/wire.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace testing {

/// SplitMix64 (Steele, Lea and Flood, 2014): one seed gives the same numbers on every machine and
/// under every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}

  [[nodiscard]] std::uint64_t next() noexcept {
    return extend::mix_bits(state_ += 0x9E3779B97F4A7C15ULL);
  }
  /// In [0, n); 0 where n is 0.
  [[nodiscard]] std::size_t below(std::size_t n) noexcept {
    return n == 0 ? 0 : static_cast<std::size_t>(next() % n);
  }
  /// In [first, last].
  [[nodiscard]] std::int64_t between(std::int64_t first, std::int64_t last) noexcept {
    return first + static_cast<std::int64_t>(below(static_cast<std::size_t>(last - first + 1)));
  }
  /// True with a probability; draws one number whatever the probability is.
  [[nodiscard]] bool chance(double probability) noexcept {
    return static_cast<double>(next() >> 11U) * 0x1p-53 < probability;
  }

 private:
  std::uint64_t state_;
};

/// An entry of the log: one operation of an agent.
struct Operation {
  enum class Kind : std::uint8_t { insert, supersede, remove };
  Kind kind = Kind::insert;
  /// False: the call failed, and the operation may have happened or not.
  bool acknowledged = false;
  Dot dot{};  ///< `unknown_sequence` where the call failed
  FragmentId id{};
  std::optional<float> confidence{};
  FragmentId successor{};
  std::vector<Dot> observed{};  ///< of a removal: the marks that the agent saw

  static constexpr std::uint64_t unknown_sequence = ~std::uint64_t{0};
};

/// A plain list of all operations, independent of the library, from which the expected content of
/// every set follows.
///
/// The reference rule: a mark is in force if its operation happened and no removal that had
/// observed it happened. An acknowledged operation happened, unless no member holds it any more and
/// a fault explains that (`forget`).
class History {
 public:
  /// False: the dot was used before.
  [[nodiscard]] bool add(Operation operation) {
    const auto same = [&](const Operation& o) {
      return o.dot == operation.dot && o.dot.sequence != Operation::unknown_sequence;
    };
    if (std::any_of(operations_.begin(), operations_.end(), same)) return false;
    operations_.push_back(std::move(operation));
    return true;
  }
  /// Marks an acknowledged operation that only lost disks held: it may have happened or not.
  void forget(const Dot& dot) {
    for (Operation& o : operations_) {
      if (o.dot == dot) o.acknowledged = false;
    }
  }
  [[nodiscard]] const std::vector<Operation>& operations() const noexcept { return operations_; }

  /// The first error in a set's marks; empty: none.
  /// @param marks of every entry of a set, each with its id.
  [[nodiscard]] std::string check(const std::vector<std::pair<FragmentId, Mark>>& marks) const {
    const auto held = [&](const Operation& o) {
      return std::find_if(marks.begin(), marks.end(),
                          [&](const auto& m) { return m.first == o.id && m.second.dot == o.dot; });
    };
    for (const Operation& o : operations_) {
      if (!o.acknowledged || o.kind == Operation::Kind::remove) continue;
      const bool removed = observed_by(o.dot, true);
      const bool may_be_removed = removed || observed_by(o.dot, false);
      const auto at = held(o);
      if (at != marks.end() && removed) return text(o) + " was removed and is still in force";
      if (at == marks.end() && !may_be_removed)
        return text(o) + " was acknowledged, never removed, and is gone";
      if (at != marks.end() && !matches(o, at->second))
        return text(o) + " has another confidence or successor than it was given";
    }
    for (const auto& [id, mark] : marks) {
      if (!explained(id, mark))
        return "a mark of agent " + text(mark.dot) + " on fragment " + id.hex().substr(0, 8) +
               " that nobody made";
    }
    return {};
  }

  [[nodiscard]] static std::string text(const Dot& dot) {
    return extend::decimal(dot.agent) + ", epoch " + extend::decimal(dot.epoch) + ", sequence " +
           extend::decimal(dot.sequence);
  }
  [[nodiscard]] static std::string text(const Operation& o) {
    const char* const kind = o.kind == Operation::Kind::insert      ? "insertion"
                             : o.kind == Operation::Kind::supersede ? "supersession"
                                                                    : "removal";
    return std::string(kind) + " of fragment " + o.id.hex().substr(0, 8) + " by agent " +
           text(o.dot);
  }

 private:
  [[nodiscard]] static bool matches(const Operation& o, const Mark& mark) {
    return o.confidence == mark.confidence && o.successor == mark.superseded_by;
  }
  [[nodiscard]] bool observed_by(const Dot& dot, bool acknowledged) const {
    return std::any_of(operations_.begin(), operations_.end(), [&](const Operation& o) {
      return o.kind == Operation::Kind::remove && o.acknowledged == acknowledged &&
             std::find(o.observed.begin(), o.observed.end(), dot) != o.observed.end();
    });
  }
  [[nodiscard]] bool explained(const FragmentId& id, const Mark& mark) const {
    return std::any_of(operations_.begin(), operations_.end(), [&](const Operation& o) {
      const bool same_dot = o.dot.sequence == Operation::unknown_sequence
                                ? o.dot.agent == mark.dot.agent && o.dot.epoch == mark.dot.epoch
                                : o.dot == mark.dot;
      return o.kind != Operation::Kind::remove && o.id == id && same_dot && matches(o, mark);
    });
  }

  std::vector<Operation> operations_;
};

/// The kinds of faults in a simulation.
enum class Fault : std::uint8_t {
  drop,          ///< a message is lost
  duplicate,     ///< a message arrives twice
  reorder,       ///< a message arrives behind a later one of the same sender
  delay,         ///< a message arrives seconds later
  truncate,      ///< a message is truncated
  bit_flip,      ///< a message arrives with one wrong bit
  partition,     ///< members are split into two groups that cannot reach each other, until it heals
  slow_peer,     ///< a member answers late for a while
  crash,         ///< a process ends between two calls
  torn_write,    ///< a process ends in the middle of a write
  restart,       ///< a process starts again, in a new epoch
  old_snapshot,  ///< a disk is restored from an earlier copy
  clock_jump,    ///< a member's clock jumps ahead or back
  disk_full,     ///< a store is full for a while
  store_unavailable,  ///< a store does not answer for a while
  write_refused,      ///< one write fails and has no effect
  write_in_doubt,     ///< one write fails but takes effect
  bit_rot,            ///< a blob or record at rest has one wrong bit
  lying_manifest,     ///< a peer sends a manifest of another fragment, or one with wrong chunks
  lying_chunk,        ///< a peer sends other bytes than the chunk that was asked for
  lying_news,         ///< a peer claims to have seen what it has not
  forged_dot,         ///< a peer acts in the name of the member it writes to
  foreign_dot,        ///< a peer tells one member of another's operation that did not happen
  foreign_removal,    ///< a peer removes in another's name, or removes an operation that has not
                      ///< happened yet
  foreign_gone,       ///< a peer claims that all of another's operations are removed
  flood,              ///< a peer sends operations beyond the quota
  join,               ///< a new member enters while the others compact
  leave,              ///< a member leaves permanently, and its disk is lost
  merger_upgrade,     ///< members restart with another merger, one after the other
};
/// Number of faults.
inline constexpr std::size_t fault_kinds = static_cast<std::size_t>(Fault::merger_upgrade) + 1;

/// The name of a fault, as reports print it.
[[nodiscard]] constexpr std::string_view to_string(Fault fault) noexcept {
  constexpr std::array<std::string_view, fault_kinds> names{
      "drop",          "duplicate",      "reorder",     "delay",           "truncate",
      "bit flip",      "partition",      "slow peer",   "crash",           "torn write",
      "restart",       "old snapshot",   "clock jump",  "disk full",       "store unavailable",
      "write refused", "write in doubt", "bit rot",     "lying manifest",  "lying chunk",
      "lying news",    "forged dot",     "foreign dot", "foreign removal", "foreign gone",
      "flood",         "join",           "leave",       "merger upgrade"};
  return names[static_cast<std::size_t>(fault)];
}

/// How often each kind happened.
struct FaultCounts {
  std::array<std::uint64_t, fault_kinds> of{};

  [[nodiscard]] std::uint64_t& operator[](Fault fault) noexcept {
    return of[static_cast<std::size_t>(fault)];
  }
  [[nodiscard]] std::uint64_t operator[](Fault fault) const noexcept {
    return of[static_cast<std::size_t>(fault)];
  }
  void add(const FaultCounts& other) noexcept {
    for (std::size_t i = 0; i < fault_kinds; ++i) of[i] += other.of[i];
  }
};

/// How likely each kind is; 0 switches it off.
struct Faults {
  // Of one message.
  double drop = 0.08;
  double duplicate = 0.05;
  double reorder = 0.15;
  double delay = 0.02;
  double truncate = 0.01;
  double bit_flip = 0.01;
  // Of one write to a store.
  double write_refused = 0.02;
  double write_in_doubt = 0.02;
  // Of one second, for the whole session or, where it says so, for each member.
  double partition = 0.4;
  double slow_peer = 0.3;
  double crash = 0.15;              ///< a member
  double torn_write = 0.15;         ///< a member
  double old_snapshot = 0.25;       ///< of a restart
  double clock_jump = 0.2;          ///< a member
  double disk_full = 0.15;          ///< a member
  double store_unavailable = 0.15;  ///< a member
  double bit_rot = 0.3;             ///< a member
  double byzantine = 6;  ///< messages a second of a peer that is Byzantine in every way above
  double insider = 0.5;  ///< of a run: that peer is a member
  double join = 0.15;
  double leave = 0.1;
  double merger_upgrade = 0.5;  ///< of a run

  /// No faults.
  [[nodiscard]] static Faults none() noexcept {
    return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  }
};

/// The figures and the first failure of a simulation, for one seed or many.
struct Report {
  std::string failure{};   ///< the first failure, in one sentence; empty: none
  std::uint64_t seed = 0;  ///< of the failure; without one, of the only run
  std::uint64_t runs = 0;
  FaultCounts faults{};
  std::uint64_t events = 0;      ///< messages delivered, ticks and operations
  std::uint64_t messages = 0;    ///< sent
  std::uint64_t cut_off = 0;     ///< messages that a partition stopped
  std::uint64_t inserted = 0;    ///< acknowledged
  std::uint64_t superseded = 0;  ///< acknowledged
  std::uint64_t refreshed = 0;   ///< fragments that their agent read again
  std::uint64_t removed = 0;     ///< acknowledged
  std::uint64_t evicted = 0;
  std::uint64_t unconfirmed = 0;  ///< operations whose call failed and which may have happened
  /// Acknowledged operations on lost disks only: no other member ever received them.
  std::uint64_t lost_operations = 0;
  /// Payloads whose bytes only lost or corrupted disks held: an agent computed them again.
  std::uint64_t lost_payloads = 0;
  std::uint64_t compacted = 0;  ///< operations that ended as ranges of removed dots
  std::uint64_t refused = 0;    ///< frames that members refused
  std::uint64_t unvouched =
      0;  ///< operations that members left out because no other member confirmed them
  /// Times that a member received its own dots before it used them.
  std::uint64_t reused = 0;
  std::uint64_t strikes = 0;  ///< wrong chunks and manifests that members noticed
  std::uint64_t corrupt_records = 0;
  std::uint64_t fetched = 0;  ///< payloads from peers
  /// Times that a member reported another one that renders with another merger.
  std::uint64_t other_mergers = 0;
  /// Simulated time from the last fault to the same state everywhere; the longest of all runs.
  std::uint64_t healed_after_ms = 0;
  std::uint64_t fingerprint = 0;  ///< hash of all deliveries: equal for equal seeds

  [[nodiscard]] bool ok() const noexcept { return failure.empty(); }

  /// The command that runs the failing seed again, alone and with a trace.
  [[nodiscard]] std::string replay() const {
    return "replay: KVMELD_SIM_SEED=" + extend::decimal(seed) + " and the same program";
  }

  /// Adds another run's figures; the first failure stays.
  void add(const Report& other) {
    if (ok() && !other.ok()) {
      failure = other.failure;
      seed = other.seed;
    }
    runs += other.runs;
    faults.add(other.faults);
    each_figure(
        [&](const char*, std::uint64_t Report::*member) { this->*member += other.*member; });
    healed_after_ms =
        healed_after_ms < other.healed_after_ms ? other.healed_after_ms : healed_after_ms;
    fingerprint = fingerprint * 31 + other.fingerprint;
  }

  /// All figures in lines of a name and a number.
  [[nodiscard]] std::string table() const {
    std::string out = line("runs", runs);
    each_figure(
        [&](const char* name, std::uint64_t Report::*member) { out += line(name, this->*member); });
    out += line("longest healing, simulated ms", healed_after_ms);
    for (std::size_t i = 0; i < fault_kinds; ++i)
      out += line("fault: " + std::string(to_string(static_cast<Fault>(i))), faults.of[i]);
    return out;
  }

 private:
  template <class Use>
  static void each_figure(const Use& use) {
    use("events", &Report::events);
    use("messages", &Report::messages);
    use("stopped by partitions", &Report::cut_off);
    use("insertions", &Report::inserted);
    use("supersessions", &Report::superseded);
    use("refreshes", &Report::refreshed);
    use("removals", &Report::removed);
    use("evictions", &Report::evicted);
    use("operations in doubt", &Report::unconfirmed);
    use("operations that only lost disks held", &Report::lost_operations);
    use("payloads that only lost disks held", &Report::lost_payloads);
    use("operations compacted away", &Report::compacted);
    use("frames refused", &Report::refused);
    use("operations that nobody vouched for", &Report::unvouched);
    use("own dots seen elsewhere", &Report::reused);
    use("strikes against peers", &Report::strikes);
    use("corrupt records read", &Report::corrupt_records);
    use("payloads fetched from peers", &Report::fetched);
    use("other mergers noticed", &Report::other_mergers);
  }

  [[nodiscard]] static std::string line(const std::string& name, std::uint64_t value) {
    const std::string number = extend::decimal(value);
    const std::size_t used = name.size() + number.size();
    return name + std::string(used < 48 ? 48 - used : 1, ' ') + number + "\n";
  }
};

/// The geometry of a small model: two layers of one head with 32 channels, f32, rotated keys.
[[nodiscard]] inline std::shared_ptr<const Geometry> small_geometry() {
  auto geometry = std::make_shared<Geometry>();
  geometry->model = "simulated model";
  geometry->tokenizer = "simulated tokenizer";
  const RopeSpec rope = RopeSpec::rotary(32, 10000.0, RopePairing::half_split);
  geometry->layers.assign(2, attention_layer(ElementType::f32, 1, 32, rope));
  return geometry;
}

/// Fills a cache of f32 planes with random K/V in [−4, 4), or with one value that repeats.
inline void fill(HostCache& cache, Random& random, std::optional<float> same = std::nullopt) {
  const std::size_t values = cache.bytes().size() / sizeof(float);
  for (std::size_t v = 0; v < values; ++v) {
    const float drawn = static_cast<float>(random.between(-(1 << 22), (1 << 22) - 1)) * 0x1p-20F;
    const float value = same.value_or(drawn);
    std::memcpy(cache.bytes().data() + v * sizeof(float), &value, sizeof value);
  }
}

/// Fragments of one to four tokens with random K/V in [−4, 4), some of which share tokens or
/// chunks. Its planes must be f32 throughout.
[[nodiscard]] inline Result<std::vector<Fragment>> make_corpus(
    const std::shared_ptr<const Geometry>& geometry, std::size_t count, std::uint64_t seed) {
  std::vector<Fragment> out;
  Random random(seed);
  for (std::size_t i = 0; i < count; ++i) {
    const auto tokens = random.between(1, 4);
    HostCache cache(geometry, tokens);
    const bool repeats = random.chance(0.2);  // equal chunks within the fragment
    fill(cache, random, repeats ? std::optional(static_cast<float>(i + 1) / 16) : std::nullopt);
    std::vector<TokenId> ids;
    std::vector<std::int64_t> positions;
    for (std::int64_t t = 0; t < tokens; ++t) {
      ids.push_back(static_cast<TokenId>(100 + random.below(8)));
      positions.push_back(static_cast<std::int64_t>(3 * i) + t);
    }
    auto fragment = seal(cache.kv_cache_ref(), {.tokens = ids, .positions = positions});
    if (!fragment) return fragment.error();
    out.push_back(*std::move(fragment));
  }
  return out;
}

/// Stored bytes, and the bytes that were written, where they differ.
struct Stored {
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  Bytes now{};
  Bytes written{};

  [[nodiscard]] bool rotten() const noexcept { return now != written; }
};

/// The content of a disk or server. A copy is a snapshot; bytes are shared.
struct SimulatedDisk {
  std::map<BlobKey, Stored> blobs{};
  /// By number; a cursor is the generation and the next number.
  std::map<std::uint64_t, Stored> records{};
  std::uint64_t next_record = 1;
  /// Changes where the content was replaced: a restored server counts as a new one.
  std::uint64_t generation = 1;

  /// Flips one bit of one blob or record. False where there is none.
  bool rot(Random& random) {
    const std::size_t all = blobs.size() + records.size();
    if (all == 0) return false;
    std::size_t at = random.below(all);
    Stored& item =
        at < blobs.size()
            ? std::next(blobs.begin(), static_cast<std::ptrdiff_t>(at))->second
            : std::next(records.begin(), static_cast<std::ptrdiff_t>(at - blobs.size()))->second;
    if (item.now->empty()) return false;
    std::vector<std::byte> bytes = *item.now;
    bytes[random.below(bytes.size())] ^= static_cast<std::byte>(1U << random.below(8));
    item.now = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
    return true;
  }
};

/// A `BlobStore` over a simulated disk, with a switch for each way in which stores fail.
///
/// An acknowledged write persists until the simulation corrupts it or restores the disk from a
/// snapshot. A write that returned an error may have taken effect. A write during which the process
/// ends is absent, complete, or torn, as the contract of `BlobStore` allows; from then on every
/// call fails until `restart`. On a shared disk every member has its own store, as its own
/// connection.
class SimulatedStore final : public replica::BlobStore {
 public:
  SimulatedStore(std::shared_ptr<SimulatedDisk> disk, std::uint64_t seed)
      : disk_(std::move(disk)), random_(seed) {}

  bool full = false;
  bool unavailable = false;
  double refused = 0;   ///< probability that a write fails without effect
  double in_doubt = 0;  ///< probability that a write takes effect and fails
  /// The process ends in the middle of the n-th write from now; 0: it does not.
  std::uint64_t dies_in = 0;
  FaultCounts* counts = nullptr;

  [[nodiscard]] bool crashed() const noexcept { return crashed_; }
  void restart() noexcept { crashed_ = false; }
  [[nodiscard]] const std::shared_ptr<SimulatedDisk>& disk() const noexcept { return disk_; }

  Result<bool> put(const BlobKey& key, std::span<const std::byte> bytes) override {
    KVMELD_TRY(reachable());
    const auto at = disk_->blobs.find(key);
    if (at != disk_->blobs.end() && std::ranges::equal(*at->second.now, bytes)) return false;
    const Outcome outcome = decide();
    if (outcome.happens && outcome.whole) {
      disk_->blobs[key] = stored(bytes);
    }
    if (!outcome.status.ok()) return outcome.status;
    return true;
  }
  Result<Blob> get(const BlobKey& key) override {
    KVMELD_TRY(reachable());
    const auto at = disk_->blobs.find(key);
    if (at == disk_->blobs.end()) return Status(ErrorCode::not_found, "no blob " + key.hex());
    const Stored::Bytes& bytes = at->second.now;
    return Blob{std::shared_ptr<const std::byte[]>(bytes, bytes->data()), bytes->size()};
  }
  Result<bool> contains(const BlobKey& key) override {
    KVMELD_TRY(reachable());
    return disk_->blobs.count(key) != 0;
  }
  Status erase(const BlobKey& key) override {
    KVMELD_TRY(reachable());
    const Outcome outcome = decide();
    if (outcome.happens) disk_->blobs.erase(key);
    return outcome.status;
  }
  Status add_record(std::span<const std::byte> bytes) override {
    KVMELD_TRY(reachable());
    const Outcome outcome = decide();
    if (outcome.happens) {
      const std::size_t size = outcome.whole ? bytes.size() : random_.below(bytes.size());
      disk_->records[disk_->next_record++] = stored(bytes.first(size));
    }
    return outcome.status;
  }
  Result<replica::RecordBatch> records(std::uint64_t cursor) override {
    KVMELD_TRY(reachable());
    replica::RecordBatch batch;
    batch.cursor = cursor_at(disk_->next_record);
    for (auto at = disk_->records.lower_bound(number_of(cursor)); at != disk_->records.end(); ++at)
      batch.records.push_back(*at->second.now);
    return batch;
  }
  Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) override {
    KVMELD_TRY(reachable());
    const Outcome outcome = decide();
    if (outcome.happens && outcome.whole) {
      const auto end = disk_->records.lower_bound(number_of(cursor));
      for (auto at = disk_->records.begin(); at != end;) {
        // A crash during the loop leaves some of the old records.
        at = outcome.status.ok() || random_.chance(0.5) ? disk_->records.erase(at) : std::next(at);
      }
      disk_->records[disk_->next_record++] = stored(bytes);
    }
    return outcome.status;
  }
  /// Identifies the content: a replica that finds another generation than before stores again what
  /// it holds.
  [[nodiscard]] std::uint64_t generation() const noexcept override { return disk_->generation; }

 private:
  struct Outcome {
    Status status;
    bool happens = true;
    bool whole = true;
  };

  static constexpr unsigned number_bits = 40;
  [[nodiscard]] std::uint64_t cursor_at(std::uint64_t number) const noexcept {
    return disk_->generation << number_bits | number;
  }
  /// 0 for a cursor of another generation, which does not apply to this content.
  [[nodiscard]] std::uint64_t number_of(std::uint64_t cursor) const noexcept {
    return cursor >> number_bits == disk_->generation
               ? cursor & ((std::uint64_t{1} << number_bits) - 1)
               : 0;
  }
  [[nodiscard]] static Stored stored(std::span<const std::byte> bytes) {
    std::vector<std::byte> copy;
    copy.reserve(bytes.size() + 1);  // never null, also where it is empty
    copy.assign(bytes.begin(), bytes.end());
    const auto shared = std::make_shared<const std::vector<std::byte>>(std::move(copy));
    return {shared, shared};
  }
  [[nodiscard]] Status reachable() const {
    if (crashed_) return Status(ErrorCode::unavailable, "the process has ended");
    return unavailable ? Status(ErrorCode::unavailable, "the store does not answer") : Status();
  }
  void count(Fault fault) noexcept {
    if (counts != nullptr) ++(*counts)[fault];
  }
  Outcome decide() {
    if (dies_in > 0 && --dies_in == 0) {
      crashed_ = true;
      count(Fault::torn_write);
      return {Status(ErrorCode::unavailable, "the process ended in a write"), random_.chance(0.7),
              random_.chance(0.4)};
    }
    if (full) return {Status(ErrorCode::store_full, "the disk is full"), false, false};
    if (random_.chance(refused)) {
      count(Fault::write_refused);
      return {Status(ErrorCode::unavailable, "the write was refused"), false, false};
    }
    if (random_.chance(in_doubt)) {
      count(Fault::write_in_doubt);
      return {Status(ErrorCode::unavailable, "the write was not confirmed"), true, true};
    }
    return {};
  }

  std::shared_ptr<SimulatedDisk> disk_;
  Random random_;
  bool crashed_ = false;
};

/// A message that has arrived.
struct Delivery {
  replica::MemberId from = 0;
  replica::MemberId to = 0;
  std::vector<std::byte> bytes{};
};

/// Carries messages in simulated time, and drops, duplicates, reorders, delays, truncates and
/// corrupts them as configured.
class SimulatedNetwork {
 public:
  SimulatedNetwork(std::uint64_t seed, FaultCounts& counts) : random_(seed), counts_(&counts) {}

  Faults faults = Faults::none();  ///< only those of messages are read

  /// Members on different sides cannot reach each other; messages in flight are lost as well.
  void set_side(replica::MemberId member, bool side) { sides_[member] = side; }
  void heal() { sides_.clear(); }
  /// Adds to the latency of all messages to and from a member.
  void set_slowness(replica::MemberId member, std::int64_t ms) { slowness_[member] = ms; }

  void send(std::int64_t now_ms, replica::MemberId from, replica::MemberId to,
            std::span<const std::byte> bytes) {
    ++sent_;
    if (random_.chance(faults.drop)) return count(Fault::drop);
    const bool twice = random_.chance(faults.duplicate);
    if (twice) count(Fault::duplicate);
    for (int copy = 0; copy < (twice ? 2 : 1); ++copy) {
      std::vector<std::byte> sent(bytes.begin(), bytes.end());
      if (random_.chance(faults.truncate) && !sent.empty()) {
        sent.resize(random_.below(sent.size()));
        count(Fault::truncate);
      }
      if (random_.chance(faults.bit_flip) && !sent.empty()) {
        sent[random_.below(sent.size())] ^= static_cast<std::byte>(1U << random_.below(8));
        count(Fault::bit_flip);
      }
      std::int64_t takes = 2 + slowness(from) + slowness(to);
      if (random_.chance(faults.reorder) || copy > 0) takes += random_.between(1, 200);
      if (random_.chance(faults.delay)) {
        takes += random_.between(500, 5000);
        count(Fault::delay);
      }
      under_way_.push_back({now_ms + takes, ++number_, {from, to, std::move(sent)}});
      std::push_heap(under_way_.begin(), under_way_.end());
    }
  }

  /// The next message that is due. None: all are later.
  [[nodiscard]] std::optional<Delivery> receive(std::int64_t now_ms) {
    while (!under_way_.empty() && under_way_.front().due <= now_ms) {
      std::pop_heap(under_way_.begin(), under_way_.end());
      UnderWay message = std::move(under_way_.back());
      under_way_.pop_back();
      if (side(message.delivery.from) != side(message.delivery.to)) {
        ++cut_off_;
        continue;
      }
      std::uint64_t& last = last_[{message.delivery.from, message.delivery.to}];
      if (message.number < last) count(Fault::reorder);
      last = (std::max)(last, message.number);
      ++delivered_;
      return std::move(message.delivery);
    }
    return std::nullopt;
  }

  [[nodiscard]] std::uint64_t sent() const noexcept { return sent_; }
  [[nodiscard]] std::uint64_t delivered() const noexcept { return delivered_; }
  /// Messages that a partition stopped.
  [[nodiscard]] std::uint64_t cut_off() const noexcept { return cut_off_; }

 private:
  struct UnderWay {
    std::int64_t due = 0;
    std::uint64_t number = 0;
    Delivery delivery;

    bool operator<(const UnderWay& other) const noexcept {
      return due != other.due ? due > other.due : number > other.number;
    }
  };

  void count(Fault fault) noexcept { ++(*counts_)[fault]; }
  [[nodiscard]] bool side(replica::MemberId member) const {
    const auto at = sides_.find(member);
    return at != sides_.end() && at->second;
  }
  [[nodiscard]] std::int64_t slowness(replica::MemberId member) const {
    const auto at = slowness_.find(member);
    return at == slowness_.end() ? 0 : at->second;
  }

  Random random_;
  FaultCounts* counts_;
  std::vector<UnderWay> under_way_;  // a heap, the earliest in front
  std::map<replica::MemberId, bool> sides_;
  std::map<replica::MemberId, std::int64_t> slowness_;
  std::map<std::pair<replica::MemberId, replica::MemberId>, std::uint64_t> last_;
  std::uint64_t number_ = 0;
  std::uint64_t sent_ = 0;
  std::uint64_t delivered_ = 0;
  std::uint64_t cut_off_ = 0;
};

/// A Byzantine peer: it serves other bytes than were requested, acts in other members' names,
/// claims that their operations were removed or that they did others, and floods.
///
/// It stays within the faults that replicas tolerate (docs/convergence.md). As a non-member it may
/// send anything. As a member it does not invent complete operations of another member before that
/// one was heard, nor operations of an agent's earlier epoch towards that agent; and in neither
/// role does it announce fragments under its own dots that nobody can serve.
class ByzantinePeer {
 public:
  static constexpr replica::MemberId id = 1'000'000;

  ByzantinePeer(std::uint64_t seed, std::vector<Fragment> corpus, std::size_t chunk_bytes,
                std::uint64_t max_operations, bool member, FaultCounts& counts)
      : random_(seed),
        corpus_(std::move(corpus)),
        chunk_bytes_(chunk_bytes),
        max_operations_(max_operations),
        member_(member),
        counts_(&counts) {}

  /// A running epoch of a member.
  struct Life {
    replica::MemberId member;
    std::uint64_t epoch;
  };

  struct Lie {
    replica::MemberId to;
    std::vector<std::byte> frame;
    bool at_once = false;  ///< delivered while the victim is in the epoch that the lie is about
  };

  /// Reads a message, and answers a request with something wrong, or not at all.
  [[nodiscard]] std::vector<Lie> hear(const Delivery& delivery) {
    const auto frame = replica::decode_frame(delivery.bytes);
    if (!frame) return {};
    const auto body = kvmeld::replica::messages::decode_body(frame->body);
    if (!body) return {};
    if (frame->type == static_cast<std::uint8_t>(replica::ReplicaMessage::news)) {
      if (const auto news = kvmeld::replica::messages::decode_news(body->rest))
        heard_.join(news->context);
    }
    if (frame->type != static_cast<std::uint8_t>(replica::ReplicaMessage::fetch)) return {};
    const auto fetch = kvmeld::replica::messages::decode_fetch(body->rest);
    if (!fetch || random_.chance(0.2)) return {};
    if (random_.chance(0.1))
      return {lie(delivery.from, replica::ReplicaMessage::lacking,
                  piece(fetch->id, manifest_key(fetch->id), {}))};
    if (fetch->chunks.empty())
      return {lie(delivery.from, replica::ReplicaMessage::manifest,
                  piece(fetch->id, manifest_key(fetch->id), false_manifest(fetch->id)))};
    std::vector<Lie> out;
    for (const BlobKey& key : fetch->chunks)
      out.push_back(
          lie(delivery.from, replica::ReplicaMessage::chunk, piece(fetch->id, key, false_chunk())));
    return out;
  }

  /// An unsolicited lie to a member, about itself or another, which may be the same.
  [[nodiscard]] Lie act(const Life& victim, const Life& other) {
    const Fragment& some = corpus_[random_.below(corpus_.size())];
    switch (random_.below(7)) {
      case 0: {
        CausalContext claimed = heard_;
        claimed.add({id, random_.below(5), 1});
        if (random_.chance(0.2))
          claimed.add({other.member, 10'000 + random_.below(1000), other.epoch});
        ++(*counts_)[Fault::lying_news];
        return lie(
            victim.member, replica::ReplicaMessage::news,
            kvmeld::replica::messages::encode(kvmeld::replica::messages::News{claimed, {}, 1}));
      }
      case 1:
        return forge(victim.member, some,
                     {victim.member, 10'000 + random_.below(1000), victim.epoch},
                     Fault::forged_dot);
      case 2: {
        FragmentSet flood;
        for (std::uint64_t n = 0; n < 20; ++n) {
          (void)flood.insert(corpus_[random_.below(corpus_.size())],
                             {id, max_operations_ + random_.below(1U << 20U), 1});
        }
        ++(*counts_)[Fault::flood];
        return lie(victim.member, replica::ReplicaMessage::delta, replica::encode_set(flood));
      }
      // in the name of a known member, including operations that it has done already
      case 3: {
        if (member_) return end(victim, other);
        return forge(victim.member, some, {other.member, random_.below(20), other.epoch},
                     Fault::foreign_dot);
      }
      case 4:
        return end(victim, other);
      case 5: {
        CausalContext gone;
        gone.append({other.member, other.epoch, 0, max_operations_ - 1});
        auto claim = FragmentSet::from_parts({}, {}, {}, gone);
        ++(*counts_)[Fault::foreign_gone];
        return at_once(lie(victim.member, replica::ReplicaMessage::delta,
                           claim ? replica::encode_set(*claim) : std::vector<std::byte>()));
      }
      default:
        return lie(victim.member, replica::ReplicaMessage::manifest,
                   piece(some.id(), manifest_key(some.id()), false_manifest(some.id())));
    }
  }

 private:
  [[nodiscard]] static Lie at_once(Lie lie) {
    lie.at_once = true;
    return lie;
  }
  [[nodiscard]] Lie forge(replica::MemberId to, const Fragment& fragment, const Dot& dot,
                          Fault fault) {
    FragmentSet forged;
    (void)forged.insert(fragment, dot, 4.0F);
    ++(*counts_)[fault];
    return at_once(lie(to, replica::ReplicaMessage::delta, replica::encode_set(forged)));
  }
  /// Removes an operation that another member has not done yet: in its own name or, as a
  /// non-member, in that member's.
  [[nodiscard]] Lie end(const Life& victim, const Life& other) {
    Removal removal{{id, random_.below(20), 1}, corpus_[random_.below(corpus_.size())].id(), {}};
    if (!member_ && random_.chance(0.5))
      removal.dot = {other.member, 5'000 + random_.below(20), other.epoch};
    const std::uint64_t from = 10'000 + random_.below(1000);
    for (std::uint64_t n = 0; n < 8; ++n)
      removal.removed.push_back({other.member, from + n, other.epoch});
    auto set = FragmentSet::from_parts({}, {}, {removal}, {});
    ++(*counts_)[Fault::foreign_removal];
    return at_once(lie(victim.member, replica::ReplicaMessage::delta,
                       set ? replica::encode_set(*set) : std::vector<std::byte>()));
  }
  [[nodiscard]] Lie lie(replica::MemberId to, replica::ReplicaMessage type,
                        std::span<const std::byte> body) {
    auto frame = encode_replica_frame(type, Digest128{random_.next(), 1}, body);
    return {to, frame ? *std::move(frame) : std::vector<std::byte>(), false};
  }
  [[nodiscard]] static std::vector<std::byte> piece(const FragmentId& of, const BlobKey& key,
                                                    std::span<const std::byte> bytes) {
    return kvmeld::replica::messages::encode(kvmeld::replica::messages::Piece{of, key, bytes});
  }
  [[nodiscard]] std::vector<std::byte> false_chunk() {
    ++(*counts_)[Fault::lying_chunk];
    const Payload& payload = corpus_[random_.below(corpus_.size())].payloads()[0];
    // another chunk, well-formed
    auto bytes = replica::encode_chunk(replica::raw_chunk(payload, 0, chunk_bytes_));
    if (random_.chance(0.3)) bytes.resize(random_.below(bytes.size() + 1));
    if (random_.chance(0.3)) bytes.assign(random_.below(64), std::byte{0xA5});
    return bytes;
  }
  /// The manifest of another fragment, or the right one with chunks that nobody has.
  [[nodiscard]] std::vector<std::byte> false_manifest(const FragmentId& of) {
    ++(*counts_)[Fault::lying_manifest];
    const Fragment* told = &corpus_[random_.below(corpus_.size())];
    const bool right = random_.chance(0.7);
    for (const Fragment& fragment : corpus_) {
      if (right && fragment.id() == of) told = &fragment;
    }
    auto manifest =
        replica::make_manifest(*told, random_.chance(0.3) ? chunk_bytes_ / 2 : chunk_bytes_);
    if (!manifest) return {};
    if (random_.chance(0.7)) {
      for (auto& keys : manifest->chunks) {
        if (!keys.empty()) keys[random_.below(keys.size())].bytes[9] ^= 0x55U;
      }
    }
    auto bytes = replica::encode_manifest(*manifest);
    if (random_.chance(0.1)) bytes.resize(random_.below(bytes.size()));
    return bytes;
  }

  Random random_;
  std::vector<Fragment> corpus_;
  std::size_t chunk_bytes_;
  std::uint64_t max_operations_;
  bool member_;
  FaultCounts* counts_;
  CausalContext heard_;
};

}  // namespace testing

KVMELD_NAMESPACE_END
