// Attention pooling and context vectors against plain loops in double; merging of states; what is
// refused.
#include <cmath>
#include <limits>
#include <string>

#include <kvmeld/policies/attention.hpp>

#include "support/reference.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::AttendSource;
using kvmeld::Attention;
using kvmeld::AttentionMode;
using kvmeld::AttentionQueries;
using kvmeld::ById;
using kvmeld::ElementType;
using kvmeld::ErrorCode;
using kvmeld::QueryFrame;
using kvmeld::attention::AttentionState;
using kvmeld::attention::LseBase2;
using kvmeld::attention::LseNatural;
using kvmeld::attention::MutableAttentionState;
using test::Layout;
using test::Sealed;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// A state with memory of its own.
template <class Base = LseNatural>
struct Owned {
  std::vector<float> outputs, lse;
  std::int64_t rows = 0, heads = 0, channels = 0;

  Owned(std::int64_t r, std::int64_t h, std::int64_t c)
      : outputs(static_cast<std::size_t>(r * h * c), 77.0F),
        lse(static_cast<std::size_t>(r * h), 77.0F),
        rows(r),
        heads(h),
        channels(c) {}
  Owned(std::vector<float> o, std::vector<float> l, std::int64_t r, std::int64_t h, std::int64_t c)
      : outputs(std::move(o)), lse(std::move(l)), rows(r), heads(h), channels(c) {}
  [[nodiscard]] AttentionState<Base> state() const { return {outputs, lse, rows, heads, channels}; }
  [[nodiscard]] MutableAttentionState<Base> out() { return {outputs, lse, rows, heads, channels}; }
  [[nodiscard]] bool untouched() const {
    return std::all_of(outputs.begin(), outputs.end(), [](float x) { return x == 77.0F; }) &&
           std::all_of(lse.begin(), lse.end(), [](float x) { return x == 77.0F; });
  }
};
Owned<> random_state(std::int64_t r, std::int64_t h, std::int64_t c, std::uint64_t seed) {
  Owned<> s(r, h, c);
  test::Random random(seed);
  for (float& x : s.outputs) x = random.value();
  for (float& x : s.lse) x = 2.0F * random.value();
  return s;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

std::vector<float> random_queries(const kvmeld::Geometry& g, std::int64_t count,
                                  std::uint64_t seed) {
  std::vector<float> out;
  test::Random random(seed);
  for (std::int64_t q = 0; q < count; ++q) {
    for (const auto& layer : g.layers) {
      if (layer.planes.empty()) continue;
      for (std::int64_t i = 0; i < layer.planes[0].heads * layer.planes[0].channels; ++i)
        out.push_back(random.value() * 0.25F);
    }
  }
  return out;
}

// One head of one layer for one query, in double: every token's weight as the mode says, and the
// log-sum-exp of all.
struct Pooled {
  std::vector<std::vector<double>> weights;  // (span)(token) 0: the layer does not hold it
  double lse = -std::numeric_limits<double>::infinity();
};
Pooled pooled(const kvmeld::Geometry& g, std::size_t layer, std::int64_t head,
              std::vector<double> q, const std::vector<Sealed>& spans, QueryFrame frame,
              std::int64_t at, double factor, AttentionMode mode) {
  const kvmeld::LayerShape& shape = g.layers[layer];
  const std::size_t plane = 2 * layer;
  const auto d = static_cast<std::size_t>(shape.planes[0].channels);
  const bool rotary = shape.rope.kind == kvmeld::RopeKind::rotary;
  if (rotary && frame == QueryFrame::at_positions)
    reference::rotation(shape.rope, static_cast<double>(at), q);
  Pooled out;
  double total = 0;
  std::size_t agents = 0;
  std::vector<double> sums;
  for (const Sealed& span : spans) {
    std::vector<double>& w = out.weights.emplace_back(span.positions.size(), 0.0);
    double sum = 0;
    for (std::size_t t = 0; t < w.size(); ++t) {
      if (!span.hidden.empty() && static_cast<std::int64_t>(t) < span.hidden[layer]) continue;
      const std::size_t begin =
          (t * static_cast<std::size_t>(shape.planes[0].heads) + static_cast<std::size_t>(head)) *
          d;
      std::vector<double> k(span.values[plane].begin() + static_cast<std::ptrdiff_t>(begin),
                            span.values[plane].begin() + static_cast<std::ptrdiff_t>(begin + d));
      const bool rotated = shape.key_form == kvmeld::KeyForm::post_rope;
      const auto position = static_cast<double>(span.positions[t]);
      if (rotary && rotated && frame == QueryFrame::pre_rope)
        reference::rotation(shape.rope, -position, k);
      if (rotary && !rotated && frame != QueryFrame::pre_rope)
        reference::rotation(shape.rope, position, k);
      double dot = 0;
      for (std::size_t c = 0; c < d; ++c) dot += q[c] * k[c];
      w[t] = std::exp(dot * factor);
      sum += w[t];
    }
    sums.push_back(sum);
    total += sum;
    agents += sum > 0 ? 1 : 0;
  }
  for (std::size_t s = 0; s < spans.size(); ++s) {
    for (double& w : out.weights[s]) {
      if (mode == AttentionMode::exact)
        w /= total;
      else if (sums[s] > 0)
        w /= sums[s] * static_cast<double>(agents);
    }
  }
  if (total > 0) out.lse = std::log(total);
  return out;
}
std::vector<double> query_of(const kvmeld::Geometry& g, const std::vector<float>& all,
                             std::int64_t q, std::int64_t count, std::size_t layer,
                             std::int64_t head) {
  std::size_t at = static_cast<std::size_t>(q) * (all.size() / static_cast<std::size_t>(count));
  for (std::size_t l = 0; l < layer; ++l)
    at += static_cast<std::size_t>(g.layers[l].planes[0].heads * g.layers[l].planes[0].channels);
  const auto d = static_cast<std::size_t>(g.layers[layer].planes[0].channels);
  at += static_cast<std::size_t>(head) * d;
  return {all.begin() + static_cast<std::ptrdiff_t>(at),
          all.begin() + static_cast<std::ptrdiff_t>(at + d)};
}

struct Case {
  test::Model model{};
  QueryFrame frame = QueryFrame::pre_rope;
  std::int64_t count = 3;
  Layout layout = Layout::canonical;
  bool hides = false;
  kvmeld::KeyForm form = kvmeld::KeyForm::post_rope;
};
std::vector<std::int64_t> query_positions(const Case& c) {
  std::vector<std::int64_t> out;
  for (std::int64_t q = 0; q < c.count && c.frame == QueryFrame::at_positions; ++q)
    out.push_back(40 + 7 * q);
  return out;
}
std::shared_ptr<const kvmeld::Geometry> geometry_of(const Case& c) {
  const auto g = test::geometry(c.model);
  for (auto& layer : g->layers) layer.key_form = c.form;
  return g;
}
std::vector<Sealed> spans_of(const Case& c, const std::shared_ptr<const kvmeld::Geometry>& g,
                             std::initializer_list<std::int64_t> sizes) {
  std::vector<Sealed> out;
  std::uint64_t seed = 11;
  for (const std::int64_t n : sizes) {
    const auto positions = test::gapped_positions(n, static_cast<std::int64_t>(seed % 5));
    std::vector<std::int64_t> hidden;
    if (c.hides) {
      hidden.assign(g->layers.size(), 0);
      hidden.back() = std::min<std::int64_t>(n, seed % 2 == 0 ? n : n / 2);
    }
    out.push_back(test::sealed(g, n, seed++, {.positions = positions},
                               c.hides ? Layout::slot_list : Layout::canonical, hidden));
    REQUIRE(out.back().fragment.valid());
  }
  return out;
}

// Largest error of `attend` over its values' size.
void attend_case(const Case& c) {
  const auto g = geometry_of(c);
  const auto spans = spans_of(c, g, {70, 1, 45});
  const auto queries = random_queries(*g, c.count, 3);
  const auto at = query_positions(c);
  std::vector<std::unique_ptr<test::TestCache>> caches;
  std::vector<AttendSource> sources;
  for (const Sealed& s : spans) {  // the caller's caches in any layout, not the sealed bytes
    const Layout layout = c.hides ? Layout::slot_list : c.layout;
    caches.push_back(
        std::make_unique<test::TestCache>(g, std::ssize(s.positions), layout, s.hidden));
    caches.back()->fill(11 + static_cast<std::uint64_t>(caches.size() - 1));
    sources.push_back({caches.back()->ref(), s.positions, {}});
  }
  const std::int64_t heads = static_cast<std::int64_t>(g->layers.size()) * c.model.heads;
  const std::int64_t channels = g->layers[0].planes[1].channels;
  Owned<> out(c.count, heads, channels);
  const AttentionQueries q{queries, c.count, c.frame, at, 0.0F, 1.0F};
  const auto status = kvmeld::attend(q, sources, out.out());
  INFO(status.message());
  REQUIRE(status.ok());
  // rows as they lie and rows that are copied give the same bytes, together or mixed
  if (c.layout == Layout::canonical) {
    std::vector<std::unique_ptr<test::TestCache>> others;
    for (std::size_t s = 0; s < spans.size(); ++s) {
      others.push_back(std::make_unique<test::TestCache>(
          g, std::ssize(spans[s].positions), c.hides ? Layout::slot_list : Layout::split_channels,
          spans[s].hidden));
      others.back()->fill(11 + s);
      if (s != 1) sources[s].cache = others.back()->ref();
    }
    Owned<> again(c.count, heads, channels);
    REQUIRE(kvmeld::attend(q, sources, again.out()).ok());
    CHECK(same_bits(out.outputs, again.outputs));
    CHECK(same_bits(out.lse, again.lse));
  }
  const double factor = 1.0 / std::sqrt(static_cast<double>(c.model.channels));
  double worst = 0, worst_lse = 0;
  for (std::int64_t i = 0; i < c.count; ++i) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto layer = static_cast<std::size_t>(h / c.model.heads);
      const Pooled want =
          pooled(*g, layer, h % c.model.heads,
                 query_of(*g, queries, i, c.count, layer, h % c.model.heads), spans, c.frame,
                 at.empty() ? 0 : at[static_cast<std::size_t>(i)], factor, AttentionMode::exact);
      worst_lse = std::max(
          worst_lse, std::abs(want.lse - static_cast<double>(
                                             out.lse[static_cast<std::size_t>(i * heads + h)])));
      for (std::int64_t ch = 0; ch < channels; ++ch) {
        double v = 0;
        for (std::size_t s = 0; s < spans.size(); ++s) {
          for (std::size_t t = 0; t < spans[s].positions.size(); ++t) {
            const auto row = static_cast<std::int64_t>(t) * c.model.heads + h % c.model.heads;
            v += want.weights[s][t] *
                 spans[s].values[2 * layer + 1][static_cast<std::size_t>(row * channels + ch)];
          }
        }
        worst = std::max(
            worst,
            std::abs(v -
                     static_cast<double>(
                         out.outputs[static_cast<std::size_t>((i * heads + h) * channels + ch)])));
      }
    }
  }
  // Values are below 4 and logits below 16 in magnitude: 1e-6 of what there is.
  CHECK(worst < 4e-6);
  CHECK(worst_lse < 1e-5);
}

