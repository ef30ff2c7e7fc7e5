// Collecting new tokens: what is sealed equals sealing the engine's cache whole, positions are
// counted, errors change nothing.

#include <kvmeld/replica/session_memory.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

using namespace kvmeld;

namespace {

// Tokens [begin, end) of a cache, through slot lists: rows as an engine hands them out, one decode
// at a time.
struct Part {
  std::vector<std::vector<std::int64_t>> slots;
  KvCacheRef ref;

  Part(const KvCacheRef& whole, std::int64_t begin, std::int64_t end) {
    std::vector<PlaneRef> planes;
    slots.reserve(whole.planes().size());
    for (PlaneRef plane : whole.planes()) {
      std::vector<std::int64_t>& list = slots.emplace_back();
      for (std::int64_t t = begin; t < end; ++t) list.push_back(plane.slots.slot(t));
      plane.slots.kind = SlotKind::slot_list_i64;
      plane.slots.table = list.data();
      plane.tokens = end - begin;
      planes.push_back(plane);
    }
    ref = KvCacheRef(whole.shared_geometry(), std::move(planes), end - begin);
  }
};

std::vector<std::int64_t> from(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < count; ++i) out.push_back(first + i);
  return out;
}

}  // namespace

TEST_CASE("rows that come one by one, in any layout, seal to what the whole cache seals to") {
  const auto g = test::geometry({.type = ElementType::f16, .layers = 3});
  const auto ids = test::token_ids(11);
  const Digest128 lead_in = lead_in_digest(std::vector<TokenId>{7, 8, 9});
  for (const test::Layout layout : test::all_layouts) {
    for (const std::vector<std::int64_t>& hidden :
         {std::vector<std::int64_t>{}, std::vector<std::int64_t>{0, 6, 0}}) {
      if (!hidden.empty() && layout != test::Layout::slot_list) continue;
      test::TestCache cache(g, 11, layout, hidden);
      cache.fill(5);
      const auto positions = from(20, 11);
      SealOptions whole{.tokens = ids, .positions = positions, .drop_first = 3};
      whole.context.lead_in = lead_in;
      const auto expected = seal(cache.ref(), whole);
      REQUIRE(expected.ok());

      replica::SpanBuffer buffer(
          g, {}, {.context = {.lead_in = lead_in}, .first_position = 20, .drop_first = 3});
      for (const auto& [begin, end] :
           {std::pair<std::int64_t, std::int64_t>{0, 2}, {2, 5}, {5, 6}, {6, 11}}) {
        const Part part(cache.ref(), begin, end);
        const auto b = static_cast<std::size_t>(begin), n = static_cast<std::size_t>(end - begin);
        const Status status = buffer.append(part.ref, std::span(ids).subspan(b, n),
                                            std::span(positions).subspan(b, n));
        INFO(status.message());
        REQUIRE(status.ok());
      }
      CHECK(buffer.next_position() == 31);
      CHECK(buffer.pending() == 8);
      const auto made = buffer.seal();
      REQUIRE(made.ok());
      CHECK(made->id() == expected->id());
      CHECK(buffer.pending() == 0);
      CHECK(buffer.next_position() == 31);
    }
  }
}

TEST_CASE("spans of every N tokens; what is over waits, and its lead-in is the span before") {
  const auto g = test::geometry();
  test::TestCache cache(g, 10);
  cache.fill(1);
  const auto ids = test::token_ids(10);
  replica::SpanBuffer buffer(g, {.seal_every = 4}, {.first_position = 6});
  REQUIRE(buffer.append(cache.ref(), ids).ok());
  REQUIRE(buffer.full());
  const auto first = buffer.seal_full(), second = buffer.seal_full();
  REQUIRE((first.ok() && second.ok()));
  CHECK_FALSE(buffer.full());
  CHECK(buffer.seal_full().error().code() == ErrorCode::invalid_argument);
  const auto last = buffer.seal();
  REQUIRE(last.ok());
  CHECK(first->token_count() == 4);
  CHECK(second->token_count() == 4);
  CHECK(last->token_count() == 2);
  CHECK(first->payloads()[0].positions == from(6, 4));
  CHECK(second->payloads()[0].positions == from(10, 4));
  CHECK(last->payloads()[0].positions == from(14, 2));
  CHECK(first->payloads()[0].lead_in == Digest128{});
  CHECK(second->payloads()[0].lead_in == kvmeld::replica::continued_lead_in({}, first->id()));
  CHECK(last->payloads()[0].lead_in ==
        kvmeld::replica::continued_lead_in(second->payloads()[0].lead_in, second->id()));
  CHECK(std::ranges::equal(last->tokens(), std::span(ids).subspan(8)));
  CHECK(buffer.seal()->token_count() == 0);  // a rotation without words
}

