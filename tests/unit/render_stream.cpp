// Outputs above the cache's size: streamed copies and streamed turns at every alignment write the
// bytes of plain ones, and no other.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <kvmeld/extend/render_rows.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/rope.hpp>

#include "support/catch.hpp"

namespace {

using kvmeld::ElementType;
using kvmeld::Isa;
using kvmeld::RopePairing;

constexpr std::byte kept{1};

using kvmeld::exec::StreamWay;

// Large outputs are written so, from one byte on, until it goes.
struct Way {
  explicit Way(StreamWay way) { REQUIRE(kvmeld::exec::set_streaming({way, 1}).ok()); }
  Way(const Way&) = delete;
  ~Way() { (void)kvmeld::exec::set_streaming(kvmeld::exec::default_streaming()); }
};

struct Head {
  int channels, first, rotary;
};

// Rows of normal numbers in `type`.
std::vector<std::byte> keys(ElementType type, int channels, std::int64_t rows) {
  std::mt19937 bits(static_cast<unsigned>(channels));
  std::vector<float> row(static_cast<std::size_t>(channels));
  const std::int64_t bytes = kvmeld::byte_size(type, channels);
  std::vector<std::byte> out(static_cast<std::size_t>(rows * bytes));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (float& x : row) x = static_cast<float>(bits()) / 2147483648.0F - 1.0F;
    kvmeld::extend::store_row(type, Isa::baseline, row.data(), channels, out.data() + r * bytes);
  }
  return out;
}

// Bytes that differ from plain turns in the baseline, or lie outside of them and changed.
std::size_t wrong_bytes(ElementType type, RopePairing pairing, const Head& head, std::int64_t rows,
                        std::size_t offset, Isa isa) {
  auto rope = kvmeld::RopeSpec::rotary(head.rotary, 10000.0, pairing);
  rope.first_channel = head.first;
  const std::vector<std::int64_t> shifts{37};
  const auto table = kvmeld::RopeTable::build(rope, shifts);
  REQUIRE(table.ok());
  const kvmeld::extend::Rotation rotation{table->row(0), head.channels, head.first, head.rotary,
                                          pairing};
  const std::vector<std::byte> in = keys(type, head.channels, rows);
  std::vector<std::byte> expected(in.size());
  const std::int64_t bytes = kvmeld::byte_size(type, head.channels);
  kvmeld::detail::rotate_stored_rows(type, Isa::baseline, rotation, in.data(), bytes,
                                     expected.data(), bytes, rows);

  std::vector<std::byte> buffer(in.size() + 256, kept);
  std::size_t begin = 64 - reinterpret_cast<std::uintptr_t>(buffer.data()) % 64 + offset;
  kvmeld::extend::PlaneTask task;
  task.out.shape.type = type;
  task.out.shape.channels = head.channels;
  kvmeld::detail::rotate_run(task, {isa, true}, rotation, in.data(), buffer.data() + begin, rows);
  kvmeld::detail::stream_fence();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < buffer.size(); ++i) {
    wrong +=
        buffer[i] != (i >= begin && i < begin + in.size() ? expected[i - begin] : kept) ? 1U : 0U;
  }
  return wrong;
}

}  // namespace