kvmeld::Target at(const std::shared_ptr<const kvmeld::Geometry>& g,
                  std::int64_t first_position = 0) {
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = first_position;
  return target;
}
template <class A>
auto merger_of(A policy) {
  return kvmeld::merger(ById{}, Aligner{std::move(policy)}, kvmeld::Fuser{kvmeld::WeightedMean{}});
}
Attention policy_of(const Case& c, const kvmeld::Geometry& g,
                    AttentionMode mode = AttentionMode::exact) {
  return {.queries = std::make_shared<const std::vector<float>>(random_queries(g, c.count, 3)),
          .count = c.count,
          .frame = c.frame,
          .positions = query_positions(c),
          .mode = mode};
}

// Renders, and compares with Σ w·v, and Σ w·(un-rotated key) rotated to the output's position.
void render_case(const Case& c, AttentionMode mode) {
  const auto g = geometry_of(c);
  const auto spans = test::by_id(spans_of(c, g, {20, 1, 45}));
  const Attention policy = policy_of(c, *g, mode);
  const auto out = test::render_everywhere(test::set_of(spans), merger_of(policy), at(g, 9));
  REQUIRE(out->tokens() == c.count);
  const double factor = 1.0 / std::sqrt(static_cast<double>(c.model.channels));
  double worst = 0;
  for (std::size_t plane = 0; plane < out->planes(); ++plane) {
    const std::size_t layer = plane / 2;
    const std::int64_t channels = out->shape(plane).channels;
    for (std::int64_t i = 0; i < c.count; ++i) {
      for (std::int64_t h = 0; h < c.model.heads; ++h) {
        const Pooled want = pooled(
            *g, layer, h, query_of(*g, *policy.queries, i, c.count, layer, h), spans, c.frame,
            policy.positions.empty() ? 0 : policy.positions[static_cast<std::size_t>(i)], factor,
            mode);
        std::vector<double> row(static_cast<std::size_t>(channels), 0.0);
        const bool rotates = plane % 2 == 0 &&
                             g->layers[layer].rope.kind == kvmeld::RopeKind::rotary &&
                             c.form == kvmeld::KeyForm::post_rope;
        for (std::size_t s = 0; s < spans.size(); ++s) {
          for (std::size_t t = 0; t < spans[s].positions.size(); ++t) {
            const auto begin = (static_cast<std::int64_t>(t) * c.model.heads + h) * channels;
            const auto& v = spans[s].values[plane];
            std::vector<double> x(v.begin() + begin, v.begin() + begin + channels);
            if (rotates)
              reference::rotation(g->layers[layer].rope,
                                  -static_cast<double>(spans[s].positions[t]), x);
            for (std::size_t k = 0; k < x.size(); ++k) row[k] += want.weights[s][t] * x[k];
          }
        }
        if (rotates) reference::rotation(g->layers[layer].rope, 9.0 + static_cast<double>(i), row);
        for (std::int64_t k = 0; k < channels; ++k) {
          const double bound = c.model.type == ElementType::f32
                                   ? 1e-5
                                   : 0x1p-8 * std::abs(row[static_cast<std::size_t>(k)]) + 1e-5;
          worst = std::max(
              worst, std::abs(out->get(plane, i, h, k) - row[static_cast<std::size_t>(k)]) / bound);
        }
      }
    }
  }
  CHECK(worst < 1.0);
}

}  // namespace

