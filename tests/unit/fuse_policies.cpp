// Fusers through real renders, in every executor: closed-form cases, plain loops in double, and
// what they refuse.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/reference.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ElementType;
using kvmeld::ErrorCode;
using kvmeld::Fuser;
using kvmeld::TokenMatch;
using test::Layout;
using test::Sealed;

// One token whose keys are all `key` and whose values are all `value`.
kvmeld::Fragment point(const std::shared_ptr<const kvmeld::Geometry>& g, float key, float value,
                       std::int64_t position = 0) {
  test::TestCache cache(g, 1);
  for (std::size_t p = 0; p < cache.planes(); ++p) {
    for (std::int64_t h = 0; h < cache.shape(p).heads; ++h) {
      for (std::int64_t c = 0; c < cache.shape(p).channels; ++c) {
        cache.set(p, 0, h, c, cache.shape(p).plane == kvmeld::Plane::key ? key : value);
      }
    }
  }
  const std::vector<std::int64_t> at{position};
  const auto made = kvmeld::seal(cache.ref(), {.positions = at});
  REQUIRE(made.ok());
  return *made;
}
kvmeld::FragmentSet points(const std::shared_ptr<const kvmeld::Geometry>& g,
                           const std::vector<float>& keys) {
  kvmeld::FragmentSet set;
  std::uint64_t agent = 0;
  for (const float key : keys)
    REQUIRE(set.insert(point(g, key, key), kvmeld::Dot{++agent, 0}).ok());
  return set;
}
kvmeld::Target at(const std::shared_ptr<const kvmeld::Geometry>& g,
                  std::int64_t first_position = 0) {
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = first_position;
  return target;
}
template <class F>
auto matched(F fuser) {
  return kvmeld::merger(ById{}, Aligner{TokenMatch{}}, Fuser{fuser});
}
// What every element of the output is, all being the same.
template <class F>
double fused(const std::shared_ptr<const kvmeld::Geometry>& g, const kvmeld::FragmentSet& set,
             F fuser) {
  const auto cache = test::render_everywhere(set, matched(fuser), at(g));
  REQUIRE(cache->tokens() == 1);
  const double first = cache->get(0, 0, 0, 0);
  for (std::size_t p = 0; p < cache->planes(); ++p) {
    for (std::int64_t h = 0; h < cache->shape(p).heads; ++h) {
      for (std::int64_t c = 0; c < cache->shape(p).channels; ++c)
        REQUIRE(cache->get(p, 0, h, c) == first);
    }
  }
  return first;
}
template <class F>
void refused(const kvmeld::FragmentSet& set, const std::shared_ptr<const kvmeld::Geometry>& g,
             F fuser, ErrorCode code, const char* text) {
  const auto plan = kvmeld::plan(set, matched(fuser), at(g));
  REQUIRE_FALSE(plan.ok());
  INFO(plan.status().message());
  CHECK(plan.status().code() == code);
  CHECK(plan.status().message().find(text) != std::string::npos);
  test::TestCache out(g, 4);
  CHECK_FALSE(kvmeld::render(kvmeld::exec::seq, set, matched(fuser), out.out()).ok());
  CHECK(out.is_untouched());
}

const auto plain = test::geometry({.heads = 3, .channels = 40, .rotary = 0});

// Whole numbers between contributions, few of them different: every sum is exact and ties are many.
struct Scores {
  std::vector<double> distances, norms, mass;

  explicit Scores(std::size_t n, test::Random& random) : distances(n * n), norms(n), mass(n) {
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < i; ++j) set(i, j, static_cast<double>(1 + random.below(4)));
      mass[i] = static_cast<double>(1 + random.below(2));
    }
  }
  // Places on a line: distances are squares, so that their roots are exact as well.
  Scores(const std::vector<int>& places, test::Random& random) : Scores(places.size(), random) {
    for (std::size_t i = 0; i < places.size(); ++i) {
      norms[i] = places[i] * places[i];
      for (std::size_t j = 0; j < i; ++j)
        set(i, j, (places[i] - places[j]) * (places[i] - places[j]));
    }
  }
  void set(std::size_t i, std::size_t j, double d) {
    distances[i * norms.size() + j] = distances[j * norms.size() + i] = d;
  }
  [[nodiscard]] double at(std::size_t i, std::size_t j) const {
    return distances[i * norms.size() + j];
  }

  // The indices that a policy leaves a weight.
  template <class P>
  [[nodiscard]] std::vector<std::size_t> kept(const P& policy) const {
    std::vector<double> weights = mass;
    const kvmeld::Status scored = policy.score({distances, norms}, weights);
    INFO(scored.message());
    REQUIRE(scored.ok());
    std::vector<std::size_t> out;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (weights[i] != 0) out.push_back(i);
    }
    return out;
  }
};

