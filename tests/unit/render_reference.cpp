// Rendered caches against the same formulas in plain double loops, over dtypes, layouts, head sizes
// and fusers; every executor must write the same bytes. What a difference may be is derived in
// support/reference.hpp.
#include <numeric>

#include "support/reference.hpp"
#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::Concat;
using kvmeld::ElementType;
using kvmeld::Fuser;
using kvmeld::Target;
using kvmeld::TokenMatch;
using kvmeld::WeightedMean;
using reference::Fuse;
using test::Layout;
using test::Sealed;

const auto concat = kvmeld::merger(ById{}, Aligner{Concat{}}, Fuser{WeightedMean{}});
const auto mean = kvmeld::merger(ById{}, Aligner{TokenMatch{}}, Fuser{WeightedMean{}});
const auto prefix_mean = kvmeld::merger(
    ById{}, Aligner{TokenMatch{.mode = kvmeld::MatchMode::common_prefix}}, Fuser{WeightedMean{}});
const auto sum = kvmeld::merger(ById{}, Aligner{TokenMatch{}}, Fuser{kvmeld::Sum{}});
const auto maximum = kvmeld::merger(ById{}, Aligner{TokenMatch{}}, Fuser{kvmeld::Max{}});

Target at(const std::shared_ptr<const kvmeld::Geometry>& g, std::int64_t first_position = 0) {
  Target target;
  target.geometry = *g;
  target.first_position = first_position;
  return target;
}

// Four spans of 0, 1, 5 and 6 tokens; the second and the fourth have gaps in their positions, all
// have token ids.
std::vector<Sealed> four_spans(const std::shared_ptr<const kvmeld::Geometry>& g,
                               Layout layout = Layout::canonical) {
  std::vector<Sealed> out;
  for (const std::int64_t n : {0, 1, 5, 6}) {
    const auto positions = test::gapped_positions(n, 2 * n);
    const auto ids = test::token_ids(n, n > 1 ? 100 : 101);
    out.push_back(test::sealed(g, n, 40 + static_cast<std::uint64_t>(n),
                               {.tokens = ids, .positions = positions}, layout));
    REQUIRE(out.back().fragment.valid());
  }
  return test::by_id(out);
}

// Renders `spans` by every merger and compares; the spans are given in order of id.
void compare_all(const std::shared_ptr<const kvmeld::Geometry>& g, const std::vector<Sealed>& spans,
                 Layout out_layout) {
  const kvmeld::FragmentSet set = test::set_of(spans);
  const auto check = [&](const char* name, const auto& merger,
                         const std::vector<reference::Output>& outputs, Fuse fuse,
                         std::int64_t first) {
    INFO(name);
    const auto cache = test::render_everywhere(set, merger, at(g, first), out_layout);
    REQUIRE(cache->tokens() == std::ssize(outputs));
    CHECK(reference::worst(*cache, spans, outputs, fuse) <= 1.0);
  };
  check("concat", concat, reference::concat(spans, 7), Fuse::mean, 7);
  check("mean", mean, reference::match(spans, -1, 0), Fuse::mean, 0);
  check("sum", sum, reference::match(spans, -1, 11), Fuse::sum, 11);
  check("max", maximum, reference::match(spans, -1, 11), Fuse::max, 11);
}

}  // namespace

TEST_CASE("every element type renders right from every layout into every layout") {
  const auto type =
      GENERATE(ElementType::f64, ElementType::f32, ElementType::f16, ElementType::bf16,
               ElementType::f8_e4m3, ElementType::f8_e5m2, ElementType::q8_0);
  const std::size_t in = GENERATE(0U, 1U, 2U, 3U, 4U, 5U);
  const Layout from = test::all_layouts[in];
  // Six pairs cover each layout on both sides; the canonical one, the library's own, meets all
  // others.
  const Layout to = test::all_layouts[in == 0 ? 0 : 6 - in];
  CAPTURE(kvmeld::to_string(type), in);
  const auto g = test::geometry(
      {.type = type, .heads = 3, .channels = 64, .value_channels = 32, .first = 8, .rotary = 40});
  compare_all(g, four_spans(g, from), to);
  if (in > 0) compare_all(g, four_spans(g, from), Layout::canonical);
}

