#pragma once

/// Metrics of sessions, anchors and coordinators.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/coordinator/coordinator.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/metrics/metrics.hpp>
#include <kvmeld/replica/session.hpp>

KVMELD_NAMESPACE_BEGIN

namespace metrics {

/// Puts on a page what a replica did not take: a replica's own (`ReplicaCounters`), a
/// coordinator's, or what `Accounting` has of it.
///
/// Errors: those of `MetricsPage`, the page unchanged.
[[nodiscard]] inline Status collect(MetricsPage& page, const replica::ReplicaRefusals& from,
                                    const MetricLabels& labels = {}) {
  MetricsPage out = page;
  struct Row {
    const char* name;
    const char* help;
    std::uint64_t value;
  };
  const Row rows[] = {
      {"kvmeld_refused_frames_total", "Frames that were damaged, unauthenticated or hostile",
       from.refused_frames},
      {"kvmeld_refused_operations_total",
       "Operations above a quota, or other than what is known of their dot",
       from.refused_operations},
      {"kvmeld_unvouched_operations_total",
       "Operations left out until their author or two members say the same",
       from.unvouched_operations},
      {"kvmeld_reused_dots_total", "Times that a dot was seen on two operations", from.reused_dots},
      {"kvmeld_refused_pieces_total", "Manifests and chunks for which there was no room",
       from.refused_pieces},
      {"kvmeld_strikes_total", "Wrong manifests and chunks", from.strikes},
      {"kvmeld_corrupt_records_total", "Records of the store that could not be read",
       from.corrupt_records},
  };
  for (const Row& row : rows)
    KVMELD_TRY(out.counter(row.name, row.help, static_cast<double>(row.value), labels));
  page = std::move(out);
  return {};
}

/// Puts on a page what an agent's session or replica counts: traffic by layer, bytes sealed and
/// stored, rounds, renders, swaps, refusals.
///
/// Errors: those of `MetricsPage`, the page unchanged.
[[nodiscard]] inline Status collect(MetricsPage& page, const replica::Accounting& from,
                                    const MetricLabels& labels = {}) {
  MetricsPage out = page;
  constexpr const char* layer_names[] = {"state", "payload", "rounds", "application"};
  for (std::size_t l = 0; l < 4; ++l) {
    const MetricLabels of = detail::with_label(labels, "layer", layer_names[l]);
    const replica::Traffic sent = from.sent_of(static_cast<replica::TrafficLayer>(l)),
                           received = from.received_of(static_cast<replica::TrafficLayer>(l));
    KVMELD_TRY(out.counter("kvmeld_sent_bytes_total", "Bytes of frames that the transport took",
                           static_cast<double>(sent.bytes), of));
    KVMELD_TRY(out.counter("kvmeld_sent_messages_total", "Frames that the transport took",
                           static_cast<double>(sent.messages), of));
    KVMELD_TRY(out.counter("kvmeld_received_bytes_total", "Bytes of frames that came",
                           static_cast<double>(received.bytes), of));
    KVMELD_TRY(out.counter("kvmeld_received_messages_total", "Frames that came",
                           static_cast<double>(received.messages), of));
  }
  struct Row {
    const char* name;
    const char* help;
    double value;
  };
  const auto number = [](std::uint64_t n) { return static_cast<double>(n); };
  const Row rows[] = {
      {"kvmeld_send_failures_total", "Frames that the transport did not take",
       number(from.send_failures)},
      {"kvmeld_stored_bytes_total", "Bytes handed to the store", number(from.stored.bytes)},
      {"kvmeld_dedup_bytes_total", "Bytes that the store had already",
       number(from.stored.dedup_bytes)},
      {"kvmeld_dedup_hits_total", "Blobs that the store had already",
       number(from.stored.dedup_hits)},
      {"kvmeld_fragments_sealed_total", "Fragments sealed", number(from.fragments_sealed)},
      {"kvmeld_fragments_refused_total", "Fragments sealed that nobody takes",
       number(from.fragments_refused)},
      {"kvmeld_fragments_fetched_total", "Fragments whose bytes came from peers",
       number(from.fragments_fetched)},
      {"kvmeld_fragments_loaded_total", "Fragments whose bytes came from the store",
       number(from.fragments_loaded)},
      {"kvmeld_application_dropped_total", "Frames of the host that were not taken in time",
       number(from.application_dropped)},
      {"kvmeld_round_wait_seconds_total", "Time between the begin and the end of rounds",
       from.wait_ms / 1000},
      {"kvmeld_session_renders_total", "Renders on the worker", number(from.renders)},
      {"kvmeld_session_render_seconds_total", "Time of renders on the worker",
       from.render_ms / 1000},
      {"kvmeld_swaps_total", "Caches taken over", number(from.swaps)},
      {"kvmeld_swap_seconds_total", "Time that swaps took on the generating thread",
       from.swap_ms / 1000},
      {"kvmeld_import_seconds_total", "Part of it that an engine took to import",
       from.import_ms / 1000},
      {"kvmeld_carried_tokens_total", "Tokens said since a snapshot and turned to their new places",
       number(from.carried_tokens)},
  };
  for (const Row& row : rows) KVMELD_TRY(out.counter(row.name, row.help, row.value, labels));
  KVMELD_TRY(out.gauge("kvmeld_store_damaged_bytes",
                       "Bytes of the store's records that were acknowledged and are spoilt",
                       number(from.store_damage.bytes), labels));
  KVMELD_TRY(out.gauge("kvmeld_store_damaged_places", "Stretches of such bytes",
                       number(from.store_damage.places), labels));
  KVMELD_TRY(collect(out, from.refused, labels));
  constexpr const char* rounds = "kvmeld_rounds_total";
  constexpr const char* rounds_help = "Synchronous rounds, by whether a new cache was taken over";
  KVMELD_TRY(out.counter(rounds, rounds_help, number(from.rounds_swapped),
                         detail::with_label(labels, "result", "swapped")));
  KVMELD_TRY(out.counter(rounds, rounds_help, number(from.rounds_kept),
                         detail::with_label(labels, "result", "kept")));
  for (std::size_t l = 0; l < from.sealed_bytes.size(); ++l) {
    KVMELD_TRY(out.counter("kvmeld_sealed_bytes_total",
                           "Raw K/V of sealed fragments, by layer of the model",
                           number(from.sealed_bytes[l]),
                           detail::with_label(labels, "model_layer", extend::decimal(l))));
  }
  page = std::move(out);
  return {};
}

/// Puts on a page what a set holds: fragments in force, superseded and removed, and the bytes of
/// K/V here. O(n log n) for n entries.
///
/// The invalidation ratio is that of entries superseded or removed, and still remembered, among all
/// that are. Errors: those of `MetricsPage`, the page unchanged.
[[nodiscard]] inline Status collect(MetricsPage& page, const FragmentSet& set,
                                    const MetricLabels& labels = {}) {
  MetricsPage out = page;
  double bytes = 0, evicted = 0;
  for (const FragmentSet::Entry& entry : set.entries()) {
    bool here = false;
    if (entry.fragment.valid()) {
      for (const Payload& payload : entry.fragment.payloads()) {
        if (payload.bytes == nullptr) continue;
        bytes += static_cast<double>(payload.byte_count);
        here = true;
      }
    }
    if (!here) ++evicted;
  }
  const auto all = static_cast<double>(set.size()),
             force = static_cast<double>(in_force(set).size());
  const auto removed = static_cast<double>(set.removals().size());
  const char* const help = "Fragments in the set, by what became of them";
  KVMELD_TRY(
      out.gauge("kvmeld_fragments", help, force, detail::with_label(labels, "state", "in_force")));
  KVMELD_TRY(out.gauge("kvmeld_fragments", help, all - force,
                       detail::with_label(labels, "state", "superseded")));
  KVMELD_TRY(
      out.gauge("kvmeld_fragments", help, removed, detail::with_label(labels, "state", "removed")));
  KVMELD_TRY(out.gauge("kvmeld_fragments_without_bytes",
                       "Fragments whose bytes were evicted or have not come", evicted, labels));
  KVMELD_TRY(out.gauge("kvmeld_fragment_bytes", "Bytes of K/V here", bytes, labels));
  KVMELD_TRY(out.gauge("kvmeld_fragment_invalidation_ratio",
                       "Fragments superseded or removed, of all that are remembered",
                       all + removed > 0 ? (all - force + removed) / (all + removed) : 0, labels));
  page = std::move(out);
  return {};
}

/// Puts on a page what an `AnchorPool` counts: look-ups by reason, hit and invalidation rate, what
/// it holds and may hold.
///
/// Hit ratio: reuses among all look-ups so far; invalidation ratio: evictions among anchors evicted
/// or held. Both are 0 at the start. Over a window, rates of the counters are the better figure.
/// Errors: those of `MetricsPage`, the page unchanged.
template <class Pool>
requires requires(const Pool& pool) {
  pool.reasons()[anchors::ReuseReason::reuse];
  pool.evictions();
  pool.capacity().bytes;
}
[[nodiscard]] Status collect(MetricsPage& page, const Pool& pool, const MetricLabels& labels = {}) {
  MetricsPage out = page;
  double lookups = 0, reused = 0;
  for (std::size_t r = 0; r < anchors::reuse_reasons; ++r) {
    const auto reason = static_cast<anchors::ReuseReason>(r);
    const auto n = static_cast<double>(pool.reasons()[reason]);
    lookups += n;
    if (reason == anchors::ReuseReason::reuse) reused = n;
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

// What a coordinator refused, on a page.

/// Puts on a page what a coordinator refused: updates by reason (`Coordinator::refusals`); what its
/// replica did not take is `collect(page, coordinator.counters())`.
///
/// Errors: those of `MetricsPage`, the page unchanged.
[[nodiscard]] inline Status collect(MetricsPage& page, const coordinator::CoordinatorCounters& from,
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

}  // namespace metrics

KVMELD_NAMESPACE_END
