// Nothing is lost when several threads count and record, and readers meanwhile see what can have
// been.

#include <atomic>
#include <thread>
#include <vector>

#include <kvmeld/metrics/metrics.hpp>

#include "support/catch.hpp"

TEST_CASE("four threads record what one would, while a fifth reads") {
  constexpr int threads = 4, each = 20'000;
  kvmeld::metrics::ServingMetrics metrics;
  kvmeld::metrics::Gauge balance;
  const auto value = [](int thread, int i) { return 1e-6 * (1 + (thread * each + i) % 10'007); };
  std::atomic<bool> stop{false};
  std::atomic<int> broken{0};
  std::thread reader([&] {
    std::uint64_t before = 0;
    while (!stop.load()) {
      const auto now = metrics.prefill_seconds.read();
      if (now.count() < before) ++broken;
      before = now.count();
      // Whatever is counted has moved the extremes: a quantile never is infinite.
      if (now.count() > 0 &&
          !(now.least() > 0 && now.greatest() < 1 && now.quantile(0.5) >= now.least() &&
            now.quantile(0.5) <= now.greatest()))
        ++broken;
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < threads; ++t) {
    writers.emplace_back([&, t] {
      for (int i = 0; i < each; ++i) {
        metrics.prefill_seconds.record(value(t, i));
        if (i % 100 == 0) metrics.prefill_seconds.record(-1);
        metrics.count(i % 10 == 0
                          ? kvmeld::Result<kvmeld::RenderReport>(kvmeld::ErrorCode::aliasing, "x")
                          : kvmeld::RenderReport{3, 1, 100, {}, {}});
        metrics.alignments.count(i % 4 == 0
                                     ? kvmeld::Status(kvmeld::ErrorCode::tokens_required, "x")
                                     : kvmeld::Status{});
        balance.add(i % 2 == 0 ? 1 : -1);
        for (int k = 0; k < 8; ++k) metrics.similarity.record(0.5);  // all in one bucket at once
      }
    });
  }
  for (auto& w : writers) w.join();
  stop.store(true);
  reader.join();
  CHECK(broken.load() == 0);

  kvmeld::metrics::HistogramCounts plain;
  for (int t = 0; t < threads; ++t) {
    for (int i = 0; i < each; ++i) plain.record(value(t, i));
  }
  const auto read = metrics.prefill_seconds.read();
  CHECK(read.count() == plain.count());
  CHECK(read.refused() == threads * each / 100);
  CHECK(read.least() == plain.least());
  CHECK(read.greatest() == plain.greatest());
  CHECK(read.sum() == Approx(plain.sum()).epsilon(1e-9));
  for (int q = 0; q <= 100; ++q) CHECK(read.quantile(q / 100.0) == plain.quantile(q / 100.0));
  for (int e = -30; e <= 40; ++e) CHECK(read.up_to_power_of_two(e) == plain.up_to_power_of_two(e));
  const auto crowded = metrics.similarity.read();
  CHECK(crowded.count() == 8 * threads * each);
  CHECK(crowded.sum() == 4.0 * threads * each);
  CHECK(metrics.render_failures.value() == threads * each / 10);
  CHECK(metrics.rendered_tokens.value() == 3U * threads * each * 9 / 10);
  CHECK(metrics.rendered_holes.value() == 1U * threads * each * 9 / 10);
  CHECK(metrics.rendered_bytes.value() == 100U * threads * each * 9 / 10);
  CHECK(metrics.alignments[kvmeld::ErrorCode::tokens_required] == threads * each / 4);
  CHECK(metrics.alignments[kvmeld::ErrorCode::ok] == threads * each * 3 / 4);
  CHECK(balance.value() == 0);
}