// Krum's score of one of those that are left: the sum of the distances to its nearest others.
double krum_score(const Scores& s, const std::vector<std::size_t>& left, std::size_t of,
                  std::size_t neighbours) {
  std::vector<double> near;
  for (const std::size_t j : left) {
    if (j != of) near.push_back(s.at(of, j));
  }
  std::sort(near.begin(), near.end());
  double sum = 0;
  for (std::size_t k = 0; k < neighbours && k < near.size(); ++k) sum += near[k];
  return sum;
}
std::vector<std::size_t> all_of(const Scores& s) {
  std::vector<std::size_t> out(s.norms.size());
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = i;
  return out;
}
// The smallest sum of roots, of equal ones the first.
std::size_t plain_medoid(const Scores& s, const std::vector<std::size_t>& members) {
  std::size_t best = members[0];
  const auto sum = [&](std::size_t i) {
    double out = 0;
    for (const std::size_t j : members) out += s.mass[j] * std::sqrt(s.at(i, j));
    return out;
  };
  for (const std::size_t i : members) {
    if (sum(i) < sum(best)) best = i;
  }
  return best;
}

}  // namespace

TEST_CASE(
    "points 0, 1, 2, 4, 100: Krum 1, mean 21.4, median 2, trimmed mean 7/3, geometric median 2, "
    "medoid 2") {
  for (const int channels : {1, 7, 32, 40, 80}) {
    CAPTURE(channels);
    const auto g = test::geometry({.heads = 3, .channels = channels, .rotary = 0});
    const auto set = points(g, {0, 1, 2, 4, 100});
    CHECK(fused(g, set, kvmeld::Krum{.f = 1}) == 1.0);
    CHECK(fused(g, set, kvmeld::WeightedMean{}) == Approx(21.4).epsilon(1e-7));
    CHECK(fused(g, set, kvmeld::Median{}) == 2.0);
    CHECK(fused(g, set, kvmeld::TrimmedMean{.f = 1}) == Approx(7.0 / 3.0).epsilon(1e-7));
    CHECK(std::abs(fused(g, set, kvmeld::GeometricMedian{}) - 2.0) <= 1e-6);
    CHECK(fused(g, set, kvmeld::Medoid{}) == 2.0);
    // Krum scores 5, 2, 5, 13, 9216 + 9604: the three best are 0, 1, 2.
    CHECK(fused(g, set, kvmeld::MultiKrum{.f = 1, .m = 3}) == 1.0);
  }
  const auto set = points(plain, {0, 1, 2, 4, 100});
  CHECK(fused(plain, set, kvmeld::TrimmedMean{.f = 2}) == 2.0);
  CHECK(fused(plain, set, kvmeld::TrimmedMean{.f = 0}) == Approx(21.4).epsilon(1e-7));
  CHECK(fused(plain, points(plain, {0, 1, 4, 100}), kvmeld::Median{}) == 2.5);
}

TEST_CASE("Bulyan: n - 2f chosen by repeated Krum, then the n - 4f values nearest to the median") {
  // The rounds choose 1, 2, 4, 5 and 9 (whatever the ties of the last rounds); of them 2, 4 and 5
  // are nearest to the median 4.
  CHECK(fused(plain, points(plain, {1, 2, 4, 5, 9, 13, 1000}), kvmeld::Bulyan{.f = 1}) ==
        Approx(11.0 / 3.0).epsilon(1e-7));
  // A Byzantine peer in one channel among 64: the distances hardly change, the channel does not
  // either.
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 64, .rotary = 0});
  kvmeld::FragmentSet set;
  for (std::uint64_t s = 0; s < 7; ++s) {
    test::TestCache cache(g, 1);
    for (std::size_t p = 0; p < 2; ++p) {
      for (std::int64_t c = 0; c < 64; ++c)
        cache.set(
            p, 0, 0, c,
            static_cast<float>(s) + static_cast<float>(c * static_cast<std::int64_t>(s)) * 0.5F);
    }
    if (s == 3) cache.set(0, 0, 0, 9, 60.0F);
    REQUIRE(set.insert(*kvmeld::seal(cache.ref()), kvmeld::Dot{s, 0}).ok());
  }
  const auto out = test::render_everywhere(set, matched(kvmeld::Bulyan{.f = 1}), at(g));
  CHECK(out->get(0, 0, 0, 9) <= 33.0);  // the largest honest value
}

