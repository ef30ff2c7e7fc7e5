// Reuse plans: the exact blend, what is refused, what becomes a hole, and that nothing is taken for
// a blend that is none.

#include <cmath>
#include <cstring>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/anchors/decision.hpp>
#include <kvmeld/anchors/prompt.hpp>
#include <kvmeld/anchors/signature.hpp>
#include <kvmeld/fragment.hpp>

#include "support/anchor_segments.hpp"
#include "support/catch.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::anchors::ReuseOffset;
using kvmeld::anchors::ReusePart;
using test::difference;
using test::rendered;
using test::Segment;

const std::shared_ptr<const kvmeld::Geometry> shape =
    test::geometry({.layers = 3, .heads = 2, .channels = 8});

ReuseOffset offset(const Segment& alone, std::uint64_t seed, std::uint8_t id, float weight = 1.0F) {
  const auto delta = kvmeld::anchors::measure_offset(alone.in_context(seed).at(0), alone.at(0));
  REQUIRE(delta.ok());
  return {.anchor = test::anchor_id(id), .delta = *delta, .weight = weight};
}
ErrorCode refused(const ReusePart& part, kvmeld::anchors::ReuseOptions options = {}) {
  return kvmeld::anchors::plan_reuse({&part, 1}, *shape, options).status().code();
}

}  // namespace

TEST_CASE("base [1, 2], offsets [.4, 0] and [0, .8], weights 3/4 and 1/4 give [1.3, 2.2]") {
  const auto g = test::geometry({.layers = 2, .heads = 1, .channels = 2, .rotary = 0});
  const auto fragment = [&](float x, float y) {
    test::TestCache cache(g, 1);
    for (std::size_t p = 0; p < cache.planes(); ++p) {
      cache.set(p, 0, 0, 0, x);
      cache.set(p, 0, 0, 1, y);
    }
    return *kvmeld::seal(cache.ref());
  };
  const auto weights = kvmeld::anchors::softmax_weights(std::vector<double>{0, std::log(3)}, 1);
  const auto first = kvmeld::anchors::measure_offset(fragment(1.4F, 2), fragment(1, 2)),
             second = kvmeld::anchors::measure_offset(fragment(1, 2.8F), fragment(1, 2));
  const ReusePart part{.base = fragment(1, 2),
                       .position = 12,
                       .offsets = {{test::anchor_id(2), *second, static_cast<float>(weights[1])},
                                   {test::anchor_id(1), *first, static_cast<float>(weights[0])}}};
  const auto plan = kvmeld::anchors::plan_reuse({&part, 1}, *g, {.compute_last = false});
  REQUIRE(plan.ok());
  REQUIRE(plan->approximate());
  test::TestCache out(g, 1);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  REQUIRE(kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.out()).ok());
  for (const std::size_t plane : {0U, 1U}) {  // layer 0 depends on the token alone
    REQUIRE(out.get(plane, 0, 0, 0) == 1);
    REQUIRE(out.get(plane, 0, 0, 1) == 2);
  }
  for (const std::size_t plane : {2U, 3U}) {
    REQUIRE(out.get(plane, 0, 0, 0) == Approx(1.3).epsilon(1e-6));
    REQUIRE(out.get(plane, 0, 0, 1) == Approx(2.2).epsilon(1e-6));
  }
}

TEST_CASE("bases are un-rotated once, offsets hold no layer that depends on the token alone") {
  const Segment s(shape, 5, 1);
  const auto base = kvmeld::anchors::unrotated(s.at(1000));
  REQUIRE(base.ok());
  REQUIRE(kvmeld::anchors::is_unrotated(*base));
  REQUIRE(base->id() != s.at(1000).id());
  REQUIRE(kvmeld::anchors::unrotated(*base)->body() == base->body());
  const auto delta = kvmeld::anchors::measure_offset(s.in_context(2).at(30), *base);
  REQUIRE(delta.ok());
  REQUIRE(delta->payloads()[0].layer_tokens(0) == 0);
  REQUIRE(delta->payloads()[0].layer_tokens(1) == 5);
  REQUIRE(delta->payloads()[0].byte_count == base->payloads()[0].byte_count / 3 * 2);
  // Measured all the same, layer 0 is engine noise: here the rounding of one rotation.
  const auto whole =
      kvmeld::anchors::measure_offset(s.in_context(2).at(30), s.at(2), {.context_free_layers = 0});
  const kvmeld::Payload& p = whole->payloads()[0];
  float most = 0;
  for (std::size_t i = 0; i < p.plane_offsets[2]; i += 4) {
    float x;
    std::memcpy(&x, p.bytes.get() + i, 4);
    most = std::max(most, std::abs(x));
  }
  REQUIRE(most < 1e-5F);
}