TEST_CASE(
    "logits {0} with value 1, {0, 0} with values 4 and 7: together 4, the mean of both agents "
    "3.25") {
  const Owned<> a({1.0F}, {0.0F}, 1, 1, 1);
  const Owned<> b({5.5F}, {std::log(2.0F)}, 1, 1, 1);
  Owned<> out(1, 1, 1);
  REQUIRE(kvmeld::attention::merge_attention_states(a.state(), b.state(), out.out()).ok());
  CHECK(static_cast<double>(out.outputs[0]) == Approx(4.0).epsilon(1e-7));
  CHECK(static_cast<double>(out.lse[0]) == Approx(std::log(3.0)).epsilon(1e-7));
  // The same through sealed caches: keys are 0, so that every logit is.
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 1, .rotary = 0});
  const auto agent = [&](std::vector<float> values) {
    test::TestCache cache(g, std::ssize(values));
    for (std::int64_t t = 0; t < std::ssize(values); ++t) {
      cache.set(0, t, 0, 0, 0.0F);
      cache.set(1, t, 0, 0, values[static_cast<std::size_t>(t)]);
    }
    return *kvmeld::seal(cache.ref());
  };
  kvmeld::FragmentSet set;
  REQUIRE(set.insert(agent({1}), kvmeld::Dot{1, 0}).ok());
  REQUIRE(set.insert(agent({4, 7}), kvmeld::Dot{2, 0}).ok());
  const auto queries = std::make_shared<const std::vector<float>>(1, 1.0F);
  CHECK(test::render_everywhere(set, merger_of(Attention{.queries = queries}), at(g))
            ->get(1, 0, 0, 0) == Approx(4.0).epsilon(1e-7));
  CHECK(test::render_everywhere(
            set, merger_of(Attention{.queries = queries, .mode = AttentionMode::per_agent_mean}),
            at(g))
            ->get(1, 0, 0, 0) == 3.25);
}

TEST_CASE(
    "a prefix of 3072 and a suffix of 64 tokens: the suffix weighs .0204, in either base, and "
    "bases do not mix") {
  STATIC_REQUIRE_FALSE(std::is_convertible_v<AttentionState<LseBase2>, AttentionState<LseNatural>>);
  STATIC_REQUIRE_FALSE(
      std::is_convertible_v<MutableAttentionState<LseNatural>, AttentionState<LseBase2>>);
  Owned<> natural(1, 1, 1);
  REQUIRE(kvmeld::attention::merge_attention_states(
              Owned<>({0.0F}, {std::log(3072.0F)}, 1, 1, 1).state(),
              Owned<>({1.0F}, {std::log(64.0F)}, 1, 1, 1).state(), natural.out())
              .ok());
  CHECK(static_cast<double>(natural.outputs[0]) == Approx(64.0 / 3136.0).epsilon(1e-6));
  const Owned<LseBase2> a({0.0F}, {std::log2(3072.0F)}, 1, 1, 1), b({1.0F}, {6.0F}, 1, 1, 1);
  Owned<LseBase2> two(1, 1, 1);
  REQUIRE(kvmeld::attention::merge_attention_states(a.state(), b.state(), two.out()).ok());
  CHECK(static_cast<double>(two.outputs[0]) == Approx(64.0 / 3136.0).epsilon(1e-6));
  CHECK(static_cast<double>(two.lse[0]) == Approx(std::log2(3136.0)).epsilon(1e-7));
  // Fed to a natural merge, the same numbers would give .0037.
  Owned<> wrong(1, 1, 1);
  REQUIRE(kvmeld::attention::merge_attention_states(Owned<>({0.0F}, a.lse, 1, 1, 1).state(),
                                                    Owned<>({1.0F}, b.lse, 1, 1, 1).state(),
                                                    wrong.out())
              .ok());
  CHECK(static_cast<double>(wrong.outputs[0]) == Approx(0.0037).epsilon(0.02));
  std::vector<float> sums(1);
  const auto rotated = kvmeld::attention::convert_lse<LseNatural>(two.state(), sums);
  REQUIRE(rotated.ok());
  CHECK(static_cast<double>(rotated->lse[0]) == Approx(std::log(3136.0)).epsilon(1e-7));
  const auto back = kvmeld::attention::convert_lse<LseBase2>(*rotated, sums);  // in place
  REQUIRE(back.ok());
  CHECK(static_cast<double>(back->lse[0]) == Approx(std::log2(3136.0)).epsilon(1e-7));
}