TEST_CASE("head sizes, odd head counts, pairings and partial rotation render right") {
  struct Head {
    int channels, first, rotary;
  };
  const auto head = GENERATE(Head{64, 0, 64}, Head{80, 0, 80}, Head{80, 10, 32}, Head{96, 0, 96},
                             Head{128, 64, 64}, Head{256, 0, 256}, Head{256, 3, 250}, Head{7, 1, 6},
                             Head{1, 0, 0});
  const auto pairing = GENERATE(kvmeld::RopePairing::half_split, kvmeld::RopePairing::interleaved);
  const auto type = head.channels % 32 == 0
                        ? GENERATE(ElementType::f32, ElementType::bf16, ElementType::q8_0)
                        : ElementType::f16;
  CAPTURE(head.channels, head.first, head.rotary, static_cast<int>(pairing),
          kvmeld::to_string(type));
  const auto g = test::geometry({.type = type,
                                 .layers = 1,
                                 .heads = 3,
                                 .channels = head.channels,
                                 .first = head.first,
                                 .rotary = head.rotary,
                                 .pairing = pairing,
                                 .base = 500000.0});
  compare_all(g, four_spans(g), Layout::canonical);
}

TEST_CASE("no fragment, no token, one token") {
  const auto g = test::geometry();
  const auto nothing = test::render_everywhere(kvmeld::FragmentSet{}, concat, at(g));
  CHECK(nothing->tokens() == 0);
  CHECK(nothing->is_untouched());
  for (const std::int64_t n : {0, 1}) {
    const std::vector<Sealed> spans{test::sealed(g, n, 5)};
    CAPTURE(n);
    compare_all(g, spans, Layout::canonical);
  }
}

TEST_CASE("matching by common prefix shares outputs up to the first different id") {
  const auto g = test::geometry({.type = ElementType::f16});
  std::vector<Sealed> spans;
  for (std::uint64_t s = 0; s < 3; ++s) {
    auto ids = test::token_ids(6);
    if (s == 2) ids[4] = 7;
    const auto positions = test::gapped_positions(6, static_cast<std::int64_t>(3 * s));
    spans.push_back(test::sealed(g, 6, s, {.tokens = ids, .positions = positions}));
  }
  spans = test::by_id(spans);
  const std::int64_t shared = reference::common_prefix(spans);
  REQUIRE(shared == 4);
  const auto outputs = reference::match(spans, shared, 2);
  REQUIRE(outputs.size() == 4 + 3 * 2);
  const auto cache = test::render_everywhere(test::set_of(spans), prefix_mean, at(g, 2));
  CHECK(reference::worst(*cache, spans, outputs, Fuse::mean) <= 1.0);
}

TEST_CASE(
    "any number of contributions to one output, around the chunk of 64 and through the tree") {
  const auto count = GENERATE(1, 2, 63, 64, 65, 128, 129, 130, 1000);
  const auto equal_positions = GENERATE(true, false);
  CAPTURE(count, equal_positions);
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  const std::vector<Sealed> spans{test::sealed(g, count, 1), test::sealed(g, count, 2)};
  const auto ordered = test::by_id(spans);
  // Output 0 takes every token of the first span, with weights; output 1 is a hole; output 2 takes
  // one token of the second.
  auto alignment = std::make_shared<kvmeld::Alignment>();
  alignment->positions = {5, 6, 9};
  alignment->tokens = {-1, -1, -1};
  kvmeld::AlignmentGroup& group = alignment->groups.emplace_back();
  std::vector<reference::Output> outputs{{5, {}}, {6, {}}, {9, {}}};
  for (int i = 0; i < count; ++i) {
    const int token = equal_positions ? count / 2 : i;
    const float weight = static_cast<float>(1 + i % 5) * 0.3F;
    group.contributions.push_back({0, static_cast<std::uint32_t>(token), weight});
    outputs[0].inputs.push_back({0, token, static_cast<double>(weight)});
  }
  group.end_row();
  group.end_row();
  group.contributions.push_back({1, 0, 2.0F});
  group.end_row();
  outputs[2].inputs.push_back({1, 0, 2.0});
  const Aligner given{test::Given{alignment}};
  const kvmeld::FragmentSet set = test::set_of(spans);
  const auto check = [&](const auto& merger, Fuse fuse) {
    const auto plan = kvmeld::plan(set, merger, at(g));
    REQUIRE(plan.ok());
    REQUIRE(plan->holes().size() == 1);
    CHECK(plan->holes()[0] == kvmeld::Hole{1, 6, -1});
    const auto cache = test::render_everywhere(set, merger, at(g));
    CHECK(reference::worst(*cache, ordered, outputs, fuse) <= 1.0);
  };
  check(kvmeld::merger(ById{}, given, Fuser{WeightedMean{}}), Fuse::mean);
  check(kvmeld::merger(ById{}, given, Fuser{kvmeld::Sum{}}), Fuse::sum);
  check(kvmeld::merger(ById{}, given, Fuser{kvmeld::Max{}}), Fuse::max);
}

