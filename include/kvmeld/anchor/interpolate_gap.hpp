#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

/// What position maps must be, and what stands in for a token that has no counterpart.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Refuses rows that no monotone map has: outside [−1, held), or not above the row before.
KVMELD_LAZY [[nodiscard]] Status check_rows_ascend(std::span<const std::int32_t> rows,
                                                   std::int64_t held, std::size_t part,
                                                   const char* what) {
  std::int32_t last = -1;
  for (std::size_t t = 0; t < rows.size(); ++t) {
    if (rows[t] == -1) continue;
    if (rows[t] < 0 || rows[t] >= held)
      return error(ErrorCode::invalid_argument, "part ", part, ": row ", rows[t], " of ", what,
                   " of ", held, " tokens");
    if (rows[t] <= last) {
      return error(ErrorCode::invalid_argument, "part ", part, ": token ", t, " has row ", rows[t],
                   " of ", what, ", behind row ", last, "; position maps ascend");
    }
    last = rows[t];
  }
  return {};
}

/// The matched tokens around a hole; moves forward over a map, O(tokens) for all of them.
class GapCursor {
 public:
  explicit GapCursor(std::span<const std::int32_t> rows) noexcept : rows_(rows) {}

  /// Goes to a token, none of which is before the last one.
  void move(std::int64_t token) noexcept {
    for (; at_ < token; ++at_) {
      if (rows_[static_cast<std::size_t>(at_)] >= 0) before_ = at_;
    }
    if (after_ < token) after_ = token;
    while (after_ < std::ssize(rows_) && rows_[static_cast<std::size_t>(after_)] < 0) ++after_;
  }
  /// Whether the hole at the current token lies between two matched ones with at most `window`
  /// tokens in between, on either side.
  [[nodiscard]] bool within(std::int64_t window) const noexcept {
    if (before_ < 0 || after_ >= std::ssize(rows_) || after_ - before_ - 1 > window) return false;
    return row_after() - row_before() - 1 <= window;
  }
  [[nodiscard]] std::int32_t row_before() const noexcept {
    return rows_[static_cast<std::size_t>(before_)];
  }
  [[nodiscard]] std::int32_t row_after() const noexcept {
    return rows_[static_cast<std::size_t>(after_)];
  }
  /// How far the current token is on the way between them, in (0, 1).
  [[nodiscard]] double share() const noexcept {
    return static_cast<double>(at_ - before_) / static_cast<double>(after_ - before_);
  }

 private:
  std::span<const std::int32_t> rows_;
  std::int64_t at_ = 0, before_ = -1, after_ = 0;
};

}  // namespace detail
KVMELD_NAMESPACE_END
