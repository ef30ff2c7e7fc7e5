// What may change without changing a rendered byte, and what a render may not touch.
#include <cmath>

#include "support/law.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ElementType;
using kvmeld::Fuser;
using kvmeld::TokenMatch;
using test::Layout;
using test::Sealed;
using test::TestCache;

const auto mean = kvmeld::merger(Aligner{TokenMatch{}});
const auto holes = kvmeld::merger(kvmeld::ByDot{}, kvmeld::SeamShare{.share = 0.4F});

std::shared_ptr<const kvmeld::Geometry> draw_model() {
  test::Model m;
  m.type =
      *rc::gen::element(ElementType::f64, ElementType::f32, ElementType::f16, ElementType::bf16,
                        ElementType::f8_e4m3, ElementType::f8_e5m2, ElementType::q8_0);
  m.layers = *rc::gen::inRange(1, 3);
  m.heads = *rc::gen::inRange(1, 4);
  m.channels = 32 * *rc::gen::inRange(1, 4);
  m.first = 2 * *rc::gen::inRange(0, 4);
  m.rotary = 2 * *rc::gen::inRange(0, (m.channels - m.first) / 2 + 1);
  m.pairing = *rc::gen::element(kvmeld::RopePairing::half_split, kvmeld::RopePairing::interleaved);
  return test::geometry(m);
}
std::vector<Sealed> draw_spans(const std::shared_ptr<const kvmeld::Geometry>& g,
                               std::int64_t most) {
  std::vector<Sealed> out;
  const auto count = *rc::gen::inRange<std::int64_t>(1, most + 1);
  const auto seed = *rc::gen::arbitrary<std::uint64_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto n = *rc::gen::inRange<std::int64_t>(0, 7);
    const Layout layout = *rc::gen::elementOf(
        std::vector<Layout>(std::begin(test::all_layouts), std::end(test::all_layouts)));
    out.push_back(test::sealed(
        g, n, seed + static_cast<std::uint64_t>(i),
        {.tokens = test::token_ids(n), .positions = test::gapped_positions(n, i)}, layout));
    RC_ASSERT(out.back().fragment.valid());
  }
  return out;
}
kvmeld::Target draw_target(const std::shared_ptr<const kvmeld::Geometry>& g) {
  kvmeld::Target target;
  target.geometry = *g;
  target.first_position = *rc::gen::inRange<std::int64_t>(0, 5000);
  return target;
}
// The set, inserted in the given order; each fragment keeps its agent.
kvmeld::FragmentSet in_order(const std::vector<Sealed>& spans,
                             const std::vector<std::size_t>& order) {
  kvmeld::FragmentSet set;
  for (const std::size_t i : order)
    RC_ASSERT(set.insert(spans[i].fragment, {i, 0}, 0.5F + static_cast<float>(i)).ok());
  return set;
}
std::vector<std::size_t> identity(std::size_t n) {
  std::vector<std::size_t> order(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = i;
  return order;
}

struct Rendered {
  kvmeld::Digest128 content;
  std::unique_ptr<TestCache> cache;
};
template <class M>
Rendered render(const kvmeld::FragmentSet& set, const M& merger, const kvmeld::Target& target,
                Layout layout = Layout::canonical, std::uint64_t prefill = 0) {
  const auto plan = kvmeld::plan(set, merger, target);
  RC_ASSERT(plan.ok());
  auto cache = std::make_unique<TestCache>(plan->shared_geometry(), plan->tokens(), layout);
  test::Random random(prefill);
  if (prefill != 0) {
    for (auto& buffer : cache->buffers()) {
      for (std::byte& b : buffer) b = static_cast<std::byte>(random.next());
    }
  }
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto report =
      kvmeld::run(kvmeld::exec::seq, *plan, workspace, cache->out(), {.content_digest = true});
  RC_ASSERT(report.ok());
  return {*report->content_digest, std::move(cache)};
}

}  // namespace

