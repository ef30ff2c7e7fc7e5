// Maps between models: what makes one, what refuses, files, hubs, the gate, and renders through
// them.
#include <kvmeld/policies/projection.hpp>
#include <kvmeld/policies/token_match.hpp>
#include <kvmeld/safetensors.hpp>

#include "support/catch.hpp"
#include "support/projection_maps.hpp"
#include "support/rendering.hpp"
#include "support/temp_folder.hpp"

using namespace kvmeld;
using test::Sharing;

static_assert(TransformForm<Chain<Projection, TokenMatch>> &&
              AlignPolicy<Chain<Projection, TokenMatch>>);
static_assert(!TransformForm<Chain<TokenMatch>> && AlignPolicy<Chain<TokenMatch>>);
static_assert(Chain<Projection, TokenMatch>::reproducible);

namespace {

using Map = std::shared_ptr<const ProjectionMap>;

const test::Model small{.layers = 3, .heads = 2, .channels = 16};
const test::Model large{.type = ElementType::f16,
                        .layers = 4,
                        .heads = 3,
                        .channels = 24,
                        .pairing = RopePairing::interleaved,
                        .base = 1e6};

std::shared_ptr<Geometry> named(const test::Model& model, const char* name) {
  auto g = test::geometry(model);
  g->model = name;
  return g;
}
ProjectionParts good_parts(Sharing sharing = Sharing::layer, std::int32_t rank = 0,
                           bool bias = false, std::uint64_t seed = 1) {
  return test::random_parts(*named(small, "source model"), *named(large, "target model"), sharing,
                            2, rank, bias, seed);
}
Map good_map() { return *ProjectionMap::make(good_parts()); }

template <class Change>
ErrorCode made(Change change, ProjectionParts parts = good_parts()) {
  change(parts);
  const auto map = ProjectionMap::make(parts);
  return map.status().code();
}
template <class Change>
Status accepted(const Map& map, Change change) {
  Geometry from = map->source(), to = map->target();
  change(from, to);
  return Projection{.map = map}.accepts(from, to);
}

}  // namespace

TEST_CASE("layers are paired from the end, or by relative depth") {
  CHECK(last_aligned(27, 28, 24) == std::vector<std::int32_t>{23});
  CHECK(last_aligned(4, 28, 24) == std::vector<std::int32_t>{0});
  CHECK(last_aligned(0, 28, 24) == std::vector<std::int32_t>{0});
  CHECK(last_aligned(0, 24, 28) == std::vector<std::int32_t>{4});
  CHECK(k_nearest(0, 28, 24, 3) == std::vector<std::int32_t>{0, 1, 2});
  CHECK(k_nearest(27, 28, 24, 3) == std::vector<std::int32_t>{21, 22, 23});
  CHECK(k_nearest(1, 4, 4, 1) == std::vector<std::int32_t>{1});
  CHECK(k_nearest(1, 4, 4, 2) == std::vector<std::int32_t>{0, 1});
  CHECK(k_nearest(1, 2, 3, 9) == std::vector<std::int32_t>{0, 1, 2});
  CHECK(k_nearest(0, 1, 3, 0).empty());
  for (std::int32_t l = 0; l < 28; ++l) {  // against sorting all layers by distance
    std::vector<std::int32_t> all(24);
    for (std::int32_t s = 0; s < 24; ++s) all[static_cast<std::size_t>(s)] = s;
    std::stable_sort(all.begin(), all.end(), [&](int a, int b) {
      return std::abs((2 * a + 1) * 28 - (2 * l + 1) * 24) <
             std::abs((2 * b + 1) * 28 - (2 * l + 1) * 24);
    });
    all.resize(6);
    std::sort(all.begin(), all.end());
    CHECK(k_nearest(l, 28, 24, 6) == all);
  }
}

