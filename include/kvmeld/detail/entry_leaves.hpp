#pragma once

/// The persistent map that a fragment set keeps its entries in.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/metadata.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a set knows of one id.
struct SetEntry {
  FragmentId id{};
  /// Not valid() where only the id has arrived; its payloads' bytes may be evicted.
  Fragment fragment{};
  Metadata metadata{};

  /// Whether every payload's bytes are here.
  [[nodiscard]] KVMELD_API bool complete() const noexcept;
};

namespace detail {

/// A copy-on-write pointer: copies share the value until one of them writes.
///
/// Copies may be in other threads: `unique` synchronises with the release of every other copy,
/// which `shared_ptr::use_count` does not.
template <class T>
class CowPtr {
 public:
  CowPtr() : node_(new Node) {}
  CowPtr(const CowPtr& other) noexcept : node_(other.node_) {
    node_->count.fetch_add(1, std::memory_order_relaxed);
  }
  CowPtr(CowPtr&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  CowPtr& operator=(CowPtr other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~CowPtr() {
    if (node_ != nullptr && node_->count.fetch_sub(1, std::memory_order_acq_rel) == 1) delete node_;
  }

  [[nodiscard]] const T& operator*() const noexcept { return node_->value; }
  [[nodiscard]] const T* operator->() const noexcept { return &node_->value; }
  [[nodiscard]] bool same(const CowPtr& other) const noexcept { return node_ == other.node_; }
  /// The value for writing, copied first where it is shared.
  [[nodiscard]] T& own() {
    if (node_->count.load(std::memory_order_acquire) != 1) {
      CowPtr copy;
      copy.node_->value = node_->value;
      *this = std::move(copy);
    }
    return node_->value;
  }

 private:
  struct Node {
    std::atomic<std::size_t> count{1};
    T value;
  };
  Node* node_;
};

/// The summary of an entry that a walk reads: half of its id, most significant byte first, and 64
/// bits of its digest, of which the lowest says whether all payload bytes are present.
struct Probe {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  std::uint64_t tag = 0;

  [[nodiscard]] bool same_prefix(const Probe& other) const noexcept {
    return high == other.high && low == other.low;
  }
  [[nodiscard]] bool before(const Probe& other) const noexcept {
    return high != other.high ? high < other.high : low < other.low;
  }
  [[nodiscard]] bool complete() const noexcept { return (tag & 1U) != 0; }
};

[[nodiscard]] KVMELD_API Probe probe_of(const FragmentId& id, std::uint64_t tag = 0) noexcept;

/// Entries of a range of ids. The probes are stored separately, since a join walks them and mostly
/// finds them equal.
struct Leaf {
  std::vector<Probe> probes;
  // never null, never changed: copies of a leaf share them
  std::vector<std::shared_ptr<const SetEntry>> entries;

  /// The first entry whose id is not below the given one. O(log leaf_size).
  [[nodiscard]] std::size_t lower_bound(const FragmentId& id) const noexcept {
    const Probe key = probe_of(id);
    std::size_t first = 0;
    for (std::size_t count = probes.size(); count > 0;) {
      const std::size_t half = count / 2;
      if (probes[first + half].before(key)) {
        first += half + 1;
        count -= half + 1;
      } else {
        count = half;
      }
    }
    while (first < probes.size() && probes[first].same_prefix(key) && entries[first]->id < id)
      ++first;
    return first;
  }
};

/// Entries in ascending order of id, in leaves of bounded size: a copy costs a pointer a leaf, a
/// change one leaf.
class EntryLeaves {
 public:
  static constexpr std::size_t leaf_size = 48;

  class Iterator {
   public:
    using value_type = SetEntry;
    using difference_type = std::ptrdiff_t;
    using reference = const SetEntry&;
    using pointer = const SetEntry*;
    using iterator_category = std::forward_iterator_tag;
    Iterator() = default;
    Iterator(const CowPtr<Leaf>* leaf, std::size_t at) noexcept : leaf_(leaf), at_(at) {}
    [[nodiscard]] const SetEntry& operator*() const noexcept { return *(*leaf_)->entries[at_]; }
    [[nodiscard]] const SetEntry* operator->() const noexcept { return &**this; }
    Iterator& operator++() noexcept {
      if (++at_ == (*leaf_)->entries.size()) {
        ++leaf_;
        at_ = 0;
      }
      return *this;
    }
    Iterator operator++(int) noexcept {
      Iterator before = *this;
      ++*this;
      return before;
    }
    bool operator==(const Iterator&) const = default;

   private:
    const CowPtr<Leaf>* leaf_ = nullptr;
    std::size_t at_ = 0;
  };

  /// A walk over probes that reads an entry only on request.
  class Walk {
   public:
    explicit Walk(const EntryLeaves& all) noexcept
        : leaf_(all.leaves_.data()), end_(leaf_ + all.leaves_.size()) {
      enter();
    }
    [[nodiscard]] bool done() const noexcept { return leaf_ == end_; }
    [[nodiscard]] const Probe& probe() const noexcept { return *at_; }
    [[nodiscard]] const SetEntry& entry() const noexcept {
      return *(*leaf_)->entries[static_cast<std::size_t>(at_ - (*leaf_)->probes.data())];
    }
    void next() noexcept {
      if (++at_ != stop_) return;
      ++leaf_;
      enter();
    }

   private:
    void enter() noexcept {
      if (leaf_ == end_) return;
      at_ = (*leaf_)->probes.data();
      stop_ = at_ + (*leaf_)->probes.size();
#if defined(__GNUC__)
      if (leaf_ + 1 !=
          end_) {  // leaves are scattered, and hardware prefetching stops at their ends
        const auto* const next = reinterpret_cast<const char*>(leaf_[1]->probes.data());
        for (std::size_t line = 0; line < 8; ++line) __builtin_prefetch(next + 64 * line);
      }
#endif
    }
    const CowPtr<Leaf>* leaf_;
    const CowPtr<Leaf>* end_;
    const Probe* at_ = nullptr;
    const Probe* stop_ = nullptr;
  };

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] Iterator begin() const noexcept { return {leaves_.data(), 0}; }
  [[nodiscard]] Iterator end() const noexcept { return {leaves_.data() + leaves_.size(), 0}; }

  /// Null where the id is not there. O(log n).
  [[nodiscard]] const SetEntry* find(const FragmentId& id) const noexcept {
    if (leaves_.empty()) return nullptr;
    const Leaf& leaf = *leaves_[leaf_of(id)];
    const std::size_t i = leaf.lower_bound(id);
    return i < leaf.entries.size() && leaf.entries[i]->id == id ? leaf.entries[i].get() : nullptr;
  }
  /// Inserts an entry, or replaces the one of its id. O(log n + leaf_size).
  KVMELD_API void put(SetEntry entry, std::uint64_t tag);
  /// Removes an entry that must exist. O(log n + leaf_size).
  KVMELD_API void erase(const FragmentId& id);

 private:
  /// The last leaf whose first id is not above the given one, or the first leaf.
  [[nodiscard]] std::size_t leaf_of(const FragmentId& id) const noexcept {
    const Probe key = probe_of(id);
    const auto begins_behind = [&](std::size_t l) {
      return firsts_[l].same_prefix(key) ? id < leaves_[l]->entries.front()->id
                                         : key.before(firsts_[l]);
    };
    std::size_t after = 0;
    for (std::size_t count = firsts_.size(); count > 0;) {
      const std::size_t half = count / 2;
      if (begins_behind(after + half)) {
        count = half;
      } else {
        after += half + 1;
        count -= half + 1;
      }
    }
    return after == 0 ? 0 : after - 1;
  }
  /// Splits a leaf in two; a leaf that grew at its end keeps nearly all entries, so that ascending
  /// insertion fills leaves.
  KVMELD_API void split(std::size_t l, bool ascending);

  std::vector<CowPtr<Leaf>> leaves_;  // none empty
  std::vector<Probe> firsts_;         // of each leaf: the search for a leaf reads nothing else
  std::size_t size_ = 0;
};

}  // namespace detail

KVMELD_NAMESPACE_END
