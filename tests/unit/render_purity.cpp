// What a render may not depend on, and what it must not lose: stale output, the caller's float
// environment, windows behind holes, slots that are shared or missing. Each case failed once.
#include <cfenv>
#include <cstring>
#include <limits>

#include <kvmeld/kvmeld.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using namespace kvmeld;

Fragment random_fragment(const std::shared_ptr<const Geometry>& g, std::int64_t tokens,
                         std::uint64_t seed, std::vector<TokenId> ids = {},
                         std::int64_t first = 0) {
  test::Random random(seed);
  HostCache cache(g, tokens);
  auto* values = reinterpret_cast<float*>(cache.bytes().data());
  for (std::size_t i = 0; i < cache.bytes().size() / sizeof(float); ++i) values[i] = random.value();
  std::vector<std::int64_t> positions(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < positions.size(); ++i)
    positions[i] = first + static_cast<std::int64_t>(i);
  SealOptions options;
  options.tokens = ids;
  options.positions = positions;
  auto fragment = seal(cache.kv_cache_ref(), options);
  REQUIRE(fragment);
  return *fragment;
}

FragmentSet set_of(const std::vector<Fragment>& fragments) {
  FragmentSet set;
  for (std::size_t i = 0; i < fragments.size(); ++i) REQUIRE(set.insert(fragments[i], Dot{i, 0}));
  return set;
}

Target at(const std::shared_ptr<const Geometry>& g, std::int64_t first = 0) {
  Target target;
  target.geometry = *g;
  target.first_position = first;
  return target;
}

/// Recomputes one output token.
struct SeamAt {
  static constexpr bool reproducible = true;
  std::size_t output = 0;
  Status mark(std::span<const Source>, const Alignment&, std::span<std::uint8_t> recompute) const {
    recompute[output] = 1;
    return {};
  }
  void digest(Hasher& hasher) const { hasher.value(static_cast<std::uint64_t>(output)); }
};

/// The magnitude of the last contribution: channel-wise, and not what one contribution is.
struct Absolute {
  static constexpr bool reproducible = true;
  static constexpr bool rotation_equivariant = false;
  KVMELD_HD float init() const { return 0; }
  KVMELD_HD float absorb(float, float value, float) const { return value < 0 ? -value : value; }
  KVMELD_HD float join(float, float b) const { return b; }
  KVMELD_HD float finish(float acc, float, int) const { return acc; }
  void digest(Hasher& hasher) const { hasher.text("test.Absolute"); }
};

/// A third of each channel of the first contribution. The third is divided where the row form is
/// made, by a table that a refused geometry does not have.
struct Third {
  static constexpr bool reproducible = true;

  struct Rows {
    static constexpr bool rotation_equivariant = false;
    float factor = 0;

    template <class HeadRows>
    KVMELD_HD int prepare(const HeadRows&) const {
      return 0;
    }
    template <class HeadRows>
    KVMELD_HD float channel(const HeadRows& rows, int, int c) const {
      return rows.value(0, c) * factor;
    }
  };
  const volatile float* three = nullptr;

  Status fits(const Geometry&) const {
    return three != nullptr ? Status() : Status(ErrorCode::unsupported, "no table");
  }
  Rows mixing() const { return {1.0F / *three}; }
  void digest(Hasher& hasher) const { hasher.text("test.Third"); }
};

/// Whether `rows_call` takes a row form that is gone at the end of the line.
template <class F>
constexpr bool takes_temporary = requires(const F& fuser) {
  extend::rows_call(fuser, extend::row_form(fuser));
};
template <class F>
constexpr bool takes_named = requires(const F& fuser, const extend::RowForm<F>& rows) {
  extend::rows_call(fuser, rows);
};
static_assert(takes_named<WeightedMean> && !takes_temporary<WeightedMean>);

}  // namespace

TEST_CASE("a fuser is asked for its row form when it took the geometry, not before") {
  const auto g = test::geometry();
  const FragmentSet set = set_of({random_fragment(g, 8, 1), random_fragment(g, 9, 2)});
  const auto refused = plan(set, merger(Fuser{Third{}}), at(g));
  REQUIRE(!refused);
  CHECK(refused.status().code() == ErrorCode::unsupported);
  CHECK(refused.status().message() == "no table");
}

TEST_CASE("the caller's rounding mode does not reach what a fuser computes for its row form") {
  const auto g = test::geometry();
  const FragmentSet set = set_of({random_fragment(g, 8, 1), random_fragment(g, 9, 2)});
  const volatile float three = 3;
  Digest128 digest[2];
  for (int k = 0; k < 2; ++k) {
    HostCache out(g, 17);
    const int before = std::fegetround();
    if (k == 1) std::fesetround(FE_DOWNWARD);
    const auto report = render(exec::seq, set, merger(Fuser{Third{&three}}), out.mutable_ref(), {},
                               {.content_digest = true});
    std::fesetround(before);
    REQUIRE(report);
    digest[k] = *report->content_digest;
  }
  CHECK(digest[0] == digest[1]);
}