TEST_CASE("layers may hold fewer tokens, keep keys before rotation, or have no positions at all") {
  auto g = test::geometry({.layers = 4, .heads = 2, .channels = 32});
  g->layers[1].window = 4;
  g->layers[2].key_form = kvmeld::KeyForm::pre_rope;
  g->layers[3].rope = kvmeld::RopeSpec::none();
  g->layers[3].planes[0].rotary = false;
  std::vector<Sealed> spans;
  for (std::uint64_t s = 0; s < 3; ++s) {
    const auto n = static_cast<std::int64_t>(4 + s);
    const std::vector<std::int64_t> hidden{0, n - 2, 0, 0};
    const auto positions = test::gapped_positions(n);
    spans.push_back(
        test::sealed(g, n, 70 + s, {.positions = positions}, Layout::slot_list, hidden));
    REQUIRE(spans.back().fragment.valid());
  }
  spans = test::by_id(spans);
  const kvmeld::FragmentSet set = test::set_of(spans);
  // Holes: rows that layer 1 lacks though some query sees them; its window is 4 tokens, the query's
  // own among them. Queries are the token behind the last output, and every hole, which is
  // computed. Their rows are left as they are in every layer.
  const auto leave_holes = [&](std::vector<reference::Output>& outputs) {
    std::vector<std::int64_t> queries{outputs.back().position + 1};
    std::vector<kvmeld::Hole> holes;
    for (std::size_t o = outputs.size(); o-- > 0;) {
      const bool seen = std::any_of(queries.begin(), queries.end(),
                                    [&](std::int64_t q) { return outputs[o].position > q - 4; });
      const bool held = std::any_of(
          outputs[o].inputs.begin(), outputs[o].inputs.end(),
          [&](const reference::Input& in) { return in.token >= spans[in.source].hidden[1]; });
      if (!seen || held) continue;
      queries.push_back(outputs[o].position);
      holes.insert(holes.begin(), {static_cast<std::int64_t>(o), outputs[o].position, -1});
      outputs[o].inputs.clear();
    }
    return holes;
  };
  const auto check = [&](const auto& merger, std::vector<reference::Output> outputs, Fuse fuse) {
    const std::vector<kvmeld::Hole> holes = leave_holes(outputs);
    const auto cache = test::render_everywhere(set, merger, at(g, 3));
    CHECK(reference::worst(*cache, spans, outputs, fuse) <= 1.0);
    const auto plan = kvmeld::plan(set, merger, at(g, 3));
    REQUIRE(plan.ok());
    CHECK(std::vector<kvmeld::Hole>(plan->holes().begin(), plan->holes().end()) == holes);
    // What is said of the bytes is said of the rows that are written: 2 planes of 2 heads of 32
    // floats a token and layer.
    std::int64_t rows = 0;
    for (const reference::Output& output : outputs) {
      for (std::size_t l = 0; l < 4; ++l) {
        rows += std::any_of(
            output.inputs.begin(), output.inputs.end(),
            [&](const reference::Input& in) { return in.token >= spans[in.source].hidden[l]; });
      }
    }
    kvmeld::Digest128 digests[2];
    for (const std::uint8_t before : {std::uint8_t{0}, std::uint8_t{0x77}}) {
      kvmeld::HostCache out(g, plan->tokens());
      std::fill(out.bytes().begin(), out.bytes().end(), std::byte{before});
      std::vector<std::byte> workspace(plan->workspace_bytes());
      const auto report = kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.mutable_ref(),
                                      {.content_digest = true});
      REQUIRE(report.ok());
      CHECK(report->bytes == rows * 2 * 2 * 32 * 4);
      CHECK(report->holes == std::ssize(holes));
      digests[before == 0 ? 0 : 1] = *report->content_digest;
    }
    CHECK(digests[0] == digests[1]);
    return holes.size();
  };
  CHECK(check(concat, reference::concat(spans, 3), Fuse::mean) > 0);
  check(mean, reference::match(spans, -1, 3), Fuse::mean);
  check(maximum, reference::match(spans, -1, 3), Fuse::max);
}

