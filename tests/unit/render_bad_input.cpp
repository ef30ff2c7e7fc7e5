// What plan, run and render refuse: the code, the numbers in the message, and an output of which no
// byte was touched.
#include <cmath>
#include <limits>

#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ElementType;
using kvmeld::ErrorCode;
using kvmeld::Fuser;
using kvmeld::Geometry;
using kvmeld::Target;
using kvmeld::TokenMatch;
using test::Layout;
using test::Sealed;
using test::TestCache;

const auto concat = kvmeld::merger(ById{});

void expect(const kvmeld::Status& status, ErrorCode code,
            std::initializer_list<std::string> parts) {
  INFO(status.message());
  CHECK(kvmeld::to_string(status.code()) == kvmeld::to_string(code));
  for (const std::string& part : parts) {
    CAPTURE(part);
    CHECK(status.message().find(part) != std::string::npos);
  }
}

// Renders into a cache of the target's geometry (or of `shape`) and demands a refusal.
template <class M>
void refused(const kvmeld::FragmentSet& set, const M& merger, const Target& target, ErrorCode code,
             std::initializer_list<std::string> parts,
             std::shared_ptr<const Geometry> shape = nullptr, std::int64_t tokens = 64) {
  if (shape == nullptr) shape = std::make_shared<Geometry>(target.geometry);
  TestCache out(shape, tokens);
  const auto report = kvmeld::render(kvmeld::exec::seq, set, merger, out.out(), target);
  expect(report.status(), code, parts);
  CHECK(out.is_untouched());
}

Target at(const std::shared_ptr<const Geometry>& g, std::int64_t first_position = 0) {
  Target target;
  target.geometry = *g;
  target.first_position = first_position;
  return target;
}

kvmeld::FragmentSet two_spans(const std::shared_ptr<const Geometry>& g) {
  return test::set_of({test::sealed(g, 3, 1, {.tokens = test::token_ids(3)}),
                       test::sealed(g, 4, 2, {.tokens = test::token_ids(4, 50)})});
}

