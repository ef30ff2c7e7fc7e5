#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/anchor.hpp>
#include <kvmeld/anchor/eviction.hpp>
#include <kvmeld/anchor/hamming_scan.hpp>
#include <kvmeld/anchor/multi_index.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Uses of one anchor, shared by all versions of a table, counted by readers.
struct UseCell {
  std::uint64_t inserted = 0;
  std::atomic<std::uint64_t> last_used{0};
  std::atomic<std::uint64_t> uses{0};

  [[nodiscard]] AnchorUse read() const noexcept {
    return {inserted, last_used.load(std::memory_order_relaxed),
            uses.load(std::memory_order_relaxed)};
  }
  void touch(std::uint64_t tick) noexcept {
    std::uint64_t seen = last_used.load(std::memory_order_relaxed);
    while (seen < tick && !last_used.compare_exchange_weak(seen, tick, std::memory_order_relaxed)) {
    }
  }
};

}  // namespace detail

/// Anchors by number, with their signatures side by side for scans: a value whose copies share
/// pages.
///
/// A copy is one table of pointers; a change replaces the one or two pages that it touches, so
/// copies that differ by a few anchors share the rest: what a pool publishes, and what an agent
/// keeps and changes for itself. Numbers are dense; erasing moves the last anchor into the gap.
/// Reading is safe from any thread, changing from one.
class AnchorTable {
 public:
  struct Row {
    std::shared_ptr<const Anchor> anchor;
    std::shared_ptr<detail::UseCell> use;
  };

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] const Row& row(std::size_t i) const noexcept {
    return (*pages_[i / page_rows])[i % page_rows];
  }
  [[nodiscard]] const std::shared_ptr<const Anchor>& anchor(std::size_t i) const noexcept {
    return row(i).anchor;
  }
  [[nodiscard]] std::uint64_t signature(std::size_t i) const noexcept {
    const Block& block = *blocks_[i / block_signatures];
    return std::uint64_t{block.high[i % block_signatures]} << 32U | block.low[i % block_signatures];
  }
  /// Bytes that `Anchor::bytes` counts, of all anchors.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

  void push_back(std::uint64_t signature, Row row) {
    if (size_ % block_signatures == 0) blocks_.push_back(std::make_shared<const Block>());
    if (size_ % page_rows == 0) pages_.push_back(std::make_shared<const Page>());
    bytes_ += row.anchor->bytes();
    ++size_;
    sign(size_ - 1, signature);
    put(size_ - 1, std::move(row));
    file();
  }
  /// Appends many rows at once, each page copied once.
  void append(std::span<const std::uint64_t> signatures, const Row& row) {
    // numbers that it knows are given anew
    if (index_ != nullptr && size_ < index_->size()) index_ = nullptr;
    for (std::size_t at = 0; at < signatures.size();) {
      if (size_ % block_signatures == 0) blocks_.push_back(std::make_shared<const Block>());
      if (size_ % page_rows == 0) pages_.push_back(std::make_shared<const Page>());
      auto block = std::make_shared<Block>(*blocks_.back());
      auto page = std::make_shared<Page>(*pages_.back());
      do {
        block->low[size_ % block_signatures] = static_cast<std::uint32_t>(signatures[at]);
        block->high[size_ % block_signatures] = static_cast<std::uint32_t>(signatures[at] >> 32U);
        (*page)[size_ % page_rows] = row;
        bytes_ += row.anchor->bytes();
        ++size_;
        ++at;
      } while (at < signatures.size() && size_ % page_rows != 0);
      blocks_.back() = std::move(block);
      pages_.back() = std::move(page);
    }
    file();
  }
  /// Another version of anchor i.
  void replace(std::size_t i, std::shared_ptr<const Anchor> anchor) {
    Row next = row(i);
    bytes_ -= next.anchor->bytes();
    bytes_ += anchor->bytes();
    next.anchor = std::move(anchor);
    put(i, std::move(next));
  }
  /// Removes anchor i; the last one takes its number.
  void erase(std::size_t i) {
    const std::size_t last = size_ - 1;
    bytes_ -= row(i).anchor->bytes();
    if (i != last) {
      sign(i, signature(last));
      put(i, row(last));
    }
    put(last, {});
    size_ = last;
    if (size_ % page_rows == 0) pages_.pop_back();
    if (size_ % block_signatures == 0) blocks_.pop_back();
    file();
  }

  /// Appends the numbers of anchors whose signatures differ from `query` in at most `max_distance`
  /// bits, ascending. Many signatures are filed in a `MultiIndex`, which is asked where it is the
  /// faster way; else O(n / 16) vector steps.
  void scan(std::uint64_t query, int max_distance, std::vector<HammingHit>& hits,
            ScanIsa isa = best_scan_isa()) const {
    std::size_t from = 0;
    if (index_ != nullptr) {
      const auto first_hit = static_cast<std::ptrdiff_t>(hits.size());
      if (index_->find(query, max_distance, hits, isa)) {
        from = (std::min)(size_, std::size_t{index_->size()});
        look_at_changed(query, max_distance, hits, first_hit);
      }
    }
    for (std::size_t b = from / block_signatures; b < blocks_.size(); ++b) {
      const std::size_t first = (std::max)(b * block_signatures, from),
                        skip = first % block_signatures;
      const auto count =
          static_cast<std::uint32_t>((std::min)(size_ - first, block_signatures - skip));
      const std::uint32_t* const next =
          b + 1 < blocks_.size() ? blocks_[b + 1]->low.data() : nullptr;
      hamming_scan({blocks_[b]->low.data() + skip, blocks_[b]->high.data() + skip, count}, query,
                   max_distance, hits, static_cast<std::uint32_t>(first), next, isa);
    }
  }

 private:
  static constexpr std::size_t block_signatures = 2048;
  static constexpr std::size_t page_rows = 64;
  struct alignas(64) Block {
    std::array<std::uint32_t, block_signatures> low{};
    std::array<std::uint32_t, block_signatures> high{};
  };
  using Page = std::array<Row, page_rows>;
  // below, a scan takes a few microseconds
  static constexpr std::size_t index_from = std::size_t{1} << 16U;

  /// Files all signatures anew where a 32nd of them, or more, stands beside the index.
  KVMELD_LAZY void file() {
    if (size_ < index_from) {
      index_ = nullptr;
      changed_.clear();
      return;
    }
    const std::size_t filed = index_ == nullptr ? 0 : index_->size();
    if ((filed < size_ ? size_ - filed : filed - size_) + changed_.size() <= size_ / 32) return;
    std::vector<std::uint64_t> signatures;
    signatures.reserve(size_);
    for (std::size_t i = 0; i < size_; ++i) signatures.push_back(signature(i));
    index_ = std::make_shared<const MultiIndex>(MultiIndex::build(signatures));
    changed_.clear();
  }
  /// Replaces what the index says of numbers that are gone or signed anew since.
  KVMELD_LAZY void look_at_changed(std::uint64_t query, int max_distance,
                                   std::vector<HammingHit>& hits, std::ptrdiff_t first_hit) const {
    hits.erase(std::remove_if(hits.begin() + first_hit, hits.end(),
                              [&](const HammingHit& h) {
                                return h.index >= size_ ||
                                       std::binary_search(changed_.begin(), changed_.end(),
                                                          h.index);
                              }),
               hits.end());
    for (const std::uint32_t i : changed_) {
      const int distance = i < size_ ? std::popcount(signature(i) ^ query) : 65;
      if (distance <= max_distance) hits.push_back({i, static_cast<std::uint32_t>(distance)});
    }
    std::sort(hits.begin() + first_hit, hits.end(),
              [](const HammingHit& a, const HammingHit& b) { return a.index < b.index; });
  }

  void sign(std::size_t i, std::uint64_t signature) {
    auto block = std::make_shared<Block>(*blocks_[i / block_signatures]);
    block->low[i % block_signatures] = static_cast<std::uint32_t>(signature);
    block->high[i % block_signatures] = static_cast<std::uint32_t>(signature >> 32U);
    blocks_[i / block_signatures] = std::move(block);
    if (index_ == nullptr || i >= index_->size()) return;
    const auto number = static_cast<std::uint32_t>(i);
    const auto at = std::lower_bound(changed_.begin(), changed_.end(), number);
    if (at == changed_.end() || *at != number) changed_.insert(at, number);
  }
  void put(std::size_t i, Row row) {
    auto page = std::make_shared<Page>(*pages_[i / page_rows]);
    (*page)[i % page_rows] = std::move(row);
    pages_[i / page_rows] = std::move(page);
  }

  std::size_t size_ = 0;
  std::size_t bytes_ = 0;
  std::vector<std::shared_ptr<const Block>> blocks_;
  std::vector<std::shared_ptr<const Page>> pages_;
  std::shared_ptr<const MultiIndex> index_;  // of the signatures as they were; null: few
  // ascending; numbers in the index that were signed anew since
  std::vector<std::uint32_t> changed_;
};

KVMELD_NAMESPACE_END
