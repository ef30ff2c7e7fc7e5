#pragma once

/// What a coordinator refused, on a page.

#include <utility>

#include <kvmeld/metrics/collect_session.hpp>
#include <kvmeld/transport/coordinator.hpp>

KVMELD_NAMESPACE_BEGIN

/// Puts on a page what a coordinator refused: updates by reason (`Coordinator::refusals`); what its
/// replica did not take is `collect(page, coordinator.counters())`.
///
/// Errors: those of `MetricsPage`, the page unchanged.
KVMELD_LAZY [[nodiscard]] Status collect(MetricsPage& page, const CoordinatorCounters& from,
                                         const MetricLabels& labels = {}) {
  MetricsPage out = page;
  const auto refused = [&](const char* reason, std::uint64_t count) {
    return out.counter("kvmeld_coordinator_refused_updates_total",
                       "Updates that were refused, by reason", static_cast<double>(count),
                       detail::with_label(labels, "reason", reason));
  };
  KVMELD_TRY(refused("quota_exceeded", from.over_quota));
  KVMELD_TRY(refused("unauthenticated", from.unauthenticated));
  page = std::move(out);
  return {};
}

KVMELD_NAMESPACE_END
