// Sealing: what a fragment keeps, what its id names, what is refused.
#include <cmath>
#include <limits>

#include <kvmeld/fragment.hpp>
#include <kvmeld/gather.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::ElementType;
using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::SealOptions;
using test::Layout;
using test::TestCache;

constexpr ElementType all_types[] = {ElementType::f64,  ElementType::f32,     ElementType::f16,
                                     ElementType::bf16, ElementType::f8_e4m3, ElementType::f8_e5m2,
                                     ElementType::i8,   ElementType::q8_0};

// Another content hash: the same bytes under another tag.
struct OtherHash : kvmeld::Xxh3_128 {
  static constexpr std::uint8_t tag = 9;
};

kvmeld::FragmentId id_of(const TestCache& cache, const SealOptions& options = {}) {
  const auto made = kvmeld::seal(cache.ref(), options);
  REQUIRE(made.ok());
  return made->id();
}

void refused(const TestCache& cache, const SealOptions& options, ErrorCode code, const char* part) {
  const auto made = kvmeld::seal(cache.ref(), options);
  REQUIRE(!made.ok());
  INFO(made.error().message());
  CHECK(kvmeld::to_string(made.error().code()) == kvmeld::to_string(code));
  CHECK(made.error().message().find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("a fragment's id depends on content, not on the layout it was read from") {
  for (const ElementType type : all_types) {
    const auto g = test::geometry({.type = type, .heads = 3, .channels = 64, .value_channels = 32});
    kvmeld::FragmentId first;
    for (const Layout layout : test::all_layouts) {
      TestCache cache(g, 6, layout);
      cache.fill(4);
      const auto made = kvmeld::seal(cache.ref());
      REQUIRE(made.ok());
      CAPTURE(kvmeld::to_string(type), static_cast<int>(layout));
      if (layout == Layout::canonical) first = made->id();
      CHECK(made->id() == first);
      CHECK(kvmeld::verify_fragment(*made).ok());
      const kvmeld::FragmentView view(*made);
      CHECK(*kvmeld::content_digest(view.ref()) == *kvmeld::content_digest(cache.ref()));
    }
  }
}

TEST_CASE("every field that makes a fragment another one changes its id") {
  const auto g = test::geometry({.channels = 32});
  TestCache cache(g, 4);
  cache.fill(1);
  const auto ids = test::token_ids(4), other_ids = test::token_ids(4, 5);
  const auto positions = test::gapped_positions(4);
  std::vector<kvmeld::FragmentId> all{id_of(cache),
                                      id_of(cache, {.tokens = ids}),
                                      id_of(cache, {.tokens = other_ids}),
                                      id_of(cache, {.positions = positions}),
                                      id_of(cache, {.role = kvmeld::Role::prefix}),
                                      id_of(cache, {.drop_first = 1}),
                                      id_of(cache, {.drop_first = 4})};
  all.push_back(id_of(cache, {.context = {.prefix = all[0], .lead_in = {}}}));
  all.push_back(id_of(cache, {.context = {.prefix = {}, .lead_in = kvmeld::lead_in_digest(ids)}}));
  TestCache value(g, 4);
  value.fill(1);
  value.set(3, 3, 1, 31, value.get(3, 3, 1, 31) == 0.5 ? 0.25F : 0.5F);  // the very last element
  all.push_back(id_of(value));
  auto other = std::make_shared<kvmeld::Geometry>(*g);
  other->tenant = "another";
  TestCache tenant(other, 4);
  tenant.fill(1);
  all.push_back(id_of(tenant));
  const auto hashed = kvmeld::seal<OtherHash>(cache.ref());
  REQUIRE(hashed.ok());
  all.push_back(hashed->id());
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      CAPTURE(i, j);
      CHECK(all[i] != all[j]);
    }
  }
  CHECK(id_of(cache) == all[0]);
  const std::vector<std::int64_t> plain{0, 1, 2, 3};
  CHECK(id_of(cache, {.positions = plain}) == all[0]);  // what the default means
}

