// Sequence-state bytes of every known form: read in place, refused with the number where they lie.

#include <kvmeld/cache_view.hpp>
#include <kvmeld/engine/detail/llama_state.hpp>

#include "support/catch.hpp"
#include "support/llama_blob.hpp"

using namespace kvmeld;
using llama::StateForm;

namespace {

using Positions = std::vector<std::int64_t>;

StateForm form_of(bool prefix, std::int32_t ext, bool basis, bool transposed,
                  bool two_sections = false) {
  StateForm form;
  form.prefix = prefix;
  form.cell_ext_bytes = ext;
  form.basis_words = basis;
  form.transposed_values = transposed;
  form.two_sections = two_sections;
  form.complete = true;
  return form;
}

/// Every row of the view holds the bytes that the hand-written blob put at that position.
void check_rows(const KvCacheRef& view, const Positions& positions) {
  REQUIRE(view.tokens() == static_cast<std::int64_t>(positions.size()));
  std::vector<std::byte> row;
  for (std::size_t l = 0; l < view.geometry().layers.size(); ++l) {
    for (std::size_t p = 0; p < 2; ++p) {
      const PlaneRef& plane = view.plane(l, p);
      const auto bytes =
          static_cast<std::size_t>(byte_size(plane.shape.type, plane.shape.channels));
      row.resize(bytes);
      for (std::size_t t = 0; t < positions.size(); ++t) {
        const std::int64_t slot = plane.slots.slot(static_cast<std::int64_t>(t));
        if (slot < 0) continue;
        for (std::size_t h = 0; h < 2; ++h) {
          extend::gather_row(plane, slot, static_cast<std::int64_t>(h), row.data());
          for (std::size_t b = 0; b < bytes; ++b) {
            if (std::to_integer<std::uint8_t>(row[b]) !=
                test::pattern(l, p, positions[t], h * bytes + b)) {
              FAIL("layer " << l << " plane " << p << " token " << t << " head " << h << " byte "
                            << b);
            }
          }
        }
      }
    }
  }
}

ErrorCode code_of(std::span<const std::byte> bytes, const Geometry& geometry) {
  const Result<llama::StateLayout> layout = llama::parse_state(bytes, geometry);
  return layout ? ErrorCode::ok : layout.error().code();
}

template <class Word>
std::vector<std::byte> with_word(std::vector<std::byte> bytes, std::size_t at, Word word) {
  std::memcpy(bytes.data() + at, &word, sizeof word);
  return bytes;
}

}  // namespace

TEST_CASE("every form is found and read in place") {
  for (const bool prefix : {false, true})
    for (const std::int32_t ext : {0, 8, 12})
      for (const bool basis : {false, true})
        for (const bool transposed : {false, true}) {
          const auto geometry = test::blob_geometry(ElementType::f16, ElementType::f32);
          test::BlobSpec spec{form_of(prefix, ext, basis, transposed), 0, {{7, 3, 4, 11}}};
          std::vector<std::byte> bytes = test::write_blob(*geometry, spec);
          const auto view = llama::view_state(std::span<const std::byte>(bytes), geometry);
          INFO("prefix " << prefix << " ext " << ext << " basis " << basis << " transposed "
                         << transposed);
          REQUIRE(view.ok());
          CHECK(view->layout.form == spec.form);
          CHECK(view->positions == Positions{3, 4, 7, 11});
          check_rows(view->cache, view->positions);
        }
}

TEST_CASE("element types of the engine") {
  for (const ElementType type :
       {ElementType::f32, ElementType::f16, ElementType::bf16, ElementType::q8_0}) {
    const auto geometry = test::blob_geometry(type, type);
    test::BlobSpec spec{form_of(true, 0, false, false), 0, {{0, 1, 2}}};
    const std::vector<std::byte> bytes = test::write_blob(*geometry, spec);
    const auto view = llama::view_state(std::span<const std::byte>(bytes), geometry);
    INFO(to_string(type));
    REQUIRE(view.ok());
    check_rows(view->cache, view->positions);
    CHECK(view->cache.plane(0, 0).slots.kind == SlotKind::identity);
  }
  CHECK(llama::element_type(2).error().code() == ErrorCode::unsupported);  // q4_0
}