TEST_CASE("parts that do not fit together make no map") {
  CHECK(made([](auto&) {}) == ErrorCode::ok);
  CHECK(made([](auto& p) { p.layers.pop_back(); }) == ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.layers[1].key.clear(); }) == ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.layers[1].key.push_back(p.layers[1].key[0]); }) ==
        ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.layers[1].key[0].first_head = 1; }) == ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.layers[1].value[0].matrix = 99; }) == ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.layers[1].value[0].inputs.pop_back(); }) ==
        ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.layers[1].value[0].inputs[0].head = 2; }) ==
        ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.layers[1].value[0].inputs[0].layer = -1; }) ==
        ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.layers[1].value[0].inputs[0].layer = 3; }) ==
        ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.matrices[0].weight.pop_back(); }) == ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.matrices[0].outputs = 0; }) == ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.matrices[0].inputs = 1 << 30; }) == ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.matrices[0].bias = {1.0}; }) == ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.matrices[0].weight[5] = std::nan(""); }) == ErrorCode::non_finite);
  CHECK(made([](auto& p) { p.matrices[0].weight[5] = 1e39; }) == ErrorCode::non_finite);
  CHECK(made([](auto& p) { p.record.bar = std::nan(""); }) == ErrorCode::non_finite);
  CHECK(made([](auto& p) { p.source.layers[0].planes[1].plane = Plane::latent; }) ==
        ErrorCode::unsupported);
  CHECK(made([](auto& p) { p.kind = MapKind::permutation; }) == ErrorCode::invalid_argument);
  CHECK(made([](auto& p) { p.kind = static_cast<MapKind>(7); }) == ErrorCode::unknown_field);
  const auto permutation = [](const test::Model& a, const test::Model& b) {
    return ProjectionMap::make(
               {.source = *named(a, "a"), .target = *named(b, "b"), .kind = MapKind::permutation})
        .status()
        .code();
  };
  test::Model paired = small;
  paired.pairing = RopePairing::interleaved;
  CHECK(permutation(small, paired) == ErrorCode::ok);
  paired.base = 5e5;
  CHECK(permutation(small, paired) == ErrorCode::geometry_mismatch);
  CHECK(permutation(small, large) == ErrorCode::geometry_mismatch);
}

TEST_CASE("a map keeps its digest through a file") {
  for (const auto& [sharing, rank, bias] :
       {std::tuple{Sharing::layer, 0, false}, std::tuple{Sharing::head, 2, true},
        std::tuple{Sharing::model, 0, true}}) {
    const auto map = *ProjectionMap::make(good_parts(sharing, rank, bias));
    const auto bytes = to_safetensors(*map);
    REQUIRE(bytes.ok());
    CHECK((*bytes == *to_safetensors(*map)));
    const auto again = projection_from_safetensors(*bytes);
    INFO(again.status().message());
    REQUIRE(again.ok());
    CHECK((*again)->digest() == map->digest());
    CHECK((*again)->record() == map->record());
    CHECK(std::equal(map->matrices().begin(), map->matrices().end(), (*again)->matrices().begin()));
    CHECK(check_same((*again)->target(), map->target()).ok());
    const auto narrow = rounded_to_f32(*map);
    REQUIRE(narrow.ok());
    CHECK((*narrow)->digest() != map->digest());
    CHECK(to_safetensors(**narrow)->size() < bytes->size());
    CHECK((*projection_from_safetensors(*to_safetensors(**narrow)))->digest() ==
          (*narrow)->digest());
  }
  CHECK((*good_map()->with_record({.attention_cosine = 0.5}))->record().attention_cosine == 0.5);
}

TEST_CASE("a map is written to disk and read; a file that is none, or was changed, is refused") {
  const test::TempFolder folder;
  const std::string path = folder / "map.safetensors";
  const auto bytes = *to_safetensors(*good_map());
  REQUIRE(write_file_bytes(path, bytes).ok());
  CHECK((*read_file_bytes(path) == bytes));
  CHECK(read_file_bytes(path, 10).status().code() == ErrorCode::oversized);
  CHECK(read_file_bytes(folder / "none").status().code() == ErrorCode::not_found);
  CHECK(write_file_bytes(folder / "none/map", bytes).code() == ErrorCode::unavailable);
  auto changed = bytes;
  changed.back() ^= std::byte{1};
  CHECK(projection_from_safetensors(changed).status().code() != ErrorCode::ok);
  changed = bytes;
  changed[changed.size() / 2] ^= std::byte{1};  // in some matrix
  CHECK(projection_from_safetensors(changed).status().code() == ErrorCode::id_mismatch);
  changed.resize(bytes.size() - 1);
  CHECK(projection_from_safetensors(changed).status().code() == ErrorCode::truncated);
  CHECK(projection_from_safetensors(*SafetensorsWriter{}.finish()).status().code() ==
        ErrorCode::unsupported);
}