TEST_CASE("the prefix comes first and is rendered once, or stays where the engine holds it") {
  const auto g = test::geometry({.type = ElementType::f16, .heads = 3, .channels = 32});
  const auto prefix_ids = test::token_ids(5, 1);
  const Sealed prefix = test::sealed(g, 5, 9, {.role = kvmeld::Role::prefix, .tokens = prefix_ids});
  REQUIRE(prefix.fragment.valid());
  std::vector<Sealed> spans;
  for (std::uint64_t s = 0; s < 3; ++s) {
    // Sealed behind the prefix: five tokens of it are in the cache, and dropped.
    test::TestCache cache(g, 9);
    cache.fill(20 + s);
    const auto ids = test::token_ids(9, static_cast<kvmeld::TokenId>(50 * s));
    const auto made = kvmeld::seal(
        cache.ref(), {.tokens = ids, .drop_first = 5, .context = {.prefix = prefix.fragment.id()}});
    REQUIRE(made.ok());
    Sealed span{*made, {}, {5, 6, 7, 8}, {}};
    for (std::size_t p = 0; p < cache.planes(); ++p) {
      const auto all = cache.dense();
      span.values.emplace_back(all[p].begin() + 5 * 3 * 32, all[p].end());
    }
    spans.push_back(std::move(span));
  }
  spans = test::by_id(spans);
  auto set = test::set_of(spans);
  REQUIRE(set.insert(prefix.fragment).ok());
  std::vector<Sealed> all{prefix};
  all.insert(all.end(), spans.begin(), spans.end());
  const auto cache = test::render_everywhere(set, concat, at(g));
  CHECK(reference::worst(*cache, all, reference::concat(all), Fuse::mean) <= 1.0);
  const auto plan = kvmeld::plan(set, concat, at(g));
  REQUIRE(plan.ok());
  CHECK(plan->token_ids()[0] == 1);
  CHECK(plan->token_ids()[5] == spans[0].fragment.tokens()[0]);

  Target in_place = at(g, 5);
  in_place.prefix_in_place = true;
  const auto rest = test::render_everywhere(set, concat, in_place);
  CHECK(reference::worst(*rest, spans, reference::concat(spans, 5), Fuse::mean) <= 1.0);

  // A fused render puts it first just so: nobody's tokens are matched with the prefix's.
  auto fused = reference::match(spans, -1, 5);
  for (auto& output : fused) {
    for (auto& in : output.inputs) ++in.source;
  }
  auto outputs = reference::concat({prefix});
  outputs.insert(outputs.end(), fused.begin(), fused.end());
  const auto both = test::render_everywhere(set, mean, at(g));
  CHECK(reference::worst(*both, all, outputs, Fuse::mean) <= 1.0);
}

TEST_CASE("whichever span comes first is read in its encoding without lead-in") {
  const auto g = test::geometry();
  std::vector<Sealed> behind, bare;
  for (std::uint64_t s = 0; s < 3; ++s) {
    const auto n = static_cast<std::int64_t>(3 + s);
    const auto far = test::gapped_positions(n, 40), near = test::gapped_positions(n, 0);
    const kvmeld::Context lead_in{.prefix = {},
                                  .lead_in = kvmeld::lead_in_digest(test::token_ids(8))};
    Sealed first = test::sealed(g, n, 2 * s, {.positions = far, .context = lead_in});
    Sealed second = test::sealed(g, n, 2 * s + 1, {.positions = near});
    test::TestCache cache(g, n);
    cache.fill(2 * s + 1);
    const auto both = kvmeld::with_variant(first.fragment, cache.ref(), {.positions = near});
    REQUIRE(both.ok());
    CHECK(both->id() != first.fragment.id());
    CHECK(both->payloads().size() == 2);
    first.fragment = second.fragment = *both;
    behind.push_back(first);
    bare.push_back(second);
  }
  const auto order = [&](bool reversed) {
    return kvmeld::merger(kvmeld::ByDot{.reversed = reversed});
  };
  const kvmeld::FragmentSet set = test::set_of(behind);
  std::vector<Sealed> forward = behind;
  forward[0] = bare[0];
  const auto cache = test::render_everywhere(set, order(false), at(g));
  CHECK(reference::worst(*cache, forward, reference::concat(forward), Fuse::mean) <= 1.0);
  std::vector<Sealed> backward{bare[2], behind[1], behind[0]};
  const auto rotated = test::render_everywhere(set, order(true), at(g));
  CHECK(reference::worst(*rotated, backward, reference::concat(backward), Fuse::mean) <= 1.0);
}

