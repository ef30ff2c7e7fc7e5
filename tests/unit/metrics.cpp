// Pages and their text, read back by a parser of this file's own; what collectors take from pools,
// sessions and sets.

#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/metrics/collect.hpp>
#include <kvmeld/metrics/metrics.hpp>

#include "support/catch.hpp"
#include "support/page_snippets.hpp"
#include "support/random_cache.hpp"
#include "support/temp_folder.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::metrics::MetricsPage;

// example-begin: file
/// What a process knows of itself, where node_exporter's collector of text files picks it up.
kvmeld::Status publish(const kvmeld::metrics::ServingMetrics& serving,
                       const kvmeld::anchors::AnchorPool<>& pool, const std::string& path) {
  kvmeld::metrics::MetricsPage page;
  KVMELD_TRY(kvmeld::metrics::collect(page, serving, {{"agent", "planner"}}));
  KVMELD_TRY(kvmeld::metrics::collect(page, pool, {{"agent", "planner"}}));
  return kvmeld::metrics::write_prometheus_file(path, page);
}
// example-end

/// What a reader of the text format 0.0.4 makes of a page: series by "name{label=value,…}" with
/// labels sorted, and types by family.
struct Parsed {
  std::map<std::string, double> series;
  std::map<std::string, std::string> types, helps;
  std::vector<std::string> order;  // families
  std::string wrong;               // the first line that is none
};

class Line {
 public:
  explicit Line(std::string text) : text_(std::move(text)) {}
  bool take(const std::string& wanted) {
    if (text_.compare(at_, wanted.size(), wanted) != 0) return false;
    at_ += wanted.size();
    return true;
  }
  std::string name() {
    const std::size_t from = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) ||
                                  text_[at_] == '_' || text_[at_] == ':'))
      ++at_;
    return text_.substr(from, at_ - from);
  }
  /// Up to an unescaped quote.
  bool quoted(std::string& out) {
    for (; at_ < text_.size(); ++at_) {
      if (text_[at_] == '"') return ++at_, true;
      if (text_[at_] != '\\') {
        out += text_[at_];
        continue;
      }
      if (++at_ == text_.size()) return false;
      const char c = text_[at_];
      if (c != '\\' && c != '"' && c != 'n') return false;
      out += c == 'n' ? '\n' : c;
    }
    return false;
  }
  std::string rest() { return text_.substr(std::exchange(at_, text_.size())); }

 private:
  std::string text_;
  std::size_t at_ = 0;
};

Parsed parse(const std::string& text) {
  Parsed out;
  if (!text.empty() && text.back() != '\n') out.wrong = "no line feed at the end";
  std::string family;
  std::size_t from = 0;
  while (from < text.size() && out.wrong.empty()) {
    const std::size_t end = text.find('\n', from);
    const std::string whole = text.substr(from, end - from);
    from = end + 1;
    Line line(whole);
    if (line.take("# HELP ")) {
      family = line.name();
      if (family.empty() || !line.take(" ") || out.helps.count(family) != 0) out.wrong = whole;
      out.helps[family] = line.rest();
      continue;
    }
    if (line.take("# TYPE ")) {
      if (line.name() != family || !line.take(" ") || out.types.count(family) != 0)
        out.wrong = whole;
      out.types[family] = line.rest();
      out.order.push_back(family);
      continue;
    }
    std::string key = line.name();
    if (key.empty() || key.compare(0, family.size(), family) != 0) out.wrong = whole;
    std::map<std::string, std::string> labels;
    if (line.take("{")) {
      do {
        const std::string label = line.name();
        std::string value;
        if (label.empty() || labels.count(label) != 0 || !line.take("=\"") || !line.quoted(value))
          out.wrong = whole;
        labels[label] = value;
      } while (line.take(","));
      if (!line.take("}")) out.wrong = whole;
    }
    if (!line.take(" ")) out.wrong = whole;
    for (const auto& [label, value] : labels) key += '|' + label + '=' + value;
    const std::string number = line.rest();
    char* stop = nullptr;
    const double value = number == "+Inf"   ? HUGE_VAL
                         : number == "-Inf" ? -HUGE_VAL
                         : number == "NaN"  ? std::nan("")
                                            : std::strtod(number.c_str(), &stop);
    if ((stop != nullptr && (*stop != '\0' || number.empty())) || out.series.count(key) != 0)
      out.wrong = whole;
    out.series[key] = value;
  }
  return out;
}