TEST_CASE("laws of rendering") {
  test::law("the order of insertion leaves every byte alone", [] {
    const auto g = draw_model();
    const auto spans = draw_spans(g, 12);
    const auto target = draw_target(g);
    auto order = identity(spans.size());
    const auto set = in_order(spans, order);
    const auto a = render(set, mean, target), b = render(set, holes, target);
    test::Random random(*rc::gen::arbitrary<std::uint64_t>());
    for (int i = 0; i < 4; ++i) {
      for (std::size_t k = order.size(); k > 1; --k)
        std::swap(order[k - 1], order[random.below(k)]);
      const auto permuted = in_order(spans, order);
      RC_ASSERT(permuted.digest() == set.digest());
      RC_ASSERT(render(permuted, mean, target).cache->buffers() == a.cache->buffers());
      RC_ASSERT(render(permuted, holes, target).cache->buffers() == b.cache->buffers());
    }
  });
  test::law("layouts on either side leave the content alone", [] {
    const auto g = draw_model();
    const auto spans = draw_spans(g, 4);
    const auto target = draw_target(g);
    const auto set = in_order(spans, identity(spans.size()));
    const auto want = render(set, mean, target).content;
    for (const Layout layout : test::all_layouts)
      RC_ASSERT(render(set, mean, target, layout).content == want);
  });
  test::law(
      "a render is pure: what lay in the output is either kept (holes, gaps) or does not matter",
      [] {
        const auto g = draw_model();
        const auto spans = draw_spans(g, 4);
        const auto target = draw_target(g);
        const auto set = in_order(spans, identity(spans.size()));
        const auto before = set.digest();
        const Layout layout = *rc::gen::elementOf(
            std::vector<Layout>(std::begin(test::all_layouts), std::end(test::all_layouts)));
        const auto a = render(set, holes, target, layout, 7),
                   b = render(set, holes, target, layout, 8);
        RC_ASSERT(set.digest() == before);
        const auto plan = kvmeld::plan(set, holes, target);
        std::vector<std::uint8_t> hole(static_cast<std::size_t>(plan->tokens()), 0);
        for (const kvmeld::Hole& h : plan->holes()) hole[static_cast<std::size_t>(h.output)] = 1;
        test::Random seven(7);
        // Bytes that differ between the runs are exactly those that neither wrote: all bytes of the
        // buffers, less written rows.
        for (std::size_t p = 0; p < a.cache->planes(); ++p) {
          std::vector<std::byte> start(a.cache->buffers()[p].size());
          for (std::byte& byte : start) byte = static_cast<std::byte>(seven.next());
          std::vector<std::uint8_t> written(start.size(), 0);
          const auto& shape = a.cache->shape(p);
          const auto size = static_cast<std::size_t>(kvmeld::block_bytes(shape.type));
          for (std::int64_t t = 0; t < a.cache->tokens(); ++t) {
            if (hole[static_cast<std::size_t>(t)] != 0) continue;
            for (std::int64_t h = 0; h < shape.heads; ++h) {
              for (std::int64_t c = 0; c < shape.channels;
                   c += kvmeld::block_elements(shape.type)) {
                const auto offset = static_cast<std::size_t>(a.cache->bytes(p, t, h, c) -
                                                             a.cache->buffers()[p].data());
                std::fill_n(written.begin() + static_cast<std::ptrdiff_t>(offset), size,
                            std::uint8_t{1});
              }
            }
          }
          for (std::size_t i = 0; i < start.size(); ++i) {
            if (written[i] != 0) {
              RC_ASSERT(a.cache->buffers()[p][i] == b.cache->buffers()[p][i]);
            } else {
              RC_ASSERT(a.cache->buffers()[p][i] == start[i]);
            }
          }
        }
      });
  test::law("one fragment at its own positions is a copy, byte for byte", [] {
    const auto g = draw_model();
    const auto n = *rc::gen::inRange<std::int64_t>(0, 9);
    const auto first = *rc::gen::inRange<std::int64_t>(0, 5000);
    std::vector<std::int64_t> positions;
    for (std::int64_t t = 0; t < n; ++t) positions.push_back(first + t);
    TestCache source(g, n);
    source.fill(*rc::gen::arbitrary<std::uint64_t>());
    const auto made = kvmeld::seal(source.ref(), {.positions = positions});
    RC_ASSERT(made.ok());
    kvmeld::FragmentSet set;
    RC_ASSERT(set.insert(*made).ok());
    kvmeld::Target target;
    target.geometry = *g;
    target.first_position = first;
    for (const auto& cache : {render(set, kvmeld::merger(), target), render(set, mean, target),
                              render(set, kvmeld::merger(Fuser{kvmeld::Max{}}), target)}) {
      RC_ASSERT(cache.content == *kvmeld::content_digest(source.ref()));
    }
  });
  test::law("a window wider than any fragment is no window", [] {
    const auto g = draw_model();
    const auto spans = draw_spans(g, 6);
    const auto target = draw_target(g);
    const auto set = in_order(spans, identity(spans.size()));
    const auto wide =
        *rc::gen::element<std::int64_t>(6, 7, 1000, std::numeric_limits<std::int64_t>::max());
    RC_ASSERT(render(set, kvmeld::merger(kvmeld::SelectLast{.tokens = wide}), target).content ==
              render(set, kvmeld::merger(), target).content);
  });
  // Fragments that say the same under other ids. Of f16, bf16 and 8-bit floats, at most 64
  // significands of at most 11 bits add up in 17 bits and divide back: exact, where keys need not
  // be rotated. f32 sums round n − 1 times and divide once.
  test::law(
      "equal fragments fuse to themselves: exactly for narrow floats, within n roundings for f32",
      [] {
        const auto type =
            *rc::gen::element(ElementType::f16, ElementType::bf16, ElementType::f8_e4m3,
                              ElementType::f8_e5m2, ElementType::f32);
        const auto g = test::geometry({.type = type, .layers = 1, .heads = 2, .channels = 32});
        const auto n = *rc::gen::inRange(2, 65);
        TestCache source(g, 3);
        source.fill(*rc::gen::arbitrary<std::uint64_t>());
        kvmeld::FragmentSet set;
        for (int i = 0; i < n; ++i) {
          const auto made = kvmeld::seal(source.ref(), {.tokens = test::token_ids(3, 10 * i)});
          RC_ASSERT(made.ok());
          RC_ASSERT(set.insert(*made).ok());
        }
        kvmeld::Target target;
        target.geometry = *g;
        const auto fused = render(set, mean, target);
        RC_ASSERT(fused.cache->tokens() == 3);
        if (type != ElementType::f32)
          RC_ASSERT(fused.content == *kvmeld::content_digest(source.ref()));
        for (std::size_t p = 0; p < 2; ++p) {
          for (std::int64_t c = 0; c < 32; ++c) {
            const double want = source.get(p, 2, 1, c);
            RC_ASSERT(std::abs(fused.cache->get(p, 2, 1, c) - want) <=
                      n * 0x1p-24 * std::abs(want));
          }
        }
      });
}

TEST_CASE(
    "content is the same for all orders of five fragments, and for 200 random orders of twelve") {
  const auto g = test::geometry({.type = ElementType::bf16, .heads = 2, .channels = 64});
  for (const std::size_t count : {5U, 12U}) {
    std::vector<Sealed> spans;
    for (std::size_t i = 0; i < count; ++i)
      spans.push_back(test::sealed(g, static_cast<std::int64_t>(1 + i % 4), i));
    kvmeld::Target target;
    target.geometry = *g;
    auto order = identity(count);
    const auto want = render(in_order(spans, order), mean, target).content;
    const auto also = render(in_order(spans, order), kvmeld::merger(), target).content;
    test::Random random(1);
    bool same = true, more = true;
    for (int round = 0; more && round < 200; ++round) {
      if (count > 5) {
        for (std::size_t k = count; k > 1; --k) std::swap(order[k - 1], order[random.below(k)]);
      } else {
        more = std::next_permutation(order.begin(), order.end());
      }
      const auto set = in_order(spans, order);
      same = same && render(set, mean, target).content == want &&
             render(set, kvmeld::merger(), target).content == also;
    }
    CHECK(same);
  }
}
