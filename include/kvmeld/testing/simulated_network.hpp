#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/session/transport.hpp>
#include <kvmeld/testing/faults.hpp>
#include <kvmeld/testing/random.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// A message that has arrived.
struct Delivery {
  MemberId from = 0;
  MemberId to = 0;
  std::vector<std::byte> bytes{};
};

/// Carries messages in simulated time, and loses, repeats, reorders, delays, cuts and damages them
/// as it is told.
class SimulatedNetwork {
 public:
  SimulatedNetwork(std::uint64_t seed, FaultCounts& counts) : random_(seed), counts_(&counts) {}

  Faults faults = Faults::none();  ///< those of messages are read

  /// Members on different sides do not hear each other, what is under way included.
  void set_side(MemberId member, bool side) { sides_[member] = side; }
  void heal() { sides_.clear(); }
  /// Adds to the time that everything to and from a member takes; 0: as the others.
  void set_slowness(MemberId member, std::int64_t ms) { slowness_[member] = ms; }

  void send(std::int64_t now_ms, MemberId from, MemberId to, std::span<const std::byte> bytes) {
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
  [[nodiscard]] bool side(MemberId member) const {
    const auto at = sides_.find(member);
    return at != sides_.end() && at->second;
  }
  [[nodiscard]] std::int64_t slowness(MemberId member) const {
    const auto at = slowness_.find(member);
    return at == slowness_.end() ? 0 : at->second;
  }

  Random random_;
  FaultCounts* counts_;
  std::vector<UnderWay> under_way_;  // a heap, the earliest in front
  std::map<MemberId, bool> sides_;
  std::map<MemberId, std::int64_t> slowness_;
  std::map<std::pair<MemberId, MemberId>, std::uint64_t> last_;
  std::uint64_t number_ = 0;
  std::uint64_t sent_ = 0;
  std::uint64_t delivered_ = 0;
  std::uint64_t cut_off_ = 0;
};

}  // namespace testing
KVMELD_NAMESPACE_END