// Every field of a geometry, changed: its name in the message, and the two values.
struct Field {
  const char* name;
  const char* there;
  const char* asked;
  void (*change)(Geometry&);
  bool possible = true;  // whether a cache can have it so
};
const Field fields[] = {
    {"model", "'test model'", "'a'", [](Geometry& g) { g.model = "a"; }},
    {"tokenizer", "'test tokenizer'", "'b'", [](Geometry& g) { g.tokenizer = "b"; }},
    {"tenant", "''", "'c'", [](Geometry& g) { g.tenant = "c"; }},
    {"bos token", "-1", "7", [](Geometry& g) { g.bos = 7; }},
    {"trained context", "0", "4096", [](Geometry& g) { g.trained_context = 4096; }},
    {"layer count", "2", "3", [](Geometry& g) { g.layers.push_back(g.layers[1]); }},
    {"plane count", "2", "1", [](Geometry& g) { g.layers[1].planes.pop_back(); }},
    {"window", "0", "512", [](Geometry& g) { g.layers[1].window = 512; }},
    {"key form", "post_rope", "pre_rope",
     [](Geometry& g) { g.layers[1].key_form = kvmeld::KeyForm::pre_rope; }},
    {"plane kind", "value", "latent",
     [](Geometry& g) { g.layers[1].planes[1].plane = kvmeld::Plane::latent; }},
    {"element type", "f32", "f16",
     [](Geometry& g) { g.layers[1].planes[1].type = ElementType::f16; }},
    {"head count", "2", "3", [](Geometry& g) { g.layers[1].planes[1].heads = 3; }},
    {"head size", "32", "64", [](Geometry& g) { g.layers[1].planes[1].channels = 64; }},
    {"rotary flag", "1", "0", [](Geometry& g) { g.layers[1].planes[0].rotary = false; }, false},
    {"scale scheme", "none", "per_tensor",
     [](Geometry& g) { g.layers[1].planes[1].scales = kvmeld::ScaleScheme::per_tensor; }},
    {"scale group", "0", "16", [](Geometry& g) { g.layers[1].planes[1].scale_group = 16; }},
    {"Hadamard basis", "0", "32", [](Geometry& g) { g.layers[1].planes[1].hadamard = 32; }},
    {"rope kind", "rotary", "multi_axis",
     [](Geometry& g) { g.layers[1].rope.kind = kvmeld::RopeKind::multi_axis; }, false},
    {"rope pairing", "half_split", "interleaved",
     [](Geometry& g) { g.layers[1].rope.pairing = kvmeld::RopePairing::interleaved; }},
    {"rope first channel", "0", "2", [](Geometry& g) { g.layers[1].rope.first_channel = 2; },
     false},
    {"rope rotary channels", "32", "16",
     [](Geometry& g) { g.layers[1].rope.rotary_channels = 16; }},
    {"rope base", "10000", "5e+05", [](Geometry& g) { g.layers[1].rope.base = 500000.0; }},
    {"rope scaling", "none", "linear",
     [](Geometry& g) { g.layers[1].rope.scaling = kvmeld::RopeScaling::linear; }},
    {"rope factor", "1", "4", [](Geometry& g) { g.layers[1].rope.factor = 4.0; }},
    {"rope original context", "0", "8192",
     [](Geometry& g) { g.layers[1].rope.original_context = 8192; }},
    {"rope low_freq_factor", "1", "2", [](Geometry& g) { g.layers[1].rope.low_freq_factor = 2.0; }},
    {"rope high_freq_factor", "4", "5",
     [](Geometry& g) { g.layers[1].rope.high_freq_factor = 5.0; }},
    {"rope beta_fast", "32", "31", [](Geometry& g) { g.layers[1].rope.beta_fast = 31.0; }},
    {"rope beta_slow", "1", "2", [](Geometry& g) { g.layers[1].rope.beta_slow = 2.0; }},
    {"rope yarn_truncate", "1", "0", [](Geometry& g) { g.layers[1].rope.yarn_truncate = false; }},
    {"rope attention factor", "1", "1.1",
     [](Geometry& g) { g.layers[1].rope.attention_factor = 1.1; }},
    {"rope short_factors", "0", "1", [](Geometry& g) { g.layers[1].rope.short_factors = {1.0F}; }},
    {"rope long_factors", "0", "2",
     [](Geometry& g) {
       g.layers[1].rope.long_factors = {1.0F, 2.0F};
     }},
    {"rope factors", "0", "1", [](Geometry& g) { g.layers[1].rope.factors = {1.0F}; }},
};

}  // namespace

TEST_CASE(
    "geometries that differ in any field do not meet, and the message names the field and both "
    "values") {
  const auto g = test::geometry({.channels = 32});
  const kvmeld::FragmentSet set = two_spans(g);
  for (const Field& field : fields) {
    CAPTURE(field.name);
    auto other = std::make_shared<Geometry>(*g);
    field.change(*other);
    const std::string name = std::string(field.name) + " differs", there = field.there,
                      asked = std::string("against ") + field.asked;
    expect(kvmeld::check_same(*g, *other), ErrorCode::geometry_mismatch, {name, there, asked});
    if (!field.possible) continue;
    // target and output against the set
    refused(set, concat, at(other), ErrorCode::geometry_mismatch, {name, there, asked});
    // output against the target
    refused(set, concat, at(g), ErrorCode::geometry_mismatch, {name}, other);
  }
  auto a = *g, b = *g;
  a.layers[0].rope.factors = {1.0F, 2.0F};
  b.layers[0].rope.factors = {1.0F, 2.5F};
  expect(kvmeld::check_same(a, b), ErrorCode::geometry_mismatch,
         {"rope factors differs at layer 0", "2", "against 2.5"});

  // A fragment of another model inside the set.
  auto foreign = std::make_shared<Geometry>(*g);
  foreign->model = "another model";
  kvmeld::FragmentSet mixed = set;
  REQUIRE(mixed.insert(test::sealed(foreign, 2, 9).fragment).ok());
  refused(mixed, concat, at(g), ErrorCode::geometry_mismatch, {"'another model'", "'test model'"});
}

