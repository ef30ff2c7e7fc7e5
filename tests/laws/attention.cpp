// What attention keeps however a context is cut, ordered and merged.
#include <cmath>

#include <kvmeld/policies/attention.hpp>

#include "support/law.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::AttendSource;
using kvmeld::Attention;
using kvmeld::AttentionMode;
using kvmeld::ElementType;
using kvmeld::QueryFrame;
using kvmeld::attention::AttentionState;
using kvmeld::attention::LseBase2;
using kvmeld::attention::LseNatural;

struct State {
  std::vector<float> outputs, lse;
  std::int64_t rows = 0, heads = 0, channels = 0;

  State(std::int64_t r, std::int64_t h, std::int64_t c)
      : outputs(static_cast<std::size_t>(r * h * c)),
        lse(static_cast<std::size_t>(r * h)),
        rows(r),
        heads(h),
        channels(c) {}
  template <class Base>
  [[nodiscard]] AttentionState<Base> as() const {
    return {outputs, lse, rows, heads, channels};
  }
  template <class Base>
  [[nodiscard]] kvmeld::attention::MutableAttentionState<Base> out() {
    return {outputs, lse, rows, heads, channels};
  }
};
State draw(std::int64_t r, std::int64_t h, std::int64_t c) {
  State s(r, h, c);
  test::Random random(*rc::gen::arbitrary<std::uint64_t>());
  const float spread = *rc::gen::element(0.1F, 2.0F, 30.0F);
  for (float& x : s.outputs) x = random.value();
  for (float& x : s.lse)
    x = random.below(6) == 0 ? -std::numeric_limits<float>::infinity() : spread * random.value();
  return s;
}
template <class Base>
State merged(const State& a, const State& b) {
  State out(a.rows, a.heads, a.channels);
  RC_ASSERT(
      kvmeld::attention::merge_attention_states(a.as<Base>(), b.as<Base>(), out.out<Base>()).ok());
  return out;
}
bool equal(const State& a, const State& b) {
  return std::memcmp(a.outputs.data(), b.outputs.data(), a.outputs.size() * 4) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * 4) == 0;
}
// Largest distance of outputs and of sums, as parts of the bound that the header states.
template <class Base>
void close(const State& a, const State& b, double largest_lse) {
  const double size = 1.0 + largest_lse * Base::natural;
  for (std::size_t i = 0; i < a.outputs.size(); ++i) {
    RC_ASSERT(std::abs(static_cast<double>(a.outputs[i]) - static_cast<double>(b.outputs[i])) <=
              (12.0 + size) * 0x1p-24 * 4.0);
  }
  for (std::size_t i = 0; i < a.lse.size(); ++i) {
    RC_ASSERT(a.lse[i] == b.lse[i] ||
              std::abs(static_cast<double>(a.lse[i]) - static_cast<double>(b.lse[i])) <=
                  4.0 * (1.0 + largest_lse) * 0x1p-24);
  }
}
template <class Base>
void merging() {
  const auto r = *rc::gen::inRange<std::int64_t>(1, 4), h = *rc::gen::inRange<std::int64_t>(1, 4),
             c = *rc::gen::element<std::int64_t>(1, 5, 32, 80, 96);
  const State x = draw(r, h, c), y = draw(r, h, c), z = draw(r, h, c);
  RC_ASSERT(equal(merged<Base>(x, y), merged<Base>(y, x)));
  const State left = merged<Base>(merged<Base>(x, y), z),
              right = merged<Base>(x, merged<Base>(y, z));
  State all(r, h, c);
  const AttentionState<Base> three[] = {x.as<Base>(), y.as<Base>(), z.as<Base>()};
  RC_ASSERT(kvmeld::attention::merge_attention_states<Base>(three, all.out<Base>()).ok());
  double largest = 0;
  for (const State* s : {&x, &y, &z, &left}) {
    for (const float l : s->lse)
      largest = std::isinf(l) ? largest : std::max(largest, std::abs(static_cast<double>(l)));
  }
  close<Base>(left, right, largest);
  close<Base>(left, all, largest);
}

struct Agents {
  std::shared_ptr<const kvmeld::Geometry> geometry;
  std::vector<test::Sealed> sealed;
  std::vector<float> queries;
  std::int64_t count = 0;
};
Agents agents(int fragments, ElementType type) {
  Agents out;
  const int channels = *rc::gen::element(1, 8, 40, 64);
  out.geometry = test::geometry({.type = type,
                                 .layers = 2,
                                 .heads = *rc::gen::inRange(1, 4),
                                 .channels = channels,
                                 .rotary = 2 * *rc::gen::inRange(0, channels / 2 + 1)});
  const auto seed = *rc::gen::arbitrary<std::uint64_t>();
  for (int s = 0; s < fragments; ++s) {
    const auto n = *rc::gen::inRange<std::int64_t>(1, 90);
    const auto positions = test::gapped_positions(n, s);
    const std::vector<std::int64_t> hidden{0, *rc::gen::inRange<std::int64_t>(0, n)};
    out.sealed.push_back(test::sealed(out.geometry, n, seed + static_cast<std::uint64_t>(s),
                                      {.positions = positions}, test::Layout::slot_list, hidden));
    RC_ASSERT(out.sealed.back().fragment.valid());
  }
  out.count = *rc::gen::inRange<std::int64_t>(1, 7);
  test::Random random(seed + 77);
  const std::int64_t width = 2 * out.geometry->layers[0].planes[0].heads * channels;
  for (std::int64_t i = 0; i < out.count * width; ++i) out.queries.push_back(0.2F * random.value());
  return out;
}

}  // namespace