TEST_CASE(
    "the empty state is the identity to the bit, also with itself, whatever its outputs hold") {
  auto some = random_state(3, 2, 37, 1);
  some.outputs[5] = -0.0F;
  Owned<> empty(std::vector<float>(3 * 2 * 37, not_a_number), std::vector<float>(6, -infinity), 3,
                2, 37);
  for (const bool first : {false, true}) {
    Owned<> out(3, 2, 37);
    REQUIRE(kvmeld::attention::merge_attention_states(first ? empty.state() : some.state(),
                                                      first ? some.state() : empty.state(),
                                                      out.out())
                .ok());
    CHECK(same_bits(out.outputs, some.outputs));
    CHECK(same_bits(out.lse, some.lse));
    REQUIRE(kvmeld::attention::merge_attention_states(
                kvmeld::exec::lanes, first ? empty.state() : some.state(),
                first ? some.state() : empty.state(), out.out())
                .ok());
    CHECK(same_bits(out.outputs, some.outputs));
  }
  const std::vector<float> zeros(3 * 2 * 37, 0.0F);
  Owned<> out(3, 2, 37);
  REQUIRE(kvmeld::attention::merge_attention_states(empty.state(), empty.state(), out.out()).ok());
  CHECK(same_bits(out.outputs, zeros));
  CHECK(same_bits(out.lse, empty.lse));
  Owned<> none(3, 2, 37);  // of no states: the empty one
  REQUIRE(kvmeld::attention::merge_attention_states<LseNatural>({}, none.out()).ok());
  CHECK(same_bits(none.outputs, zeros));
  CHECK(same_bits(none.lse, empty.lse));
}

TEST_CASE(
    "states merge to the same bytes in rows, lanes and threads, into a third place or in place") {
  for (const std::int64_t channels : {1, 31, 32, 64, 80, 129}) {
    CAPTURE(channels);
    const auto a = random_state(5, 3, channels, 1);
    auto b = random_state(5, 3, channels, 2);
    b.lse[4] = a.lse[4] + 200.0F;  // a's weight underflows
    b.lse[7] = a.lse[7] + 17.0F;   // b's weight rounds to 1, a's is not 0
    b.lse[8] = -infinity;
    Owned<> out(5, 3, channels);
    REQUIRE(kvmeld::attention::merge_attention_states(a.state(), b.state(), out.out()).ok());
    const auto check = [&](const Owned<>& got) {
      CHECK((same_bits(got.outputs, out.outputs) && same_bits(got.lse, out.lse)));
    };
    for (const auto& exec : {kvmeld::exec::threads(1), kvmeld::exec::threads(3)}) {
      Owned<> got(5, 3, channels);
      REQUIRE(
          kvmeld::attention::merge_attention_states(exec, a.state(), b.state(), got.out()).ok());
      check(got);
    }
    Owned<> lanes(5, 3, channels);
    REQUIRE(kvmeld::attention::merge_attention_states(kvmeld::exec::lanes, a.state(), b.state(),
                                                      lanes.out())
                .ok());
    check(lanes);
    Owned<> in_place = a;
    REQUIRE(kvmeld::attention::merge_attention_states(in_place.state(), b.state(), in_place.out())
                .ok());
    check(in_place);
    in_place = b;
    REQUIRE(kvmeld::attention::merge_attention_states(kvmeld::exec::lanes, a.state(),
                                                      in_place.state(), in_place.out())
                .ok());
    check(in_place);
    const std::vector<kvmeld::detail::StateRows> rows{{a.outputs.data(), a.lse.data()},
                                                      {b.outputs.data(), b.lse.data()}};
    for (const kvmeld::Isa isa : test::instruction_sets()) {
      Owned<> got(5, 3, channels);
      std::vector<float> weights(2);
      for (std::size_t r = 0; r < got.lse.size(); ++r) {
        got.lse[r] = kvmeld::detail::state_weights<LseNatural>(rows, r, weights);
        kvmeld::detail::merge_row(isa, rows, weights, r, static_cast<std::size_t>(channels),
                                  got.outputs.data());
      }
      check(got);
    }
  }
}

TEST_CASE("states that do not fit or hold NaN are refused, and the output is left alone") {
  const auto good = random_state(2, 2, 4, 1);
  Owned<> out(2, 2, 4);
  const auto refused = [&](const AttentionState<LseNatural>& a,
                           const MutableAttentionState<LseNatural>& to, ErrorCode code,
                           const char* text) {
    for (int form = 0; form < 3; ++form) {
      const AttentionState<LseNatural> both[] = {good.state(), a};
      const auto status =
          form == 0 ? kvmeld::attention::merge_attention_states(a, good.state(), to)
          : form == 1
              ? kvmeld::attention::merge_attention_states(kvmeld::exec::lanes, good.state(), a, to)
              : kvmeld::attention::merge_attention_states<LseNatural>(both, to);
      INFO(status.message());
      CHECK(status.code() == code);
      CHECK(status.message().find(text) != std::string::npos);
      CHECK(out.untouched());
    }
  };
  auto bad = good;
  bad.lse[3] = not_a_number;
  refused(bad.state(), out.out(), ErrorCode::non_finite, "row 1 head 1");
  bad = good;
  bad.lse[0] = infinity;
  refused(bad.state(), out.out(), ErrorCode::non_finite, "row 0");
  bad = good;
  bad.outputs[9] = not_a_number;
  refused(bad.state(), out.out(), ErrorCode::non_finite, "row 1 head 0");
  auto view = good.state();
  view.lse = view.lse.first(3);
  refused(view, out.out(), ErrorCode::invalid_argument, "3 sums");
  view = good.state();
  view.outputs = view.outputs.first(15);
  refused(view, out.out(), ErrorCode::invalid_argument, "15 outputs");
  view = good.state();
  view.rows = -1;
  refused(view, out.out(), ErrorCode::invalid_argument, "-1 rows");
  view.rows = std::int64_t{1} << 47;
  view.heads = std::int64_t{1} << 47;
  refused(view, out.out(), ErrorCode::invalid_argument, "sums for");
  refused(random_state(2, 1, 4, 2).state(), out.out(), ErrorCode::invalid_argument, "does not fit");
  std::vector<float> shared(40, 1.0F);
  const std::span<float> all(shared);
  const AttentionState<LseNatural> in{all.first(16), all.subspan(32, 4), 2, 2, 4};
  CHECK(kvmeld::attention::merge_attention_states(in, good.state(),
                                                  {all.subspan(8, 16), all.subspan(36, 4), 2, 2, 4})
            .code() == ErrorCode::aliasing);
  CHECK(kvmeld::attention::merge_attention_states(
            in, good.state(), {all.subspan(16, 16), all.subspan(12, 4), 2, 2, 4})
            .code() == ErrorCode::aliasing);
  CHECK(kvmeld::attention::convert_lse<LseBase2>(good.state(), all.first(3)).error().code() ==
        ErrorCode::invalid_argument);
  CHECK(kvmeld::attention::convert_lse<LseBase2>(in, all.subspan(33, 4)).error().code() ==
        ErrorCode::aliasing);
  // outputs are not looked at
  CHECK(kvmeld::attention::convert_lse<LseBase2>(AttentionState<LseNatural>(bad.state()),
                                                 all.first(4))
            .ok());
  // Sums that only one of the bases can hold, the last one of four.
  for (const float sum : {3e38F, -3e38F, not_a_number, infinity}) {
    Owned<> large({}, {1.0F, -infinity, 2.0F, sum}, 2, 2, 0);
    const auto refusal = kvmeld::attention::convert_lse<LseBase2>(large.state(), out.lse);
    REQUIRE(refusal.status().code() == ErrorCode::non_finite);
    CHECK(refusal.status().message().find("sum 3") != std::string::npos);
    CHECK(out.untouched());
  }
}

