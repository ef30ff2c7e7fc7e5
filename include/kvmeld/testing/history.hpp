#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/cache/metadata.hpp>
#include <kvmeld/decimal.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// What an agent did, in the words of a log.
struct Operation {
  enum class Kind : std::uint8_t { insert, supersede, remove };
  Kind kind = Kind::insert;
  /// False: the call failed, and the operation may have happened or not.
  bool acknowledged = false;
  Provenance dot{};  ///< `unknown_sequence` where the call failed
  FragmentId id{};
  std::optional<float> confidence{};
  FragmentId successor{};
  std::vector<Provenance> observed{};  ///< of a removal: the marks that the agent saw

  static constexpr std::uint64_t unknown_sequence = ~std::uint64_t{0};
};

/// A plain list of what was done, kept apart from the library, and what must therefore be in every
/// set at the end.
///
/// The reference is one sentence: a mark is in force if its operation happened and no removal that
/// had observed it happened. What was acknowledged happened, unless nobody holds it any more and a
/// fault explains that (`forget`).
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
  /// An acknowledged operation that only lost disks held: from now on it may have happened or not.
  void forget(const Provenance& dot) {
    for (Operation& o : operations_) {
      if (o.dot == dot) o.acknowledged = false;
    }
  }
  [[nodiscard]] const std::vector<Operation>& operations() const noexcept { return operations_; }

  /// What is wrong with a set's marks; empty: nothing.
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

  [[nodiscard]] static std::string text(const Provenance& dot) {
    return detail::decimal(dot.agent) + ", epoch " + detail::decimal(dot.epoch) + ", sequence " +
           detail::decimal(dot.sequence);
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
  [[nodiscard]] bool observed_by(const Provenance& dot, bool acknowledged) const {
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

}  // namespace testing
KVMELD_NAMESPACE_END