kvmeld::metrics::HistogramCounts counts(std::initializer_list<double> values) {
  kvmeld::metrics::HistogramCounts out;
  for (const double v : values) out.record(v);
  return out;
}

}  // namespace

TEST_CASE("a page is written as Prometheus reads it") {
  MetricsPage page;
  REQUIRE(page.counter("a_total", "One \\ of\ntwo \"lines\"", 3).ok());
  REQUIRE(page.gauge("b:c", "", -0.1, {{"path", "C:\\x \"y\"\nz, } ü"}, {"empty", ""}}).ok());
  REQUIRE(page.gauge("b:c", "", std::nan(""), {{"path", "nan"}}).ok());
  REQUIRE(page.gauge("b:c", "", HUGE_VAL, {{"path", "inf"}}).ok());
  REQUIRE(page.gauge("b:c", "", -HUGE_VAL, {{"path", "-inf"}}).ok());
  REQUIRE(
      page.histogram("h_seconds", "h", counts({0.25, 0.3, 0.5, 3, 100}), {{"agent", "1"}}, {-2, 2})
          .ok());
  REQUIRE(page.summary("s_seconds", "s", counts({1, 2, 3, 4})).ok());
  CHECK(kvmeld::metrics::prometheus_text(page).starts_with(
      "# HELP a_total One \\\\ of\\ntwo \"lines\"\n# TYPE a_total counter\na_total 3\n"
      "# HELP b:c \n# TYPE b:c gauge\nb:c{path=\"C:\\\\x \\\"y\\\"\\nz, } ü\",empty=\"\"} "
      "-0.1\nb:c{path=\"nan\"} NaN\n"));
  const Parsed read = parse(kvmeld::metrics::prometheus_text(page));
  REQUIRE(read.wrong == "");
  CHECK(read.order == std::vector<std::string>{"a_total", "b:c", "h_seconds", "s_seconds"});
  CHECK(read.types.at("h_seconds") == "histogram");
  CHECK(read.types.at("s_seconds") == "summary");
  CHECK(read.helps.at("a_total") == "One \\\\ of\\ntwo \"lines\"");
  CHECK(read.series.at("a_total") == 3);
  CHECK(read.series.at("b:c|empty=|path=C:\\x \"y\"\nz, } ü") == -0.1);
  CHECK(std::isnan(read.series.at("b:c|path=nan")));
  CHECK(read.series.at("b:c|path=-inf") == -HUGE_VAL);
  const std::pair<const char*, double> buckets[] = {{"0.25", 1}, {"0.5", 3}, {"1", 3},
                                                    {"2", 3},    {"4", 4},   {"+Inf", 5}};
  for (const auto& [le, count] : buckets)
    CHECK(read.series.at(std::string("h_seconds_bucket|agent=1|le=") + le) == count);
  CHECK(read.series.at("h_seconds_sum|agent=1") == 104.05);
  CHECK(read.series.at("h_seconds_count|agent=1") == 5);
  CHECK(read.series.at("s_seconds|quantile=0.5") == Approx(2).epsilon(0.02));
  CHECK(read.series.at("s_seconds|quantile=0.999") == 4);
  CHECK(read.series.at("s_seconds_sum") == 10);
  CHECK(read.series.size() == 5 + 8 + 6);
  // Buckets stand in ascending order of `le` before the sum and the count.
  const auto& samples = page.families()[2].samples;
  double before = 0;
  for (std::size_t i = 0; i + 2 < samples.size(); ++i) {
    CHECK(samples[i].suffix == "_bucket");
    CHECK(samples[i].value >= before);
    before = samples[i].value;
  }
  CHECK(samples[samples.size() - 3].labels.back().value == "+Inf");
}

TEST_CASE("numbers are written so that the same f64 is read") {
  for (const double v :
       {0.0, 1.0, 0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, 123456789012345680.0, 1e22}) {
    CHECK(std::strtod(kvmeld::metrics::detail::metric_number(v).c_str(), nullptr) == v);
  }
}

