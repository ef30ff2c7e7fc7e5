#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <kvmeld/metrics/counters.hpp>
#include <kvmeld/metrics/histogram.hpp>
#include <kvmeld/metrics/metrics_page.hpp>
#include <kvmeld/state/target.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// What only the host can measure, since it runs the engine and owns the clock: a member for each,
/// recorded by any thread.
///
/// Some 130 KB; one for a process, or one for each agent with its own labels.
struct ServingMetrics {
  Histogram prefill_seconds{};  ///< of a segment that was computed
  Histogram reuse_seconds{};  ///< of a segment that was blended instead: look-up, plan, run, import
  /// From a word said to its arrival in another agent's set, or of a round.
  Histogram sync_seconds{};
  Histogram load_bytes_per_second{};  ///< of payloads from a store, a file or a peer
  Histogram similarity{};             ///< of the signatures of anchors that were chosen, 0 to 1
  /// Relative error of aligned K/V against full prefill, where it was measured.
  Histogram alignment_error{};
  Histogram quality{};         ///< the host's own score of an answer, 0 and up
  ErrorCounters alignments{};  ///< of `plan`, `plan_reuse`, fits: by cause
  Counter renders, render_failures, rendered_tokens, rendered_holes, rendered_bytes;

  /// Counts what a `run` or `render` came to.
  void count(const Result<RenderReport>& report) noexcept {
    if (!report) return render_failures.add();
    renders.add();
    rendered_tokens.add(static_cast<std::uint64_t>(report->tokens));
    rendered_holes.add(static_cast<std::uint64_t>(report->holes));
    rendered_bytes.add(static_cast<std::uint64_t>(report->bytes));
  }
};

/// Whether distributions are written as quantiles, within 1.6 % for one process, or as buckets,
/// which add up over processes and times.
enum class DistributionForm : std::uint8_t { quantiles, buckets };

/// Puts all of it on a page. Causes of errors that never occurred have no series. Errors: those of
/// `MetricsPage`.
KVMELD_LAZY [[nodiscard]] Status collect(MetricsPage& page, const ServingMetrics& from,
                                         const MetricLabels& labels = {},
                                         DistributionForm form = DistributionForm::quantiles) {
  MetricsPage out = page;
  const auto put = [&](const char* name, const char* help, const Histogram& histogram,
                       OctaveBounds bounds = {}) {
    const HistogramCounts counts = histogram.read();
    KVMELD_TRY(out.counter(
        "kvmeld_refused_samples_total", "Samples that were negative or not finite",
        static_cast<double>(counts.refused()), detail::with_label(labels, "metric", name)));
    return form == DistributionForm::quantiles ? out.summary(name, help, counts, labels)
                                               : out.histogram(name, help, counts, labels, bounds);
  };
  const OctaveBounds ratio{-16, 0};
  KVMELD_TRY(put("kvmeld_prefill_seconds", "Time to prefill a segment", from.prefill_seconds));
  KVMELD_TRY(
      put("kvmeld_reuse_seconds", "Time to make a segment from anchors", from.reuse_seconds));
  KVMELD_TRY(
      put("kvmeld_sync_seconds", "Time until others have what an agent said", from.sync_seconds));
  KVMELD_TRY(put("kvmeld_load_bytes_per_second", "Rate at which payloads were loaded",
                 from.load_bytes_per_second, {16, 40}));
  KVMELD_TRY(put("kvmeld_similarity_ratio", "Similarity of the anchors that were chosen",
                 from.similarity, ratio));
  KVMELD_TRY(put("kvmeld_alignment_error_ratio",
                 "Relative error of aligned K/V against full prefill", from.alignment_error,
                 {-16, 4}));
  KVMELD_TRY(
      put("kvmeld_quality", "Scores of answers, as the host gives them", from.quality, {-16, 10}));
  for (std::size_t c = 1; c < ErrorCounters::codes; ++c) {
    const auto code = static_cast<ErrorCode>(c);
    if (from.alignments[code] == 0) continue;
    const std::string_view name = to_string(code);
    KVMELD_TRY(out.counter(
        "kvmeld_alignment_failures_total", "Alignments that were refused, by cause",
        static_cast<double>(from.alignments[code]),
        detail::with_label(labels, "code",
                           name == "unknown" ? detail::decimal(c) : std::string(name))));
  }
  const auto count = [&](const char* name, const char* help, const Counter& counter) {
    return out.counter(name, help, static_cast<double>(counter.value()), labels);
  };
  KVMELD_TRY(count("kvmeld_renders_total", "Caches rendered", from.renders));
  KVMELD_TRY(count("kvmeld_render_failures_total", "Renders that failed", from.render_failures));
  KVMELD_TRY(
      count("kvmeld_rendered_tokens_total", "Output tokens, holes included", from.rendered_tokens));
  KVMELD_TRY(count("kvmeld_rendered_holes_total", "Output tokens left to the engine",
                   from.rendered_holes));
  KVMELD_TRY(count("kvmeld_rendered_bytes_total", "Bytes of K/V written", from.rendered_bytes));
  page = std::move(out);
  return {};
}

KVMELD_NAMESPACE_END
