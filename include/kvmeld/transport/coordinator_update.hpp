#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/assembler.hpp>
#include <kvmeld/session/fragment_io.hpp>
#include <kvmeld/session/set_codec.hpp>
#include <kvmeld/session/transport.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Bytes that all updates on their way in may take together.
class UpdateBudget {
 public:
  explicit UpdateBudget(std::uint64_t bytes) : left_(bytes) {}
  [[nodiscard]] bool take(std::uint64_t bytes) noexcept {
    std::uint64_t left = left_.load(std::memory_order_relaxed);
    while (bytes <= left) {
      if (left_.compare_exchange_weak(left, left - bytes, std::memory_order_relaxed)) return true;
    }
    return false;
  }
  void give(std::uint64_t bytes) noexcept { left_.fetch_add(bytes, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t left() const noexcept {
    return left_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> left_;
};

}  // namespace detail

/// One update on its way in: sets, manifests and chunks, checked as they come, and taken over
/// together or not at all.
template <ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
class CoordinatorUpdate {
 public:
  /// What updates may take together; this one gives back what it took.
  struct Budgets {
    std::shared_ptr<detail::UpdateBudget> all;     ///< of all members
    std::shared_ptr<detail::UpdateBudget> member;  ///< of this one
  };

  /// @param member  whose update it is; `everyone`: the caller's, who vouches for what others did.
  CoordinatorUpdate(const SetHash& hash, const FragmentFormat<Hash, C>& format,
                    std::uint64_t max_bytes, MemberId member = everyone, Budgets budgets = {})
      : format_(format),
        sets_(hash),
        left_bytes_(max_bytes),
        member_(member),
        budgets_(std::move(budgets)) {}
  CoordinatorUpdate(const CoordinatorUpdate&) = delete;
  CoordinatorUpdate& operator=(const CoordinatorUpdate&) = delete;
  ~CoordinatorUpdate() { give(taken_); }

  /// Errors: those of `decode_set` and `FragmentSet::join`, `quota_exceeded`.
  Status add_set(std::span<const std::byte> bytes) {
    KVMELD_TRY(spend(bytes.size(), set_expansion, "a set"));
    auto set = decode_set(bytes, sets_.hash());
    if (!set) return set.error();
    KVMELD_TRY(sets_.join(*set));
    ++items_;
    return {};
  }
  /// Errors: those of `decode_manifest`, `id_mismatch` for another fragment's, `quota_exceeded`.
  Status add_manifest(const FragmentId& id, std::span<const std::byte> bytes) {
    KVMELD_TRY(spend(bytes.size(), manifest_expansion, "a manifest"));
    auto manifest = decode_manifest<Hash>(bytes, format_.limits());
    if (!manifest) return manifest.error();
    if (manifest->fragment.id() != id) {
      return detail::error(ErrorCode::id_mismatch, "manifest of fragment ",
                           manifest->fragment.id().hex(), " sent as that of ", id.hex());
    }
    for (const auto& keys : manifest->chunks) {
      for (const BlobKey& key : keys) {
        auto& owners = owners_[key];
        if (owners.empty() || owners.back() != id) owners.push_back(id);
      }
    }
    parts_.insert_or_assign(id, Assembler<Hash>(*std::move(manifest)));
    ++items_;
    return {};
  }
  /// Errors: those of `decode_chunk`; `not_found` for a chunk that no manifest of this update
  /// names, `quota_exceeded` where what came takes too much: raw bytes, before they are unpacked.
  Status add_chunk(const BlobKey& key, std::span<const std::byte> stored) {
    const auto at = owners_.find(key);
    if (at == owners_.end())
      return detail::error(ErrorCode::not_found, "chunk ", key.hex(),
                           " of no manifest that came before it");
    for (const FragmentId& id : at->second) {
      KVMELD_TRY(spend(parts_.at(id).bytes_of(key), 1, "a chunk"));
      if (const auto added = parts_.at(id).add(key, stored, format_.compressor); !added)
        return added.error();
    }
    ++items_;
    return {};
  }
  /// Errors: `truncated` where the sender counted other items than came.
  Status end(std::uint64_t items) {
    if (items != items_)
      return detail::error(ErrorCode::truncated, "an update of ", items, " items, of which ",
                           items_, " came");
    ended_ = true;
    return {};
  }

  /// The fragments that are whole, by what came and what a store has.
  ///
  /// Errors: those of `Assembler::finish`, `quota_exceeded`, the store's.
  template <BlobStore S>
  [[nodiscard]] Result<std::vector<Fragment>> finish(S& store) {
    std::vector<Fragment> out;
    for (auto& [id, part] : parts_) {
      const std::uint64_t came = part.held_bytes();
      if (!part.complete()) {
        KVMELD_TRY(load_chunks(store, part, format_, came + left_bytes_));
        KVMELD_TRY(spend(part.held_bytes() - came, 1, "what the store has of a payload"));
      }
      if (!part.complete()) continue;
      std::uint64_t bytes = 0;
      for (const Payload& payload : part.manifest().fragment.payloads())
        bytes += payload.byte_count;
      const std::uint64_t held = part.held_bytes();
      KVMELD_TRY(spend(bytes - (std::min)(bytes, held), 1, "a payload of repeated chunks"));
      auto fragment = part.finish();
      if (!fragment) return fragment.error();
      out.push_back(*std::move(fragment));
    }
    return out;
  }

  [[nodiscard]] MemberId member() const noexcept { return member_; }
  [[nodiscard]] bool ended() const noexcept { return ended_; }
  [[nodiscard]] std::uint64_t items() const noexcept { return items_; }
  [[nodiscard]] const FragmentSet& set() const noexcept { return sets_; }
  [[nodiscard]] const std::map<FragmentId, Assembler<Hash>>& parts() const noexcept {
    return parts_;
  }

 private:
  // What decoded bytes take in memory at most: a mark of 3 bytes takes some 72, a position of one
  // 8.
  static constexpr std::uint64_t set_expansion = 24;
  static constexpr std::uint64_t manifest_expansion = 8;

  Status spend(std::uint64_t bytes, std::uint64_t expansion, const char* what) {
    if (bytes > left_bytes_)
      return detail::error(ErrorCode::quota_exceeded, what, " of ", bytes, " bytes, where ",
                           left_bytes_, " are left to this update");
    const std::uint64_t memory =
        bytes > ~std::uint64_t{0} / expansion ? ~std::uint64_t{0} : bytes * expansion;
    if (budgets_.member != nullptr && !budgets_.member->take(memory)) {
      return detail::error(ErrorCode::quota_exceeded, what, " of ", bytes, " bytes takes ", memory,
                           ", where ", budgets_.member->left(),
                           " are left to all updates of member ", member_, "; come back later");
    }
    if (budgets_.all != nullptr && !budgets_.all->take(memory)) {
      if (budgets_.member != nullptr) budgets_.member->give(memory);
      return detail::error(ErrorCode::quota_exceeded, what, " of ", bytes, " bytes takes ", memory,
                           ", where ", budgets_.all->left(),
                           " are left to all updates together; come back later");
    }
    taken_ += memory;
    left_bytes_ -= bytes;
    return {};
  }

  void give(std::uint64_t bytes) noexcept {
    if (budgets_.member != nullptr) budgets_.member->give(bytes);
    if (budgets_.all != nullptr) budgets_.all->give(bytes);
  }

  FragmentFormat<Hash, C> format_;
  FragmentSet sets_;
  std::map<FragmentId, Assembler<Hash>> parts_;
  std::map<BlobKey, std::vector<FragmentId>> owners_;
  std::uint64_t left_bytes_;
  MemberId member_;
  Budgets budgets_;
  std::uint64_t taken_ = 0;
  std::uint64_t items_ = 0;
  bool ended_ = false;
};

KVMELD_NAMESPACE_END
