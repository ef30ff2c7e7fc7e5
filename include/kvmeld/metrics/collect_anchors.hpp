#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <kvmeld/anchor/reuse_reason.hpp>
#include <kvmeld/metrics/metrics_page.hpp>

KVMELD_NAMESPACE_BEGIN

/// Puts on a page what an `AnchorPool` counts: look-ups by reason, hit and invalidation rate, what
/// it holds and may hold.
///
/// Hit ratio: reuses among all look-ups so far; invalidation ratio: evictions among anchors evicted
/// or held. Both are 0 at the start. Over a window, rates of the counters are the better figure.
/// Errors: those of `MetricsPage`, the page unchanged.
template <class Pool>
requires requires(const Pool& pool) {
  pool.reasons()[ReuseReason::reuse];
  pool.evictions();
  pool.capacity().bytes;
}
[[nodiscard]] Status collect(MetricsPage& page, const Pool& pool, const MetricLabels& labels = {}) {
  MetricsPage out = page;
  double lookups = 0, reused = 0;
  for (std::size_t r = 0; r < reuse_reasons; ++r) {
    const auto reason = static_cast<ReuseReason>(r);
    const auto n = static_cast<double>(pool.reasons()[reason]);
    lookups += n;
    if (reason == ReuseReason::reuse) reused = n;
    KVMELD_TRY(out.counter("kvmeld_anchor_lookups_total",
                           "Look-ups in the anchor pool, by what was decided", n,
                           detail::with_label(labels, "reason", std::string(to_string(reason)))));
  }
  const auto snapshot = pool.snapshot();
  const auto evicted = static_cast<double>(pool.evictions());
  const auto held = static_cast<double>(snapshot->table.size());
  KVMELD_TRY(out.gauge("kvmeld_anchor_hit_ratio", "Look-ups that were answered by reuse",
                       lookups > 0 ? reused / lookups : 0, labels));
  KVMELD_TRY(out.gauge("kvmeld_anchor_invalidation_ratio",
                       "Anchors that were evicted, of those evicted or held",
                       evicted > 0 ? evicted / (evicted + held) : 0, labels));
  KVMELD_TRY(out.counter("kvmeld_anchor_evictions_total", "Anchors that left for want of room",
                         evicted, labels));
  KVMELD_TRY(out.gauge("kvmeld_anchors", "Anchors in the pool", held, labels));
  KVMELD_TRY(out.gauge("kvmeld_anchor_bytes", "Bytes of bases, offsets and vectors",
                       static_cast<double>(snapshot->table.bytes()), labels));
  KVMELD_TRY(out.gauge("kvmeld_anchor_capacity_bytes", "Bytes that the pool may hold",
                       static_cast<double>(pool.capacity().bytes), labels));
  KVMELD_TRY(out.gauge("kvmeld_anchor_capacity_anchors", "Anchors that the pool may hold",
                       static_cast<double>(pool.capacity().anchors), labels));
  KVMELD_TRY(out.gauge("kvmeld_anchor_version", "Versions that the pool has published",
                       static_cast<double>(snapshot->version), labels));
  page = std::move(out);
  return {};
}

KVMELD_NAMESPACE_END