TEST_CASE(
    "layers that are said to depend on the token alone take the base, though an offset has rows "
    "for them") {
  const Segment alone(shape, 4, 1), other(shape, 4, 9);
  const auto delta =
      kvmeld::anchors::measure_offset(other.at(0), alone.at(0), {.context_free_layers = 0});
  REQUIRE(delta.ok());
  REQUIRE(delta->payloads()[0].layer_tokens(0) == 4);
  const ReusePart blended{
      .base = alone.at(0), .position = 6, .offsets = {{test::anchor_id(1), *delta}}},
      bare{.base = alone.at(0), .position = 6, .rotated_only = true};
  const auto base = rendered({&bare, 1}, shape);
  const auto all =
      rendered({&blended, 1}, shape, {.context_free_layers = 0, .compute_last = false});
  REQUIRE((base.size() == 6 && all.size() == 6));
  for (std::int32_t layers = 0; layers <= 3; ++layers) {
    const auto some =
        rendered({&blended, 1}, shape, {.context_free_layers = layers, .compute_last = false});
    REQUIRE(some.size() == 6);
    for (std::size_t p = 0; p < 6; ++p) {
      REQUIRE(all[p] != base[p]);
      REQUIRE(some[p] == (p < 2 * static_cast<std::size_t>(layers) ? base[p] : all[p]));
    }
  }
}

TEST_CASE("offsets are refused where they would mean nothing") {
  const Segment s(shape, 5, 1);
  REQUIRE(kvmeld::anchors::measure_offset({}, s.at(0)).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::measure_offset(Segment(shape, 4, 1).at(0), s.at(0)).status().code() ==
          ErrorCode::token_count_mismatch);
  REQUIRE(
      kvmeld::anchors::measure_offset(Segment(test::geometry({.layers = 2}), 5, 1).at(0), s.at(0))
          .status()
          .code() == ErrorCode::geometry_mismatch);
  REQUIRE(kvmeld::anchors::measure_offset(s.at(0), test::evicted(s.at(3))).status().code() ==
          ErrorCode::payload_missing);
  REQUIRE(kvmeld::anchors::measure_offset(s.at(0), s.at(0), {.context_free_layers = 4})
              .status()
              .code() == ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::unrotated({}).status().code() == ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::unrotated(test::evicted(s.at(3))).status().code() ==
          ErrorCode::payload_missing);
}

TEST_CASE("plans are refused, and a base is never taken for a blend in silence") {
  const Segment s(shape, 5, 1);
  const ReusePart good{.base = s.at(0), .position = 10, .offsets = {offset(s, 2, 1)}};
  REQUIRE(refused(good) == ErrorCode::ok);
  ReusePart part = good;
  part.offsets.clear();
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part.rotated_only = true;
  REQUIRE(refused(part) == ErrorCode::ok);
  part = good;
  part.rotated_only = true;
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part = good;
  part.offsets.push_back(part.offsets[0]);
  REQUIRE(refused(part) == ErrorCode::invalid_argument);  // an anchor twice
  part = good;
  part.base = {};
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part.base = test::evicted(s.at(0));
  REQUIRE(refused(part) == ErrorCode::payload_missing);
  part = good;
  part.offsets[0].delta = s.at(7);  // no offset
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part.offsets[0].delta = offset(Segment(shape, 4, 1), 2, 1).delta;  // shorter than the segment
  REQUIRE(refused(part) == ErrorCode::token_count_mismatch);
  part = good;
  part.offsets[0].weight = std::nanf("");
  REQUIRE(refused(part) == ErrorCode::non_finite);
  part = good;
  part.offsets[0].token_weights = {1, 1};
  REQUIRE(refused(part) == ErrorCode::token_count_mismatch);
  part.offsets[0].token_weights = {1, 1, INFINITY, 1, 1};
  REQUIRE(refused(part) == ErrorCode::non_finite);
  part = good;
  part.offsets[0].rows = {0, 1, 2, 3, 5};
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part.offsets[0].rows = {0};
  REQUIRE(refused(part) == ErrorCode::token_count_mismatch);
  part = good;
  part.first = 3;
  part.tokens = 3;
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  part = good;
  part.position = -1;
  REQUIRE(refused(part) == ErrorCode::invalid_argument);
  REQUIRE(refused(good, {.context_free_layers = 9}) == ErrorCode::invalid_argument);
  const std::vector<ReusePart> overlap{good, good};
  REQUIRE(kvmeld::anchors::plan_reuse(overlap, *shape).status().code() ==
          ErrorCode::duplicate_position);
  REQUIRE(kvmeld::anchors::plan_reuse({&good, 1}, *test::geometry({.layers = 2})).status().code() ==
          ErrorCode::geometry_mismatch);

  // An output that overlaps a base, and one that is too small.
  const auto plan = kvmeld::anchors::plan_reuse({&good, 1}, *shape);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const kvmeld::FragmentView view(good.base);
  std::vector<kvmeld::MutablePlaneRef> planes;
  for (const kvmeld::PlaneRef& p : view.ref().planes()) {
    kvmeld::MutablePlaneRef m;
    m.data = const_cast<std::byte*>(p.data);
    m.shape = p.shape;
    m.tokens = p.tokens;
    m.token_stride = p.token_stride;
    m.head_stride = p.head_stride;
    planes.push_back(m);
  }
  REQUIRE(
      kvmeld::run(kvmeld::exec::seq, *plan, workspace, kvmeld::MutableKvCacheRef(shape, planes, 5))
          .status()
          .code() == ErrorCode::aliasing);
  test::TestCache few(shape, 4);
  REQUIRE(kvmeld::run(kvmeld::exec::seq, *plan, workspace, few.out()).status().code() ==
          ErrorCode::output_too_small);
  REQUIRE(few.is_untouched());
}

