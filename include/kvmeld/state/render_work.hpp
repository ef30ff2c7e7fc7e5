#pragma once

#include <cstdint>

#include <kvmeld/exec/row_work.hpp>
#include <kvmeld/state/plane_task.hpp>
#include <kvmeld/state/render_lanes.hpp>
#include <kvmeld/state/render_rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Renders rows: row r is one output token of one (layer, plane), all heads.
///
/// gather → turn to the frame → reduce → turn to the output position → store, in f32, nothing
/// stored between.
/// @tparam F models `FoldForm`, `SelectForm` or `MixForm`.
template <class F>
struct RenderWork {
  using State = NoState;

  F fuser;
  const PlaneTask* tasks = nullptr;
  std::int64_t task_count = 0;
  std::int64_t outputs = 0;
  bool streams = false;  ///< hosts write past their caches

  // Lane form: elementwise, so there is nothing to reduce between lanes.
  [[nodiscard]] KVMELD_HD NoState partial(std::int64_t, int) const noexcept { return {}; }
  [[nodiscard]] KVMELD_HD static NoState join(NoState, NoState) noexcept { return {}; }
  KVMELD_HD void finish(std::int64_t row, int lane, NoState) const {
    RenderLanes<F>{fuser}.token(tasks[row / outputs], row % outputs, lane);
  }

  // Host form: the same expressions over whole rows.
  void host_rows(Isa isa, std::int64_t begin, std::int64_t end) const {
    render_rows(fuser, tasks, outputs, {isa, streams}, begin, end);
  }
};

}  // namespace detail
KVMELD_NAMESPACE_END