TEST_CASE(
    "context vectors agree with plain loops: head sizes, types, layouts, frames, key forms, layers "
    "that hold fewer tokens") {
  for (const int channels : {1, 64, 80, 96, 128}) {
    attend_case({.model = {.channels = channels, .rotary = channels == 1 ? 0 : -1}});
    attend_case({.model = {.channels = channels, .rotary = 0}, .count = 5});
  }
  for (const auto type : {ElementType::bf16, ElementType::f16, ElementType::f64, ElementType::q8_0})
    attend_case({.model = {.type = type}});
  for (const Layout layout : test::all_layouts) {
    attend_case({.model = {.type = ElementType::f16}, .layout = layout});
    attend_case({.model = {.value_channels = 40, .rotary = 0}, .layout = layout});
  }
  for (const auto frame : {QueryFrame::pre_rope, QueryFrame::post_rope, QueryFrame::at_positions}) {
    for (const auto form : {kvmeld::KeyForm::post_rope, kvmeld::KeyForm::pre_rope}) {
      for (const auto pairing :
           {kvmeld::RopePairing::half_split, kvmeld::RopePairing::interleaved}) {
        attend_case({.model = {.first = 8, .rotary = 40, .pairing = pairing},
                     .frame = frame,
                     .hides = true,
                     .form = form});
      }
    }
  }
  attend_case({.model = {.heads = 7}, .count = 16});
}

TEST_CASE("pooled tokens agree with plain loops, in every executor") {
  for (const auto mode : {AttentionMode::exact, AttentionMode::per_agent_mean}) {
    for (const auto frame :
         {QueryFrame::pre_rope, QueryFrame::post_rope, QueryFrame::at_positions}) {
      render_case({.frame = frame}, mode);
      render_case({.model = {.type = ElementType::bf16}, .frame = frame, .hides = true}, mode);
      render_case({.model = {.heads = 3, .channels = 80, .rotary = 16},
                   .frame = frame,
                   .form = kvmeld::KeyForm::pre_rope},
                  mode);
    }
    render_case({.model = {.channels = 1, .rotary = 0}, .count = 1}, mode);
    render_case({.model = {.channels = 96}, .count = 9}, mode);
  }
  // Sharper and sharper: weights of 0 for one output and not for the next, until a head is left a
  // single token. Rows, lanes and threads agree.
  const Case c{.model = {.type = ElementType::bf16}, .count = 5};
  const auto g = geometry_of(c);
  const auto set = test::set_of(test::by_id(spans_of(c, g, {20, 1, 150})));
  for (const float scale : {1.0F, 5.0F, 25.0F, 300.0F}) {
    auto policy = policy_of(c, *g);
    policy.scale = scale;
    test::render_everywhere(set, merger_of(policy), at(g, 9));
  }
}

TEST_CASE(
    "the first span's weights come from the encoding that is mixed: the one without lead-in") {
  const auto g = test::geometry();
  test::TestCache behind(g, 9), alone(g, 9);
  behind.fill(1);
  alone.fill(2);
  const std::vector<kvmeld::TokenId> lead_in{1, 2, 3};
  const auto sealed =
      kvmeld::seal(behind.ref(), {.context = {.lead_in = kvmeld::lead_in_digest(lead_in)}});
  REQUIRE(sealed.ok());
  const auto both = kvmeld::with_variant(*sealed, alone.ref(), {});
  const auto plain = kvmeld::seal(alone.ref());
  REQUIRE(both.ok());
  REQUIRE(plain.ok());
  const auto rendered = [&](const kvmeld::Fragment& fragment) {
    kvmeld::FragmentSet set;
    REQUIRE(set.insert(fragment, kvmeld::Dot{1, 0}).ok());
    return test::render_everywhere(set, merger_of(policy_of({}, *g)), at(g))->buffers();
  };
  CHECK(rendered(*both) == rendered(*plain));
  kvmeld::FragmentSet gone;
  REQUIRE(gone.insert(test::evicted(*both, 1), kvmeld::Dot{1, 0}).ok());
  CHECK(kvmeld::plan(gone, merger_of(policy_of({}, *g)), at(g)).status().code() ==
        ErrorCode::payload_missing);
}