TEST_CASE("the last token is computed, empty parts are nothing, and what was asked is named") {
  const Segment s(shape, 5, 1);
  const ReusePart part{.base = s.at(0), .position = 10, .offsets = {offset(s, 2, 1)}};
  const auto plan = kvmeld::anchors::plan_reuse({&part, 1}, *shape);
  REQUIRE(plan->tokens() == 5);
  REQUIRE(plan->holes().size() == 1);
  REQUIRE(plan->holes()[0] == kvmeld::Hole{4, 14, 104});
  REQUIRE(plan->positions()[0] == 10);
  ReusePart other = part;
  other.offsets[0].weight = 0.5F;
  REQUIRE(kvmeld::anchors::plan_reuse({&other, 1}, *shape)->render_id() != plan->render_id());
  kvmeld::FragmentSet set;
  REQUIRE(set.insert(part.base).ok());
  const auto exact = kvmeld::plan(set, kvmeld::anchors::ReuseMerger{},
                                  kvmeld::Target{.geometry = *shape, .first_position = 10});
  REQUIRE(exact->render_id() != plan->render_id());
  const auto none = kvmeld::anchors::plan_reuse({}, *shape);
  REQUIRE(none.ok());
  REQUIRE(none->tokens() == 0);
  REQUIRE_FALSE(none->approximate());
  ReusePart empty = part;
  empty.tokens = 0;
  REQUIRE(kvmeld::anchors::plan_reuse({&empty, 1}, *shape)->tokens() == 0);
}

TEST_CASE("weights by token, rows by token, longer anchors, and a part of a base") {
  const Segment s(shape, 6, 1), longer(shape, 9, 7);
  const ReuseOffset a = offset(s, 2, 1), b = offset(s, 3, 2), c = offset(longer, 4, 3);
  ReusePart by_token{.base = s.at(0), .position = 10, .offsets = {a, b}};
  by_token.offsets[0].token_weights = {1, 1, 1, 0, 0, 0};
  by_token.offsets[1].token_weights = {0, 0, 0, 1, 1, 1};
  std::vector<ReusePart> halves{{.base = s.at(0), .position = 10, .tokens = 3, .offsets = {a}},
                                {.base = s.at(0), .position = 13, .first = 3, .offsets = {b}}};
  halves[1].offsets[0].rows = {3, 4, 5};
  const auto whole = rendered({&by_token, 1}, shape);
  REQUIRE(!whole.empty());
  REQUIRE(whole == rendered(halves, shape));
  // A longer anchor lends its first rows.
  const ReusePart first_rows{.base = s.at(0), .position = 10, .offsets = {c}};
  ReusePart said = first_rows;
  said.offsets[0].rows = {0, 1, 2, 3, 4, 5};
  REQUIRE(rendered({&first_rows, 1}, shape) == rendered({&said, 1}, shape));
  // A token without counterpart is a hole, and its row stays as it was.
  said.offsets[0].rows[2] = -1;
  const auto plan = kvmeld::anchors::plan_reuse({&said, 1}, *shape, {.compute_last = false});
  REQUIRE(plan->holes().size() == 1);
  REQUIRE(plan->holes()[0].output == 2);
}