TEST_CASE(
    "outputs that are too small, have no geometry, or share memory with an input are refused") {
  const auto g = test::geometry({.layers = 1, .channels = 32});
  const kvmeld::FragmentSet set = two_spans(g);
  refused(set, concat, at(g), ErrorCode::output_too_small, {"7 tokens", "holds 6"}, nullptr, 6);
  const auto none = kvmeld::render(kvmeld::exec::seq, set, concat, kvmeld::MutableKvCacheRef{});
  expect(none.status(), ErrorCode::invalid_argument, {"no geometry"});

  const auto plan = kvmeld::plan(set, concat, at(g));
  REQUIRE(plan.ok());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  expect(kvmeld::run(kvmeld::exec::seq, *plan, workspace, kvmeld::MutableKvCacheRef{}).status(),
         ErrorCode::invalid_argument, {"no geometry"});
  // Planes that lie in the bytes of one of the inputs: all of it, its first byte, its last.
  const kvmeld::Payload& payload = set.entries().front().fragment.payloads()[0];
  std::vector<std::byte> before(payload.bytes.get(), payload.bytes.get() + payload.byte_count);
  auto* inside = const_cast<std::byte*>(payload.bytes.get());
  TestCache out(g, 7);
  const std::ptrdiff_t plane_bytes = 7 * 2 * 32 * 4;
  for (const std::ptrdiff_t shift :
       {std::ptrdiff_t{0}, 1 - plane_bytes, static_cast<std::ptrdiff_t>(payload.byte_count) - 1}) {
    CAPTURE(shift);
    const kvmeld::MutableKvCacheRef whole = out.out();
    std::vector<kvmeld::MutablePlaneRef> planes(whole.planes().begin(), whole.planes().end());
    planes[1].data = inside + shift;
    const auto report =
        kvmeld::run(kvmeld::exec::seq, *plan, workspace, kvmeld::MutableKvCacheRef(g, planes, 7));
    expect(report.status(), ErrorCode::aliasing,
           {"fragment " + set.entries().front().fragment.id().hex()});
    CHECK(out.is_untouched());
  }
  CHECK(std::equal(before.begin(), before.end(), payload.bytes.get()));
}

TEST_CASE("a workspace that is too small is refused, one that starts anywhere is used") {
  const auto g = test::geometry({.channels = 32});
  const kvmeld::FragmentSet set = two_spans(g);
  const auto plan = kvmeld::plan(set, concat, at(g));
  REQUIRE(plan.ok());
  const std::size_t needed = plan->workspace_bytes();
  TestCache out(g, 7);
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, needed - 65}) {
    std::vector<std::byte> workspace(size);
    const auto report = kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.out());
    expect(report.status(), ErrorCode::workspace_too_small,
           {std::to_string(size), std::to_string(needed)});
  }
  CHECK(out.is_untouched());
  std::vector<std::byte> memory(needed + 3);
  CHECK(kvmeld::run(kvmeld::exec::seq, *plan, std::span(memory).subspan(3), out.out()).ok());
}