TEST_CASE("seams leave holes for the engine, with position and token, and touch nothing there") {
  const auto g = test::geometry({.heads = 1, .channels = 32});
  std::vector<Sealed> spans;
  for (std::uint64_t s = 0; s < 3; ++s) {
    const auto ids = test::token_ids(10, static_cast<kvmeld::TokenId>(100 * s));
    spans.push_back(test::sealed(g, 10, s, {.tokens = ids}));
  }
  const kvmeld::FragmentSet set = test::set_of(spans);
  auto outputs = reference::concat(spans, 4);
  for (std::size_t o = 10; o < 30; ++o) {
    if (o % 10 < 3) outputs[o].inputs.clear();  // ⌈¼ · 10⌉ tokens of every span but the first
  }
  const auto merger = kvmeld::merger(kvmeld::ByDot{}, kvmeld::SeamShare{.share = 0.25F});
  const auto cache = test::render_everywhere(set, merger, at(g, 4));
  CHECK(reference::worst(*cache, spans, outputs, Fuse::mean) <= 1.0);
  const auto plan = kvmeld::plan(set, merger, at(g, 4));
  REQUIRE(plan.ok());
  REQUIRE(plan->holes().size() == 6);
  CHECK(plan->holes()[0] == kvmeld::Hole{10, 14, 100});
  CHECK(plan->holes()[5] == kvmeld::Hole{22, 26, 202});
  const std::int64_t row = 2 * 2 * 32 * 4;  // bytes of a token: layers, planes, channels, f32
  CHECK(plan->bytes() == 24 * row);

  const auto everything = kvmeld::merger(kvmeld::ByDot{}, kvmeld::SeamAll{});
  const auto empty = test::render_everywhere(set, everything, at(g));
  CHECK(empty->is_untouched());
}

TEST_CASE("a window per fragment keeps its last tokens") {
  const auto g = test::geometry();
  const auto spans = four_spans(g);
  const auto merger = kvmeld::merger(kvmeld::SelectLast{.tokens = 2}, ById{});
  std::vector<reference::Output> outputs;
  std::int64_t position = 1;
  for (std::size_t s = 0; s < spans.size(); ++s) {
    const std::int64_t n = std::ssize(spans[s].positions);
    for (std::int64_t t = std::max<std::int64_t>(n - 2, 0); t < n; ++t)
      outputs.push_back({position++, {{s, t}}});
  }
  const auto cache = test::render_everywhere(test::set_of(spans), merger, at(g, 1));
  REQUIRE(cache->tokens() == std::ssize(outputs));
  CHECK(reference::worst(*cache, spans, outputs, Fuse::mean) <= 1.0);
}

TEST_CASE("layers that the target leaves out keep the local cache's rows") {
  const auto g = test::geometry({.layers = 3, .heads = 2, .channels = 32});
  const auto spans = four_spans(g);
  const std::int64_t tokens = 12;
  test::TestCache local(g, tokens + 2, Layout::paged);
  local.fill(99);
  Target target = at(g, 5);
  target.local = local.ref();
  target.layers.layers = {1, 0, 1};
  const auto cache = test::render_everywhere(test::set_of(spans), concat, target);
  // The kept layer is one more span whose row t stands at output t, unturned; the others are as
  // ever.
  const auto outputs = reference::concat(spans, 5);
  const auto whole = test::render_everywhere(test::set_of(spans), concat, at(g, 5));
  for (std::size_t p = 0; p < cache->planes(); ++p) {
    if (cache->layer_of(p) != 1) {
      CHECK(cache->buffers()[p] == whole->buffers()[p]);
      continue;
    }
    bool same = true;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t c = 0; c < 32; ++c)
          same = same && cache->get(p, t, h, c) == local.get(p, t, h, c);
      }
    }
    CHECK(same);
  }
}