TEST_CASE("dropped tokens are gone, what follows keeps its positions") {
  const auto g = test::geometry({.channels = 32});
  TestCache cache(g, 6, Layout::paged);
  cache.fill(3);
  const auto ids = test::token_ids(6);
  const auto made = kvmeld::seal(cache.ref(), {.tokens = ids, .drop_first = 4});
  REQUIRE(made.ok());
  CHECK(made->token_count() == 2);
  CHECK(made->tokens()[0] == ids[4]);
  CHECK(made->payloads()[0].positions == std::vector<std::int64_t>{4, 5});
  const kvmeld::FragmentView view(*made);
  for (std::size_t p = 0; p < cache.planes(); ++p) {
    const auto row =
        kvmeld::read_row(view.ref(), {.layer = p / 2, .plane = p % 2, .token = 1, .head = 1});
    REQUIRE(row.ok());
    CHECK(row->back() == static_cast<float>(cache.get(p, 5, 1, 31)));
  }
  const auto nothing = kvmeld::seal(cache.ref(), {.drop_first = 6});
  REQUIRE(nothing.ok());
  CHECK(nothing->token_count() == 0);
  CHECK_FALSE(nothing->latent());
  REQUIRE(nothing->payloads()[0].bytes != nullptr);  // null would mean evicted
}

TEST_CASE("layers that hold fewer tokens keep their own sets") {
  const auto g = test::geometry({.layers = 3, .channels = 32});
  TestCache cache(g, 6, Layout::slot_list, {0, 4, 6});
  cache.fill(3);
  const auto made = kvmeld::seal(cache.ref(), {.drop_first = 1});
  REQUIRE(made.ok());
  const kvmeld::Payload& payload = made->payloads()[0];
  CHECK(payload.layer_tokens(0) == 5);
  CHECK(payload.layer_tokens(1) == 2);
  CHECK(payload.layer_tokens(2) == 0);
  CHECK(payload.token_sets[payload.layer_set[1]].present == std::vector<std::int32_t>{3, 4});
  const kvmeld::FragmentView view(*made);
  const auto row = [&](std::int64_t token) {
    return kvmeld::read_row(view.ref(), {.layer = 1, .plane = 1, .token = token});
  };
  CHECK(row(2).status().code() == ErrorCode::not_found);
  REQUIRE(row(3).ok());
  CHECK(row(3)->front() == static_cast<float>(cache.get(3, 4, 0, 0)));
}

TEST_CASE("minus zero becomes zero, subnormal numbers stay, in every type") {
  struct Case {
    ElementType type;
    std::uint64_t minus_zero, subnormal;
  };
  for (const Case& c :
       {Case{ElementType::f64, 0x8000000000000000, 0x8000000000000001},
        Case{ElementType::f32, 0x80000000, 0x80000001}, Case{ElementType::f16, 0x8000, 0x8001},
        Case{ElementType::bf16, 0x8000, 0x8001}, Case{ElementType::f8_e4m3, 0x80, 0x81},
        Case{ElementType::f8_e5m2, 0x80, 0x81}}) {
    CAPTURE(kvmeld::to_string(c.type));
    const auto size = static_cast<std::size_t>(kvmeld::block_bytes(c.type));
    const auto g = test::geometry({.type = c.type, .layers = 1, .heads = 1, .channels = 32});
    TestCache cache(g, 1, Layout::transposed_values), positive(g, 1);
    cache.fill(2);
    positive.fill(2);
    const std::uint64_t zero = 0;
    std::memcpy(cache.bytes(1, 0, 0, 5), &c.minus_zero, size);
    std::memcpy(positive.bytes(1, 0, 0, 5), &zero, size);
    for (TestCache* one : {&cache, &positive})
      std::memcpy(one->bytes(0, 0, 0, 7), &c.subnormal, size);
    CHECK(id_of(cache) == id_of(positive));
    const auto made = kvmeld::seal(cache.ref());
    const kvmeld::FragmentView view(*made);
    CHECK(std::memcmp(view.ref().planes()[0].data + 7 * size, &c.subnormal, size) == 0);
    CHECK(std::memcmp(view.ref().planes()[1].data + 5 * size, &zero, size) == 0);
  }
  // Integers have one zero, and all their bytes are numbers; the scale of a block is a float.
  const auto g =
      test::geometry({.type = ElementType::q8_0, .layers = 1, .heads = 1, .channels = 32});
  TestCache block(g, 1), same(g, 1);
  for (TestCache* one : {&block, &same}) one->fill(1);
  const std::uint16_t minus_zero = 0x8000, zero = 0;
  std::memcpy(block.bytes(0, 0, 0, 0), &minus_zero, 2);
  std::memcpy(same.bytes(0, 0, 0, 0), &zero, 2);
  CHECK(id_of(block) == id_of(same));
}

