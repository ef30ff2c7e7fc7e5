// Prometheus' own parser (of its Python client) fetches a page over loopback while others record,
// and reads what was counted.

#include <cstdio>
#include <cstdlib>

#ifdef KVMELD_TEST_HTTP

#include <atomic>
#include <fstream>
#include <string>
#include <thread>

#include <kvmeld/metrics/http.hpp>
#include <kvmeld/metrics/metrics.hpp>

#include "support/catch.hpp"
#include "support/temp_folder.hpp"

namespace {

// example-begin: endpoint
/// Prometheus scrapes http://127.0.0.1:PORT/metrics for as long as the endpoint is kept; each
/// scrape makes a page anew.
kvmeld::Result<kvmeld::metrics::MetricsEndpoint> serve_metrics(
    const kvmeld::metrics::ServingMetrics& metrics, int port) {
  return kvmeld::metrics::MetricsEndpoint::serve(
      [&metrics](kvmeld::metrics::MetricsPage& page) {
        return kvmeld::metrics::collect(page, metrics, {},
                                        kvmeld::metrics::DistributionForm::buckets);
      },
      {.port = port});
}
// example-end

/// A Python that has the parser, or an empty text.
std::string python() {
  for (const char* name : {"python3", "/usr/bin/python3"}) {
    if (std::system(
            (std::string(name) + " -c 'import prometheus_client.parser' 2>/dev/null").c_str()) == 0)
      return name;
  }
  return {};
}

// Prints each sample as "name|label=value… number", labels sorted; fails on anything that the
// parser does not take. A value that Prometheus would not take in a histogram fails, too: counts
// that fall, or a last bucket that is not the count.
constexpr const char* scrape = R"(
import sys, urllib.request, urllib.error
from prometheus_client.parser import text_string_to_metric_families
try:
    with urllib.request.urlopen(sys.argv[1], timeout=20) as reply:
        print("content-type", reply.headers["Content-Type"])
        text = reply.read().decode("utf-8")
except urllib.error.HTTPError as error:
    print("status", error.code, error.read().decode("utf-8"))
    sys.exit(0)
for family in text_string_to_metric_families(text):
    print("family", family.name, family.type, repr(family.documentation))
    before = {}
    for s in family.samples:
        labels = dict(s.labels)
        name = s.name + "".join("|%s=%s" % pair for pair in sorted(labels.items()))
        print("sample", name, repr(s.value))
        if family.type == "histogram" and s.name.endswith("_bucket"):
            le = float(labels.pop("le"))
            key = repr(sorted(labels.items()))
            last = before.get(key, (-1.0, 0.0))
            assert le > last[0] and s.value >= last[1], s
            before[key] = (le, s.value)
        if family.type == "histogram" and s.name.endswith("_count"):
            assert before[repr(sorted(labels.items()))] == (float("inf"), s.value), s
)";

struct Scraper {
  std::string python3 = python();
  test::TempFolder folder;

  Scraper() { std::ofstream(folder / "scrape.py") << scrape; }
  /// What the script printed; "failed" and its words where it failed.
  std::string fetch(int port, const std::string& path = "/metrics") {
    const std::string out = folder / "out.txt";
    const std::string command = python3 + " " + (folder / "scrape.py") +
                                " http://127.0.0.1:" + std::to_string(port) + path + " >" + out +
                                " 2>&1";
    const int status = std::system(command.c_str());
    std::ifstream file(out);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    return status == 0 ? text : "failed: " + text;
  }
};

bool has(const std::string& text, const std::string& line) {
  return text.find(line + "\n") != std::string::npos;
}

}  // namespace