TEST_CASE(
    "caches that a map was not made for are refused, and maps below the bar, with both figures") {
  const Map map = good_map();
  CHECK(accepted(map, [](Geometry&, Geometry&) {}).ok());
  CHECK(accepted(map, [](Geometry& from, Geometry& to) {
          for (LayerShape& layer : from.layers)
            layer.planes[0].type = layer.planes[1].type = ElementType::bf16;
          from.tenant = to.tenant = "t";
          to.layers[0].window = 16;
        }).ok());
  const auto mismatch = [&](auto change) {
    return accepted(map, change).code() == ErrorCode::geometry_mismatch;
  };
  CHECK(mismatch([](Geometry& from, Geometry&) { from.model = "another"; }));
  CHECK(mismatch([](Geometry&, Geometry& to) { to.model = "another"; }));
  CHECK(mismatch([](Geometry& from, Geometry&) { from.tenant = "t"; }));
  CHECK(mismatch([](Geometry& from, Geometry&) { from.layers.pop_back(); }));
  CHECK(mismatch([](Geometry& from, Geometry&) { from.layers[1].planes[0].heads = 4; }));
  CHECK(mismatch([](Geometry&, Geometry& to) { to.layers[1].planes[1].channels = 32; }));
  CHECK(mismatch([](Geometry& from, Geometry&) { from.layers[1].rope.base = 5e5; }));
  CHECK(mismatch(
      [](Geometry& from, Geometry&) { from.layers[2].rope.pairing = RopePairing::interleaved; }));
  CHECK(accepted(map, [](Geometry& from, Geometry&) {
          from.layers[1].planes[0].hadamard = 16;
        }).code() == ErrorCode::unsupported);
  CHECK(accepted(map, [](Geometry&, Geometry& to) {
          to.layers[1].planes[1].scales = ScaleScheme::per_token_head;
        }).code() == ErrorCode::unsupported);
  CHECK(Projection{}.accepts(map->source(), map->target()).code() == ErrorCode::invalid_argument);
  const Status below = Projection{.map = map, .bar = 0.96F}.accepts(map->source(), map->target());
  CHECK(below.code() == ErrorCode::gate_refused);
  CHECK(below.message().find("0.95") != std::string::npos);
  CHECK(below.message().find("0.96") != std::string::npos);
  const Map unmeasured = *map->with_record({});
  CHECK(Projection{.map = unmeasured}.accepts(map->source(), map->target()).code() ==
        ErrorCode::gate_refused);
  CHECK(Projection{.map = unmeasured, .bar = -1}.accepts(map->source(), map->target()).ok());
  CHECK(Projection{.map = map, .bar = std::nanf("")}.accepts(map->source(), map->target()).code() ==
        ErrorCode::gate_refused);
}