TEST_CASE("a content digest does not see what lies in holes") {
  const auto g = test::geometry();
  const FragmentSet set = set_of({random_fragment(g, 8, 1), random_fragment(g, 9, 2)});
  Digest128 digest[2];
  for (int k = 0; k < 2; ++k) {
    HostCache out(g, 17);
    std::memset(out.bytes().data(), k == 0 ? 0 : 0x11, out.bytes().size());
    const auto report = render(exec::seq, set, merger(ById{}, SeamShare{.share = 0.5F}),
                               out.mutable_ref(), {}, {.content_digest = true});
    REQUIRE(report);
    CHECK(report->holes > 0);
    digest[k] = *report->content_digest;
  }
  CHECK(digest[0] == digest[1]);
}

TEST_CASE("the caller's rounding mode changes no byte") {
  const auto g = test::geometry();
  const FragmentSet set = set_of({random_fragment(g, 8, 1), random_fragment(g, 9, 2)});
  Digest128 digest[2];
  for (int k = 0; k < 2; ++k) {
    HostCache out(g, 17);
    const int before = std::fegetround();
    if (k == 1) std::fesetround(FE_DOWNWARD);
    const auto report =
        render(exec::seq, set, merger(), out.mutable_ref(), {}, {.content_digest = true});
    std::fesetround(before);
    REQUIRE(report);
    digest[k] = *report->content_digest;
  }
  CHECK(digest[0] == digest[1]);
}

TEST_CASE("a hole asks for the rows that its window sees") {
  const auto full = test::geometry();
  auto windowed = std::make_shared<Geometry>(*full);
  windowed->layers[1].window = 4;
  // One span of 12 tokens whose windowed layer holds the last 4 only, as an engine exports it.
  HostCache cache(windowed, 12);
  std::vector<std::int32_t> slots(12, -1);
  for (int t = 8; t < 12; ++t) slots[static_cast<std::size_t>(t)] = t;
  std::vector<PlaneRef> planes;
  const KvCacheRef whole = cache.kv_cache_ref();
  for (std::size_t l = 0; l < 2; ++l) {
    for (std::size_t p = 0; p < 2; ++p) {
      planes.push_back(whole.plane(l, p));
      if (l == 1) planes.back().slots = {.kind = SlotKind::slot_list_i32, .table = slots.data()};
    }
  }
  const auto span = seal(KvCacheRef(whole.shared_geometry(), planes, 12));
  REQUIRE(span);
  const FragmentSet alone = set_of({*span});
  const auto without = plan(alone, merger(ById{}), at(windowed));
  REQUIRE(without);
  CHECK(without->holes().empty());  // nothing after token 11 looks further back
  // A token that is recomputed in the middle sees 3 tokens back; those are not there, nor what they
  // would need: all is a hole.
  const auto middle = plan(alone, merger(ById{}, SeamAt{8}), at(windowed));
  REQUIRE(middle);
  CHECK(middle->holes().size() == 9);
  const auto late = plan(alone, merger(ById{}, SeamAt{11}), at(windowed));
  REQUIRE(late);
  CHECK(late->holes().size() == 1);
}

TEST_CASE("a second BOS behind a prefix that the engine holds") {
  auto g = std::make_shared<Geometry>(*test::geometry());
  g->bos = 1;
  const FragmentSet set = set_of({random_fragment(g, 3, 1, {1, 5, 6})});
  Target target = at(g, 5);
  target.prefix_in_place = true;
  const auto refused = plan(set, merger(), target);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code() == ErrorCode::duplicate_bos);
  CHECK(plan(set, merger(), at(g)));
}

TEST_CASE("frequencies are checked for every source") {
  auto g = std::make_shared<Geometry>(*test::geometry());
  for (LayerShape& layer : g->layers) {
    layer.rope.scaling = RopeScaling::longrope;
    layer.rope.original_context = 8;
    layer.rope.short_factors.assign(32, 1.0F);
    layer.rope.long_factors.assign(32, 2.0F);
  }
  const FragmentSet set = set_of({random_fragment(g, 4, 1), random_fragment(g, 4, 2, {}, 20)});
  const auto refused = plan(set, merger(), at(g, 30));
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code() == ErrorCode::rope_length_dependent);
}