TEST_CASE("prefixes: two of them, two named, another than named, none of the named") {
  const auto g = test::geometry({.channels = 32});
  const auto prefix = [&](std::uint64_t seed) {
    return test::sealed(g, 2, seed, {.role = kvmeld::Role::prefix}).fragment;
  };
  const auto behind = [&](const kvmeld::FragmentId& id, std::uint64_t seed) {
    return test::sealed(g, 3, seed, {.context = {.prefix = id, .lead_in = {}}}).fragment;
  };
  const auto one = prefix(1), two = prefix(2);
  const auto set_of = [](std::initializer_list<kvmeld::Fragment> fragments) {
    kvmeld::FragmentSet set;
    for (const auto& f : fragments) REQUIRE(set.insert(f).ok());
    return set;
  };
  Target in_place = at(g, 2);
  in_place.prefix_in_place = true;
  refused(set_of({one, two}), concat, at(g), ErrorCode::prefix_conflict,
          {"two prefixes", one.id().hex(), two.id().hex()});
  refused(set_of({one, two}), concat, in_place, ErrorCode::prefix_conflict, {"two prefixes"});
  const auto torn = set_of({behind(one.id(), 5), behind(two.id(), 6)});
  for (const Target& target : {at(g), in_place}) {
    refused(torn, concat, target, ErrorCode::prefix_conflict,
            {"behind two prefixes", one.id().hex(), two.id().hex()});
    refused(set_of({behind(one.id(), 5), two}), concat, target, ErrorCode::prefix_conflict,
            {one.id().hex(), "the set holds " + two.id().hex()});
  }
  const auto orphan = set_of({behind(one.id(), 5), test::sealed(g, 2, 8).fragment});
  refused(orphan, concat, at(g), ErrorCode::prefix_missing, {one.id().hex(), "prefix_in_place"});
  // Held by the engine, or in the set: fine. A span that names none may stand beside those that do.
  CHECK(kvmeld::plan(orphan, concat, in_place).ok());
  const auto both = kvmeld::plan(set_of({behind(one.id(), 5), one}), concat, in_place);
  REQUIRE(both.ok());
  CHECK(both->tokens() == 3);
}

TEST_CASE("a payload that is not there is named, and never rendered around") {
  const auto g = test::geometry({.channels = 32});
  const Sealed a = test::sealed(g, 3, 1), b = test::sealed(g, 4, 2), c = test::sealed(g, 2, 3);
  const Sealed prefix = test::sealed(g, 2, 4, {.role = kvmeld::Role::prefix});
  kvmeld::FragmentSet set;
  for (const auto& f : {test::evicted(a.fragment), b.fragment, test::evicted(c.fragment),
                        test::evicted(prefix.fragment)})
    REQUIRE(set.insert(f).ok());
  refused(set, concat, at(g), ErrorCode::payload_missing,
          {a.fragment.id().hex(), c.fragment.id().hex(), prefix.fragment.id().hex()});
  // an order that reads bytes
  refused(set, kvmeld::merger(), at(g), ErrorCode::payload_missing, {a.fragment.id().hex()});
  // The prefix that the engine holds is not read.
  Target in_place = at(g);
  in_place.prefix_in_place = true;
  for (const auto& f : {a.fragment, c.fragment}) REQUIRE(set.insert(f).ok());  // fetched again
  CHECK(kvmeld::plan(set, concat, in_place).ok());
  refused(set, concat, at(g), ErrorCode::payload_missing, {prefix.fragment.id().hex()});

  // The encoding without lead-in of whichever span is first is needed too: without it another
  // replica renders other bytes.
  TestCache cache(g, 3);
  cache.fill(7);
  const auto both = kvmeld::with_variant(a.fragment, cache.ref(), {});
  REQUIRE(both.ok());
  kvmeld::FragmentSet variants;
  REQUIRE(variants.insert(test::evicted(*both, 1), kvmeld::Dot{1, 0}).ok());
  REQUIRE(variants.insert(b.fragment, kvmeld::Dot{2, 0}).ok());
  refused(variants, kvmeld::merger(kvmeld::ByDot{}), at(g), ErrorCode::payload_missing,
          {both->id().hex()});
  CHECK(kvmeld::plan(variants, kvmeld::merger(kvmeld::ByDot{.reversed = true}), at(g)).ok());
}