TEST_CASE("Krum, MultiKrum and Bulyan against plain loops, over distances full of ties") {
  test::Random random(5);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t n = 3 + random.below(18);
    const Scores s(n, random);
    const std::size_t f = random.below((n - 3) / 2 + 1);
    CAPTURE(round, n, f);
    // n − f − 2 neighbours; ties go to the smaller index.
    std::vector<std::pair<double, std::size_t>> order;
    for (std::size_t i = 0; i < n; ++i)
      order.emplace_back(krum_score(s, all_of(s), i, n - f - 2), i);
    std::sort(order.begin(), order.end());
    const std::size_t m = 1 + random.below(n - f);
    std::vector<std::size_t> first_m;
    for (std::size_t i = 0; i < m; ++i) first_m.push_back(order[i].second);
    std::sort(first_m.begin(), first_m.end());
    CHECK(s.kept(kvmeld::Krum{.f = static_cast<std::int32_t>(f)}) == std::vector{order[0].second});
    CHECK(s.kept(kvmeld::MultiKrum{.f = static_cast<std::int32_t>(f),
                                   .m = static_cast<std::int32_t>(m)}) == first_m);
    // Each round of Bulyan counts by those that are left.
    const std::size_t g = random.below((n - 3) / 4 + 1);
    std::vector<std::size_t> left = all_of(s), chosen;
    while (chosen.size() < n - 2 * g) {
      const std::size_t neighbours = left.size() > g + 3 ? left.size() - g - 2 : 1;
      std::size_t best = 0;
      for (std::size_t i = 1; i < left.size(); ++i) {
        if (krum_score(s, left, left[i], neighbours) < krum_score(s, left, left[best], neighbours))
          best = i;
      }
      chosen.push_back(left[best]);
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(best));
    }
    std::sort(chosen.begin(), chosen.end());
    CHECK(s.kept(kvmeld::Bulyan{.f = static_cast<std::int32_t>(g)}) == chosen);
  }
}

TEST_CASE(
    "Bulyan's last step against a plain sort: the values nearest to the median, of equally near "
    "ones the smaller") {
  test::Random random(6);
  for (int round = 0; round < 2000; ++round) {
    const int f = static_cast<int>(random.below(4));
    const int n = 2 * f + 1 + static_cast<int>(random.below(12));
    std::vector<float> values;
    for (int i = 0; i < n; ++i) values.push_back(static_cast<float>(random.below(9)));
    std::sort(values.begin(), values.end());
    const float median = n % 2 == 1 ? values[static_cast<std::size_t>(n / 2)]
                                    : (values[static_cast<std::size_t>(n / 2)] +
                                       values[static_cast<std::size_t>(n / 2 - 1)]) /
                                          2;
    std::vector<float> near = values;
    std::stable_sort(near.begin(), near.end(),
                     [&](float a, float b) { return std::abs(a - median) < std::abs(b - median); });
    float sum = 0;  // whole numbers: in any order
    for (int i = 0; i < n - 2 * f; ++i) sum += near[static_cast<std::size_t>(i)];
    CAPTURE(values, f);
    CHECK(kvmeld::Bulyan{.f = f}.select({values.data(), 1, n}) ==
          sum / static_cast<float>(n - 2 * f));
  }
}

TEST_CASE("medoids and clusters against plain loops: ties, and halves of an even number") {
  using kvmeld::Cluster;
  test::Random random(7);
  int halves = 0;
  for (int round = 0; round < 2000; ++round) {
    const std::size_t n = 2 + random.below(11);
    std::vector<int> places;
    for (std::size_t i = 0; i < n; ++i) {
      const int far = 1 + static_cast<int>(random.below(4));
      places.push_back(random.below(2) == 0 ? far : -far);
    }
    const Scores s(places, random);
    CAPTURE(round, places, s.mass);
    CHECK(s.kept(kvmeld::Medoid{}) == std::vector{plain_medoid(s, all_of(s))});
    // On a line cosines are 1 or −1: two clusters, those of either sign; of equally large ones that
    // of the first contribution.
    std::vector<std::size_t> with_first, others;
    for (std::size_t i = 0; i < n; ++i)
      ((places[i] > 0) == (places[0] > 0) ? with_first : others).push_back(i);
    halves += with_first.size() == others.size();
    const auto& largest = others.size() > with_first.size() ? others : with_first;
    CHECK(s.kept(Cluster{.threshold = 0.5F, .result = kvmeld::ClusterResult::centre}) == largest);
    CHECK(s.kept(Cluster{.threshold = 0.5F}) == std::vector{plain_medoid(s, largest)});
  }
  CHECK(halves > 100);
  // Directions at right angles, up to four clusters: the largest needs no half of all.
  for (int round = 0; round < 500; ++round) {
    const std::size_t n = 2 + random.below(9);
    Scores s(n, random);
    std::vector<std::vector<std::size_t>> clusters(4);
    std::vector<std::size_t> way;
    for (std::size_t i = 0; i < n; ++i) {
      way.push_back(random.below(4));
      clusters[way[i]].push_back(i);
      s.norms[i] = 1;
      for (std::size_t j = 0; j < i; ++j)
        s.set(i, j, way[i] == way[j] ? 0 : (way[i] + way[j]) % 2 == 0 ? 4 : 2);
    }
    std::vector<std::size_t> largest;
    for (const std::size_t w : way) {  // in the order in which the clusters were founded
      if (clusters[w].size() > largest.size()) largest = clusters[w];
    }
    CAPTURE(way);
    CHECK(s.kept(Cluster{.threshold = 0.5F, .result = kvmeld::ClusterResult::centre}) == largest);
  }
  // By number: of {0, 0, 9, 9} and of {9, 0, 0, 9} the half of the first contribution.
  const auto halved = [&](const std::vector<int>& places) {
    return Scores(places, random).kept(Cluster{.k = 2, .result = kvmeld::ClusterResult::centre});
  };
  CHECK(halved({0, 0, 9, 9}) == std::vector<std::size_t>{0, 1});
  CHECK(halved({9, 0, 0, 9}) == std::vector<std::size_t>{0, 3});
  CHECK(halved({9, 0, 0, 9, 0}) == std::vector<std::size_t>{1, 2, 4});
}