TEST_CASE("what Prometheus does not take is refused and leaves the page as it was") {
  MetricsPage page;
  REQUIRE(page.histogram("h", "", counts({1})).ok());
  REQUIRE(page.counter("n_total", "", 1, {{"a", "1"}, {"b", "2"}}).ok());
  const std::string before = kvmeld::metrics::prometheus_text(page);
  const double unsorted[] = {0.9, 0.5}, beyond[] = {1.5};
  const kvmeld::Status refused[] = {
      page.counter("", "", 1),
      page.counter("1a", "", 1),
      page.counter("a-b", "", 1),
      page.counter("a\nb", "", 1),
      page.counter("x", "bad \xff", 1),
      page.counter("x", "", -1),
      page.gauge("x", "", 1, {{"", "v"}}),
      page.gauge("x", "", 1, {{"a:b", "v"}}),
      page.gauge("x", "", 1, {{"__name__", "v"}}),
      page.gauge("x", "", 1, {{"a", "1"}, {"a", "2"}}),
      page.gauge("x", "", 1, {{"a", "\xc0\x80"}}),
      page.gauge("x", "", 1, {{"a", "\xed\xa0\x80"}}),
      page.histogram("x", "", {}, {{"le", "v"}}),
      page.summary("x", "", {}, {{"quantile", "v"}}),
      page.summary("x", "", {}, {}, unsorted),
      page.summary("x", "", {}, {}, beyond),
      page.histogram("x", "", {}, {}, {3, 2}),
      page.histogram("x", "", {}, {}, {-31, 2}),
      page.counter("n_total", "", 2, {{"b", "2"}, {"a", "1"}}),  // the same labels in another order
      page.gauge("n_total", "", 2),                              // another type
      page.gauge("h_sum", "", 2),                                // a line of h
      page.histogram("h", "", counts({1}), {}),
  };
  for (const auto& status : refused) {
    INFO(status.message());
    CHECK(status.code() == ErrorCode::invalid_argument);
    CHECK_FALSE(status.message().empty());
  }
  CHECK(page.counter("x", "", HUGE_VAL).code() == ErrorCode::non_finite);
  CHECK(kvmeld::metrics::prometheus_text(page) == before);
  CHECK(page.gauge("le_is_fine_here", "", 1, {{"le", "v"}}).ok());
}

TEST_CASE("a file of metrics is replaced whole, and stays where it cannot be") {
  const test::TempFolder folder;
  const std::string path = folder / "kvmeld.prom";
  MetricsPage page;
  REQUIRE(page.gauge("x", "", 1).ok());
  REQUIRE(kvmeld::metrics::write_prometheus_file(path, page).ok());
  REQUIRE(page.gauge("y", "", 2).ok());
  REQUIRE(kvmeld::metrics::write_prometheus_file(path, page).ok());
  const auto bytes = kvmeld::read_file_bytes(path);
  REQUIRE(bytes.ok());
  CHECK(std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size()) ==
        kvmeld::metrics::prometheus_text(page));
  CHECK(kvmeld::read_file_bytes(path + ".new").error().code() == ErrorCode::not_found);
  CHECK(kvmeld::metrics::write_prometheus_file((folder / "none") + "/x.prom", page).code() ==
        ErrorCode::unavailable);
  std::filesystem::create_directory(folder / "taken.prom");
  CHECK(kvmeld::metrics::write_prometheus_file(folder / "taken.prom", page).code() ==
        ErrorCode::unavailable);
  CHECK_FALSE(std::filesystem::exists(folder / "taken.prom.new"));
}