TEST_CASE("a second beginning-of-sequence token does not enter a context") {
  auto g = test::geometry({.channels = 32});
  g->bos = 1;
  const auto with_bos = test::token_ids(3, 1), without = test::token_ids(3, 10),
             again = std::vector<kvmeld::TokenId>{1, 8};
  const auto one = test::sealed(g, 3, 1, {.tokens = with_bos}),
             two = test::sealed(g, 2, 2, {.tokens = again});
  refused(test::set_of({one, two}), concat, at(g), ErrorCode::duplicate_bos,
          {"2 beginning-of-sequence", "id 1"});
  const auto later = test::set_of({one, test::sealed(g, 3, 3, {.tokens = without})});
  CHECK(kvmeld::plan(later, kvmeld::merger(kvmeld::ByDot{}), at(g)).ok());
  // The only one, but something stands before it.
  refused(later, kvmeld::merger(kvmeld::ByDot{.reversed = true}), at(g), ErrorCode::duplicate_bos,
          {"id 1"});
  // Matched tokens are one.
  CHECK(kvmeld::plan(test::set_of({one, two}), kvmeld::merger(ById{}, Aligner{TokenMatch{}}), at(g))
            .ok());
  const auto prefix = test::sealed(g, 3, 5, {.role = kvmeld::Role::prefix, .tokens = with_bos});
  refused(test::set_of({prefix, two}), concat, at(g), ErrorCode::duplicate_bos, {"2"});
  Target in_place = at(g, 3);
  in_place.prefix_in_place = true;
  refused(test::set_of({prefix, two}), concat, in_place, ErrorCode::duplicate_bos, {"2"});
  // The window takes the tail, which has none.
  CHECK(
      kvmeld::plan(test::set_of({one, two}), kvmeld::merger(kvmeld::SelectLast{.tokens = 1}), at(g))
          .ok());
}

TEST_CASE("keys whose frequencies would change with the length are refused") {
  auto g = test::geometry({.channels = 32});
  kvmeld::RopeSpec& rope = g->layers[1].rope;
  rope.scaling = kvmeld::RopeScaling::dynamic_ntk;
  rope.original_context = 8;
  rope.factor = 2.0;
  const kvmeld::FragmentSet dynamic = two_spans(g);
  CHECK(kvmeld::plan(dynamic, concat, at(g)).ok());  // 7 tokens: below 8 nothing changes
  refused(dynamic, concat, at(g, 5), ErrorCode::rope_length_dependent,
          {"and 12", "original context 8"});

  rope.scaling = kvmeld::RopeScaling::longrope;
  rope.short_factors.assign(16, 1.0F);
  rope.long_factors.assign(16, 4.0F);
  const kvmeld::FragmentSet longrope = two_spans(g);
  CHECK(kvmeld::plan(longrope, concat, at(g)).ok());
  refused(longrope, concat, at(g, 5), ErrorCode::rope_length_dependent, {"and 12"});
  Target fixed = at(g, 5);
  fixed.context_length = 4096;  // the engine chose its list when the context was made
  CHECK(kvmeld::plan(longrope, concat, fixed).ok());

  // Channels given and the kind forgotten; nobody said anything.
  auto undeclared = test::geometry({.channels = 32});
  undeclared->layers[1].rope.kind = kvmeld::RopeSpec{}.kind;
  refused(kvmeld::FragmentSet{}, concat, at(undeclared), ErrorCode::invalid_argument,
          {"layer 1", "RopeSpec::none()"});
  undeclared->layers[1] = {};
  refused(kvmeld::FragmentSet{}, concat, at(undeclared), ErrorCode::invalid_argument,
          {"layer 1", "RopeSpec::none()"});
  auto axes = test::geometry({.channels = 32});
  axes->layers[1].rope.kind = kvmeld::RopeKind::multi_axis;
  refused(kvmeld::FragmentSet{}, concat, at(axes), ErrorCode::rope_unsupported, {"M-RoPE"});
}

TEST_CASE("what is known and not possible is refused, with what to do") {
  auto hadamard = test::geometry({.layers = 1, .channels = 32});
  hadamard->layers[0].planes[0].hadamard = 32;
  const kvmeld::FragmentSet rotated = two_spans(hadamard);
  refused(rotated, concat, at(hadamard), ErrorCode::unsupported,
          {"layer 0", "Hadamard basis of 32"});
  // Where nothing moves, the basis does not matter.
  CHECK(kvmeld::plan(test::set_of({test::sealed(hadamard, 3, 1)}), concat, at(hadamard)).ok());

  auto wide = test::geometry({.layers = 1, .heads = 1, .channels = 1056});
  refused(two_spans(wide), concat, at(wide), ErrorCode::unsupported, {"head size 1056", "1024"});

  auto scaled = test::geometry(
      {.type = ElementType::i8, .layers = 1, .heads = 1, .channels = 32, .rotary = 0});
  scaled->layers[0].planes[1].scales = kvmeld::ScaleScheme::per_token_head;
  TestCache integers(scaled, 2);
  const std::vector<float> scales(2, 1.0F);
  const kvmeld::KvCacheRef whole = integers.ref();
  std::vector<kvmeld::PlaneRef> planes(whole.planes().begin(), whole.planes().end());
  planes[1].scales = {.data = scales.data(), .slot_stride = 1};
  const auto made = kvmeld::seal(kvmeld::KvCacheRef(scaled, planes, 2));
  REQUIRE(made.ok());
  kvmeld::FragmentSet set;
  REQUIRE(set.insert(*made).ok());
  refused(set, concat, at(scaled), ErrorCode::unsupported, {"scales"});
}