TEST_CASE(
    "clusters: an outlier among five does not move the result, by cosine or by number, medoid or "
    "centre") {
  const auto g = test::geometry({.layers = 2, .heads = 2, .channels = 32, .rotary = 0});
  // Four nearly parallel rows of different length and one opposite: (1, t) and (-1, -1).
  kvmeld::FragmentSet set, honest;
  for (std::uint64_t s = 0; s < 5; ++s) {
    test::TestCache cache(g, 1);
    for (std::size_t p = 0; p < cache.planes(); ++p) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t c = 0; c < 32; ++c) {
          const float x = s == 4       ? -1.0F
                          : c % 2 == 0 ? 1.0F
                                       : 1.0F + 0.125F * static_cast<float>(s * s);
          cache.set(p, 0, h, c, x);
        }
      }
    }
    const auto made = kvmeld::seal(cache.ref());
    REQUIRE(set.insert(*made, kvmeld::Dot{s, 0}).ok());
    if (s < 4) REQUIRE(honest.insert(*made, kvmeld::Dot{s, 0}).ok());
  }
  using kvmeld::Cluster;
  using kvmeld::ClusterResult;
  const auto bytes = [&](const kvmeld::FragmentSet& of, auto fuser) {
    return test::render_everywhere(of, matched(fuser), at(g))->buffers();
  };
  for (const std::int32_t k : {0, 2}) {
    CAPTURE(k);
    CHECK(bytes(set, Cluster{.threshold = 0.8F, .k = k}) == bytes(honest, kvmeld::Medoid{}));
    CHECK(bytes(set, Cluster{.threshold = 0.8F, .k = k, .result = ClusterResult::centre}) ==
          bytes(honest, kvmeld::WeightedMean{}));
  }
  // With k = 1, or any cosine allowed, the outlier belongs.
  CHECK(bytes(set, Cluster{.k = 1, .result = ClusterResult::centre}) ==
        bytes(set, kvmeld::WeightedMean{}));
  CHECK(bytes(set, Cluster{.threshold = -1.0F, .result = ClusterResult::centre}) ==
        bytes(set, kvmeld::WeightedMean{}));
  // As many clusters as contributions: equally large, so that the smallest id counts.
  kvmeld::FragmentSet first;
  REQUIRE(first.insert(kvmeld::in_force(set)[0].entry->fragment).ok());
  CHECK(bytes(set, Cluster{.k = 5}) == bytes(first, kvmeld::Medoid{}));
  refused(set, g, Cluster{.k = 6}, ErrorCode::invalid_argument, "k = 6");
  refused(set, g, Cluster{.k = -1}, ErrorCode::invalid_argument, "k = -1");
  refused(set, g, Cluster{.threshold = 1.5F}, ErrorCode::invalid_argument, "1.5");
  refused(set, g, Cluster{.threshold = std::nanf("")}, ErrorCode::invalid_argument, "no cosine");
}

TEST_CASE("Krum and medoid take K and V of all layers from one agent, byte for byte") {
  const auto type =
      GENERATE(ElementType::f32, ElementType::bf16, ElementType::q8_0, ElementType::f8_e4m3);
  CAPTURE(kvmeld::to_string(type));
  const auto g = test::geometry({.type = type, .layers = 3, .heads = 3, .channels = 64});
  std::vector<Sealed> spans;
  for (std::uint64_t s = 0; s < 5; ++s) spans.push_back(test::sealed(g, 4, 90 + s));
  spans = test::by_id(spans);
  const auto set = test::set_of(spans);
  const auto check = [&](const auto& fuser) {
    const auto cache = test::render_everywhere(set, matched(fuser), at(g), Layout::paged);
    std::vector<std::size_t> whose;
    for (std::int64_t t = 0; t < 4; ++t) {
      std::size_t same = 5;
      for (std::size_t s = 0; s < 5; ++s) {
        bool equal = true;
        for (std::size_t p = 0; p < cache->planes(); ++p) {
          for (std::int64_t h = 0; h < 3; ++h) {
            for (std::int64_t c = 0; c < 64; ++c) {
              equal =
                  equal && cache->get(p, t, h, c) ==
                               spans[s].values[p][static_cast<std::size_t>((t * 3 + h) * 64 + c)];
            }
          }
        }
        if (equal) same = s;
      }
      whose.push_back(same);
    }
    return whose;
  };
  // Plain loops: distances of keys over heads and layers.
  std::vector<std::size_t> medoids, krums;
  for (std::size_t t = 0; t < 4; ++t) {
    double least_sum = INFINITY, least_krum = INFINITY;
    std::size_t medoid = 0, krum = 0;
    for (std::size_t i = 0; i < 5; ++i) {
      double sum = 0;
      std::vector<double> near;
      for (std::size_t j = 0; j < 5; ++j) {
        double d = 0;
        for (std::size_t p = 0; p < 6; p += 2) {
          for (std::size_t e = t * 192; e < (t + 1) * 192; ++e)
            d += std::pow(spans[i].values[p][e] - spans[j].values[p][e], 2);
        }
        sum += std::sqrt(d);
        if (i != j) near.push_back(d);
      }
      std::sort(near.begin(), near.end());
      if (sum < least_sum) least_sum = sum, medoid = i;
      if (near[0] + near[1] < least_krum) least_krum = near[0] + near[1], krum = i;
    }
    medoids.push_back(medoid);
    krums.push_back(krum);
  }
  CHECK(check(kvmeld::Medoid{}) == medoids);
  CHECK(check(kvmeld::Krum{.f = 1}) == krums);
}