TEST_CASE("a pool's page tells look-ups by reason, its rates and its memory") {
  const std::shared_ptr<const kvmeld::Geometry> shape =
      test::geometry({.layers = 2, .heads = 1, .channels = 2});
  kvmeld::anchors::AnchorPool<> pool(kvmeld::anchors::AnchorSpace::of(*shape), {2, 1 << 20});
  std::vector<kvmeld::anchors::Anchor> anchors;
  for (std::uint8_t n = 0; n < 3; ++n) {
    test::TestCache cache(shape, 4);
    cache.fill(n);
    const auto ids = test::token_ids(4, 10 * n);
    anchors.push_back(
        *kvmeld::anchors::make_anchor(*kvmeld::seal(cache.ref(), {.tokens = ids}), {1}));
    REQUIRE(kvmeld::anchors::add_offset(
                anchors.back(),
                {{1, 1},
                 *kvmeld::anchors::measure_offset(anchors.back().base, anchors.back().base),
                 {}})
                .ok());
  }
  const auto page_of = [&] {
    MetricsPage page;
    REQUIRE(kvmeld::metrics::collect(page, pool, {{"agent", "7"}}).ok());
    Parsed read = parse(kvmeld::metrics::prometheus_text(page));
    REQUIRE(read.wrong == "");
    return read;
  };
  CHECK(page_of().series.at("kvmeld_anchor_hit_ratio|agent=7") == 0);
  CHECK(page_of().series.at("kvmeld_anchor_invalidation_ratio|agent=7") == 0);
  const std::vector<float> vector{1};
  const auto look = [&](const kvmeld::anchors::Anchor& like, kvmeld::Digest128 context) {
    return pool
        .look_up({}, {.space = &pool.space(),
                      .signature = {like.base.tokens(), {}},
                      .vector = vector,
                      .context = context,
                      .request = {.tokens = 4}})
        .decision.reason;
  };
  CHECK(look(anchors[0], {1, 1}) == kvmeld::anchors::ReuseReason::empty_pool);
  // the third evicts the first
  for (const auto& anchor : anchors) REQUIRE(pool.commit(anchor).ok());
  CHECK(look(anchors[2], {1, 1}) == kvmeld::anchors::ReuseReason::reuse);
  CHECK(look(anchors[2], {1, 1}) == kvmeld::anchors::ReuseReason::reuse);
  CHECK(look(anchors[2], {9, 9}) == kvmeld::anchors::ReuseReason::no_offset);
  const auto read = page_of();
  CHECK(read.series.at("kvmeld_anchor_lookups_total|agent=7|reason=reuse") == 2);
  CHECK(read.series.at("kvmeld_anchor_lookups_total|agent=7|reason=no_offset") == 1);
  CHECK(read.series.at("kvmeld_anchor_lookups_total|agent=7|reason=empty_pool") == 1);
  CHECK(read.series.at("kvmeld_anchor_lookups_total|agent=7|reason=uncertain") == 0);
  CHECK(read.series.at("kvmeld_anchor_hit_ratio|agent=7") == 0.5);
  CHECK(read.series.at("kvmeld_anchor_evictions_total|agent=7") == 1);
  CHECK(read.series.at("kvmeld_anchor_invalidation_ratio|agent=7") == Approx(1.0 / 3));
  CHECK(read.series.at("kvmeld_anchors|agent=7") == 2);
  CHECK(read.series.at("kvmeld_anchor_bytes|agent=7") ==
        static_cast<double>(anchors[1].bytes() + anchors[2].bytes()));
  CHECK(read.series.at("kvmeld_anchor_capacity_bytes|agent=7") == 1 << 20);
  CHECK(read.types.at("kvmeld_anchor_lookups_total") == "counter");
  // Twice on one page is refused, and leaves the page as it was.
  MetricsPage page;
  REQUIRE(kvmeld::metrics::collect(page, pool).ok());
  const std::string before = kvmeld::metrics::prometheus_text(page);
  CHECK(kvmeld::metrics::collect(page, pool).code() == ErrorCode::invalid_argument);
  CHECK(kvmeld::metrics::prometheus_text(page) == before);
  CHECK(kvmeld::metrics::collect(page, pool, {{"agent", "8"}}).ok());
}

