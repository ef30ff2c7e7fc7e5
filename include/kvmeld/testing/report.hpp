#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <kvmeld/decimal.hpp>
#include <kvmeld/testing/faults.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// What a simulation did and found, of one seed or of many.
struct Report {
  std::string failure{};   ///< the first thing that went wrong, in one sentence; empty: nothing did
  std::uint64_t seed = 0;  ///< of the failure; of the only run where there was none
  std::uint64_t runs = 0;
  FaultCounts faults{};
  std::uint64_t events = 0;      ///< messages delivered, ticks and operations
  std::uint64_t messages = 0;    ///< sent
  std::uint64_t cut_off = 0;     ///< messages that a partition stopped
  std::uint64_t inserted = 0;    ///< acknowledged
  std::uint64_t superseded = 0;  ///< acknowledged
  std::uint64_t removed = 0;     ///< acknowledged
  std::uint64_t evicted = 0;
  std::uint64_t unconfirmed = 0;  ///< operations whose call failed and which may have happened
  /// Acknowledged, on lost disks only: nobody else had ever received them.
  std::uint64_t lost_operations = 0;
  /// Whose bytes lost or rotten disks alone held: an agent produced them again.
  std::uint64_t lost_payloads = 0;
  std::uint64_t compacted = 0;  ///< operations that ended as ranges of what is gone
  std::uint64_t refused = 0;    ///< frames that members refused
  std::uint64_t unvouched = 0;  ///< operations that members left out since nobody vouched for them
  /// Times that a member was told of its own dots before it gave them out.
  std::uint64_t reused = 0;
  std::uint64_t strikes = 0;  ///< wrong pieces that members noticed
  std::uint64_t corrupt_records = 0;
  std::uint64_t fetched = 0;  ///< payloads from peers
  /// Times that a member named another one as rendering with another merger.
  std::uint64_t other_mergers = 0;
  /// Simulated time from the last fault to the same state everywhere; the longest of all runs.
  std::uint64_t healed_after_ms = 0;
  std::uint64_t fingerprint = 0;  ///< of everything delivered: the same seed gives the same one

  [[nodiscard]] bool ok() const noexcept { return failure.empty(); }

  /// What runs the failing seed again, alone and with a trace.
  [[nodiscard]] std::string replay() const {
    return "replay: KVMELD_SIM_SEED=" + detail::decimal(seed) + " and the same program";
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
    const std::string number = detail::decimal(value);
    const std::size_t used = name.size() + number.size();
    return name + std::string(used < 48 ? 48 - used : 1, ' ') + number + "\n";
  }
};

}  // namespace testing
KVMELD_NAMESPACE_END