TEST_CASE("inner loops give the same bytes in every instruction set") {
  constexpr std::size_t n = 160, most_rows = kvmeld::detail::attended_rows, most = 9;
  constexpr float untouched = 77.0F;
  test::Random random(5);
  std::vector<float> queries(n * most), dots(kvmeld::detail::attended_block), values(n * most_rows),
      weights(most * most_rows);
  for (auto* v : {&queries, &dots, &values, &weights}) {
    for (float& x : *v) x = random.value();
  }
  dots[9] = -infinity;
  dots[11] = -300.0F;
  std::vector<std::vector<float>> results;
  std::vector<double> sums;
  for (const kvmeld::Isa isa : test::instruction_sets()) {
    INFO(kvmeld::to_string(isa));
    auto& all = results.emplace_back();
    // Blocks of queries, keys and rows, and what is left of them; f32, and stored as f16 and bf16,
    // as they lie and widened.
    for (const auto type : {ElementType::f32, ElementType::f16, ElementType::bf16}) {
      const auto steps = kvmeld::detail::attention_steps(isa, type);
      const auto size = static_cast<std::size_t>(kvmeld::block_bytes(type));
      std::vector<std::byte> stored(values.size() * size);
      std::vector<float> as_f32(values.size());
      kvmeld::extend::store_row(type, isa, values.data(),
                                static_cast<std::ptrdiff_t>(values.size()), stored.data());
      kvmeld::extend::load_row(type, isa, stored.data(), static_cast<std::ptrdiff_t>(values.size()),
                               as_f32.data());
      std::vector<const std::byte*> lie, wide;
      for (std::size_t i = 0; i < most_rows; ++i) {
        lie.push_back(stored.data() + i * n * size);
        wide.push_back(reinterpret_cast<const std::byte*>(as_f32.data() + i * n));
      }
      for (const std::size_t count : {std::size_t{1}, std::size_t{3}, std::size_t{4}, most}) {
        for (std::size_t rows = 1; rows <= most_rows; ++rows) {
          CAPTURE(kvmeld::to_string(type), count, rows);
          const kvmeld::detail::RowParts raw_part{lie.data(), rows,
                                                  static_cast<std::ptrdiff_t>(32 * size), n - 32,
                                                  static_cast<std::ptrdiff_t>(rows * n)};
          const kvmeld::detail::RowParts part{wide.data(), rows, 128, n - 32, 0};
          std::vector<float> out(count * (rows + 1), untouched), acc(count * (n - 32), 0.5F);
          auto from_raw = out, acc_raw = acc;
          steps.dots(queries.data(), count, part, out.data(), rows + 1);
          for (std::size_t q = 0; q < count; ++q) {
            CHECK(out[q * (rows + 1) + rows] == untouched);
            double dot = 0;
            for (std::size_t c = 0; c < n - 32; ++c)
              dot += static_cast<double>(queries[q * (n - 32) + c]) *
                     static_cast<double>(as_f32[(rows - 1) * n + 32 + c]);
            CHECK(static_cast<double>(out[q * (rows + 1) + rows - 1]) == Approx(dot).margin(1e-3));
          }
          all.insert(all.end(), out.begin(), out.end());
          const bool adds = rows % kvmeld::detail::added_rows == 0;
          if (adds) {
            steps.add(weights.data(), most_rows, count, part, acc.data());
            all.insert(all.end(), acc.begin(), acc.end());
            double sum = 0.5;
            for (std::size_t r = 0; r < rows; ++r)
              sum += static_cast<double>(weights[(count - 1) * most_rows + r]) *
                     static_cast<double>(as_f32[r * n + n - 1]);
            CHECK(static_cast<double>(acc.back()) == Approx(sum).margin(1e-3));
          }
          if (steps.widen != nullptr) {
            std::vector<float> widened(rows * (n - 32), untouched), expected;
            for (std::size_t r = 0; r < rows; ++r) {
              const auto row = as_f32.begin() + static_cast<std::ptrdiff_t>(r * n);
              expected.insert(expected.end(), row + 32, row + n);
            }
            steps.widen(raw_part, widened.data());
            CHECK(same_bits(widened, expected));
          }
          if (steps.raw_dots == nullptr) continue;
          steps.raw_dots(queries.data(), count, raw_part, from_raw.data(), rows + 1);
          CHECK(same_bits(from_raw, out));
          if (adds) steps.raw_add(weights.data(), most_rows, count, raw_part, acc_raw.data());
          if (adds) CHECK(same_bits(acc_raw, acc));
        }
      }
    }
    const auto steps = kvmeld::detail::attention_steps(isa);
    std::vector<float> made(kvmeld::detail::attended_block), block = values;
    std::vector<double> total(values.size(), 0.25);
    CHECK(steps.largest(dots.data()) == *std::max_element(dots.begin(), dots.end()));
    sums.push_back(steps.weigh(dots.data(), 0.3, 1.1, made.data()));
    steps.carry(block.data(), 0.7, block.size(), total.data());
    CHECK(std::all_of(block.begin(), block.end(), [](float x) { return x == 0.0F; }));
    all.insert(all.end(), made.begin(), made.end());
    for (const double x : total) all.push_back(static_cast<float>(x));
    CHECK(same_bits(all, results[0]));
    CHECK(sums.back() == sums[0]);
  }
}

TEST_CASE(
    "exponentials of weights: 1 at 0, within 2^-33 before they are rounded, 0 where f32 has "
    "nothing left, NaN stays NaN") {
  double worst = 0;
  for (int i = 0; i <= 200000; ++i) {
    const double x = -103.9 * i / 200000.0 + 0.4;
    worst = std::max(worst, std::abs(kvmeld::detail::weight_exp(x) / std::exp(x) - 1.0));
  }
  CHECK(worst < 0x1p-33);
  CHECK(kvmeld::detail::weight_exp(0.0) == 1.0);
  CHECK(kvmeld::detail::weight_exp(-105.0) == 0.0);
  CHECK(kvmeld::detail::weight_exp(-std::numeric_limits<double>::infinity()) == 0.0);
  CHECK(std::isnan(kvmeld::detail::weight_exp(std::numeric_limits<double>::quiet_NaN())));
  // NaN is not lost among a block's weights
  for (const kvmeld::Isa isa : test::instruction_sets()) {
    std::vector<float> dots(kvmeld::detail::attended_block, 1.0F), weights(dots.size());
    dots[13] = not_a_number;
    CHECK(std::isnan(
        kvmeld::detail::attention_steps(isa).weigh(dots.data(), 1.0, 1.0, weights.data())));
  }
}