TEST_CASE("NaN and infinity are refused in every type, wherever they stand") {
  struct Case {
    ElementType type;
    std::uint64_t bits;
  };
  for (const Case& c :
       {Case{ElementType::f64, 0x7FF0000000000000}, Case{ElementType::f64, 0xFFF8000000000000},
        Case{ElementType::f32, 0x7F800000}, Case{ElementType::f32, 0xFFC00000},
        Case{ElementType::f16, 0x7C00}, Case{ElementType::f16, 0xFE01},
        Case{ElementType::bf16, 0xFF80}, Case{ElementType::bf16, 0x7FC0},
        Case{ElementType::f8_e4m3, 0x7F}, Case{ElementType::f8_e4m3, 0xFF},
        Case{ElementType::f8_e5m2, 0x7C}, Case{ElementType::f8_e5m2, 0xFF},
        Case{ElementType::q8_0, 0x7C00}, Case{ElementType::q8_0, 0xFE00}}) {
    CAPTURE(kvmeld::to_string(c.type), c.bits);
    const auto g = test::geometry({.type = c.type, .channels = 32});
    for (const std::size_t plane : {0U, 3U}) {
      TestCache cache(g, 3);
      cache.fill(2);
      const std::size_t size =
          c.type == ElementType::q8_0 ? 2 : static_cast<std::size_t>(kvmeld::block_bytes(c.type));
      std::memcpy(cache.bytes(plane, 2, 1, 0), &c.bits, size);
      refused(cache, {}, ErrorCode::non_finite, plane == 0 ? "layer 0 plane 0" : "layer 1 plane 1");
      CHECK(kvmeld::seal(cache.ref().first(2)).ok());  // what is not sealed does not count
    }
  }
}

TEST_CASE("tokens, positions and rows must be equally many, positions ascend") {
  TestCache cache(test::geometry({.channels = 32}), 4);
  cache.fill(1);
  refused(cache, {.tokens = test::token_ids(3)}, ErrorCode::token_count_mismatch,
          "3 token ids for 4 rows");
  refused(cache, {.positions = test::gapped_positions(5)}, ErrorCode::token_count_mismatch,
          "5 positions for 4 rows");
  using Positions = std::vector<std::int64_t>;
  refused(cache, {.positions = Positions{0, 1, 1, 2}}, ErrorCode::duplicate_position,
          "position 1 of token 2 follows position 1");
  refused(cache, {.positions = Positions{0, 5, 4, 6}}, ErrorCode::duplicate_position,
          "position 4 of token 2 follows position 5");
  refused(cache, {.positions = Positions{-1, 5, 6, 7}}, ErrorCode::invalid_argument, "-1");
  refused(cache, {.positions = Positions{0, 1, 2, std::numeric_limits<std::int64_t>::max()}},
          ErrorCode::invalid_argument, "9223372036854775807");
  refused(cache, {.drop_first = 5}, ErrorCode::invalid_argument, "drop_first 5 of 4");
  refused(cache, {.drop_first = -1}, ErrorCode::invalid_argument, "drop_first -1");
  refused(cache, {.role = static_cast<kvmeld::Role>(7)}, ErrorCode::unknown_field, "role");
  refused(cache, {.role = kvmeld::Role::prefix, .drop_first = 1}, ErrorCode::invalid_argument,
          "prefix");
  const auto none = kvmeld::seal(kvmeld::KvCacheRef{});
  CHECK(none.error().code() == ErrorCode::invalid_argument);
}