TEST_CASE("a second encoding travels with its span") {
  const auto g = test::geometry();
  test::TestCache with(g, 6), without(g, 6);
  with.fill(1);
  without.fill(2);
  const auto ids = test::token_ids(6);
  const Context context{.lead_in = lead_in_digest(std::vector<TokenId>{1})};
  replica::SpanBuffer buffer(g, {.seal_every = 6, .variants = true},
                             {.context = context, .first_position = 40, .variant_position = 4});
  REQUIRE(buffer.append(with.ref(), ids).ok());
  CHECK_FALSE(buffer.full());
  CHECK(buffer.seal().error().code() == ErrorCode::token_count_mismatch);
  CHECK(buffer.append_variant(without.ref(), from(5, 6)).code() == ErrorCode::position_gap);
  REQUIRE(buffer.append_variant(without.ref(), from(4, 6)).ok());
  CHECK(buffer.append_variant(without.ref()).code() == ErrorCode::invalid_argument);
  REQUIRE(buffer.full());
  const auto made = buffer.seal_full();
  REQUIRE(made.ok());
  const auto positions = from(40, 6), variant_positions = from(4, 6);
  const auto expected =
      with_variant(*seal(with.ref(), {.tokens = ids, .positions = positions, .context = context}),
                   without.ref(), {.tokens = ids, .positions = variant_positions});
  REQUIRE(expected.ok());
  CHECK(made->id() == expected->id());
  CHECK(replica::SpanBuffer(g).append_variant(with.ref()).code() == ErrorCode::invalid_argument);
}

TEST_CASE("what cannot be appended changes nothing") {
  const auto g = test::geometry();
  test::TestCache good(g, 3), bad(g, 3);
  good.fill(1);
  bad.fill(2);
  bad.set(3, 2, 1, 5, std::numeric_limits<float>::quiet_NaN());
  const auto ids = test::token_ids(3);
  replica::SpanBuffer buffer(g, {}, {.first_position = 9});
  REQUIRE(buffer.append(good.ref(), ids).ok());
  const auto refuse = [&](const Status& status, ErrorCode code, const char* number) {
    INFO(status.message());
    CHECK(status.code() == code);
    CHECK(status.message().find(number) != std::string::npos);
    CHECK(buffer.next_position() == 12);
    CHECK(buffer.pending() == 3);
  };
  refuse(buffer.append(good.ref(), ids, from(13, 3)), ErrorCode::position_gap, "13");
  refuse(buffer.append(good.ref(), ids, from(11, 3)), ErrorCode::duplicate_position, "11");
  const std::vector<std::int64_t> repeated{12, 13, 13};
  refuse(buffer.append(good.ref(), ids, repeated), ErrorCode::duplicate_position, "13");
  refuse(buffer.append(good.ref(), ids, from(12, 2)), ErrorCode::token_count_mismatch,
         "2 positions");
  refuse(buffer.append(good.ref(), std::span(ids).first(2)), ErrorCode::token_count_mismatch,
         "2 token ids");
  refuse(buffer.append(good.ref()), ErrorCode::token_count_mismatch, "latent");
  refuse(buffer.append(bad.ref(), ids), ErrorCode::non_finite, "layer 1 plane 1");
  test::TestCache other(test::geometry({.layers = 3}), 3);
  other.fill(1);
  refuse(buffer.append(other.ref(), ids), ErrorCode::geometry_mismatch, "3");
  refuse(buffer.append(KvCacheRef{}, ids), ErrorCode::invalid_argument, "geometry");
  const auto positions = from(9, 3);
  const auto made = buffer.seal();
  REQUIRE(made.ok());
  CHECK(made->id() == seal(good.ref(), {.tokens = ids, .positions = positions})->id());
}