TEST_CASE("an agent's page tells its traffic, its rounds and its set") {
  kvmeld::replica::Accounting accounting;
  accounting.sent[1].add(100);
  accounting.sent[4].add(5000);
  accounting.sent[200].add(7);
  accounting.received[33].add(11);
  accounting.stored = {900, 300, 2};
  accounting.sealed_bytes = {10, 20};
  accounting.rounds_swapped = 4;
  accounting.rounds_kept = 1;
  accounting.wait_ms = 2500;
  accounting.swaps = 6;
  accounting.refused = {11, 12, 13, 14, 15, 16, 17};
  accounting.swap_ms = 12;

  const std::shared_ptr<const kvmeld::Geometry> shape =
      test::geometry({.layers = 1, .heads = 1, .channels = 2});
  kvmeld::FragmentSet set;
  std::vector<kvmeld::Fragment> fragments;
  for (std::uint8_t n = 0; n < 4; ++n) {
    test::TestCache cache(shape, 3);
    cache.fill(n);
    const auto ids = test::token_ids(3, 10 * n);
    fragments.push_back(*kvmeld::seal(cache.ref(), {.tokens = ids}));
    REQUIRE(set.insert(fragments.back(), kvmeld::Dot{1, n + 1U, 0}).ok());
  }
  REQUIRE(set.supersede(fragments[0].id(), fragments[1].id(), {1, 10, 0}).ok());
  REQUIRE(set.remove(fragments[2].id(), {1, 11, 0}).ok());
  REQUIRE(set.evict(fragments[3].id()).ok());

  MetricsPage page;
  REQUIRE(kvmeld::metrics::collect(page, accounting).ok());
  REQUIRE(kvmeld::metrics::collect(page, set).ok());
  const Parsed read = parse(kvmeld::metrics::prometheus_text(page));
  REQUIRE(read.wrong == "");
  CHECK(read.series.at("kvmeld_sent_bytes_total|layer=state") == 100);
  CHECK(read.series.at("kvmeld_sent_bytes_total|layer=payload") == 5000);
  CHECK(read.series.at("kvmeld_sent_bytes_total|layer=application") == 7);
  CHECK(read.series.at("kvmeld_sent_messages_total|layer=payload") == 1);
  CHECK(read.series.at("kvmeld_received_bytes_total|layer=rounds") == 11);
  CHECK(read.series.at("kvmeld_stored_bytes_total") == 900);
  CHECK(read.series.at("kvmeld_dedup_bytes_total") == 300);
  CHECK(read.series.at("kvmeld_dedup_hits_total") == 2);
  CHECK(read.series.at("kvmeld_sealed_bytes_total|model_layer=1") == 20);
  CHECK(read.series.at("kvmeld_rounds_total|result=swapped") == 4);
  CHECK(read.series.at("kvmeld_rounds_total|result=kept") == 1);
  CHECK(read.series.at("kvmeld_round_wait_seconds_total") == 2.5);
  CHECK(read.series.at("kvmeld_swap_seconds_total") == 0.012);
  CHECK(read.series.at("kvmeld_refused_frames_total") == 11);
  CHECK(read.series.at("kvmeld_refused_operations_total") == 12);
  CHECK(read.series.at("kvmeld_unvouched_operations_total") == 13);
  CHECK(read.series.at("kvmeld_reused_dots_total") == 14);
  CHECK(read.series.at("kvmeld_refused_pieces_total") == 15);
  CHECK(read.series.at("kvmeld_strikes_total") == 16);
  CHECK(read.series.at("kvmeld_corrupt_records_total") == 17);
  CHECK(read.series.at("kvmeld_fragments|state=in_force") == 2);
  CHECK(read.series.at("kvmeld_fragments|state=superseded") == 1);
  CHECK(read.series.at("kvmeld_fragments|state=removed") == 1);
  CHECK(read.series.at("kvmeld_fragments_without_bytes") == 1);
  CHECK(read.series.at("kvmeld_fragment_bytes") ==
        2.0 * static_cast<double>(fragments[0].payloads()[0].byte_count));
  CHECK(read.series.at("kvmeld_fragment_invalidation_ratio") == 0.5);
}

TEST_CASE("a replica's and a coordinator's refusals are on one page, told apart by labels") {
  kvmeld::replica::ReplicaCounters counters;
  counters.refused_pieces = 3;
  counters.unvouched_operations = 4;
  MetricsPage page;
  REQUIRE(kvmeld::metrics::collect(page, kvmeld::coordinator::CoordinatorCounters{5, 6},
                                   {{"at", "hub"}})
              .ok());
  REQUIRE(kvmeld::metrics::collect(page, counters, {{"at", "hub"}}).ok());
  CHECK(kvmeld::metrics::collect(page, counters, {{"at", "hub"}}).code() ==
        ErrorCode::invalid_argument);
  const Parsed read = parse(kvmeld::metrics::prometheus_text(page));
  REQUIRE(read.wrong == "");
  CHECK(read.series.at("kvmeld_coordinator_refused_updates_total|at=hub|reason=quota_exceeded") ==
        5);
  CHECK(read.series.at("kvmeld_coordinator_refused_updates_total|at=hub|reason=unauthenticated") ==
        6);
  CHECK(read.series.at("kvmeld_refused_pieces_total|at=hub") == 3);
  CHECK(read.series.at("kvmeld_unvouched_operations_total|at=hub") == 4);
}

