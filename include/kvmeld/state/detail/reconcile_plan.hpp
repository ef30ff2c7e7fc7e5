#pragma once

/// How a stage of a reconciliation is cut into cells, and how many power sums it spends on them.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// How the side with fewer elements describes those of a cell.
enum class CellForm : std::uint8_t {
  sketch = 0,  ///< power sums of short hashes: 4 bytes for each element that differs
  list = 1,    ///< the short hashes: 3 bytes for each element
};

inline constexpr std::uint32_t max_cells = 1U << 16U;
inline constexpr std::uint32_t max_capacity = 256;   ///< power sums of a cell
inline constexpr std::uint32_t max_attempts = 6;     ///< salts tried on a cell
inline constexpr std::uint32_t sketch_attempts = 2;  ///< of which the first ones may be sketches

/// How a stage is cut. Whoever sees both sides' counts and counters decides it.
struct CellPlan {
  CellForm form = CellForm::list;
  std::uint32_t cells = 1;
  std::uint32_t capacity = 1;  ///< power sums in a cell's first sketch
};

/// Share of the expected power sums that first sketches have. Of many cells too few, for
/// `CellSpread` says how many are missing, and sums that were not needed are lost; but tags have
/// bytes to spare, which saves messages.
[[nodiscard]] constexpr double first_share(bool tags, std::uint32_t cells) noexcept {
  return cells < 8 ? 1.0 : tags ? 0.85 : 0.75;
}

/// Estimates how much differs from the counts of cells: how many more elements one side has than
/// the other in a cell varies as much as elements differ, since each differing one adds or
/// subtracts one (a difference of Poisson variables).
struct CellSpread {
  double cells = 0, sum = 0, squares = 0;

  void add(std::uint64_t ours, std::uint64_t theirs) noexcept {
    const double more = static_cast<double>(ours) - static_cast<double>(theirs);
    cells += 1;
    sum += more;
    squares += more * more;
  }
  /// Power sums with which about two of three cells are solved, from the counts and from what the
  /// plan went by.
  [[nodiscard]] double capacity(const CellPlan& plan, bool tags) const noexcept {
    constexpr double counters = 32;  // what the plan's estimate weighs, in cells
    const double planned = (plan.capacity - 2.0) / first_share(tags, plan.cells);
    const double variance = cells < 2 ? 0 : (squares - sum * sum / cells) * cells / (cells - 1);
    const double mean = (std::max)(0.0, (counters * planned + variance) / (counters + cells));
    return mean + 0.4 * std::sqrt(mean) + 1.5;
  }
};

/// The cheaper form, for sets of `fewer` and `more` elements of which about `estimate` are on one
/// side only.
KVMELD_LAZY [[nodiscard]] CellPlan plan_cells(std::uint64_t fewer, std::uint64_t more,
                                              double estimate, bool tags) {
  const auto least = static_cast<double>(more - fewer);
  const double differing = (std::max)({estimate, least, 1.0});
  // Bytes beside the names: a list costs the same whatever differs, a sketch as much as does. The
  // estimate is uncertain, and only the list is dear where it was too high.
  const double sketch_bytes = 5.2 * differing + 2.0 * (differing - least);
  CellPlan plan;
  double cells = 1;
  if (3.2 * static_cast<double>(fewer) <= 0.8 * sketch_bytes) {
    cells = static_cast<double>(fewer + more) / 256.0;
  } else {
    // work grows with its square; a cell costs 10 bytes beside its sums
    constexpr double per_cell = 24;
    plan.form = CellForm::sketch;
    cells = differing / per_cell;
  }
  plan.cells = static_cast<std::uint32_t>(
      (std::min)((std::max)(cells, 1.0), static_cast<double>(max_cells)));
  if (plan.form == CellForm::sketch) {
    const double sums = differing / plan.cells * first_share(tags, plan.cells) + 2.0;
    plan.capacity = static_cast<std::uint32_t>((std::min)(sums, static_cast<double>(max_capacity)));
  }
  return plan;
}

}  // namespace detail

KVMELD_NAMESPACE_END