TEST_CASE("sliding-window layers have their own cells, and holes where the others have none") {
  const auto geometry = test::blob_geometry(ElementType::f16, ElementType::f16, 2);
  for (const bool transposed : {false, true}) {
    test::BlobSpec spec{form_of(true, 0, false, transposed, true), 0, {{5, 6, 7, 8}, {8, 7}}};
    const std::vector<std::byte> bytes = test::write_blob(*geometry, spec);
    const auto view = llama::view_state(std::span<const std::byte>(bytes), geometry);
    REQUIRE(view.ok());
    CHECK(view->layout.form.two_sections);
    CHECK(view->positions == Positions{5, 6, 7, 8});
    for (const std::size_t layer : {std::size_t{0}, std::size_t{1}, std::size_t{2}})
      for (std::int64_t t = 0; t < 4; ++t)
        CHECK((view->cache.plane(layer, 0).slots.slot(t) < 0) == (layer != 1 && t < 2));
    check_rows(view->cache, view->positions);
    // The same layers in one section are a form of their own.
    test::BlobSpec one{form_of(true, 0, false, transposed, false), 0, {{5, 6, 7, 8}}};
    const std::vector<std::byte> together = test::write_blob(*geometry, one);
    CHECK_FALSE(llama::parse_state(together, *geometry)->form.two_sections);
  }
}

TEST_CASE("one cell, no cells, and cells in another stream") {
  const auto geometry = test::blob_geometry(ElementType::f16, ElementType::f16);
  const std::vector<std::byte> one =
      test::write_blob(*geometry, {form_of(true, 0, false, false), 0, {{0}}});
  CHECK(llama::parse_state(one, *geometry)->form.complete);
  StateForm streams = form_of(true, 0, false, false);
  streams.streams = 4;
  const std::vector<std::byte> third = test::write_blob(*geometry, {streams, 2, {{1, 2}}});
  const auto view = llama::view_state(std::span<const std::byte>(third), geometry);
  REQUIRE(view.ok());
  CHECK(view->layout.form.streams == 4);
  check_rows(view->cache, view->positions);

  const std::vector<std::byte> none =
      test::write_blob(*geometry, {form_of(true, 0, false, false), 0, {{}}});
  CHECK(none.size() == 16);
  const auto empty = llama::view_state(std::span<const std::byte>(none), geometry);
  REQUIRE(empty.ok());
  CHECK(empty->cache.tokens() == 0);
  CHECK_FALSE(empty->layout.form.complete);
  const std::vector<std::int64_t> positions{0};
  CHECK(llama::make_state(geometry, empty->layout.form, positions).error().code() ==
        ErrorCode::invalid_argument);
  CHECK(llama::make_state(geometry, empty->layout.form, {})->bytes().size() == 16);
}

TEST_CASE("bytes cut anywhere are refused, and so are bytes too many") {
  const auto full = test::blob_geometry(ElementType::f16, ElementType::f16);
  const auto sliding = test::blob_geometry(ElementType::f16, ElementType::f16, 2);
  const std::vector<std::byte> blobs[] = {
      test::write_blob(*full, {form_of(true, 0, false, false), 0, {{0, 1, 2}}}),
      test::write_blob(*full, {form_of(false, 12, true, true), 0, {{0, 1, 2}}}),
      test::write_blob(*sliding, {form_of(true, 8, false, false, true), 0, {{0, 1, 2}, {1, 2}}}),
  };
  for (std::size_t i = 0; i < 3; ++i) {
    const Geometry& geometry = i == 2 ? *sliding : *full;
    REQUIRE(code_of(blobs[i], geometry) == ErrorCode::ok);
    for (std::size_t size = 0; size < blobs[i].size(); ++size) {
      const std::vector<std::byte> cut(blobs[i].begin(),
                                       // exact bounds for ASan
                                       blobs[i].begin() + static_cast<std::ptrdiff_t>(size));
      const ErrorCode code = code_of(cut, geometry);
      INFO("blob " << i << " cut to " << size << " of " << blobs[i].size());
      REQUIRE(code != ErrorCode::ok);
      if (size > 200) REQUIRE(code == ErrorCode::truncated);
    }
    for (const std::size_t more : {std::size_t{1}, std::size_t{4}, std::size_t{100}}) {
      std::vector<std::byte> longer = blobs[i];
      longer.resize(longer.size() + more);
      CHECK(code_of(longer, geometry) == ErrorCode::oversized);
    }
  }
}

