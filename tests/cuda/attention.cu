// States of attention merged on the device: the bytes of the host's rows, in both bases, with empty
// parts and in place.
#include <kvmeld/cuda/render.cuh>

#include <kvmeld/policies/attention_state.hpp>

#include <limits>

#include "cuda/device_cache.cuh"
#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

template <class Base>
void compare(std::int64_t rows, std::int64_t heads, std::int64_t channels) {
  const auto sums = static_cast<std::size_t>(rows * heads);
  const std::size_t outputs = sums * static_cast<std::size_t>(channels);
  std::vector<float> values[2] = {std::vector<float>(outputs), std::vector<float>(outputs)};
  std::vector<float> lse[2] = {std::vector<float>(sums), std::vector<float>(sums)};
  test::Random random(3);
  for (int i = 0; i < 2; ++i) {
    for (float& x : values[i]) x = random.value();
    for (float& x : lse[i])
      x = random.below(4) == 0 ? -std::numeric_limits<float>::infinity() : 20.0F * random.value();
  }
  std::vector<float> expected(outputs), expected_lse(sums), got(outputs), got_lse(sums);
  const kvmeld::attention::AttentionState<Base> a{values[0], lse[0], rows, heads, channels},
      b{values[1], lse[1], rows, heads, channels};
  REQUIRE(kvmeld::attention::merge_attention_states(a, b,
                                                    {expected, expected_lse, rows, heads, channels})
              .ok());

  const test::DeviceBytes da(outputs * sizeof(float)), db(outputs * sizeof(float)),
      la(sums * sizeof(float)), lb(sums * sizeof(float));
  da.upload(values[0].data());
  db.upload(values[1].data());
  la.upload(lse[0].data());
  lb.upload(lse[1].data());
  const auto floats = [](const test::DeviceBytes& bytes, std::size_t n) {
    return std::span<float>(reinterpret_cast<float*>(bytes.data()), n);
  };
  const kvmeld::attention::MutableAttentionState<Base> on_a{floats(da, outputs), floats(la, sums),
                                                            rows, heads, channels};
  const kvmeld::attention::AttentionState<Base> on_b{floats(db, outputs), floats(lb, sums), rows,
                                                     heads, channels};
  const test::TestStream stream;
  const kvmeld::attention::AttentionState<Base> before = on_a;
  const kvmeld::Status status =
      kvmeld::attention::merge_attention_states(stream.get(), before, on_b, on_a);
  INFO(status.message());
  REQUIRE(status.ok());
  stream.wait();
  da.download(got.data());
  la.download(got_lse.data());
  CHECK(got == expected);
  CHECK(got_lse == expected_lse);
  const kvmeld::attention::MutableAttentionState<Base> shorter{
      floats(da, outputs), floats(la, sums - 1), rows, heads, channels};
  CHECK(kvmeld::attention::merge_attention_states(stream.get(), before, on_b, shorter).code() ==
        kvmeld::ErrorCode::invalid_argument);
}

}  // namespace

TEST_CASE("states merge on the device to the bytes of the host") {
  for (const std::int64_t channels : {1, 31, 64, 80, 129}) {
    compare<kvmeld::attention::LseNatural>(5, 3, channels);
    compare<kvmeld::attention::LseBase2>(7, 2, channels);
  }
}