TEST_CASE("a page is fetched over loopback, and its reader sees what was counted") {
  Scraper scraper;
  if (scraper.python3.empty()) {
    return test::skip("no python3 with prometheus_client (Debian: python3-prometheus-client)");
  }
  kvmeld::metrics::ServingMetrics metrics;
  std::atomic<bool> broken{false};
  const auto fill = [&](kvmeld::metrics::MetricsPage& page) -> kvmeld::Status {
    if (broken.load()) return {kvmeld::ErrorCode::unavailable, "the pool is being replaced"};
    KVMELD_TRY(kvmeld::metrics::collect(page, metrics, {{"agent", "a \"b\" \\ \n c"}}));
    KVMELD_TRY(kvmeld::metrics::collect(page, metrics, {{"agent", "ü"}}));
    return page.gauge("kvmeld_memory_bytes", "line\nfeed \\ and \"quotes\"", 1.5e9);
  };
  auto endpoint = kvmeld::metrics::MetricsEndpoint::serve(fill);
  REQUIRE(endpoint.ok());
  REQUIRE(endpoint->port() > 0);

  std::atomic<bool> stop{false};
  std::thread recorder([&] {
    for (int i = 0; !stop.load(); ++i) metrics.sync_seconds.record(1e-5 * (1 + i % 1000));
  });
  const std::string first = scraper.fetch(endpoint->port());
  INFO(first);
  CHECK(has(first, "content-type text/plain; version=0.0.4; charset=utf-8"));
  CHECK(has(first, "family kvmeld_prefill_seconds summary 'Time to prefill a segment'"));
  CHECK(has(first, "sample kvmeld_prefill_seconds_count|agent=ü 0.0"));
  CHECK(has(first, "family kvmeld_memory_bytes gauge 'line\\nfeed \\\\ and \"quotes\"'"));
  CHECK(has(first, "sample kvmeld_memory_bytes 1500000000.0"));
  CHECK(first.find("sample kvmeld_sync_seconds|agent=ü|quantile=0.5 ") != std::string::npos);
  stop.store(true);
  recorder.join();

  for (int i = 0; i < 100; ++i) metrics.prefill_seconds.record(0.25);
  metrics.count(kvmeld::RenderReport{7, 0, 1 << 20, {}, {}});
  const std::string second = scraper.fetch(endpoint->port());
  INFO(second);
  CHECK(has(second, "sample kvmeld_prefill_seconds_count|agent=ü 100.0"));
  CHECK(has(second, "sample kvmeld_prefill_seconds|agent=ü|quantile=0.99 0.25"));
  CHECK(has(second, "sample kvmeld_prefill_seconds_sum|agent=ü 25.0"));
  CHECK(has(second, "sample kvmeld_rendered_bytes_total|agent=ü 1048576.0"));
  CHECK(has(second, "sample kvmeld_sync_seconds_count|agent=ü " +
                        std::to_string(metrics.sync_seconds.read().count()) + ".0"));

  CHECK(scraper.fetch(endpoint->port(), "/other").starts_with("status 404"));
  broken.store(true);
  CHECK(scraper.fetch(endpoint->port()).starts_with("status 500 the pool is being replaced"));
}

TEST_CASE("buckets are what Prometheus takes for a histogram") {
  Scraper scraper;
  kvmeld::metrics::ServingMetrics metrics;
  for (int i = 1; i <= 1000; ++i) metrics.prefill_seconds.record(i / 1000.0);
  auto endpoint = serve_metrics(metrics, 0);
  REQUIRE(endpoint.ok());
  const std::string text = scraper.fetch(endpoint->port());
  INFO(text);
  CHECK(has(text, "family kvmeld_prefill_seconds histogram 'Time to prefill a segment'"));
  CHECK(has(text, "sample kvmeld_prefill_seconds_bucket|le=0.5 500.0"));
  CHECK(has(text, "sample kvmeld_prefill_seconds_bucket|le=+Inf 1000.0"));
  CHECK(has(text, "sample kvmeld_prefill_seconds_count 1000.0"));
}

TEST_CASE("a port that is taken is an error, and is free again once its endpoint is gone") {
  const auto fill = [](kvmeld::metrics::MetricsPage& page) { return page.gauge("x", "", 1); };
  auto first = kvmeld::metrics::MetricsEndpoint::serve(fill);
  REQUIRE(first.ok());
  const int port = first->port();
  CHECK(kvmeld::metrics::MetricsEndpoint::serve(fill, {.port = port}).error().code() ==
        kvmeld::ErrorCode::unavailable);
  CHECK(kvmeld::metrics::MetricsEndpoint::serve(fill, {.host = "256.0.0.1"}).error().code() ==
        kvmeld::ErrorCode::unavailable);
  first = kvmeld::Status(kvmeld::ErrorCode::unavailable, "closed");
  auto second = kvmeld::metrics::MetricsEndpoint::serve(fill, {.port = port, .path = "/m"});
  REQUIRE(second.ok());
  CHECK(second->port() == port);
  // begun and ended at once
  for (int i = 0; i < 20; ++i) CHECK(kvmeld::metrics::MetricsEndpoint::serve(fill).ok());
}

#else

#include "support/catch.hpp"

TEST_CASE("the endpoint of metrics") {
  std::printf("skipped: no cpp-httplib (Debian: libcpp-httplib-dev, pkg-config)\n");
  std::exit(77);
}

#endif