TEST_CASE("a target's position, mask and local cache must fit") {
  const auto g = test::geometry({.layers = 3, .channels = 32});
  const kvmeld::FragmentSet set = two_spans(g);
  refused(set, concat, at(g, -1), ErrorCode::invalid_argument, {"first_position -1"});
  refused(set, concat, at(g, std::numeric_limits<std::int64_t>::max()), ErrorCode::invalid_argument,
          {"first_position 9223372036854775807"});
  refused(set, concat, at(g, std::int64_t{1} << 30), ErrorCode::invalid_argument, {"shift"});

  Target target = at(g);
  target.layers.layers = {1, 0, 1};
  refused(set, concat, target, ErrorCode::invalid_argument, {"no local cache"});
  TestCache local(g, 9);
  local.fill(3);
  target.local = local.ref();
  CHECK(kvmeld::plan(set, concat, target).ok());
  target.layers.layers = {1, 0};
  refused(set, concat, target, ErrorCode::invalid_argument, {"2 entries for 3 layers"});
  target.layers.layers = {1, 1, 1};
  target.local.reset();
  CHECK(kvmeld::plan(set, concat, target).ok());  // leaves nothing out
  target.layers.layers = {0, 0, 0};
  target.local = kvmeld::KvCacheRef{};
  refused(set, concat, target, ErrorCode::invalid_argument, {"no local cache"});
  TestCache few(g, 6);
  few.fill(3);
  target.local = few.ref();
  refused(set, concat, target, ErrorCode::token_count_mismatch, {"holds 6", "7"});
  TestCache other(test::geometry({.layers = 3, .channels = 64}), 9);
  target.local = other.ref();
  refused(set, concat, target, ErrorCode::geometry_mismatch, {"rope rotary channels", "64", "32"},
          g);
  local.set(3, 6, 0, 0, std::nanf(""));
  target.local = local.ref();
  refused(set, concat, target, ErrorCode::non_finite, {"layer 1 plane 1"});
  local.set(3, 6, 0, 0, 0.0F);
  local.set(3, 7, 0, 0, std::nanf(""));  // behind what is rendered: stale, and not read
  CHECK(kvmeld::plan(set, concat, target).ok());
}

TEST_CASE("confidence must be a number, and give a mean something to divide by") {
  const auto g = test::geometry({.channels = 32});
  const Sealed a = test::sealed(g, 3, 1), b = test::sealed(g, 3, 2);
  kvmeld::FragmentSet set;
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    expect(set.insert(a.fragment, {7, 0}, bad), ErrorCode::non_finite, {"agent 7"});
    CHECK(set.empty());
    CHECK(set.digest() == kvmeld::FragmentSet{}.digest());
  }
  for (const float pair : {0.0F, -1.0F, 3e38F}) {
    kvmeld::FragmentSet weighed;
    REQUIRE(weighed.insert(a.fragment, {1, 0}, pair).ok());
    REQUIRE(weighed.insert(b.fragment, {2, 0}, pair == -1.0F ? 1.0F : pair).ok());
    const auto mean =
        kvmeld::merger(ById{}, Aligner{TokenMatch{}},
                       Fuser{kvmeld::WeightedMean{.weighting = kvmeld::Weighting::confidence}});
    refused(weighed, mean, at(g), ErrorCode::non_finite, {"output 0", "the 2 weights"});
    // a single one is its own mean
    CHECK(kvmeld::plan(weighed, kvmeld::merger(ById{}, mean.fuse), at(g)).ok());
    CHECK(kvmeld::plan(weighed, kvmeld::merger(ById{}, Aligner{TokenMatch{}}), at(g)).ok());
  }
}