TEST_CASE("weights multiply: the aligner's, and confidence where the fuser asks for it") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  const std::vector<Sealed> spans =
      test::by_id({test::sealed(g, 4, 1), test::sealed(g, 4, 2), test::sealed(g, 3, 3)});
  kvmeld::FragmentSet set;
  const float confidence[] = {0.5F, 2.0F, 0.25F};
  for (std::size_t s = 0; s < 3; ++s)
    REQUIRE(set.insert(spans[s].fragment, {s, 0}, confidence[s]).ok());
  const auto merger =
      kvmeld::merger(ById{}, Aligner{TokenMatch{}},
                     Fuser{WeightedMean{.weighting = kvmeld::Weighting::confidence}});
  auto outputs = reference::match(spans, -1, 6);
  for (auto& output : outputs) {
    for (auto& in : output.inputs) in.weight = static_cast<double>(confidence[in.source]);
  }
  const auto cache = test::render_everywhere(set, merger, at(g, 6));
  CHECK(reference::worst(*cache, spans, outputs, Fuse::mean) <= 1.0);
}

// Exact cases, computed apart in double.
TEST_CASE("means and maxima of points come out right") {
  auto g = test::geometry({.layers = 1, .heads = 1, .channels = 1, .rotary = 0});
  std::vector<Sealed> spans;
  for (const float x : {1.0F, 2.0F, 4.0F}) {
    test::TestCache cache(g, 1);
    for (std::size_t p = 0; p < 2; ++p) cache.set(p, 0, 0, 0, x);
    Sealed s;
    s.fragment = *kvmeld::seal(cache.ref());
    spans.push_back(s);
  }
  const kvmeld::FragmentSet set = test::set_of(spans);
  // join never averages
  CHECK(test::render_everywhere(set, mean, at(g))->get(1, 0, 0, 0) ==
        static_cast<double>(7.0F / 3.0F));
  CHECK(test::render_everywhere(set, sum, at(g))->get(1, 0, 0, 0) == 7.0);
  CHECK(test::render_everywhere(set, maximum, at(g))->get(1, 0, 0, 0) == 4.0);
}

TEST_CASE("keys at different positions are averaged at one: half a turn apart they do not cancel") {
  auto g = test::geometry({.layers = 1, .heads = 1, .channels = 2});
  g->layers[0].rope.scaling = kvmeld::RopeScaling::explicit_factors;
  g->layers[0].rope.factors = {0.318309886F};  // 1 / π: the only pair rotates by π a position
  test::TestCache near(g, 1), far(g, 1);
  const float k[] = {1.0F, 2.0F};
  for (int c = 0; c < 2; ++c) {
    near.set(0, 0, 0, c, k[c]);
    far.set(0, 0, 0, c, -k[c]);  // the same key at position 1; the raw mean of both is 0
    near.set(1, 0, 0, c, 1.0F);
    far.set(1, 0, 0, c, 1.0F);
  }
  const std::vector<std::int64_t> at_one{1};
  kvmeld::FragmentSet set;
  REQUIRE(set.insert(*kvmeld::seal(near.ref())).ok());
  REQUIRE(set.insert(*kvmeld::seal(far.ref(), {.positions = at_one})).ok());
  const auto cache = test::render_everywhere(set, mean, at(g));
  for (int c = 0; c < 2; ++c)
    CHECK(std::abs(cache->get(0, 0, 0, c) - static_cast<double>(k[c])) < 1e-6);
}

TEST_CASE("a window of one agent's text delivered four times renders once") {
  const auto g = test::geometry({.layers = 1, .heads = 1, .channels = 32});
  const Sealed once = test::sealed(g, 308, 1);
  kvmeld::FragmentSet set;
  for (std::uint64_t agent = 0; agent < 4; ++agent) {
    REQUIRE(set.insert(test::sealed(g, 308, 1).fragment, kvmeld::Dot{agent, agent}).ok());
  }
  CHECK(set.size() == 1);
  const auto plan = kvmeld::plan(set, kvmeld::merger(), at(g));
  REQUIRE(plan.ok());
  CHECK(plan->tokens() == 308);
}