TEST_CASE("a hostile word is refused with its number") {
  const auto geometry = test::blob_geometry(ElementType::f16, ElementType::f16);
  const std::vector<std::byte> good =
      test::write_blob(*geometry, {form_of(true, 0, false, false), 0, {{4, 5, 6}}});
  const std::size_t streams = 8, cells = 12, cell = 16, layers = cell + 3 * 12;
  CHECK(code_of(with_word(good, streams, std::uint32_t{0}), *geometry) == ErrorCode::corrupt);
  CHECK(code_of(with_word(good, streams, std::uint32_t{0xffffffff}), *geometry) ==
        ErrorCode::corrupt);
  CHECK(code_of(with_word(good, cells, std::uint32_t{0xffffffff}), *geometry) ==
        ErrorCode::truncated);
  CHECK(code_of(with_word(good, cells, std::uint32_t{0x7fffffff}), *geometry) ==
        ErrorCode::truncated);
  CHECK(code_of(with_word(good, cell, std::int32_t{-1}), *geometry) == ErrorCode::corrupt);
  CHECK(code_of(with_word(good, cell + 4, std::uint32_t{2}), *geometry) == ErrorCode::corrupt);
  CHECK(code_of(with_word(good, cell + 12, std::int32_t{4}), *geometry) ==
        ErrorCode::duplicate_position);
  CHECK(code_of(with_word(good, cell, std::int32_t{0x7fffffff}), *geometry) ==
        ErrorCode::ok);  // a position like any other
  CHECK(code_of(with_word(good, layers, std::uint32_t{2}), *geometry) == ErrorCode::corrupt);
  CHECK(code_of(with_word(good, layers + 4, std::uint32_t{4}), *geometry) ==
        ErrorCode::geometry_mismatch);
  // bf16
  CHECK(code_of(with_word(good, layers + 8, std::int32_t{30}), *geometry) ==
        ErrorCode::geometry_mismatch);
  CHECK(code_of(with_word(good, layers + 12, std::uint64_t{1} << 63), *geometry) ==
        ErrorCode::geometry_mismatch);
  const Status named =
      llama::parse_state(with_word(good, cell + 12, std::int32_t{4}), *geometry).error();
  CHECK(named.message().find("position 4") != std::string::npos);

  // Another model's state: one layer less, or another type.
  CHECK(code_of(good, *test::blob_geometry(ElementType::bf16, ElementType::f16)) ==
        ErrorCode::geometry_mismatch);
  Geometry fewer = *geometry;
  fewer.layers.pop_back();
  CHECK(code_of(good, fewer) == ErrorCode::geometry_mismatch);
  Geometry latent = *geometry;
  latent.layers[1].planes[0].plane = Plane::latent;
  CHECK(code_of(good, latent) == ErrorCode::unsupported);
}

TEST_CASE("basis words must agree with the declared basis") {
  Geometry rotated = *test::blob_geometry(ElementType::q8_0, ElementType::q8_0);
  for (LayerShape& layer : rotated.layers)
    for (PlaneShape& plane : layer.planes) plane.hadamard = 32;
  const Geometry plain = *test::blob_geometry(ElementType::q8_0, ElementType::q8_0);
  StateForm form = form_of(true, 0, true, false);
  const std::vector<std::byte> unrotated = test::write_blob(plain, {form, 0, {{0, 1}}});
  form.key_basis = form.value_basis = 32;
  const std::vector<std::byte> blocks = test::write_blob(plain, {form, 0, {{0, 1}}});
  form.key_basis = form.value_basis = 1;
  const std::vector<std::byte> flags = test::write_blob(plain, {form, 0, {{0, 1}}});
  CHECK(code_of(unrotated, plain) == ErrorCode::ok);
  CHECK(code_of(unrotated, rotated) == ErrorCode::geometry_mismatch);
  CHECK(code_of(blocks, rotated) == ErrorCode::ok);
  CHECK(code_of(flags, rotated) == ErrorCode::ok);
  CHECK(code_of(blocks, plain) == ErrorCode::geometry_mismatch);
}

TEST_CASE("made states are what the engine would write") {
  for (const bool prefix : {false, true})
    for (const std::int32_t ext : {0, 8, 12})
      for (const bool transposed : {false, true})
        for (const bool sliding : {false, true}) {
          const auto geometry =
              test::blob_geometry(ElementType::f16, ElementType::f16, sliding ? 3 : 0);
          const StateForm form = form_of(prefix, ext, false, transposed, sliding);
          const Positions positions{2, 5, 6, 7, 9};
          const std::vector<TokenId> tokens{1002, 1005, 1006, 1007, 1009};
          test::BlobSpec spec{form, 0, {{2, 5, 6, 7, 9}}};
          if (sliding) spec.cells.push_back({7, 9});  // less than 3 before the last
          const std::vector<std::byte> expected = test::write_blob(*geometry, spec);
          Result<llama::StateBlob> blob = llama::make_state(geometry, form, positions, tokens);
          REQUIRE(blob.ok());
          REQUIRE(blob->bytes().size() == expected.size());
          std::vector<std::byte> row(64);
          for (std::size_t l = 0; l < 3; ++l)
            for (std::size_t p = 0; p < 2; ++p) {
              const MutablePlaneRef& plane = blob->mutable_ref().plane(l, p);
              for (std::size_t t = 0; t < positions.size(); ++t) {
                const std::int64_t slot = plane.slots.slot(static_cast<std::int64_t>(t));
                if (slot < 0) continue;
                for (std::size_t h = 0; h < 2; ++h) {
                  for (std::size_t b = 0; b < 64; ++b)
                    row[b] = std::byte{test::pattern(l, p, positions[t], h * 64 + b)};
                  extend::scatter_row(plane, slot, static_cast<std::int64_t>(h), row.data());
                }
              }
            }
          const std::vector<std::byte> made(blob->bytes().begin(), blob->bytes().end());
          INFO("prefix " << prefix << " ext " << ext << " transposed " << transposed << " sliding "
                         << sliding);
          CHECK(made == expected);
          CHECK(std::vector<std::int64_t>(blob->positions().begin(), blob->positions().end()) ==
                positions);
        }
}