TEST_CASE(
    "gradients agree with central differences, with respect to queries, keys and values, exact and "
    "by agent") {
  constexpr std::size_t m = 3, n = 7, d = 5, e = 4;
  test::Random random(9);
  std::vector<double> q(m * d), k(n * d), v(n * e), to_v(m * e), to_k(m * d), to_lse(m);
  for (auto* x : {&q, &k, &v, &to_v, &to_k, &to_lse}) {
    for (double& y : *x) y = 0.3 * static_cast<double>(random.value());
  }
  const double factor = 0.7;
  for (const std::vector<std::size_t>& agents : {std::vector<std::size_t>{}, {0, 3, 3, 5}}) {
    // The number whose gradient is asked for: cotangents times results, in plain loops.
    const auto value = [&] {
      double out = 0;
      const std::vector<std::size_t> begins = agents.empty() ? std::vector<std::size_t>{0} : agents;
      double speakers = 0;
      for (std::size_t a = 0; a < begins.size(); ++a)
        speakers += (a + 1 < begins.size() ? begins[a + 1] : n) > begins[a] ? 1 : 0;
      for (std::size_t i = 0; i < m; ++i) {
        for (std::size_t a = 0; a < begins.size(); ++a) {
          const std::size_t last = a + 1 < begins.size() ? begins[a + 1] : n;
          double total = 0, sum = 0;
          for (std::size_t t = begins[a]; t < last; ++t) {
            double dot = 0, g = 0;
            for (std::size_t c = 0; c < d; ++c) dot += q[i * d + c] * k[t * d + c];
            for (std::size_t c = 0; c < e; ++c) g += to_v[i * e + c] * v[t * e + c];
            for (std::size_t c = 0; c < d; ++c) g += to_k[i * d + c] * k[t * d + c];
            total += std::exp(dot * factor);
            sum += std::exp(dot * factor) * g;
          }
          if (last > begins[a]) out += sum / total / speakers;
          if (agents.empty()) out += to_lse[i] * std::log(total);
        }
      }
      return out;
    };
    std::vector<double> gq(m * d, 0.0), gk(n * d, 0.0), gv(n * e, 0.0);
    kvmeld::gradients::AttentionPullback<double> pull{
        q,      k,
        v,      d,
        e,      factor,
        agents, to_v,
        to_k,   agents.empty() ? std::span<const double>(to_lse) : std::span<const double>()};
    REQUIRE(kvmeld::gradients::attention_vjp<double>(pull, {gq, gk, gv}).ok());
    double worst = 0;
    const auto compare = [&](std::vector<double>& x, const std::vector<double>& gradient) {
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double was = x[i], h = 1e-5;
        x[i] = was + h;
        const double up = value();
        x[i] = was - h;
        const double difference = (up - value()) / (2 * h);
        x[i] = was;
        worst = std::max(worst, std::abs(gradient[i] - difference) / (std::abs(difference) + 1e-3));
      }
    };
    compare(q, gq);
    compare(k, gk);
    compare(v, gv);
    CHECK(worst < 1e-6);  // the requirement says 1e-4
    // f32 follows.
    const auto narrow = [](const std::vector<double>& x) {
      return std::vector<float>(x.begin(), x.end());
    };
    const auto q32 = narrow(q), k32 = narrow(k), v32 = narrow(v), tv32 = narrow(to_v),
               tk32 = narrow(to_k);
    std::vector<float> gq32(m * d, 0.0F), gk32(n * d, 0.0F), gv32(n * e, 0.0F);
    REQUIRE(kvmeld::gradients::attention_vjp<float>(
                {q32, k32, v32, d, e, 0.7F, agents, tv32, tk32, {}}, {gq32, gk32, gv32})
                .ok());
    if (!agents.empty()) CHECK(static_cast<double>(gk32[1]) == Approx(gk[1]).epsilon(1e-4));

    auto wrong = pull;
    wrong.values = wrong.values.first(n * e - 1);
    const auto before = gq;
    CHECK(kvmeld::gradients::attention_vjp<double>(wrong, {gq, gk, gv}).code() ==
          ErrorCode::invalid_argument);
    wrong = pull;
    wrong.key_channels = 0;
    CHECK(kvmeld::gradients::attention_vjp<double>(wrong, {gq, gk, gv}).code() ==
          ErrorCode::invalid_argument);
    const std::vector<std::size_t> descending{0, 5, 3}, late{1};
    for (const auto& begins : {descending, late}) {
      wrong = pull;
      wrong.lse_natural = {};
      wrong.agents = begins;
      CHECK(kvmeld::gradients::attention_vjp<double>(wrong, {gq, gk, gv}).code() ==
            ErrorCode::invalid_argument);
    }
    wrong = pull;
    wrong.agents = descending;
    wrong.lse_natural = to_lse;
    CHECK(kvmeld::gradients::attention_vjp<double>(wrong, {gq, gk, gv}).code() ==
          ErrorCode::unsupported);
    wrong = pull;
    wrong.factor = std::numeric_limits<double>::infinity();
    CHECK(kvmeld::gradients::attention_vjp<double>(wrong, {gq, gk, gv}).code() ==
          ErrorCode::non_finite);
    CHECK(gq == before);
  }
}

