// Fragments of another model in a plan: an aligner maps them into the target's geometry, and run
// turns their keys once.
#include <cmath>
#include <memory>
#include <vector>

#include "support/rendering.hpp"

namespace {

using kvmeld::Aligner;
using kvmeld::ById;
using kvmeld::ErrorCode;
using kvmeld::Geometry;

// Takes layer 1, head 0 of the other model, whose keys it un-rotates by plain formulas in double.
// `wrong` spoils the answer.
struct TakeOneHead {
  static constexpr bool reproducible = true;
  int wrong = 0;

  [[nodiscard]] kvmeld::Result<kvmeld::Alignment> align(std::span<const kvmeld::Source> ordered,
                                                        std::int64_t first) const {
    return kvmeld::Concat{}.align(ordered, first);
  }
  [[nodiscard]] kvmeld::Status accepts(const Geometry& from, const Geometry&) const {
    return from.model == "other model"
               ? kvmeld::Status()
               : kvmeld::extend::error(ErrorCode::geometry_mismatch, "no map from ", from.model);
  }
  [[nodiscard]] kvmeld::Result<kvmeld::Payload> transform(const kvmeld::Fragment& fragment,
                                                          std::size_t p, const Geometry& to) const {
    const kvmeld::Payload& from = fragment.payloads()[p];
    const auto tokens = static_cast<std::size_t>(fragment.token_count());
    const auto bytes = std::make_shared<std::byte[]>(2 * tokens * 64 * 4);
    for (std::size_t plane = 0; plane < 2; ++plane) {
      for (std::size_t t = 0; t < tokens; ++t) {
        float row[64];
        std::memcpy(row, from.bytes.get() + from.plane_offsets[2 + plane] + t * 2 * 64 * 4,
                    sizeof row);
        for (std::size_t i = 0; plane == 0 && i < 32; ++i) {
          const double angle = -static_cast<double>(from.positions[t]) *
                               std::pow(10000.0, -static_cast<double>(i) / 32.0);
          const double a = static_cast<double>(row[i]), b = static_cast<double>(row[i + 32]);
          row[i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
          row[i + 32] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
        }
        std::memcpy(bytes.get() + (plane * tokens + t) * 64 * 4, row, sizeof row);
      }
    }
    kvmeld::Payload out;
    out.positions.assign(tokens, wrong == 1 ? 3 : 0);
    out.token_sets = {{}};
    out.layer_set.assign(to.layers.size(), wrong == 2 ? std::uint16_t{1} : std::uint16_t{0});
    out.plane_offsets = {0, tokens * 64 * 4};
    out.bytes = bytes;
    out.byte_count = 2 * tokens * 64 * 4 - (wrong == 3 ? 1 : 0);
    return out;
  }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("test.TakeOneHead"); }
};

struct Models {
  std::shared_ptr<Geometry> target = test::geometry({.layers = 1, .heads = 1});
  std::shared_ptr<Geometry> other = [] {
    auto g = test::geometry({.layers = 2, .heads = 2});
    g->model = "other model";
    return g;
  }();
};

}  // namespace

TEST_CASE("fragments of two models meet in one cache") {
  Models models;
  std::vector<test::Sealed> spans;
  const auto far = test::gapped_positions(20, 5), near = test::gapped_positions(7, 9);
  spans.push_back(test::sealed(models.other, 20, 1, {.positions = far}));
  spans.push_back(test::sealed(models.target, 7, 2, {.positions = near}));
  spans = test::by_id(spans);
  const auto set = test::set_of(spans);
  kvmeld::Target target{*models.target};
  target.first_position = 11;
  const auto merger = kvmeld::merger(ById{}, Aligner{TakeOneHead{}});
  const auto out = test::render_everywhere(set, merger, target);
  std::int64_t o = 0;
  for (const test::Sealed& span : spans) {
    const kvmeld::Payload& payload = span.fragment.payloads()[0];
    const bool mapped = span.fragment.geometry().model == "other model";
    for (std::size_t t = 0; t < payload.positions.size(); ++t, ++o) {
      for (std::size_t plane = 0; plane < 2; ++plane) {
        const float* in =
            reinterpret_cast<const float*>(payload.bytes.get() +
                                           payload.plane_offsets[plane + (mapped ? 2 : 0)]) +
            t * (mapped ? 128 : 64);
        const auto view = out->out().plane(0, plane);
        const float* got =
            reinterpret_cast<const float*>(view.data + view.byte_offset(view.row_offset(o, 0)));
        for (std::size_t i = 0; i < 32; ++i) {
          const double angle = plane == 1 ? 0
                                          : static_cast<double>(11 + o - payload.positions[t]) *
                                                std::pow(10000.0, -static_cast<double>(i) / 32.0);
          const double a = static_cast<double>(in[i]), b = static_cast<double>(in[i + 32]);
          REQUIRE(std::abs(static_cast<double>(got[i]) -
                           (a * std::cos(angle) - b * std::sin(angle))) < 1e-4);
          REQUIRE(std::abs(static_cast<double>(got[i + 32]) -
                           (b * std::cos(angle) + a * std::sin(angle))) < 1e-4);
        }
      }
    }
  }
}

TEST_CASE("a map that does not fit is refused, whoever made it") {
  Models models;
  const auto set = test::set_of({test::sealed(models.other, 20, 1)});
  const kvmeld::Target target{*models.target};
  // no map at all
  CHECK(kvmeld::plan(set, kvmeld::merger(ById{}), target).status().code() ==
        ErrorCode::geometry_mismatch);
  for (int wrong = 0; wrong < 4; ++wrong) {
    const auto plan =
        kvmeld::plan(set, kvmeld::merger(ById{}, Aligner{TakeOneHead{wrong}}), target);
    CHECK(plan.status().code() == (wrong == 0 ? ErrorCode::ok : ErrorCode::invalid_argument));
  }
  models.other->model = "a third model";
  const auto third = test::set_of({test::sealed(models.other, 20, 1)});
  CHECK(
      kvmeld::plan(third, kvmeld::merger(ById{}, Aligner{TakeOneHead{}}), target).status().code() ==
      ErrorCode::geometry_mismatch);
}

TEST_CASE("another tokenizer's ids are not known to the target, and its prefix stays with it") {
  Models models;
  models.other->tokenizer = "another tokenizer";
  const auto prefix = test::sealed(models.other, 3, 4, {.role = kvmeld::Role::prefix});
  const std::vector<kvmeld::TokenId> ids{1, 2, 3, 4, 5};
  const auto span = test::sealed(models.other, 5, 1,
                                 {.tokens = ids, .context = {.prefix = prefix.fragment.id()}});
  const auto plan =
      kvmeld::plan(test::set_of({prefix, span}), kvmeld::merger(ById{}, Aligner{TakeOneHead{}}),
                   kvmeld::Target{*models.target});
  REQUIRE(plan.ok());
  CHECK(plan->tokens() == 5);
  for (const kvmeld::TokenId id : plan->token_ids()) CHECK(id == -1);
}
