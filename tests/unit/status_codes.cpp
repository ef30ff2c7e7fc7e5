// Error codes have names of their own, results carry a value or a reason.
#include <set>

#include <kvmeld/kvmeld.hpp>
#include <kvmeld/status.hpp>

#include "support/catch.hpp"

using kvmeld::ErrorCode;
using kvmeld::Result;
using kvmeld::Status;

TEST_CASE("every code has a name of its own") {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(ErrorCode::memory_space); ++code)
    names.insert(kvmeld::to_string(static_cast<ErrorCode>(code)));
  CHECK(names.size() == static_cast<std::size_t>(ErrorCode::memory_space) + 1);
  CHECK(names.count("unknown") == 0);
  CHECK(kvmeld::to_string(static_cast<ErrorCode>(250)) == "unknown");
  // and it is its own
  CHECK(kvmeld::to_string(ErrorCode::ok) == "ok");
  CHECK(kvmeld::to_string(ErrorCode::duplicate_bos) == "duplicate_bos");
  CHECK(kvmeld::to_string(ErrorCode::payload_missing) == "payload_missing");
  CHECK(kvmeld::to_string(ErrorCode::dot_reused) == "dot_reused");
  CHECK(kvmeld::to_string(ErrorCode::gate_refused) == "gate_refused");
  CHECK(kvmeld::to_string(ErrorCode::memory_space) == "memory_space");
}

TEST_CASE("a status is a code and a sentence") {
  CHECK(Status{}.ok());
  CHECK(Status{}.message().empty());
  const Status bad = kvmeld::extend::error(ErrorCode::truncated, "ends at byte ", 7, " of ", 12U,
                                           ", share ", 0.5F);
  CHECK_FALSE(bad);
  CHECK(bad.code() == ErrorCode::truncated);
  CHECK(bad.message() == "ends at byte 7 of 12, share 0.5");
  CHECK(kvmeld::extend::error(ErrorCode::truncated).message().empty());
}

TEST_CASE("a result holds a value or an error, and gives a movable value away") {
  const Result<int> seven = 7;
  CHECK(*seven == 7);
  CHECK(seven.status().ok());
  Result<std::string> moved = std::string(100, 'x');
  const std::string text = *std::move(moved);
  CHECK(text.size() == 100);
  const Result<int> none{ErrorCode::corrupt, "bytes contradict themselves"};
  CHECK_FALSE(none.ok());
  CHECK(none.error().code() == ErrorCode::corrupt);
  const auto twice = [](Result<int> in) -> Result<int> {
    KVMELD_TRY(in.status());
    return 2 * *in;
  };
  CHECK(*twice(4) == 8);
  CHECK(twice(none).error().message() == "bytes contradict themselves");
}

TEST_CASE("messages name enumerators, and say the number of one that this build has no name for") {
  using namespace kvmeld;
  const auto text = [](const auto& value) {
    return extend::error(ErrorCode::unknown_field, "<", value, ">").message();
  };
  CHECK(text(Plane::rope_part) == "<rope_part>");
  CHECK(text(KeyForm::pre_rope) == "<pre_rope>");
  CHECK(text(ScaleScheme::per_channel_group) == "<per_channel_group>");
  CHECK(text(RopeKind::undeclared) == "<undeclared>");
  CHECK(text(RopePairing::interleaved) == "<interleaved>");
  CHECK(text(RopeScaling::explicit_factors) == "<explicit_factors>");
  CHECK(text(MatchMode::neighbours) == "<neighbours>");
  CHECK(text(ElementType::bf16) == "<bf16>");
  CHECK(text(exec::StreamWay::four_pages) == "<four_pages>");
  CHECK(text(static_cast<Plane>(77)) == "<unknown 77>");
}

// Compiled with -Wextra -Werror: a member without a default would have every user write it.
TEST_CASE(
    "public aggregates are written by the members that matter, and the others have defaults") {
  using namespace kvmeld;
  CHECK(Target{.first_position = 3}.refuse == RenderWarnings::none);
  CHECK(RenderReport{.tokens = 3}.render_id == Digest128{});
  CHECK(RunOptions{.content_digest = true}.content_digest);
  CHECK(Geometry{.model = "m"}.layers.empty());
  CHECK(LayerShape{.window = 3}.planes.empty());
  CHECK(PlaneShape{.plane = Plane::value}.heads == 0);
  CHECK(RopeSpec{.base = 3.0}.kind == RopeKind::undeclared);
  CHECK(SealOptions{.role = Role::prefix}.tokens.empty());
  CHECK(Payload{.byte_count = 3}.bytes == nullptr);
  CHECK(Alignment{.positions = {1}}.groups.empty());
  CHECK(AlignmentGroup{.row_begin = {0}}.contributions.empty());
  CHECK(Contribution{.token = 3}.source == 0);
  CHECK(Mark{.time_ms = 3}.dot == Dot{});
  CHECK(Removal{.id = {}}.removed.empty());
  CHECK(TokenSlots{.first = 3}.table == nullptr);
  CHECK(exec::Streaming{.threshold_bytes = 3}.way == exec::StreamWay::off);
}
