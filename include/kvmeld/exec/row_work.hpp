#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN

/// Work over independent rows in the form that every backend runs: 32 lanes a row.
///
/// Lane l owns channels l, l + 32, …; the executor calls `partial` in every lane, joins the 32
/// states by the fixed tree 16, 8, 4, 2, 1, and calls `finish` in every lane with the total. A work
/// may add a host form, `void host_rows(Isa, begin, end) const`, which chooses among functions
/// compiled for several instruction sets.
///
/// Semantic requirements: rows touch disjoint outputs; the host form writes the bytes that the lane
/// form writes.
template <class W>
concept RowWork = std::is_trivially_copyable_v<W> &&
    requires(const W& work, std::int64_t row, int lane, typename W::State state) {
  { work.partial(row, lane) } -> std::same_as<typename W::State>;
  { W::join(state, state) } -> std::same_as<typename W::State>;
  work.finish(row, lane, state);
};

/// Work that does nothing, by which executors are checked.
struct NoWork {
  struct State {};

  [[nodiscard]] KVMELD_HD State partial(std::int64_t, int) const noexcept { return {}; }
  [[nodiscard]] KVMELD_HD static State join(State, State) noexcept { return {}; }
  KVMELD_HD void finish(std::int64_t, int, State) const noexcept {}
};

/// Where and how rows run. `bulk(rows, work)` is the only launch: it returns when the work is
/// enqueued (devices) or done (hosts).
///
/// Semantic requirements: every row of any `RowWork` runs once; hosts hold a
/// `FloatEnvironmentGuard` in each worker.
template <class E>
concept ExecutionPolicy = requires(const E& exec, std::int64_t rows, const NoWork& work) {
  { E::on_device } -> std::convertible_to<bool>;
  { exec.bulk(rows, work) } -> std::same_as<Status>;
};

/// Lanes of a row, on every backend: the width of a warp.
inline constexpr int lanes_per_row = 32;

namespace detail {

struct NoState {};

/// Joins 32 lane states by the fixed tree, as a warp's shuffles do; the total ends in element 0.
template <class W>
KVMELD_ALWAYS_INLINE typename W::State join_lanes(typename W::State (&states)[lanes_per_row]) {
  for (int half = lanes_per_row / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane)
      states[lane] = W::join(states[lane], states[lane + half]);
  }
  return states[0];
}

/// Runs rows [begin, end) in the lane form on the host.
template <RowWork W>
void lane_rows(const W& work, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    typename W::State states[lanes_per_row];
    for (int lane = 0; lane < lanes_per_row; ++lane) states[lane] = work.partial(row, lane);
    const typename W::State total = join_lanes<W>(states);
    for (int lane = 0; lane < lanes_per_row; ++lane) work.finish(row, lane, total);
  }
}

template <class W>
concept HasHostRows = requires(const W& work) {
  work.host_rows(Isa{}, std::int64_t{}, std::int64_t{});
};

/// Runs rows [begin, end) on the host: the work's own host form, or the lane form.
template <RowWork W>
void host_rows(const W& work, Isa isa, std::int64_t begin, std::int64_t end) {
  if constexpr (HasHostRows<W>) {
    work.host_rows(isa, begin, end);
  } else {
    (void)isa;
    lane_rows(work, begin, end);
  }
}

}  // namespace detail

KVMELD_NAMESPACE_END
