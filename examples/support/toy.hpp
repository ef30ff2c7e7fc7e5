#pragma once

/// A small cache for examples that need no model: what an engine would have computed is numbers.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <kvmeld/kvmeld.hpp>
#include <memory>
#include <vector>

namespace toy {

/// Two layers of two KV heads with 32 channels, f32.
inline std::shared_ptr<const kvmeld::Geometry> geometry() {
  auto made = std::make_shared<kvmeld::Geometry>();
  const auto rope = kvmeld::RopeSpec::rotary(32, 1e4, kvmeld::RopePairing::half_split);
  made->model = "toy";
  made->layers.assign(2, kvmeld::attention_layer(kvmeld::ElementType::f32, 2, 32, rope));
  return made;
}

/// The K/V of `tokens` tokens, which depends on a seed.
inline kvmeld::HostCache cache(const std::shared_ptr<const kvmeld::Geometry>& geometry,
                               std::int64_t tokens, std::uint32_t seed) {
  kvmeld::HostCache made(geometry, tokens);
  auto* const values = reinterpret_cast<float*>(made.bytes().data());
  for (std::size_t i = 0; i < made.bytes().size() / sizeof(float); ++i) {
    seed = seed * 1664525 + 1013904223;  // Numerical Recipes
    values[i] = static_cast<float>(seed >> 8) / (1 << 24) - 0.5F;
  }
  return made;
}

/// Ids of `tokens` tokens: first, first + 1, …
inline std::vector<kvmeld::TokenId> ids(kvmeld::TokenId first, std::int64_t tokens) {
  std::vector<kvmeld::TokenId> made;
  for (std::int64_t t = 0; t < tokens; ++t) made.push_back(first + static_cast<kvmeld::TokenId>(t));
  return made;
}

/// The value, or the end of the program with the reason.
template <class T>
T value(kvmeld::Result<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "%s\n", result.error().message().c_str());
  std::exit(1);
}
inline void check(const kvmeld::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

}  // namespace toy