TEST_CASE(
    "segments that a sliding window dropped in part: holes where a window still sees, never a bare "
    "base") {
  auto g = std::make_shared<kvmeld::Geometry>(*shape);
  g->layers[1].window = 4;
  const Segment s(g, 8, 1);
  const std::vector<std::int64_t> hidden{0, 3, 0};  // layer 1 lacks tokens 0, 1, 2
  const auto delta = kvmeld::anchors::measure_offset(s.in_context(2).at(0, hidden), s.at(0));
  REQUIRE(delta.ok());
  REQUIRE(delta->payloads()[0].layer_tokens(1) == 5);
  const ReusePart part{.base = s.at(0), .position = 0, .offsets = {{test::anchor_id(1), *delta}}};
  const auto plan = kvmeld::anchors::plan_reuse({&part, 1}, *g, {.compute_last = false});
  REQUIRE(plan.ok());
  REQUIRE(plan->holes().empty());  // the next query sees 4 tokens back and asks for none of them
  // now token 7 is computed, and sees tokens 4 to 7
  const auto early = kvmeld::anchors::plan_reuse({&part, 1}, *g);
  REQUIRE(early->holes().size() == 1);
  g->layers[1].window = 0;
  const Segment full(g, 8, 1);
  const auto lacking =
      kvmeld::anchors::measure_offset(full.in_context(2).at(0, hidden), full.at(0));
  const ReusePart all{
      .base = full.at(0), .position = 0, .offsets = {{test::anchor_id(1), *lacking}}};
  REQUIRE(kvmeld::anchors::plan_reuse({&all, 1}, *g, {.compute_last = false})->holes().size() == 3);
}

TEST_CASE("a template: slots filled, text corrected behind them, one slot twice") {
  const Segment lead(shape, 4, 1), slot(shape, 6, 2), tail(shape, 5, 3);
  const auto placed =
      kvmeld::anchors::place(13, std::vector<kvmeld::anchors::TemplatePlaceholder>{{4, 6}, {6, 8}},
                             std::vector<kvmeld::anchors::PlaceholderFill>{{6, 0}, {6, 0}});
  REQUIRE(placed.ok());
  REQUIRE(placed->size() == 4);
  const ReuseOffset slot_offset = offset(slot, 5, 1), tail_offset = offset(tail, 6, 1);
  std::vector<ReusePart> parts{
      {.base = lead.at(0), .position = (*placed)[0].position, .rotated_only = true},
      {.base = slot.at(0), .position = (*placed)[1].position, .offsets = {slot_offset}},
      {.base = slot.at(0), .position = (*placed)[2].position, .offsets = {slot_offset}},
      {.base = tail.at(8), .position = (*placed)[3].position, .offsets = {tail_offset}}};
  const auto g = shape;
  test::TestCache real(g, 21);
  {
    const Segment* const segments[] = {&lead, &slot, &slot, &tail};
    const std::uint64_t contexts[] = {0, 5, 5, 6};
    std::int64_t at = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const Segment in_place = i == 0 ? *segments[i] : segments[i]->in_context(contexts[i]);
      test::TestCache part(g, in_place.tokens);
      in_place.write(part, at);
      for (std::size_t p = 0; p < real.planes(); ++p) {
        for (std::int64_t t = 0; t < in_place.tokens; ++t) {
          for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t c = 0; c < 8; ++c)
              real.set(p, at + t, h, c, static_cast<float>(part.get(p, t, h, c)));
          }
        }
      }
      at += in_place.tokens;
    }
  }
  const auto out = rendered(parts, g);
  REQUIRE(!out.empty());
  REQUIRE(difference(out, real.buffers()) < 1e-5);
}