TEST_CASE("attention refuses what it cannot read, with the number, and leaves the output alone") {
  const auto g = test::geometry({.layers = 2, .heads = 2, .channels = 8});
  const auto positions = test::gapped_positions(5);
  test::TestCache cache(g, 5);
  cache.fill(1);
  const auto values = random_queries(*g, 2, 1);
  const AttentionQueries good{values, 2, QueryFrame::pre_rope, {}, 0.0F, 1.0F};
  const AttendSource source{cache.ref(), positions, {}};
  Owned<> out(2, 4, 8);
  const auto refused = [&](const AttentionQueries& q, const AttendSource& s,
                           const MutableAttentionState<LseNatural>& to, ErrorCode code,
                           const char* text) {
    const auto status = kvmeld::attend(q, std::span(&s, 1), to);
    INFO(status.message());
    CHECK(status.code() == code);
    CHECK(status.message().find(text) != std::string::npos);
    CHECK(out.untouched());
  };
  auto q = good;
  q.count = 0;
  refused(q, source, out.out(), ErrorCode::invalid_argument, "0 queries");
  q = good;
  q.values = q.values.first(q.values.size() - 1);
  refused(q, source, out.out(), ErrorCode::invalid_argument, "63 numbers for 2 queries");
  auto odd = values;
  odd[33] = not_a_number;
  q = good;
  q.values = odd;
  refused(q, source, out.out(), ErrorCode::non_finite, "query 1");
  q = good;
  q.frame = static_cast<QueryFrame>(7);
  refused(q, source, out.out(), ErrorCode::unknown_field, "frame 7");
  q = good;
  q.frame = QueryFrame::at_positions;
  refused(q, source, out.out(), ErrorCode::invalid_argument, "0 positions for 2");
  q = good;
  q.positions = positions;
  refused(q, source, out.out(), ErrorCode::invalid_argument, "5 positions for 2");
  for (const float bad : {-1.0F, not_a_number, infinity}) {
    q = good;
    q.scale = bad;
    refused(q, source, out.out(), ErrorCode::invalid_argument, "scale");
    q = good;
    q.temperature = bad;
    refused(q, source, out.out(), ErrorCode::invalid_argument, "temperature");
  }
  q = good;
  q.temperature = 0.0F;
  refused(q, source, out.out(), ErrorCode::invalid_argument, "temperature");
  refused(good, {cache.ref(), std::span(positions).first(4), {}}, out.out(),
          ErrorCode::token_count_mismatch, "4 positions for 5");
  refused(good,
          {cache.ref(),
           std::vector<std::int64_t>{0, 1, 2, std::numeric_limits<std::int64_t>::max(), 4},
           {}},
          out.out(), ErrorCode::invalid_argument, "position 9223372036854775807 of token 3");
  refused(good, {cache.ref(), std::vector<std::int64_t>{0, -1, 2, 3, 4}, {}}, out.out(),
          ErrorCode::invalid_argument, "position -1 of token 1");
  refused(good, {cache.ref(), positions, {false, {1, 5}}}, out.out(), ErrorCode::invalid_argument,
          "token 5");
  refused(good, {cache.ref(), positions, {false, {3, 3}}}, out.out(), ErrorCode::invalid_argument,
          "token 3");
  refused(good, {kvmeld::KvCacheRef(), positions, {}}, out.out(), ErrorCode::invalid_argument,
          "no geometry");
  refused(good, source, Owned<>(3, 4, 8).out(), ErrorCode::invalid_argument, "3 rows for 2");
  refused(good, source, Owned<>(2, 3, 8).out(), ErrorCode::invalid_argument, "3 heads for 4");
  refused(good, source, Owned<>(2, 4, 9).out(), ErrorCode::unsupported, "9 channels");
  cache.set(1, 3, 1, 2, infinity);
  refused(good, source, out.out(), ErrorCode::non_finite, "layer 0 head 1");
  cache.fill(1);
  cache.set(2, 3, 1, 2, not_a_number);
  refused(good, source, out.out(), ErrorCode::non_finite, "layer 1 head 1");
  cache.fill(1);
  const auto edited = [&](auto edit, ErrorCode code, const char* text) {
    const auto other = std::make_shared<kvmeld::Geometry>(*g);
    edit(*other);
    std::vector<kvmeld::PlaneRef> planes;
    for (const auto& layer : other->layers) {
      for (const auto& shape : layer.planes)
        planes.push_back(kvmeld::extend::canonical_plane(
            shape, static_cast<const std::byte*>(nullptr), nullptr, 0));
    }
    refused(good, {kvmeld::KvCacheRef(other, planes, 0), {}, {}}, out.out(), code, text);
  };
  edited([](kvmeld::Geometry& o) { o.layers[1].planes[0].plane = kvmeld::Plane::latent; },
         ErrorCode::unsupported, "latent");
  edited([](kvmeld::Geometry& o) { o.layers[1].planes[0].hadamard = 8; }, ErrorCode::unsupported,
         "basis of 8");
  edited(
      [](kvmeld::Geometry& o) { o.layers[0].planes[1].scales = kvmeld::ScaleScheme::per_tensor; },
      ErrorCode::unsupported, "scales");
  edited([](kvmeld::Geometry& o) { o.layers[0].planes[1].heads = 1; }, ErrorCode::unsupported,
         "2 planes");
  edited([](kvmeld::Geometry& o) { o.layers[0].planes.pop_back(); }, ErrorCode::unsupported,
         "1 planes");
  edited([](kvmeld::Geometry& o) { o.layers[1].rope = {}; }, ErrorCode::invalid_argument,
         "layer 1: rope: nobody said");
  edited([](kvmeld::Geometry& o) { o.layers[0].planes[0].channels = 0; },
         ErrorCode::invalid_argument, "0 key");
  {
    auto o = std::make_shared<kvmeld::Geometry>(*g);
    o->layers[1].rope.base = 500.0;
    test::TestCache other(o, 5);
    other.fill(2);
    const AttendSource both[] = {source, {other.ref(), positions, {}}};
    CHECK(kvmeld::attend(good, both, out.out()).code() == ErrorCode::geometry_mismatch);
    for (auto& layer : o->layers)
      layer.rope = kvmeld::RopeSpec::dynamic_ntk(
          kvmeld::RopeSpec::rotary(8, 10000.0, kvmeld::RopePairing::half_split), 2.0, 6);
    test::TestCache grown(o, 5);
    grown.fill(2);
    refused(good, {grown.ref(), positions, {}}, out.out(), ErrorCode::rope_length_dependent,
            "original context 6");
    refused(good, {grown.ref(), std::vector<std::int64_t>{0, 6, 2, 3, 1}, {}}, out.out(),
            ErrorCode::rope_length_dependent, "contexts of 7");
  }

  // Nothing to attend over is the empty state.
  for (int form = 0; form < 3; ++form) {
    Owned<> none(2, 4, 8);
    test::TestCache no_tokens(g, 0);
    const AttendSource sources[] = {form == 1 ? AttendSource{no_tokens.ref(), {}, {}}
                                              : AttendSource{cache.ref(), positions, {false, {}}}};
    REQUIRE(kvmeld::attend(good,
                           form == 0 ? std::span<const AttendSource>()
                                     : std::span<const AttendSource>(sources),
                           none.out())
                .ok());
    CHECK(std::all_of(none.outputs.begin(), none.outputs.end(), [](float x) { return x == 0.0F; }));
    CHECK(std::all_of(none.lse.begin(), none.lse.end(), [](float x) { return x == -infinity; }));
  }
}

TEST_CASE("plans refuse wrong queries, and take empty fragments, one fragment, a thousand") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 4});
  kvmeld::FragmentSet set;
  for (std::uint64_t s = 0; s < 1000; ++s) {
    REQUIRE(set.insert(test::sealed(g, s % 7 == 0 ? 0 : 1, s).fragment, kvmeld::Dot{s, 0}).ok());
  }
  const auto queries = std::make_shared<const std::vector<float>>(random_queries(*g, 2, 5));
  const Attention good{.queries = queries, .count = 2};
  const auto plan = kvmeld::plan(set, merger_of(good), at(g));
  INFO(plan.status().message());
  REQUIRE(plan.ok());
  CHECK(plan->tokens() == 2);
  CHECK(plan->holes().empty());
  CHECK(plan->token_ids()[0] == -1);
  CHECK(plan->positions()[1] == 1);
  const auto refused = [&](const Attention& policy, ErrorCode code) {
    const auto no = kvmeld::plan(set, merger_of(policy), at(g));
    REQUIRE_FALSE(no.ok());
    INFO(no.status().message());
    CHECK(no.status().code() == code);
  };
  auto bad = good;
  bad.queries = nullptr;
  refused(bad, ErrorCode::invalid_argument);
  bad = good;
  bad.count = 3;
  refused(bad, ErrorCode::invalid_argument);
  bad = good;
  bad.mode = static_cast<AttentionMode>(9);
  refused(bad, ErrorCode::unknown_field);
  bad = good;
  auto odd = *queries;
  odd[0] = infinity;
  bad.queries = std::make_shared<const std::vector<float>>(odd);
  refused(bad, ErrorCode::non_finite);
  odd[0] = 3e38F;
  odd[1] = 3e38F;
  bad.queries = std::make_shared<const std::vector<float>>(odd);
  refused(bad, ErrorCode::non_finite);
  // One fragment of one token is that token, in every head.
  const auto alone = test::sealed(g, 1, 3);
  kvmeld::FragmentSet one;
  REQUIRE(one.insert(alone.fragment, kvmeld::Dot{1, 0}).ok());
  const auto out = test::render_everywhere(
      one,
      merger_of(Attention{
          .queries = std::make_shared<const std::vector<float>>(random_queries(*g, 1, 5))}),
      at(g));
  for (std::int64_t c = 0; c < 4; ++c)
    CHECK(out->get(1, 0, 0, c) == alone.values[1][static_cast<std::size_t>(c)]);
  // No fragments: no output.
  const auto none = kvmeld::plan(kvmeld::FragmentSet{}, merger_of(good), at(g));
  REQUIRE(none.ok());
  CHECK(none->tokens() == 0);
}