TEST_CASE("a streamed copy copies its bytes and no other, from and to any address") {
  const Way way(GENERATE(StreamWay::off, StreamWay::one_page, StreamWay::four_pages));
  std::vector<std::byte> in(1200), out(1200);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(7 * i + 2);
  std::size_t wrong = 0;
  for (std::size_t to = 1; to < 66; ++to) {
    for (std::size_t from = 0; from < 66; from += 3) {
      for (const std::size_t size : {0U, 1U, 63U, 64U, 65U, 200U, 1000U}) {
        std::fill(out.begin(), out.end(), kept);
        kvmeld::extend::stream_copy(out.data() + to, in.data() + from, size);
        kvmeld::detail::stream_fence();
        for (std::size_t i = 0; i < size; ++i) wrong += out[to + i] != in[from + i] ? 1U : 0U;
        wrong += out[to - 1] != kept || out[to + size] != kept ? 1U : 0U;
      }
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("a streamed copy longer than its four stretches copies its bytes and no other") {
  const Way way(GENERATE(StreamWay::one_page, StreamWay::four_pages));
  std::vector<std::byte> in(50000), out(50200);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(i / 251 + 3 * i);
  std::size_t wrong = 0;
  for (const std::size_t to : {64U, 65U, 80U, 127U}) {
    for (const std::size_t size : {16384U, 16447U, 33000U, 49999U}) {
      std::fill(out.begin(), out.end(), kept);
      kvmeld::extend::stream_copy(out.data() + to, in.data(), size);
      kvmeld::detail::stream_fence();
      for (std::size_t i = 0; i < size; ++i) wrong += out[to + i] != in[i] ? 1U : 0U;
      wrong += out[to - 1] != kept || out[to + size] != kept ? 1U : 0U;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE(
    "streamed turns write the bytes of plain ones, straight from registers and through a stage") {
  const Way way(GENERATE(StreamWay::one_page, StreamWay::four_pages));
  const auto type =
      GENERATE(ElementType::f16, ElementType::bf16, ElementType::f32, ElementType::f8_e4m3);
  const auto pairing = GENERATE(RopePairing::half_split, RopePairing::interleaved);
  const auto head = GENERATE(Head{32, 0, 32}, Head{64, 0, 64}, Head{96, 0, 96}, Head{64, 8, 40},
                             Head{80, 0, 80}, Head{1024, 0, 1024});
  CAPTURE(kvmeld::to_string(type), static_cast<int>(pairing), head.channels, head.rotary);
  for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > kvmeld::best_isa()) continue;
    for (const std::int64_t rows : {1, 35, 300}) {
      for (const std::size_t offset : {0U, 4U, 16U}) {
        // through a stage, whichever way
        if (offset != 0 && !kvmeld::detail::streams_four_pages()) continue;
        CAPTURE(kvmeld::to_string(isa), rows, offset);
        CHECK(wrong_bytes(type, pairing, head, rows, offset, isa) == 0);
      }
    }
  }
}

TEST_CASE("a render writes the same bytes whichever way it streams, and off means off") {
  kvmeld::FragmentSet set;
  auto geometry = std::make_shared<kvmeld::Geometry>();
  for (int l = 0; l < 3; ++l) {
    kvmeld::RopeSpec rope;
    rope.kind = kvmeld::RopeKind::rotary;
    rope.rotary_channels = 64;
    geometry->layers.push_back(kvmeld::attention_layer(ElementType::bf16, 2, 64, rope));
  }
  for (std::uint64_t agent = 0; agent < 3; ++agent) {
    kvmeld::HostCache cache(geometry, 37);
    const std::vector<std::byte> values = keys(ElementType::bf16, 64, 3 * 2 * 2 * 37);
    REQUIRE(values.size() <= cache.bytes().size());
    std::rotate_copy(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(256 * agent),
                     values.end(), cache.bytes().begin());
    const auto fragment = kvmeld::seal(cache.kv_cache_ref());
    REQUIRE(fragment.ok());
    REQUIRE(set.insert(*fragment, kvmeld::Dot{agent, 0}).ok());
  }
  std::vector<kvmeld::Digest128> digests;
  for (const StreamWay chosen : {StreamWay::off, StreamWay::one_page, StreamWay::four_pages}) {
    const Way way(chosen);
    CHECK(kvmeld::detail::streams_output(1) ==
          (KVMELD_X86_DISPATCH != 0 && chosen != StreamWay::off));
    kvmeld::HostCache out(geometry, 111);
    const auto report = kvmeld::render(kvmeld::exec::seq, set, kvmeld::merger(), out.mutable_ref(),
                                       {}, {.content_digest = true});
    REQUIRE(report.ok());
    digests.push_back(*report->content_digest);
  }
  CHECK(digests[1] == digests[0]);
  CHECK(digests[2] == digests[0]);
}

TEST_CASE(
    "how outputs stream is chosen by the processor, measured on request, and set by the caller") {
  const kvmeld::exec::Streaming chosen = kvmeld::exec::default_streaming();
  CHECK(kvmeld::exec::streaming() == chosen);
  CHECK(chosen.threshold_bytes >= 4 << 20);
  CHECK(kvmeld::detail::streams_output(chosen.threshold_bytes) == (chosen.way != StreamWay::off));
  CHECK_FALSE(kvmeld::detail::streams_output(chosen.threshold_bytes - 1));
  CHECK(kvmeld::exec::set_streaming({StreamWay::one_page, -1}).code() ==
        kvmeld::ErrorCode::invalid_argument);
  CHECK(kvmeld::exec::set_streaming({static_cast<StreamWay>(9), 1}).code() ==
        kvmeld::ErrorCode::unknown_field);
  CHECK(kvmeld::exec::streaming() == chosen);
  std::vector<std::byte> scratch(std::size_t{2} << 20);
  const auto measured = kvmeld::exec::measure_streaming(scratch);
  REQUIRE(measured.ok());
  CHECK(measured->threshold_bytes == chosen.threshold_bytes);
  CHECK(kvmeld::exec::streaming() == chosen);  // measuring chooses nothing
  scratch.pop_back();
  CHECK(kvmeld::exec::measure_streaming(scratch).status().code() ==
        kvmeld::ErrorCode::invalid_argument);
}

TEST_CASE(
    "planes of a host cache begin with a line, also where rows are odd, and all bytes are inside") {
  auto geometry = std::make_shared<kvmeld::Geometry>();
  for (const int channels : {3, 64, 7})
    geometry->layers.push_back(
        kvmeld::attention_layer(ElementType::f16, 1, channels, kvmeld::RopeSpec::none()));
  for (const std::int64_t tokens : {0, 1, 5}) {
    kvmeld::HostCache cache(geometry, tokens);
    const kvmeld::HostCache moved = std::move(cache);
    const std::byte* const begin = moved.bytes().data();
    const kvmeld::KvCacheRef ref = moved.kv_cache_ref();
    for (const kvmeld::PlaneRef& plane : ref.planes()) {
      CHECK(reinterpret_cast<std::uintptr_t>(plane.data) % 64 == 0);
      CHECK(plane.data >= begin);
      CHECK(plane.data + tokens * kvmeld::byte_size(ElementType::f16, plane.shape.channels) <=
            begin + moved.bytes().size());
    }
  }
}