TEST_CASE("two maps through a hub are one, and a permutation in between changes nothing") {
  const auto hub = named({.layers = 2, .heads = 2, .channels = 20}, "hub");
  for (const auto& [sharing, rank, bias] :
       {std::tuple{Sharing::layer, 0, true}, std::tuple{Sharing::head, 3, false},
        std::tuple{Sharing::layer, 4, true}}) {
    auto to_hub =
        test::random_parts(*named(small, "source model"), *hub, sharing, 2, rank, bias, 3);
    auto from_hub =
        test::random_parts(*hub, *named(large, "target model"), Sharing::layer, 2, rank, bias, 4);
    from_hub.source.model = "hub";
    const auto a = ProjectionMap::make(to_hub), b = ProjectionMap::make(from_hub);
    REQUIRE(a.ok());
    REQUIRE(b.ok());
    const auto both = compose(**a, **b);
    INFO(both.status().message());
    REQUIRE(both.ok());
    CHECK((*both)->record().attention_cosine == -1);
    const auto positions = test::gapped_positions(5);
    const auto source = test::sealed(named(small, "source model"), 5, 1, {.positions = positions});
    const auto direct = Projection{.map = *both, .bar = -1}.transform(
        source.fragment, 0, *named(large, "target model"));
    REQUIRE(direct.ok());
    // In two steps, through an f64 hub whose keys carry no position.
    Geometry wide = *hub;
    for (LayerShape& layer : wide.layers) {
      layer.key_form = KeyForm::pre_rope;
      for (PlaneShape& plane : layer.planes) plane.type = ElementType::f64;
    }
    auto body = std::make_shared<Fragment::Body>();
    body->geometry = std::make_shared<const Geometry>(wide);
    body->token_count = 5;
    body->payloads.push_back(*Projection{.map = *a}.transform(source.fragment, 0, wide));
    const auto steps =
        Projection{.map = *b}.transform(Fragment(body), 0, *named(large, "target model"));
    REQUIRE(steps.ok());
    const auto count = static_cast<std::ptrdiff_t>(direct->byte_count / 2);
    double worst = 0;
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      const double x =
          static_cast<double>(detail::load_element(ElementType::f16, direct->bytes.get(), i));
      worst = std::max(worst, std::abs(x - static_cast<double>(detail::load_element(
                                               ElementType::f16, steps->bytes.get(), i))) /
                                  (std::abs(x) * 0x1p-10 + 1e-6));
    }
    CHECK(worst <= 1.0);  // one unit of f16
    CHECK(compose(**b, **a).status().code() == ErrorCode::geometry_mismatch);
  }
  test::Model paired = small;
  paired.pairing = RopePairing::interleaved;
  const auto there = *ProjectionMap::make({.source = *named(small, "source model"),
                                           .target = *named(paired, "paired"),
                                           .kind = MapKind::permutation});
  const auto back = *ProjectionMap::make({.source = *named(paired, "paired"),
                                          .target = *named(small, "source model"),
                                          .kind = MapKind::permutation});
  const Map direct = good_map();
  const auto round = compose(**compose(*there, *back), *direct);
  REQUIRE(round.ok());
  for (std::size_t l = 0; l < 4; ++l) {
    const MapBlock& want = direct->layers()[l].key[0];
    const MapBlock& got = (*round)->layers()[l].key[0];
    CHECK(got.inputs == want.inputs);
    // twice in parentheses: no pages of numbers
    CHECK(((*round)->matrices()[got.matrix] == direct->matrices()[want.matrix]));
  }
}

TEST_CASE(
    "a set of two models renders into one: projected keys are turned once, to where they end up") {
  const auto from = named(small, "source model");
  const auto to = named(large, "target model");
  const auto map =
      ProjectionMap::make(test::random_parts(*from, *to, Sharing::layer, 2, 0, false, 1));
  REQUIRE(map.ok());
  const auto ids = test::token_ids(6);
  const auto positions = test::gapped_positions(6);
  const std::vector<test::Sealed> spans{
      test::sealed(from, 6, 1, {.tokens = ids, .positions = positions}),
      test::sealed(to, 4, 2, {.tokens = std::span(ids).first(4)})};
  const FragmentSet set = test::set_of(spans);
  const auto policies = [&](auto align) { return merger(ById{}, Aligner{align}); };
  const Target target{.geometry = *to, .first_position = 5};
  const auto out = test::render_everywhere(set, policies(Projection{.map = *map}), target);
  REQUIRE(out->tokens() == 10);
  const bool source_first = spans[0].fragment.id() < spans[1].fragment.id();
  double worst = 0;
  std::size_t plane = 0;
  for (std::size_t l = 0; l < to->layers.size(); ++l) {
    for (const PlaneShape& shape : to->layers[l].planes) {
      const test::Mapped want = test::mapped(**map, *from, spans[0], l, shape.plane);
      for (std::int64_t t = 0; t < 6; ++t) {
        const std::int64_t o = source_first ? t : 4 + t;
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          const std::ptrdiff_t at = (t * shape.heads + h) * shape.channels;
          std::vector<double> row(want.values.begin() + at,
                                  want.values.begin() + at + shape.channels);
          if (shape.plane == Plane::key)
            reference::rotation(to->layers[l].rope, static_cast<double>(5 + o), row);
          for (std::int64_t c = 0; c < shape.channels; ++c) {
            const double off =
                std::abs(out->get(plane, o, h, c) - row[static_cast<std::size_t>(c)]);
            worst = std::max(worst, off / (3 * 0x1p-11 *
                                               *std::max_element(row.begin(), row.end(),
                                                                 [](double a, double b) {
                                                                   return std::abs(a) < std::abs(b);
                                                                 }) +
                                           1e-7));
          }
        }
      }
      ++plane;
    }
  }
  CHECK(std::abs(worst) <= 1.0);
  // Matched by index, both contribute to four tokens; matched by ids, too, for the tokenizer is
  // one.
  CHECK(plan(set, policies(Chain{Projection{.map = *map}, TokenMatch{}}), target)->tokens() == 6);
  CHECK(plan(set,
             policies(Chain{Projection{.map = *map}, TokenMatch{.mode = MatchMode::common_prefix}}),
             target)
            ->tokens() == 6);
  const auto plain = plan(set, policies(Projection{.map = *map}), target);
  CHECK(std::count(plain->token_ids().begin(), plain->token_ids().end(), -1) == 0);
  // Refusals reach the caller; without a map, another model's fragment is one.
  CHECK(plan(set, policies(Projection{.map = *map, .bar = 0.99F}), target).status().code() ==
        ErrorCode::gate_refused);
  CHECK(plan(set, policies(Concat{}), target).status().code() == ErrorCode::geometry_mismatch);
  CHECK(plan(set, policies(Projection{.map = *map}), Target{.geometry = *from}).status().code() ==
        ErrorCode::geometry_mismatch);
  // Another bar, another merger.
  CHECK(policies(Projection{.map = *map}).digest() !=
        policies(Projection{.map = *map, .bar = 0.5F}).digest());
  CHECK(policies(Chain{Projection{.map = *map}, TokenMatch{}}).digest() !=
        policies(Projection{.map = *map}).digest());
}