namespace {

// Policies that answer wrongly, each in one way.
struct BadOrder {
  static constexpr bool reproducible = true;
  std::vector<std::uint32_t> answer;
  [[nodiscard]] kvmeld::Result<std::vector<std::uint32_t>> order(
      std::span<const kvmeld::Source>) const {
    return answer;
  }
  void digest(kvmeld::Hasher&) const {}
};
struct BadSelect {
  static constexpr bool reproducible = true;
  std::vector<std::int32_t> answer;
  [[nodiscard]] kvmeld::Result<kvmeld::TokenSet> select(const kvmeld::Source&) const {
    return kvmeld::TokenSet{.all = false, .present = answer};
  }
  void digest(kvmeld::Hasher&) const {}
};
struct Failing {
  static constexpr bool reproducible = true;
  [[nodiscard]] kvmeld::Status mark(std::span<const kvmeld::Source>, const kvmeld::Alignment&,
                                    std::span<std::uint8_t>) const {
    return {ErrorCode::unsupported, "this seam never works"};
  }
  void digest(kvmeld::Hasher&) const {}
};
struct BadWeight : kvmeld::WeightedMean {
  [[nodiscard]] float weight(const kvmeld::Source&) const { return std::nanf(""); }
};

}  // namespace

TEST_CASE("answers of a user's policies are checked before anything is rendered") {
  const auto g = test::geometry({.channels = 32});
  const kvmeld::FragmentSet set = two_spans(g);  // 3 and 4 tokens
  using Order = std::vector<std::uint32_t>;
  for (const Order& answer : {Order{}, Order{0}, Order{0, 0}, Order{0, 2}, Order{0, 1, 1}}) {
    refused(set, kvmeld::merger(BadOrder{answer}), at(g), ErrorCode::invalid_argument,
            {"order policy"});
  }
  using Select = std::vector<std::int32_t>;
  for (const Select& answer : {Select{-1}, Select{0, 4}, Select{1, 0}, Select{1, 1}}) {
    refused(set, kvmeld::merger(BadSelect{answer}), at(g), ErrorCode::invalid_argument,
            {"select policy"});
  }
  refused(set, kvmeld::merger(Failing{}), at(g), ErrorCode::unsupported, {"this seam never works"});
  refused(set, kvmeld::merger(Fuser{BadWeight{}}), at(g), ErrorCode::non_finite,
          {"weight of fragment"});

  const auto broken = [&](void (*change)(kvmeld::Alignment&), ErrorCode code,
                          std::initializer_list<std::string> parts, std::int64_t first = 0) {
    auto alignment = std::make_shared<kvmeld::Alignment>(*kvmeld::Concat{}.align({}, 0));
    alignment->positions = {5, 6, 7};
    alignment->tokens = {-1, -1, -1};
    alignment->groups[0].contributions = {{0, 0, 1.0F}, {0, 1, 1.0F}, {1, 2, 1.0F}};
    alignment->groups[0].row_begin = {0, 1, 2, 3};
    change(*alignment);
    refused(set, kvmeld::merger(ById{}, Aligner{test::Given{alignment}}), at(g, first), code,
            parts);
  };
  using kvmeld::Alignment;
  constexpr auto invalid = ErrorCode::invalid_argument;
  broken([](Alignment& a) { a.tokens.pop_back(); }, ErrorCode::token_count_mismatch,
         {"2 ids for 3 outputs"});
  broken([](Alignment& a) { a.positions[2] = 6; }, ErrorCode::duplicate_position,
         {"output 2 at position 6"});
  broken([](Alignment& a) { a.positions[0] = -2; }, ErrorCode::duplicate_position, {"position -2"});
  broken([](Alignment&) {}, ErrorCode::duplicate_position, {"position 5", "free one is 6"}, 6);
  broken([](Alignment& a) { a.positions[2] = std::numeric_limits<std::int64_t>::max(); }, invalid,
         {"beyond"});
  broken(
      [](Alignment& a) {
        a.groups[0].row_begin = {0, 1, 2};
      },
      invalid, {"3 row offsets for 3 outputs"});
  broken([](Alignment& a) { a.groups[0].row_begin = {0, 2, 1, 3}; }, invalid, {"row offsets"});
  broken([](Alignment& a) { a.groups[0].row_begin = {0, 1, 2, 4}; }, invalid, {"row offsets"});
  broken([](Alignment& a) { a.groups[0].row_begin = {1, 1, 2, 3}; }, invalid, {"row offsets"});
  broken([](Alignment& a) { a.groups[0].row_begin.clear(); }, invalid, {"0 row offsets"});
  broken([](Alignment& a) { a.groups[0].contributions[1].token = 4; }, invalid, {"token 4"});
  broken([](Alignment& a) { a.groups[0].contributions[1].source = 2; }, invalid, {"source 2"});
  broken([](Alignment& a) { a.groups[0].contributions[1].weight = std::nanf(""); },
         ErrorCode::non_finite, {"weight of source 0"});
  broken([](Alignment& a) { a.groups.clear(); }, invalid, {"covers layer 0"});
  broken([](Alignment& a) { a.groups[0].layers.layers = {1, 0}; }, invalid, {"covers layer 1"});
  broken(
      [](Alignment& a) {
        a.groups[0].contributions.assign((64 << 11) + 1, {0, 0, 1.0F});
        a.groups[0].row_begin = {0, (64 << 11) + 1, (64 << 11) + 1, (64 << 11) + 1};
      },
      ErrorCode::oversized, {"131073 contributions"});
}

