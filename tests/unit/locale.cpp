// Identity, files, pages and messages under a locale that writes 1,5 where C writes 1.5.
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <regex>

#include <kvmeld/merger.hpp>
#include <kvmeld/metrics/metrics.hpp>
#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/projection.hpp>
#include <kvmeld/policies/token_match.hpp>

#include "support/catch.hpp"
#include "support/comma_locale.hpp"
#include "support/projection_maps.hpp"

using namespace kvmeld;

namespace {

std::shared_ptr<const ProjectionMap> map_of(double cosine) {
  const test::Model small{.layers = 2, .heads = 2, .channels = 16};
  auto from = test::geometry(small), to = test::geometry(small);
  from->model = "source model";
  to->model = "target model";
  ProjectionParts parts = test::random_parts(*from, *to, test::Sharing::layer, 1, 0, true, 7);
  parts.record.attention_cosine = cosine;
  parts.record.bar = 0.1;
  return *ProjectionMap::make(std::move(parts));
}

// Everything that leaves the process as text or as bytes.
struct Written {
  std::string digests, messages, page, cosine;
  std::vector<std::byte> file;
};

Written written() {
  Written out;
  const auto map = map_of(0.8999999);
  out.digests =
      map->digest().hex() + ' ' + merger(ById{}, Aligner{Projection{map, 0.5}}).digest().hex() +
      ' ' +
      merger(SeamShare{.share = 0.3F}, Aligner{TokenMatch{.threshold = 0.97F}}).digest().hex();
  out.messages =
      Projection{map, 0.9F}.accepts(map->source(), map->target()).message() + '\n' +
      extend::error(ErrorCode::corrupt, 1.5, ' ', 1234567, " ", 1e-7, " ", 0.3F, " ", 1e300)
          .message();
  metrics::MetricsPage page;
  REQUIRE(page.gauge("g", "h", 1234567.25).ok());
  out.page = prometheus_text(page);
  out.file = *to_safetensors(*map);
  out.cosine = *parse_safetensors(out.file)->find_metadata("attention_cosine");
  return out;
}

}  // namespace

TEST_CASE("identity, files, pages and messages do not depend on the locale") {
  const Written plain = written();
  CHECK(plain.messages.find("\n1.5321234567 1e-07 0.3 1e+300") != std::string::npos);
  CHECK(plain.cosine == "0.8999999");
  CHECK(plain.page.find("g 1234567.25\n") != std::string::npos);
  const test::CommaLocale comma;
  comma.require();
  const Written other = written();
  CHECK(other.digests == plain.digests);
  CHECK(other.messages == plain.messages);
  CHECK(other.page == plain.page);
  CHECK(other.cosine == plain.cosine);
  CHECK(other.file == plain.file);
  // a file of one locale, read in the other
  const auto read = projection_from_safetensors(plain.file);
  REQUIRE(read.ok());
  CHECK((*read)->digest() == map_of(0.8999999)->digest());
  CHECK(extend::parse_decimal<double>("0.25") == 0.25);
  CHECK(!extend::parse_decimal<double>("0,25"));
}

TEST_CASE("decimals read back as the number they came from") {
  test::Random random(5);
  for (int i = 0; i < 20000; ++i) {
    const auto high = static_cast<std::uint64_t>(random.next());
    double x = 0;
    std::memcpy(&x, &high, sizeof x);
    if (!std::isfinite(x)) continue;
    const auto back = extend::parse_decimal<double>(extend::decimal(x));
    REQUIRE(back.has_value());
    REQUIRE(*back == x);
  }
  CHECK(extend::decimal(-1.7976931348623157e308) == "-1.7976931348623157e+308");
  CHECK(extend::decimal(1e-7) != extend::decimal(1.0000000000000002e-7));
  CHECK(extend::decimal(std::numeric_limits<std::int64_t>::min()) == "-9223372036854775808");
  CHECK(extend::decimal(std::numeric_limits<std::uint64_t>::max()) == "18446744073709551615");
  CHECK(extend::decimal(true) == "1");
  CHECK(extend::decimal('a') == "97");
  CHECK(!extend::parse_decimal<std::uint64_t>("18446744073709551616"));
  CHECK(!extend::parse_decimal<int>("12 "));
  CHECK(!extend::parse_decimal<int>(""));
}

TEST_CASE("no header calls a function that asks the locale") {
  const std::regex asks(
      "std::to_string|printf *\\([^;]*%[-+ "
      "#0-9.*l]*[aAeEfFgG]\\b|\\b(strto(d|f|ld|l|ll|ul|ull)|sto(d|f|ld|i|l|ll|ul|ull)|atof|"
      "s?scanf|[a-z]*stringstream|[io]stream|iostream|fstream|is(alpha|digit|space|alnum|upper|"
      "lower|xdigit|punct|"
      "print)|"
      "to(lower|upper)|setlocale)\\b");
  CHECK(std::regex_search(std::string("x = std::strtod(text, nullptr);"), asks));
  CHECK(std::regex_search(std::string("std::snprintf(text, sizeof(text), \"%.6g\", x);"), asks));
  std::size_t headers = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator("include/kvmeld")) {
    if (!entry.is_regular_file()) continue;
    ++headers;
    std::ifstream file(entry.path());
    std::size_t number = 0;
    for (std::string line; std::getline(file, line);) {
      ++number;
      const std::string code = line.substr(0, line.find("//"));
      INFO(entry.path().string() << ":" << number << ": " << code
                                 << "\nuse detail::decimal and detail::parse_decimal");
      const bool calls = code.find_first_of("(#<") != std::string::npos;  // the regex is slow
      if (calls && std::regex_search(code, asks))
        FAIL_CHECK("a function whose result depends on the locale");
    }
  }
  CHECK(headers > 60);
}
