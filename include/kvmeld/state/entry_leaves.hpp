#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/metadata.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a set knows of one id.
struct SetEntry {
  FragmentId id;
  Fragment fragment;  ///< not valid() where nothing but the id has arrived; its payloads' bytes may be evicted
  Metadata metadata;

  /// Whether every payload's bytes are here.
  [[nodiscard]] bool complete() const noexcept {
    if (!fragment.valid()) return false;
    for (const Payload& payload : fragment.payloads()) {
      if (payload.bytes == nullptr) return false;
    }
    return true;
  }
};

namespace detail {

/// A pointer whose copies share, until one of them wants to write.
///
/// `unique` synchronises with the release of every other copy, which `shared_ptr::use_count` does not: copies live in other threads.
template <class T>
class CowPtr {
 public:
  CowPtr() : node_(new Node) {}
  CowPtr(const CowPtr& other) noexcept : node_(other.node_) { node_->count.fetch_add(1, std::memory_order_relaxed); }
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
  /// The value to write to, copied first where somebody else reads it.
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

/// Entries of neighbouring ids. Ids and digests lie apart, since a join walks them and mostly finds them equal.
struct Leaf {
  std::vector<FragmentId> ids;
  std::vector<Digest128> tags;  ///< of the entries' digests
  std::vector<SetEntry> entries;
};

/// Entries in ascending order of id, in leaves of bounded size: a copy costs a pointer a leaf, a change one leaf.
class EntryLeaves {
 public:
  static constexpr std::size_t leaf_size = 128;

  class Iterator {
   public:
    using value_type = SetEntry;
    using difference_type = std::ptrdiff_t;
    using reference = const SetEntry&;
    using pointer = const SetEntry*;
    using iterator_category = std::forward_iterator_tag;
    Iterator() = default;
    Iterator(const CowPtr<Leaf>* leaf, std::size_t at) noexcept : leaf_(leaf), at_(at) {}
    [[nodiscard]] const SetEntry& operator*() const noexcept { return (*leaf_)->entries[at_]; }
    [[nodiscard]] const SetEntry* operator->() const noexcept { return &**this; }
    [[nodiscard]] const FragmentId& id() const noexcept { return (*leaf_)->ids[at_]; }
    [[nodiscard]] const Digest128& tag() const noexcept { return (*leaf_)->tags[at_]; }
    Iterator& operator++() noexcept {
      if (++at_ == (*leaf_)->ids.size()) {
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

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] Iterator begin() const noexcept { return {leaves_.data(), 0}; }
  [[nodiscard]] Iterator end() const noexcept { return {leaves_.data() + leaves_.size(), 0}; }

  /// Null where the id is not there. O(log n).
  [[nodiscard]] const SetEntry* find(const FragmentId& id) const noexcept {
    if (leaves_.empty()) return nullptr;
    const Leaf& leaf = *leaves_[leaf_of(id)];
    const auto at = std::lower_bound(leaf.ids.begin(), leaf.ids.end(), id);
    return at != leaf.ids.end() && *at == id ? &leaf.entries[static_cast<std::size_t>(at - leaf.ids.begin())] : nullptr;
  }
  /// Inserts an entry, or replaces the one of its id. O(log n + leaf_size).
  void put(SetEntry entry, const Digest128& tag) {
    if (leaves_.empty()) leaves_.emplace_back();  // not empty for long
    const std::size_t l = size_ == 0 ? 0 : leaf_of(entry.id);
    Leaf& leaf = leaves_[l].own();
    const auto at = std::lower_bound(leaf.ids.begin(), leaf.ids.end(), entry.id) - leaf.ids.begin();
    const auto i = static_cast<std::size_t>(at);
    if (i < leaf.ids.size() && leaf.ids[i] == entry.id) {
      leaf.tags[i] = tag;
      leaf.entries[i] = std::move(entry);
      return;
    }
    leaf.ids.insert(leaf.ids.begin() + at, entry.id);
    leaf.tags.insert(leaf.tags.begin() + at, tag);
    leaf.entries.insert(leaf.entries.begin() + at, std::move(entry));
    ++size_;
    if (leaf.ids.size() > leaf_size) split(l, i + 1 == leaf.ids.size() && l + 1 == leaves_.size());
  }
  /// Takes an entry out that must be there. O(log n + leaf_size).
  void erase(const FragmentId& id) {
    const std::size_t l = leaf_of(id);
    Leaf& leaf = leaves_[l].own();
    const auto at = std::lower_bound(leaf.ids.begin(), leaf.ids.end(), id) - leaf.ids.begin();
    leaf.ids.erase(leaf.ids.begin() + at);
    leaf.tags.erase(leaf.tags.begin() + at);
    leaf.entries.erase(leaf.entries.begin() + at);
    --size_;
    if (leaf.ids.empty()) leaves_.erase(leaves_.begin() + static_cast<std::ptrdiff_t>(l));
  }

 private:
  /// The last leaf that begins at or before an id, or the first.
  [[nodiscard]] std::size_t leaf_of(const FragmentId& id) const noexcept {
    const auto after = std::upper_bound(leaves_.begin(), leaves_.end(), id,
                                        [](const FragmentId& key, const CowPtr<Leaf>& leaf) { return key < leaf->ids.front(); });
    return after == leaves_.begin() ? 0 : static_cast<std::size_t>(after - leaves_.begin()) - 1;
  }
  /// Cuts a leaf in two; one that grew at the very end keeps nearly all, so that ascending insertion fills leaves.
  void split(std::size_t l, bool ascending) {
    CowPtr<Leaf> right;
    Leaf& left = leaves_[l].own();
    Leaf& to = right.own();
    const auto cut = static_cast<std::ptrdiff_t>(ascending ? left.ids.size() - 1 : left.ids.size() / 2);
    const auto move_tail = [&](auto& from, auto& into) {
      into.reserve(leaf_size + 1);
      into.assign(std::make_move_iterator(from.begin() + cut), std::make_move_iterator(from.end()));
      from.resize(static_cast<std::size_t>(cut));
    };
    move_tail(left.ids, to.ids);
    move_tail(left.tags, to.tags);
    move_tail(left.entries, to.entries);
    leaves_.insert(leaves_.begin() + static_cast<std::ptrdiff_t>(l) + 1, std::move(right));
  }

  std::vector<CowPtr<Leaf>> leaves_;  // none empty
  std::size_t size_ = 0;
};

}  // namespace detail

KVMELD_NAMESPACE_END