TEST_CASE("fields that a newer build may know are refused, not guessed") {
  const auto g = test::geometry({.channels = 32});
  const kvmeld::FragmentSet set = two_spans(g);
  refused(set, kvmeld::merger(Aligner{TokenMatch{.mode = static_cast<kvmeld::MatchMode>(9)}}),
          at(g), ErrorCode::unknown_field, {"mode"});
  auto strange = std::make_shared<Geometry>(*g);
  strange->layers[0].planes[0].type = static_cast<ElementType>(77);
  Target target = at(g);
  target.geometry = *strange;
  refused(set, concat, target, ErrorCode::unknown_field, {"layer 0"}, g);
}

TEST_CASE("policies refuse what they cannot do, with numbers") {
  const auto g = test::geometry({.channels = 32});
  const kvmeld::FragmentSet set = two_spans(g);
  const kvmeld::FragmentSet latent = test::set_of({test::sealed(g, 3, 1), test::sealed(g, 4, 2)});
  refused(set, kvmeld::merger(kvmeld::SelectLast{.tokens = -1}), at(g), ErrorCode::invalid_argument,
          {"-1"});
  refused(set, kvmeld::merger(kvmeld::ByKeyNorm{.layer = 2}), at(g), ErrorCode::invalid_argument,
          {"layer 2", "2 layers"});
  for (const float share : {-0.1F, 1.5F, std::nanf("")}) {
    refused(set, kvmeld::merger(kvmeld::SeamShare{.share = share}), at(g),
            ErrorCode::invalid_argument, {"share"});
  }
  refused(set, kvmeld::merger(kvmeld::SeamShare{.boundary_tokens = {5, 3}}), at(g),
          ErrorCode::invalid_argument, {"ascend"});
  refused(latent, kvmeld::merger(kvmeld::SeamShare{.boundary_tokens = {3, 5}}), at(g),
          ErrorCode::tokens_required, {"no ids"});
  refused(latent, kvmeld::merger(Aligner{TokenMatch{.mode = kvmeld::MatchMode::common_prefix}}),
          at(g), ErrorCode::tokens_required, {"without ids"});
  // By index, no ids are needed.
  CHECK(kvmeld::plan(latent, kvmeld::merger(Aligner{TokenMatch{}}), at(g)).ok());
}
