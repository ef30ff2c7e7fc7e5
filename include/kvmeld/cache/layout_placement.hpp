#pragma once

/// What an engine declares about its tokens: which slots hold them, in which order, and per layer
/// where layers differ.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/plane_ref.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Which slots hold a view's tokens, in logical order. Tables are the caller's, host memory, and
/// outlive the view.
///
/// A negative table entry is a hole: that token has no row here. Entries behind the last one that
/// the tokens need (the padding of engines' tables) are not read.
struct TokenPlacement {
  std::int64_t tokens = 0;
  SlotKind kind = SlotKind::identity;
  const void* table = nullptr;
  std::int64_t entries = 0;  ///< of the table
  std::int64_t first = 0;    ///< slot of token 0, for `identity`

  /// Token t lies in slot `first + t`.
  [[nodiscard]] static TokenPlacement in_order(std::int64_t tokens,
                                               std::int64_t first = 0) noexcept {
    return {.tokens = tokens, .first = first};
  }
  /// Token t lies in block `table[t / block_size]`.
  [[nodiscard]] static TokenPlacement block_table(std::span<const std::int32_t> table,
                                                  std::int64_t tokens) noexcept {
    return {.tokens = tokens,
            .kind = SlotKind::block_table_i32,
            .table = table.data(),
            .entries = std::ssize(table)};
  }
  [[nodiscard]] static TokenPlacement block_table(std::span<const std::int64_t> table,
                                                  std::int64_t tokens) noexcept {
    return {.tokens = tokens,
            .kind = SlotKind::block_table_i64,
            .table = table.data(),
            .entries = std::ssize(table)};
  }
  /// Token t lies in slot `table[t]`; in a paged layout a slot is `block * block_size + offset`, as
  /// in vLLM's slot mapping.
  [[nodiscard]] static TokenPlacement slot_list(std::span<const std::int32_t> table) noexcept {
    return {.tokens = std::ssize(table),
            .kind = SlotKind::slot_list_i32,
            .table = table.data(),
            .entries = std::ssize(table)};
  }
  [[nodiscard]] static TokenPlacement slot_list(std::span<const std::int64_t> table) noexcept {
    return {.tokens = std::ssize(table),
            .kind = SlotKind::slot_list_i64,
            .table = table.data(),
            .entries = std::ssize(table)};
  }
};

/// One value for all layers, or one for each: sliding-window layers have pools and tables of their
/// own.
template <class T>
class PerLayer {
 public:
  PerLayer() : values_(1) {}
  PerLayer(T value) : values_{std::move(value)} {}  // NOLINT: implicit on purpose
  // NOLINT: implicit on purpose
  PerLayer(std::vector<T> values) : values_(std::move(values)), each_(true) {}

  [[nodiscard]] const T& operator[](std::size_t layer) const noexcept {
    return values_[each_ ? layer : 0];
  }
  [[nodiscard]] bool covers(std::size_t layers) const noexcept {
    return !each_ || values_.size() == layers;
  }
  [[nodiscard]] std::size_t size() const noexcept { return values_.size(); }

 private:
  std::vector<T> values_;
  bool each_ = false;
};

/// Slots of a ring buffer's tokens in temporal order, for `TokenPlacement::slot_list`.
///
/// A ring of `window` slots that has seen `seen` tokens holds the last min(seen, window), token t
/// of the sequence in slot t % window. The list is for the last `view_tokens` tokens of the
/// sequence, -1 for those that the ring lost, so that a sliding-window layer can stand beside full
/// layers in one view; below 0, for just those that the ring holds. Two rings of different fill
/// have different lists: their cursors say nothing about time. Errors: `invalid_argument` (window
/// below 1, seen below 0, more view tokens than were seen).
[[nodiscard]] inline Result<std::vector<std::int64_t>> ring_slots(std::int64_t seen,
                                                                  std::int64_t window,
                                                                  std::int64_t view_tokens = -1) {
  if (window < 1 || seen < 0 || view_tokens > seen) {
    return detail::error(ErrorCode::invalid_argument, "a ring of ", window, " slots that saw ",
                         seen, " tokens cannot show ", view_tokens);
  }
  const std::int64_t held = seen < window ? seen : window;
  const std::int64_t shown = view_tokens < 0 ? held : view_tokens;
  std::vector<std::int64_t> slots;
  slots.reserve(static_cast<std::size_t>(shown));
  for (std::int64_t t = seen - shown; t < seen; ++t)
    slots.push_back(t < seen - held ? -1 : t % window);
  return slots;
}

namespace detail {

/// Checks a table's length against the tokens; what its entries may be is `check_slots`' business.
[[nodiscard]] inline Status check_table(const TokenPlacement& placement, std::int64_t block_size) {
  if (placement.kind > SlotKind::slot_list_i64) {
    return error(ErrorCode::unknown_layout, "slot kind ", static_cast<int>(placement.kind),
                 " is none that this build knows");
  }
  if (placement.tokens < 0)
    return error(ErrorCode::invalid_argument, "a view of ", placement.tokens, " tokens");
  if (placement.kind == SlotKind::identity) return {};
  const bool blocks =
      placement.kind == SlotKind::block_table_i32 || placement.kind == SlotKind::block_table_i64;
  if (blocks && block_size <= 0) {
    return error(ErrorCode::invalid_argument,
                 "a block table, and a layout without blocks; give a slot list");
  }
  const std::int64_t needed = placement.tokens == 0 ? 0
                              : blocks              ? (placement.tokens - 1) / block_size + 1
                                                    : placement.tokens;
  if (placement.entries < needed) {
    return error(ErrorCode::token_count_mismatch, "the table has ", placement.entries, " entries; ",
                 placement.tokens, " tokens need ", needed);
  }
  return {};
}

}  // namespace detail

KVMELD_NAMESPACE_END