TEST_CASE("what the host measures is on its page in either form") {
  kvmeld::metrics::ServingMetrics metrics;
  for (int i = 1; i <= 1000; ++i) metrics.prefill_seconds.record(i / 1000.0);
  metrics.prefill_seconds.record(-1);
  metrics.load_bytes_per_second.record(3e9);
  metrics.similarity.record(0.9);
  metrics.alignment_error.record(0.01);
  metrics.alignments.count(kvmeld::Status(ErrorCode::tokens_required, "x"));
  metrics.alignments.count(kvmeld::Status(static_cast<ErrorCode>(255), "of a later version"));
  metrics.count(kvmeld::RenderReport{12, 2, 4096, {}, {}});
  metrics.count(kvmeld::Result<kvmeld::RenderReport>(ErrorCode::aliasing, "x"));
  MetricsPage quantiles, buckets;
  REQUIRE(kvmeld::metrics::collect(quantiles, metrics).ok());
  REQUIRE(kvmeld::metrics::collect(buckets, metrics, {}, kvmeld::metrics::DistributionForm::buckets)
              .ok());
  const Parsed q = parse(kvmeld::metrics::prometheus_text(quantiles)),
               b = parse(kvmeld::metrics::prometheus_text(buckets));
  REQUIRE(q.wrong == "");
  REQUIRE(b.wrong == "");
  CHECK(q.series.at("kvmeld_prefill_seconds|quantile=0.5") == Approx(0.5).epsilon(0.02));
  CHECK(q.series.at("kvmeld_prefill_seconds|quantile=0.99") == Approx(0.99).epsilon(0.02));
  CHECK(q.series.at("kvmeld_prefill_seconds_count") == 1000);
  CHECK(q.series.at("kvmeld_refused_samples_total|metric=kvmeld_prefill_seconds") == 1);
  CHECK(q.series.at("kvmeld_refused_samples_total|metric=kvmeld_quality") == 0);
  CHECK(q.series.at("kvmeld_alignment_failures_total|code=tokens_required") == 1);
  CHECK(q.series.at("kvmeld_alignment_failures_total|code=255") == 1);
  CHECK(q.series.at("kvmeld_rendered_tokens_total") == 12);
  CHECK(q.series.at("kvmeld_rendered_holes_total") == 2);
  CHECK(q.series.at("kvmeld_rendered_bytes_total") == 4096);
  CHECK(q.series.at("kvmeld_render_failures_total") == 1);
  CHECK(std::isnan(q.series.at("kvmeld_quality|quantile=0.5")));
  CHECK(b.types.at("kvmeld_prefill_seconds") == "histogram");
  CHECK(b.series.at("kvmeld_prefill_seconds_bucket|le=0.5") == 500);
  CHECK(b.series.at("kvmeld_prefill_seconds_bucket|le=1") == 1000);
  CHECK(b.series.at("kvmeld_load_bytes_per_second_bucket|le=2147483648") == 0);
  CHECK(b.series.at("kvmeld_load_bytes_per_second_bucket|le=4294967296") == 1);
}

TEST_CASE(
    "what docs/metrics.md shows writes a file that can be read, and the page shows it word for "
    "word") {
  const test::TempFolder folder;
  const std::shared_ptr<const kvmeld::Geometry> shape =
      test::geometry({.layers = 1, .heads = 1, .channels = 2});
  const kvmeld::anchors::AnchorPool<> pool(kvmeld::anchors::AnchorSpace::of(*shape), {2, 1 << 20});
  kvmeld::metrics::ServingMetrics serving;
  serving.prefill_seconds.record(0.125);
  REQUIRE(publish(serving, pool, folder / "kvmeld.prom").ok());
  const auto bytes = kvmeld::read_file_bytes(folder / "kvmeld.prom");
  const Parsed read =
      parse(std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size()));
  CHECK(read.wrong == "");
  CHECK(read.series.at("kvmeld_prefill_seconds_sum|agent=planner") == 0.125);
  CHECK(read.series.at("kvmeld_anchors|agent=planner") == 0);
  test::check_page("docs/metrics.md",
                   {"tests/unit/metrics.cpp", "tests/unit/metrics_endpoint.cpp"});
}