TEST_CASE("keys at different positions are compared at a common one") {
  // One content at positions 0, 7 and 31, rotated as an engine would have it, and two others: the
  // three are alike.
  const auto g =
      test::geometry({.layers = 2, .heads = 2, .channels = 48, .first = 4, .rotary = 40});
  test::TestCache alike(g, 1);
  alike.fill(7);
  const auto values = alike.dense();
  kvmeld::FragmentSet set;
  for (const std::int64_t position : {0, 7, 31, -1, -2}) {
    test::TestCache cache(g, 1);
    cache.fill(static_cast<std::uint64_t>(60 - position));
    for (std::size_t p = 0; position >= 0 && p < cache.planes(); ++p) {
      for (std::int64_t h = 0; h < 2; ++h) {
        std::vector<double> row(values[p].begin() + h * 48, values[p].begin() + (h + 1) * 48);
        if (p % 2 == 0) reference::rotation(g->layers[0].rope, static_cast<double>(position), row);
        for (std::int64_t c = 0; c < 48; ++c)
          cache.set(p, 0, h, c, static_cast<float>(row[static_cast<std::size_t>(c)]));
      }
    }
    const std::vector<std::int64_t> where{position < 0 ? 5 : position};
    REQUIRE(set.insert(*kvmeld::seal(cache.ref(), {.positions = where}),
                       kvmeld::Dot{static_cast<std::uint64_t>(position + 9), 0})
                .ok());
  }
  const auto check = [&](const auto& fuser, double tolerance) {
    const auto out = test::render_everywhere(set, matched(fuser), at(g));
    double worst = 0;
    for (std::size_t p = 0; p < out->planes(); ++p) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t c = 0; c < 48; ++c)
          worst = std::max(worst, std::abs(out->get(p, 0, h, c) -
                                           values[p][static_cast<std::size_t>(h * 48 + c)]));
      }
    }
    CHECK(worst <= tolerance);
  };
  // Two turns of values below 4·√2, each within 4 · 2^-24 of a pair's size.
  check(kvmeld::Medoid{}, 5e-6);
  check(kvmeld::Krum{.f = 1}, 5e-6);
  check(kvmeld::Median{}, 5e-6);
  check(kvmeld::Cluster{.threshold = 0.99F, .result = kvmeld::ClusterResult::centre}, 5e-6);
  check(kvmeld::GeometricMedian{}, 5e-5);
}

