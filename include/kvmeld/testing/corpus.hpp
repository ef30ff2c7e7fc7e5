#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <kvmeld/cache/host_cache.hpp>
#include <kvmeld/cache/seal.hpp>
#include <kvmeld/testing/random.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// A small model: two layers of one head with 32 channels, f32, rotated keys.
[[nodiscard]] inline std::shared_ptr<const Geometry> small_geometry() {
  auto geometry = std::make_shared<Geometry>();
  geometry->model = "simulated model";
  geometry->tokenizer = "simulated tokenizer";
  const RopeSpec rope = RopeSpec::rotary(32, 10000.0, RopePairing::half_split);
  geometry->layers.assign(2, attention_layer(ElementType::f32, 1, 32, rope));
  return geometry;
}

/// Fragments of one to four tokens with random K/V in [−4, 4), some of which share tokens or
/// chunks. Its planes must be f32 throughout.
[[nodiscard]] inline Result<std::vector<Fragment>> make_corpus(
    const std::shared_ptr<const Geometry>& geometry, std::size_t count, std::uint64_t seed) {
  std::vector<Fragment> out;
  Random random(seed);
  for (std::size_t i = 0; i < count; ++i) {
    const auto tokens = random.between(1, 4);
    HostCache cache(geometry, tokens);
    const std::size_t values = cache.bytes().size() / sizeof(float);
    const bool repeats = random.chance(0.2);  // equal chunks within the fragment
    const float same = static_cast<float>(i + 1) / 16;
    for (std::size_t v = 0; v < values; ++v) {
      const float drawn = static_cast<float>(random.between(-(1 << 22), (1 << 22) - 1)) * 0x1p-20F;
      const float value = repeats ? same : drawn;
      std::memcpy(cache.bytes().data() + v * sizeof(float), &value, sizeof value);
    }
    std::vector<TokenId> ids;
    std::vector<std::int64_t> positions;
    for (std::int64_t t = 0; t < tokens; ++t) {
      ids.push_back(static_cast<TokenId>(100 + random.below(8)));
      positions.push_back(static_cast<std::int64_t>(3 * i) + t);
    }
    auto fragment = seal(cache.kv_cache_ref(), {.tokens = ids, .positions = positions});
    if (!fragment) return fragment.error();
    out.push_back(*std::move(fragment));
  }
  return out;
}

}  // namespace testing
KVMELD_NAMESPACE_END