TEST_CASE("states") {
  test::law("merging is commutative to the bit and associative within its bound, base e",
            [] { merging<LseNatural>(); });
  test::law("and base 2", [] { merging<LseBase2>(); });
}

TEST_CASE("context vectors of parts, merged, are those of the whole, however it is cut") {
  test::law("within 1e-6 of the largest value", [] {
    const auto a = agents(1, *rc::gen::element(ElementType::f32, ElementType::bf16));
    const auto frame = *rc::gen::element(QueryFrame::pre_rope, QueryFrame::post_rope);
    const kvmeld::FragmentView view(a.sealed[0].fragment);
    const auto& positions = a.sealed[0].positions;
    const kvmeld::AttentionQueries queries{a.queries, a.count, frame,
                                           {},        0.0F,    *rc::gen::element(0.5F, 1.0F, 8.0F)};
    const std::int64_t heads = 2 * a.geometry->layers[0].planes[0].heads,
                       channels = a.geometry->layers[0].planes[1].channels;
    State whole(a.count, heads, channels), parts(a.count, heads, channels);
    RC_ASSERT(kvmeld::attend(queries, view.ref(), whole.out<LseNatural>(), positions).ok());
    std::fill(parts.lse.begin(), parts.lse.end(), -std::numeric_limits<float>::infinity());
    std::vector<std::int32_t> left(positions.size());
    std::iota(left.begin(), left.end(), 0);
    while (!left.empty()) {  // any tokens in any part
      AttendSource part{view.ref(), positions, {false, {}}};
      std::vector<std::int32_t> rest;
      for (const std::int32_t t : left)
        (*rc::gen::inRange(0, 3) == 0 ? part.selected.present : rest).push_back(t);
      left = rest;
      State some(a.count, heads, channels);
      RC_ASSERT(kvmeld::attend(queries, std::span(&part, 1), some.out<LseNatural>()).ok());
      RC_ASSERT(kvmeld::attention::merge_attention_states(
                    parts.as<LseNatural>(), some.as<LseNatural>(), parts.out<LseNatural>())
                    .ok());
    }
    for (std::size_t i = 0; i < whole.outputs.size(); ++i) {
      // values below 4
      RC_ASSERT(std::abs(static_cast<double>(whole.outputs[i]) -
                         static_cast<double>(parts.outputs[i])) <= 4e-6);
    }
    for (std::size_t i = 0; i < whole.lse.size(); ++i) {
      RC_ASSERT(whole.lse[i] == parts.lse[i] ||
                std::abs(static_cast<double>(whole.lse[i]) - static_cast<double>(parts.lse[i])) <=
                    1e-5);
    }
  });
}

TEST_CASE("pooled tokens") {
  test::law("permuting fragments leaves bytes alone, in rows and in lanes", [] {
    const auto a =
        agents(5, *rc::gen::element(ElementType::f32, ElementType::bf16, ElementType::f16));
    const auto mode = *rc::gen::element(AttentionMode::exact, AttentionMode::per_agent_mean);
    const auto merger = kvmeld::merger(
        Aligner{Attention{.queries = std::make_shared<const std::vector<float>>(a.queries),
                          .count = a.count,
                          .frame = *rc::gen::element(QueryFrame::pre_rope, QueryFrame::post_rope),
                          .mode = mode}});
    kvmeld::Target target;
    target.geometry = *a.geometry;
    const auto rendered = [&](const std::vector<test::Sealed>& fragments, bool lanes) {
      kvmeld::FragmentSet set;
      for (const auto& f : fragments) RC_ASSERT(set.insert(f.fragment).ok());
      const auto plan = kvmeld::plan(set, merger, target);
      if (!plan.ok()) RC_FAIL(plan.status().message());
      test::TestCache out(plan->shared_geometry(), plan->tokens());
      std::vector<std::byte> workspace(plan->workspace_bytes());
      RC_ASSERT((lanes ? kvmeld::run(kvmeld::exec::lanes, *plan, workspace, out.out())
                       : kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.out()))
                    .ok());
      return out.buffers();
    };
    auto shuffled = a.sealed;
    test::Random random(*rc::gen::arbitrary<std::uint64_t>());
    for (std::size_t k = shuffled.size(); k > 1; --k)
      std::swap(shuffled[k - 1], shuffled[random.below(k)]);
    RC_ASSERT(rendered(a.sealed, false) == rendered(shuffled, true));
  });
}