TEST_CASE(
    "order statistics against plain loops, over types, layouts, heads, pairings and positions") {
  const auto type =
      GENERATE(ElementType::f32, ElementType::f16, ElementType::bf16, ElementType::q8_0);
  const auto layout =
      GENERATE(Layout::canonical, Layout::head_first, Layout::slot_list, Layout::split_channels);
  const auto pairing =
      layout == Layout::paged ? kvmeld::RopePairing::interleaved : kvmeld::RopePairing::half_split;
  CAPTURE(kvmeld::to_string(type), static_cast<int>(layout));
  const auto g = test::geometry({.type = type,
                                 .heads = 3,
                                 .channels = 96,
                                 .value_channels = 320,
                                 .first = 8,
                                 .rotary = 80,
                                 .pairing = pairing});
  std::vector<Sealed> spans;
  for (std::int64_t s = 0; s < 5; ++s) {
    const auto n = std::int64_t{3} + s % 2;
    const auto positions = test::gapped_positions(n, s / 2);
    spans.push_back(
        test::sealed(g, n, static_cast<std::uint64_t>(20 + s), {.positions = positions}));
  }
  spans = test::by_id(spans);
  const auto set = test::set_of(spans);
  const auto check = [&](const auto& fuser, auto reduce) {
    const auto cache = test::render_everywhere(set, matched(fuser), at(g, 11), layout);
    const auto outputs = reference::match(spans, -1, 11);
    double worst = 0;
    for (std::size_t p = 0; p < cache->planes(); ++p) {
      const auto channels = static_cast<std::size_t>(cache->shape(p).channels);
      for (std::size_t o = 0; o < outputs.size(); ++o) {
        for (std::size_t h = 0; h < 3; ++h) {
          std::vector<std::vector<double>> rows;
          for (const auto& in : outputs[o].inputs) {
            const Sealed& span = spans[in.source];
            const auto begin = span.values[p].begin() +
                               static_cast<std::ptrdiff_t>(
                                   (static_cast<std::size_t>(in.token) * 3 + h) * channels);
            rows.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(channels));
            if (p % 2 == 0)
              reference::rotation(
                  g->layers[0].rope,
                  -static_cast<double>(span.positions[static_cast<std::size_t>(in.token)]),
                  rows.back());
          }
          reference::Row want{std::vector<double>(channels), 0, false, rows.size()};
          for (std::size_t c = 0; c < channels; ++c) {
            std::vector<double> column;
            for (const auto& row : rows) column.push_back(row[c]);
            for (const double x : column) want.magnitude = std::max(want.magnitude, std::abs(x));
            std::sort(column.begin(), column.end());
            want.values[c] = reduce(column);
          }
          if (p % 2 == 0)
            reference::rotation(g->layers[0].rope, static_cast<double>(outputs[o].position),
                                want.values);
          for (std::size_t c = 0; c < channels; ++c) {
            const double off =
                std::abs(cache->get(p, static_cast<std::int64_t>(o), static_cast<std::int64_t>(h),
                                    static_cast<std::int64_t>(c)) -
                         want.values[c]);
            worst = std::max(worst, off / reference::tolerance(type, want, c));
          }
        }
      }
    }
    CHECK(worst <= 1.0);
  };
  check(kvmeld::Median{}, [](const std::vector<double>& x) {
    return x.size() % 2 == 1 ? x[x.size() / 2] : (x[x.size() / 2 - 1] + x[x.size() / 2]) / 2;
  });
  // The longest two fragments share the last output: two values, one of which is not enough for f =
  // 1.
  refused(set, g, kvmeld::TrimmedMean{.f = 1}, ErrorCode::invalid_argument,
          "needs more than 2 contributions, there are 2");
  check(kvmeld::TrimmedMean{.f = 0}, [](const std::vector<double>& x) {
    double sum = 0;
    for (const double v : x) sum += v;
    return sum / static_cast<double>(x.size());
  });
}

TEST_CASE("weights by agent and by fragment; 0 leaves one out, so that one survivor is copied") {
  const auto g = test::geometry({.heads = 2, .channels = 32});
  std::vector<Sealed> spans;
  for (std::uint64_t s = 0; s < 3; ++s) {
    const auto positions = test::gapped_positions(3, static_cast<std::int64_t>(s));
    spans.push_back(test::sealed(g, 3, 5 + s, {.positions = positions}));
  }
  const auto set = test::set_of(spans);  // agents 1, 2, 3
  auto outputs = reference::match(spans, -1, 0);
  for (auto& output : outputs) {
    for (auto& in : output.inputs) in.weight = in.source == 0 ? 0.5 : in.source == 1 ? 3.0 : 1.0;
  }
  const kvmeld::AgentWeights agents{.weights = {{1, 0.5F}, {2, 3.0F}}};
  const auto by_agent = kvmeld::merger(kvmeld::ByDot{}, Aligner{TokenMatch{}}, Fuser{agents});
  CHECK(reference::worst(*test::render_everywhere(set, by_agent, at(g)), spans, outputs,
                         reference::Fuse::mean) <= 1.0);
  kvmeld::FragmentWeights fragments{
      .weights = {{spans[0].fragment.id(), 0.5F}, {spans[1].fragment.id(), 3.0F}}};
  std::sort(fragments.weights.begin(), fragments.weights.end(),
            [](auto& a, auto& b) { return a.fragment < b.fragment; });
  const auto by_fragment = kvmeld::merger(kvmeld::ByDot{}, Aligner{TokenMatch{}}, Fuser{fragments});
  CHECK(reference::worst(*test::render_everywhere(set, by_fragment, at(g)), spans, outputs,
                         reference::Fuse::mean) <= 1.0);
  CHECK(by_agent.digest() != by_fragment.digest());
  const kvmeld::AgentWeights others{.weights = {{1, 0.5F}, {2, 3.5F}}};
  CHECK(by_agent.digest() !=
        kvmeld::merger(kvmeld::ByDot{}, Aligner{TokenMatch{}}, Fuser{others}).digest());

  const kvmeld::AgentWeights only{.weights = {{3, 1.0F}}, .otherwise = 0.0F};
  kvmeld::FragmentSet alone;
  REQUIRE(alone.insert(spans[2].fragment).ok());
  CHECK(test::render_everywhere(set, matched(only), at(g, 9))->buffers() ==
        test::render_everywhere(alone, matched(kvmeld::WeightedMean{}), at(g, 9))->buffers());

  const float nan = std::nanf("");
  refused(set, g, kvmeld::AgentWeights{.weights = {{1, -0.5F}}}, ErrorCode::non_finite,
          "hold -0.5");
  refused(set, g, kvmeld::AgentWeights{.weights = {{2, nan}}}, ErrorCode::non_finite, "not finite");
  refused(set, g, kvmeld::AgentWeights{.otherwise = 0.0F}, ErrorCode::non_finite,
          "3 weights of output 0");
  refused(set, g, kvmeld::AgentWeights{.weights = {{2, 1.0F}, {1, 1.0F}}},
          ErrorCode::invalid_argument, "agent 1 follows agent 2");
  refused(set, g, kvmeld::AgentWeights{.weights = {{2, 1.0F}, {2, 1.0F}}},
          ErrorCode::invalid_argument, "ascends");
  refused(set, g, kvmeld::FragmentWeights{.otherwise = -1.0F}, ErrorCode::non_finite, "hold -1");
  std::reverse(fragments.weights.begin(), fragments.weights.end());
  refused(set, g, fragments, ErrorCode::invalid_argument, "ascends");
}