TEST_CASE("ids of another tokenizer are not known after the map") {
  auto from = named(small, "source model");
  from->tokenizer = "another";
  const auto to = named(large, "target model");
  const auto map =
      ProjectionMap::make(test::random_parts(*from, *to, Sharing::layer, 2, 0, false, 1));
  REQUIRE(map.ok());
  const auto ids = test::token_ids(3);
  const FragmentSet set = test::set_of({test::sealed(from, 3, 1, {.tokens = ids})});
  const auto made = plan(set, merger(Aligner{Projection{.map = *map}}), {.geometry = *to});
  INFO(made.status().message());
  REQUIRE(made.ok());
  CHECK(std::count(made->token_ids().begin(), made->token_ids().end(), -1) == 3);
  const auto matched =
      merger(Aligner{Chain{Projection{.map = *map}, TokenMatch{.mode = MatchMode::common_prefix}}});
  CHECK(plan(set, matched, {.geometry = *to}).status().code() == ErrorCode::tokens_required);
}

TEST_CASE("a render through a permutation has the bytes of a native one") {
  test::Model paired = small;
  paired.type = ElementType::bf16;
  test::Model halves = paired;
  paired.pairing = RopePairing::interleaved;
  const auto from = named(paired, "source model"), to = named(halves, "target model");
  const auto map =
      ProjectionMap::make({.source = *from, .target = *to, .kind = MapKind::permutation});
  REQUIRE(map.ok());
  test::TestCache theirs(from, 7), native(to, 7);
  theirs.fill(3);
  for (std::size_t p = 0; p < native.planes(); ++p) {
    for (std::int64_t t = 0; t < 7; ++t) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t c = 0; c < 16; ++c) {
          const std::int64_t there = native.shape(p).plane == Plane::key ? 2 * (c % 8) + c / 8 : c;
          std::memcpy(native.bytes(p, t, h, c), theirs.bytes(p, t, h, there), 2);
        }
      }
    }
  }
  const auto ids = test::token_ids(7);
  const auto positions = test::gapped_positions(7);
  FragmentSet a, b;
  REQUIRE(a.insert(*seal(theirs.ref(), {.tokens = ids, .positions = positions}), Dot{1, 0}).ok());
  REQUIRE(b.insert(*seal(native.ref(), {.tokens = ids, .positions = positions}), Dot{1, 0}).ok());
  const Target target{.geometry = *to, .first_position = 2};
  const auto mapped = test::render_everywhere(a, merger(Aligner{Projection{.map = *map}}), target);
  CHECK(mapped->buffers() == test::render_everywhere(b, merger(), target)->buffers());
}