TEST_CASE("anchors: vectors, offsets by context, bytes") {
  const Segment s(shape, 5, 1);
  const auto mean = kvmeld::anchors::mean_value_row(s.at(0));
  REQUIRE(mean.ok());
  REQUIRE(mean->size() == 16);
  double sum = 0;
  for (std::size_t t = 0; t < 5; ++t) sum += s.values[3][t * 16 + 9];
  REQUIRE(static_cast<double>((*mean)[9]) == Approx(sum / 5));
  REQUIRE(kvmeld::anchors::mean_value_row(s.at(0), 3).status().code() ==
          ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::mean_value_row(test::evicted(s.at(0))).status().code() ==
          ErrorCode::payload_missing);
  auto anchor = kvmeld::anchors::make_anchor(s.at(9), *mean);
  REQUIRE(anchor.ok());
  REQUIRE(anchor->id == s.at(9).id());
  const std::size_t bare = anchor->bytes();
  REQUIRE(bare == anchor->base.payloads()[0].byte_count + 64);
  const kvmeld::Digest128 here{1, 0}, there{2, 0};
  REQUIRE(anchor->find(here) == nullptr);
  const auto delta = offset(s, 2, 1).delta;
  REQUIRE(*kvmeld::anchors::add_offset(*anchor, {there, delta, {}}));
  REQUIRE(*kvmeld::anchors::add_offset(*anchor, {here, delta, delta}));
  REQUIRE_FALSE(*kvmeld::anchors::add_offset(*anchor, {here, offset(s, 9, 1).delta, {}}));
  REQUIRE(anchor->find(here)->segment.id() == delta.id());
  REQUIRE(anchor->find(there) != nullptr);
  REQUIRE(anchor->offsets[0].context < anchor->offsets[1].context);
  REQUIRE(anchor->bytes() == bare + 3 * delta.payloads()[0].byte_count);
  REQUIRE(kvmeld::anchors::add_offset(
              *anchor, {kvmeld::Digest128{3, 0}, offset(Segment(shape, 4, 1), 2, 1).delta, {}})
              .status()
              .code() == ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::make_anchor(Segment(shape, 0, 1).at(0), {}).status().code() ==
          ErrorCode::invalid_argument);
}

TEST_CASE("weights by channel are products of single offsets, and add up like weights by segment") {
  const Segment s(shape, 5, 1);
  const std::size_t channels = kvmeld::anchors::channel_count(*shape);
  REQUIRE(channels == 3 * 2 * 2 * 8);
  std::vector<double> distances;  // (anchor, channel)
  for (std::size_t i = 0; i < 2 * channels; ++i)
    distances.push_back(0.1 * static_cast<double>(i * i % 23));
  const std::vector<float> weights = kvmeld::anchors::token_weights(distances, 2, 0.5);
  const std::span<const float> all(weights);
  ReusePart part{.base = s.at(0), .position = 30};
  for (std::size_t a = 0; a < 2; ++a) {
    auto weighed = offset(s, 50 + a, static_cast<std::uint8_t>(a));
    const auto by_channel =
        kvmeld::anchors::weighted_by_channel(weighed.delta, all.subspan(a * channels, channels));
    REQUIRE(by_channel.ok());
    REQUIRE(by_channel->id() != weighed.delta.id());
    weighed.delta = *by_channel;
    part.offsets.push_back(weighed);
  }
  // In plain double: each channel by its own weights; layer 0 stays the base.
  Segment expected = s;
  const Segment first = s.in_context(50), second = s.in_context(51);
  for (std::size_t p = 2; p < s.values.size(); ++p) {
    for (std::size_t i = 0; i < s.values[p].size(); ++i) {
      const std::size_t channel = p * 16 + i % 16;
      expected.values[p][i] =
          s.values[p][i] +
          static_cast<double>(weights[channel]) * (first.values[p][i] - s.values[p][i]) +
          static_cast<double>(weights[channels + channel]) * (second.values[p][i] - s.values[p][i]);
    }
  }
  test::TestCache wanted(shape, 5);
  expected.write(wanted, 30);
  REQUIRE(difference(rendered({&part, 1}, shape), wanted.buffers()) < 1e-5);
  // Equal weights in all channels are a weight of the segment.
  ReusePart same{.base = s.at(0), .position = 30, .offsets = {offset(s, 50, 1)}};
  ReusePart half = same;
  half.offsets[0].weight = 0.5F;
  same.offsets[0].delta = *kvmeld::anchors::weighted_by_channel(same.offsets[0].delta,
                                                                std::vector<float>(channels, 0.5F));
  REQUIRE(rendered({&same, 1}, shape) == rendered({&half, 1}, shape));
  const auto delta = offset(s, 50, 1).delta;
  REQUIRE(kvmeld::anchors::weighted_by_channel(delta, std::vector<float>(channels - 1, 1))
              .status()
              .code() == ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::weighted_by_channel(delta, std::vector<float>(channels, NAN))
              .status()
              .code() == ErrorCode::non_finite);
  const std::vector<float> huge(channels, 1e38F);
  REQUIRE(
      kvmeld::anchors::weighted_by_channel(*kvmeld::anchors::weighted_by_channel(delta, huge), huge)
          .status()
          .code() == ErrorCode::non_finite);
  REQUIRE(kvmeld::anchors::weighted_by_channel(s.at(7), std::vector<float>(channels, 1))
              .status()
              .code() == ErrorCode::invalid_argument);
  REQUIRE(kvmeld::anchors::weighted_by_channel({}, {}).status().code() ==
          ErrorCode::invalid_argument);
}