TEST_CASE("rules refuse fewer contributions than they need, and more than they can sort") {
  const auto five = points(plain, {0, 1, 2, 4, 100});
  refused(five, plain, kvmeld::Krum{.f = 2}, ErrorCode::invalid_argument,
          "at least 2f + 3 = 7 contributions, there are 5");
  refused(five, plain, kvmeld::Krum{.f = -1}, ErrorCode::invalid_argument, "f = -1");
  refused(five, plain, kvmeld::MultiKrum{.f = 1, .m = 5}, ErrorCode::invalid_argument, "at most 4");
  refused(five, plain, kvmeld::MultiKrum{.f = 1, .m = 0}, ErrorCode::invalid_argument, "m = 0");
  refused(five, plain, kvmeld::TrimmedMean{.f = 3}, ErrorCode::invalid_argument,
          "needs more than 6 contributions, there are 5");
  refused(five, plain, kvmeld::TrimmedMean{.f = -1}, ErrorCode::invalid_argument, "f = -1");
  refused(five, plain, kvmeld::Bulyan{.f = 1}, ErrorCode::invalid_argument,
          "at least 4f + 3 = 7 contributions, there are 5");
  refused(five, plain, kvmeld::Krum{.f = std::numeric_limits<std::int32_t>::max()},
          ErrorCode::invalid_argument, "there are 5");

  // 1,000 fragments: what compares pairs does, what sorts says how many it takes. Some are empty.
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 1, .rotary = 0});
  const auto set_of_many = [&] {
    kvmeld::FragmentSet set;
    for (std::uint64_t i = 0; i < 1000; ++i) {
      const float x = static_cast<float>(i < 600 ? i % 7 : i);
      REQUIRE(set.insert(point(g, x, static_cast<float>(i)), kvmeld::Dot{i, 0}).ok());
    }
    REQUIRE(set.insert(test::sealed(g, 0, 1).fragment).ok());
    return set;
  }();
  refused(set_of_many, g, kvmeld::Median{}, ErrorCode::oversized,
          "1000 contributions; this fuser sorts at most 64");
  // Before its rounds, which would take half a minute.
  refused(set_of_many, g, kvmeld::Bulyan{.f = 1}, ErrorCode::oversized,
          "Bulyan{f = 1} would choose 998 of 1000 contributions and sorts at most 64");
  const auto krum = test::render_everywhere(set_of_many, matched(kvmeld::Krum{.f = 300}), at(g));
  CHECK(krum->get(0, 0, 0, 0) < 7.0);
  const auto medoid = test::render_everywhere(set_of_many, matched(kvmeld::Medoid{}), at(g));
  CHECK(medoid->get(0, 0, 0, 0) < 7.0);
}

TEST_CASE("ties go to the smaller fragment id, whatever the order policy says") {
  kvmeld::FragmentSet set;
  const kvmeld::Fragment a = point(plain, 1, 1), b = point(plain, 3, 3);
  REQUIRE(set.insert(a, kvmeld::Dot{1, 0}).ok());
  REQUIRE(set.insert(b, kvmeld::Dot{2, 0}).ok());
  const double want = a.id() < b.id() ? 1.0 : 3.0;
  for (const bool reversed : {false, true}) {
    const auto merger = kvmeld::merger(kvmeld::ByDot{.reversed = reversed}, Aligner{TokenMatch{}},
                                       Fuser{kvmeld::Medoid{}});
    CHECK(test::render_everywhere(set, merger, at(plain))->get(0, 0, 0, 0) == want);
  }
}

namespace {

// Leaves one output to the engine.
struct SeamAt {
  static constexpr bool reproducible = true;
  std::size_t output = 0;

  [[nodiscard]] kvmeld::Status mark(std::span<const kvmeld::Source>, const kvmeld::Alignment&,
                                    std::span<std::uint8_t> recompute) const {
    recompute[output] = 1;
    return {};
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("test.SeamAt"); }
};

}  // namespace