TEST_CASE("a rope that no plane follows is a forgotten flag") {
  auto g = std::make_shared<Geometry>(*test::geometry());
  g->layers[1].planes[0].rotary = false;
  for (const KeyForm form : {KeyForm::post_rope, KeyForm::pre_rope}) {
    g->layers[1].key_form = form;
    CHECK(validate(*g).code() == ErrorCode::invalid_argument);
  }
  g->layers[1].planes[0].rotary = true;
  CHECK(validate(*g));
}

TEST_CASE("a seam counts the tokens that were selected") {
  const auto g = test::geometry();
  const FragmentSet set = set_of({random_fragment(g, 8, 1), random_fragment(g, 8, 2)});
  const auto made = plan(set, merger(ById{}, SelectLast{2}, SeamShare{.share = 0.5F}), at(g));
  REQUIRE(made);
  CHECK(made->tokens() == 4);
  CHECK(made->holes().size() == 1);
  const auto far = plan(
      set,
      merger(ById{},
             SeamShare{.share = 0.5F, .past_boundary = (std::numeric_limits<std::int64_t>::max)()}),
      at(g));
  REQUIRE(far);
  CHECK(far->holes().size() == 8);
}

TEST_CASE("outputs that lose rows are refused") {
  const auto g = test::geometry();
  const FragmentSet set = set_of({random_fragment(g, 4, 1)});
  HostCache out(g, 4);
  const auto with = [&](std::vector<std::int32_t> slots) {
    std::vector<MutablePlaneRef> planes(out.mutable_ref().planes().begin(),
                                        out.mutable_ref().planes().end());
    for (MutablePlaneRef& plane : planes)
      plane.slots = {.kind = SlotKind::slot_list_i32, .table = slots.data()};
    const auto report = render(exec::seq, set, merger(), MutableKvCacheRef(g, planes, 4));
    return report ? ErrorCode::ok : report.error().code();
  };
  CHECK(with({3, 2, 1, 0}) == ErrorCode::ok);
  CHECK(with({0, 1, 1, 2}) == ErrorCode::aliasing);
  CHECK(with({0, 1, -1, 2}) == ErrorCode::output_too_small);
}

TEST_CASE("a variant is the encoding without lead-in") {
  const auto g = test::geometry();
  const Fragment fragment = random_fragment(g, 3, 1);
  HostCache cache(g, 3);
  SealOptions options;
  options.context.lead_in = lead_in_digest(std::vector<TokenId>{7});
  const auto refused = with_variant(fragment, cache.kv_cache_ref(), options);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code() == ErrorCode::invalid_argument);
}

TEST_CASE("a channel-wise fuser of one contribution acts un-rotated") {
  const auto g = test::geometry();
  const Fragment fragment = random_fragment(g, 1, 3, {}, 40);
  HostCache at_source(g, 1), at_zero(g, 1);
  // The row un-rotated, made non-negative; then rotated to 40 it must be what a render to 40 gives.
  REQUIRE(render(exec::seq, set_of({fragment}), merger(Fuser{Absolute{}}), at_zero.mutable_ref(),
                 at(g, 0)));
  REQUIRE(render(exec::seq, set_of({fragment}), merger(Fuser{Absolute{}}), at_source.mutable_ref(),
                 at(g, 40)));
  const auto rotated = seal(at_zero.kv_cache_ref());
  REQUIRE(rotated);
  HostCache back(g, 1);
  REQUIRE(render(exec::seq, set_of({*rotated}), merger(), back.mutable_ref(), at(g, 40)));
  const auto* a = reinterpret_cast<const float*>(at_source.bytes().data());
  const auto* b = reinterpret_cast<const float*>(back.bytes().data());
  for (std::size_t i = 0; i < back.bytes().size() / sizeof(float); ++i)
    CHECK(std::abs(a[i] - b[i]) < 1e-5F);
}

TEST_CASE(
    "the report tells the position that the engine computes next, behind holes and gaps, and with "
    "nothing rendered") {
  const auto g = test::geometry();
  const FragmentSet set = set_of({random_fragment(g, 5, 1), random_fragment(g, 3, 2)});
  kvmeld::Target target;
  target.first_position = 11;
  HostCache out(g, 8);
  const auto whole = render(exec::seq, set, merger(), out.mutable_ref(), target);
  REQUIRE(whole.ok());
  CHECK(whole->next_position == 19);
  const auto holes =
      render(exec::seq, set, merger(ById{}, SeamShare{.share = 1.0F}), out.mutable_ref(), target);
  REQUIRE(holes.ok());
  CHECK(holes->next_position == 19);  // tokens that the engine computes itself stand before it
  const auto nothing = render(exec::seq, FragmentSet(), merger(), out.mutable_ref(), target);
  REQUIRE(nothing.ok());
  CHECK(nothing->next_position == 11);
}