TEST_CASE("states that cannot be made are refused") {
  const auto geometry = test::blob_geometry(ElementType::f16, ElementType::f16);
  const StateForm form = form_of(true, 0, false, false);
  const auto code = [&](const StateForm& f, const Positions& positions,
                        const std::vector<TokenId>& tokens = {}) {
    const Result<llama::StateBlob> blob = llama::make_state(geometry, f, positions, tokens);
    return blob ? ErrorCode::ok : blob.error().code();
  };
  CHECK(code(form, {0, 1}) == ErrorCode::ok);
  CHECK(code(form, {1, 1}) == ErrorCode::duplicate_position);
  CHECK(code(form, {2, 1}) == ErrorCode::invalid_argument);
  CHECK(code(form, {-1}) == ErrorCode::invalid_argument);
  CHECK(code(form, {std::int64_t{1} << 31}) == ErrorCode::invalid_argument);
  CHECK(code(form_of(true, 12, false, false), {0, 1}) == ErrorCode::tokens_required);
  CHECK(code(form_of(true, 12, false, false), {0, 1}, {5}) == ErrorCode::token_count_mismatch);
  CHECK(code(form_of(true, 4, false, false), {0}) == ErrorCode::unknown_layout);
  const auto blocks = test::blob_geometry(ElementType::q8_0, ElementType::q8_0);
  const std::int64_t zero[] = {0};
  CHECK(llama::make_state(blocks, form_of(true, 0, false, true), zero).error().code() ==
        ErrorCode::unsupported);
}

TEST_CASE("memory of an earlier state is used again, and cleared") {
  const auto geometry = test::blob_geometry(ElementType::f16, ElementType::f16);
  const StateForm form = form_of(true, 0, false, false);
  llama::StateBlob first = *llama::make_state(geometry, form, Positions{0, 1, 2, 3});
  const std::byte* const memory = first.bytes().data();
  for (std::byte& b : first.mutable_bytes()) b = std::byte{0xff};
  llama::StateBlob second =
      *llama::make_state(geometry, form, Positions{4, 5}, {}, std::move(first));
  const std::vector<std::byte> fresh = [&] {
    const llama::StateBlob blob = *llama::make_state(geometry, form, Positions{4, 5});
    return std::vector<std::byte>(blob.bytes().begin(), blob.bytes().end());
  }();
  CHECK(second.bytes().data() == memory);
  CHECK(std::vector<std::byte>(second.bytes().begin(), second.bytes().end()) == fresh);
  llama::StateBlob third =
      *llama::make_state(geometry, form, Positions{4, 5, 6, 7}, {}, std::move(second));
  CHECK(third.bytes().data() == memory);
  const llama::StateBlob large =
      *llama::make_state(geometry, form, Positions{0, 1, 2, 3, 4, 5}, {}, std::move(third));
  CHECK(large.positions().size() == 6);
}

TEST_CASE("two states are compared by position, not by place") {
  for (const bool transposed : {false, true}) {
    const auto geometry = test::blob_geometry(ElementType::f16, ElementType::f16);
    const StateForm form = form_of(true, 0, false, transposed);
    const std::vector<std::byte> a = test::write_blob(*geometry, {form, 0, {{1, 2, 3}}});
    const std::vector<std::byte> b = test::write_blob(*geometry, {form, 0, {{3, 1, 2}}});
    const llama::StateLayout x = *llama::parse_state(a, *geometry),
                             y = *llama::parse_state(b, *geometry);
    CHECK(llama::same_state(a, x, b, y, *geometry).ok());
    for (std::size_t l = 0; l < 3; ++l)
      for (const std::size_t at : {y.sections[0].keys[l], y.sections[0].values[l]}) {
        std::vector<std::byte> other = b;
        other[at + 37] ^= std::byte{1};
        CHECK(llama::same_state(a, x, other, y, *geometry).code() == ErrorCode::probe_failed);
      }
    const std::vector<std::byte> moved = test::write_blob(*geometry, {form, 0, {{1, 2, 4}}});
    CHECK(llama::same_state(a, x, moved, *llama::parse_state(moved, *geometry), *geometry).code() ==
          ErrorCode::probe_failed);
  }
}