TEST_CASE("a fuser that cannot act is a warning, and an error where the caller says so") {
  const auto g = test::geometry({.heads = 1, .channels = 32});
  std::vector<Sealed> spans;
  for (std::uint64_t s = 0; s < 3; ++s)
    spans.push_back(test::sealed(g, 4, 5 + s, {.tokens = test::token_ids(4, 100)}));
  const auto set = test::set_of(spans);  // agents 1, 2, 3
  const auto refusing = [&](kvmeld::RenderWarnings what) {
    kvmeld::Target target = at(g);
    target.refuse = what;
    return target;
  };
  using kvmeld::RenderWarnings;
  const auto report = [&](const kvmeld::FragmentSet& of, const auto& merger) {
    kvmeld::HostCache out(g, 12);
    const auto made = kvmeld::plan(of, merger, at(g));
    REQUIRE(made.ok());
    const auto rendered = kvmeld::render(kvmeld::exec::seq, of, merger, out.mutable_ref());
    REQUIRE(rendered.ok());
    CHECK(rendered->fused == made->fused());
    CHECK(rendered->warnings == made->warnings());
    return *rendered;
  };
  const auto side_by_side = [](const auto& fuser) {
    return kvmeld::merger(kvmeld::ById{}, Fuser{fuser});
  };

  // Concatenation brings nothing together: a rule that was chosen does nothing, and the default is
  // no rule.
  CHECK(report(set, kvmeld::merger()).warnings == RenderWarnings::none);
  CHECK(report(set, side_by_side(kvmeld::WeightedMean{})).warnings == RenderWarnings::none);
  for (const RenderWarnings warnings :
       {report(set, side_by_side(kvmeld::TrimmedMean{.f = 1})).warnings,
        report(set, side_by_side(kvmeld::Krum{.f = 1})).warnings,
        report(set, side_by_side(kvmeld::WeightedMean{kvmeld::Weighting::confidence})).warnings}) {
    CHECK(warnings == RenderWarnings::nothing_fused);
  }
  CHECK(report(set, side_by_side(kvmeld::TrimmedMean{.f = 1})).fused == 0);
  const auto refused = kvmeld::plan(set, side_by_side(kvmeld::TrimmedMean{.f = 1}),
                                    refusing(RenderWarnings::nothing_fused));
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code() == ErrorCode::invalid_argument);
  CHECK(refused.error().message().find("none of 12 rendered tokens") != std::string::npos);
  CHECK(kvmeld::plan(set, side_by_side(kvmeld::TrimmedMean{.f = 1}),
                     refusing(RenderWarnings::weights_unmatched))
            .ok());
  CHECK(kvmeld::plan(set, kvmeld::merger(), refusing(RenderWarnings::nothing_fused)).ok());

  // Matched tokens are fused: four of them, and none of a single fragment.
  const auto matching = report(set, matched(kvmeld::TrimmedMean{.f = 1}));
  CHECK(matching.fused == 4);
  CHECK(matching.warnings == RenderWarnings::none);
  CHECK(report(set, matched(kvmeld::Medoid{})).fused ==
        4);  // also where the rule leaves one contribution of each
  CHECK(report(test::set_of({spans[0]}), matched(kvmeld::TrimmedMean{.f = 1})).warnings ==
        RenderWarnings::nothing_fused);
  CHECK(report({}, matched(kvmeld::TrimmedMean{.f = 1})).warnings ==
        RenderWarnings::none);  // nothing is rendered at all

  // A token that is left to the engine is not fused.
  CHECK(report(set, kvmeld::merger(kvmeld::ById{}, Aligner{TokenMatch{}}, Fuser{kvmeld::Median{}},
                                   SeamAt{2}))
            .fused == 3);

  // A table that names nobody here: agents 8 and 9 are elsewhere.
  const kvmeld::AgentWeights elsewhere{.weights = {{8, 0.5F}, {9, 3.0F}}},
      one{.weights = {{3, 0.5F}, {9, 3.0F}}};
  CHECK(report(set, matched(elsewhere)).warnings == RenderWarnings::weights_unmatched);
  CHECK(report(set, matched(one)).warnings == RenderWarnings::none);
  CHECK(report(set, matched(kvmeld::AgentWeights{})).warnings == RenderWarnings::none);
  CHECK(report(set, side_by_side(elsewhere)).warnings ==
        (RenderWarnings::nothing_fused | RenderWarnings::weights_unmatched));
  const auto unmatched =
      kvmeld::plan(set, matched(elsewhere), refusing(RenderWarnings::weights_unmatched));
  REQUIRE_FALSE(unmatched.ok());
  CHECK(unmatched.error().code() == ErrorCode::invalid_argument);
  const kvmeld::FragmentWeights known{.weights = {{spans[1].fragment.id(), 2.0F}}},
      unknown{.weights = {{kvmeld::FragmentId{}, 2.0F}}};
  CHECK(report(set, matched(known)).warnings == RenderWarnings::none);
  CHECK(report(set, matched(unknown)).warnings == RenderWarnings::weights_unmatched);
}