TEST_CASE(
    "planes of a layer that hold different tokens, and scales that are not there, are refused") {
  const auto g = test::geometry({.layers = 1, .channels = 32});
  TestCache cache(g, 3);
  cache.fill(1);
  const kvmeld::KvCacheRef whole = cache.ref();
  std::vector<kvmeld::PlaneRef> planes(whole.planes().begin(), whole.planes().end());
  const std::vector<std::int32_t> slots{0, -1, 2};
  planes[1].slots = {.kind = kvmeld::SlotKind::slot_list_i32, .table = slots.data()};
  const auto torn = kvmeld::seal(kvmeld::KvCacheRef(g, planes, 3));
  CHECK(torn.error().code() == ErrorCode::token_count_mismatch);
  CHECK(torn.error().message().find("token 1") != std::string::npos);

  auto scaled = test::geometry({.type = ElementType::i8, .layers = 1, .channels = 32});
  scaled->layers[0].planes[1].scales = kvmeld::ScaleScheme::per_token_head;
  TestCache integers(scaled, 3);
  refused(integers, {}, ErrorCode::invalid_argument, "scales");
}

TEST_CASE("scales are part of the content") {
  auto g = test::geometry(
      {.type = ElementType::i8, .layers = 1, .heads = 2, .channels = 32, .rotary = 0});
  g->layers[0].planes[1].scales = kvmeld::ScaleScheme::per_channel_group;
  g->layers[0].planes[1].scale_group = 16;
  TestCache cache(g, 3);
  cache.fill(1);
  std::vector<float> scales(3 * 2 * 2, 0.5F);
  const kvmeld::KvCacheRef whole = cache.ref();
  std::vector<kvmeld::PlaneRef> planes(whole.planes().begin(), whole.planes().end());
  planes[1].scales = {.data = scales.data(), .slot_stride = 4, .head_stride = 2, .group_stride = 1};
  const kvmeld::KvCacheRef view(g, planes, 3);
  const auto first = kvmeld::seal(view);
  REQUIRE(first.ok());
  scales[11] = 0.25F;
  const auto second = kvmeld::seal(view);
  REQUIRE(second.ok());
  CHECK(first->id() != second->id());
  scales[11] = std::numeric_limits<float>::infinity();
  CHECK(kvmeld::seal(view).error().code() == ErrorCode::non_finite);
}

TEST_CASE("a geometry that no cache can have is refused, with the layer") {
  struct Case {
    const char* part;
    ErrorCode code;
    void (*change)(kvmeld::Geometry&);
  };
  for (const Case& c : {
           Case{"enumerator", ErrorCode::unknown_field,
                [](kvmeld::Geometry& g) {
                  g.layers[1].planes[0].plane = static_cast<kvmeld::Plane>(17);
                }},
           Case{
               "key form", ErrorCode::unknown_field,
               [](kvmeld::Geometry& g) { g.layers[1].key_form = static_cast<kvmeld::KeyForm>(9); }},
           Case{"window", ErrorCode::invalid_argument,
                [](kvmeld::Geometry& g) { g.layers[1].window = -3; }},
           Case{"canonical order", ErrorCode::invalid_argument,
                [](kvmeld::Geometry& g) {
                  std::swap(g.layers[1].planes[0], g.layers[1].planes[1]);
                }},
           Case{"Hadamard", ErrorCode::invalid_argument,
                [](kvmeld::Geometry& g) { g.layers[1].planes[1].hadamard = 24; }},
           Case{"M-RoPE", ErrorCode::rope_unsupported,
                [](kvmeld::Geometry& g) { g.layers[1].rope.kind = kvmeld::RopeKind::multi_axis; }},
           Case{"layer 1: rope: nobody said", ErrorCode::invalid_argument,
                [](kvmeld::Geometry& g) { g.layers[1].rope = {}; }},
           Case{"layer 1 plane 0 is marked rotary", ErrorCode::invalid_argument,
                [](kvmeld::Geometry& g) { g.layers[1].rope = kvmeld::RopeSpec::none(); }},
           Case{"pairing", ErrorCode::unknown_field,
                [](kvmeld::Geometry& g) {
                  g.layers[1].rope.pairing = static_cast<kvmeld::RopePairing>(5);
                }},
       }) {
    auto g = test::geometry({.channels = 32});
    c.change(*g);
    TestCache cache(g, 2);
    refused(cache, {}, c.code, c.part);
  }
}

TEST_CASE("a second encoding joins its fragment only if it is of the same tokens") {
  const auto g = test::geometry({.channels = 32});
  TestCache cache(g, 4), other(g, 4);
  cache.fill(1);
  other.fill(2);
  const auto ids = test::token_ids(4), wrong = test::token_ids(4, 9);
  const auto one = kvmeld::seal(cache.ref(), {.tokens = ids});
  REQUIRE(one.ok());
  const auto two = kvmeld::with_variant(*one, other.ref(), {.tokens = ids});
  REQUIRE(two.ok());
  CHECK(two->payloads()[0].digest == one->payloads()[0].digest);
  CHECK(two->payloads()[1].digest != one->payloads()[0].digest);
  CHECK(kvmeld::verify_fragment(*two).ok());
  CHECK(kvmeld::with_variant(*two, other.ref(), {.tokens = ids}).error().code() ==
        ErrorCode::invalid_argument);
  CHECK(kvmeld::with_variant(*one, other.ref(), {.tokens = wrong}).error().code() ==
        ErrorCode::token_count_mismatch);
  CHECK(kvmeld::with_variant(*one, other.ref(), {.tokens = ids, .drop_first = 1}).error().code() ==
        ErrorCode::token_count_mismatch);
  CHECK(kvmeld::with_variant(*one, other.ref(),
                             {.tokens = ids, .context = {.prefix = one->id(), .lead_in = {}}})
            .error()
            .code() == ErrorCode::invalid_argument);
  CHECK(kvmeld::with_variant<OtherHash>(*one, other.ref(), {.tokens = ids}).error().code() ==
        ErrorCode::hash_mismatch);
  TestCache bigger(test::geometry({.channels = 64}), 4);
  bigger.fill(1);
  CHECK(kvmeld::with_variant(*one, bigger.ref(), {.tokens = ids}).error().code() ==
        ErrorCode::geometry_mismatch);
}

TEST_CASE("bytes that are not what the id names are found") {
  const auto g = test::geometry({.channels = 32});
  TestCache cache(g, 4);
  cache.fill(1);
  const auto made = kvmeld::seal(cache.ref());
  REQUIRE(made.ok());
  CHECK(kvmeld::verify_fragment<OtherHash>(*made).code() == ErrorCode::hash_mismatch);
  CHECK(kvmeld::verify_fragment(Fragment{}).code() == ErrorCode::invalid_argument);

  auto flipped = std::make_shared<Fragment::Body>(*made->body());
  std::vector<std::byte> bytes(flipped->payloads[0].bytes.get(),
                               flipped->payloads[0].bytes.get() + flipped->payloads[0].byte_count);
  bytes.back() ^= std::byte{1};
  flipped->payloads[0].bytes =
      std::shared_ptr<const std::byte[]>(std::shared_ptr<void>{}, bytes.data());
  CHECK(kvmeld::verify_fragment(Fragment(flipped)).code() == ErrorCode::id_mismatch);

  auto renamed = std::make_shared<Fragment::Body>(*made->body());
  renamed->tokens = test::token_ids(4);
  const kvmeld::Status status = kvmeld::verify_fragment(Fragment(renamed));
  CHECK(status.code() == ErrorCode::id_mismatch);
  CHECK(status.message().find(made->id().hex()) != std::string::npos);
  CHECK(kvmeld::verify_fragment(test::evicted(*made)).ok());
}
