#pragma once

// Caches, fragments and sets of a given size.

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/kvmeld.hpp>

namespace bench {

inline constexpr std::int64_t mebibyte = 1 << 20;

/// Finite elements of every type that the benchmarks use.
inline void fill(std::span<std::byte> bytes, std::uint32_t seed) {
  for (std::size_t i = 0; i + 4 <= bytes.size(); i += 4) {
    const std::uint32_t word =
        0x3c003c00U + ((static_cast<std::uint32_t>(i) * 2654435761U + seed * 97U) & 0x03ff03ffU);
    std::memcpy(&bytes[i], &word, 4);
  }
}

/// A model of 24 layers of 2 KV heads of 64 channels, as small models of today have them.
inline std::shared_ptr<const kvmeld::Geometry> small_model(
    kvmeld::ElementType type, kvmeld::RopePairing pairing = kvmeld::RopePairing::half_split) {
  const auto rope = kvmeld::RopeSpec::rotary(64, 10000.0, pairing);
  auto geometry = std::make_shared<kvmeld::Geometry>();
  for (int layer = 0; layer < 24; ++layer)
    geometry->layers.push_back(kvmeld::attention_layer(type, 2, 64, rope));
  return geometry;
}

/// One layer whose keys carry no rotation: a token's heads fuse as they lie.
inline std::shared_ptr<const kvmeld::Geometry> plain_layer(kvmeld::ElementType type) {
  auto geometry = std::make_shared<kvmeld::Geometry>();
  geometry->layers.push_back(kvmeld::attention_layer(type, 8, 128, kvmeld::RopeSpec::none()));
  return geometry;
}

inline std::int64_t token_bytes(const kvmeld::Geometry& geometry) {
  std::int64_t bytes = 0;
  for (const auto& layer : geometry.layers) {
    for (const auto& plane : layer.planes)
      bytes += kvmeld::byte_size(plane.type, plane.channels) * plane.heads;
  }
  return bytes;
}

/// A set of `agents` fragments of `tokens` tokens each; empty where anything was refused.
inline kvmeld::FragmentSet agents(const std::shared_ptr<const kvmeld::Geometry>& geometry,
                                  int agents, std::int64_t tokens) {
  kvmeld::FragmentSet set;
  for (int agent = 0; agent < agents; ++agent) {
    kvmeld::HostCache cache(geometry, tokens);
    fill(cache.bytes(), static_cast<std::uint32_t>(agent));
    const auto fragment = kvmeld::seal(cache.kv_cache_ref());
    if (!fragment || !set.insert(*fragment, kvmeld::Dot{static_cast<std::uint64_t>(agent), 0}))
      return {};
  }
  return set;
}

/// A plan with the memory that it renders into.
template <class M>
struct Render {
  kvmeld::Plan<M> plan;
  kvmeld::HostCache out;
  std::vector<std::byte> workspace;

  template <class E>
  void run(const E& exec) {
    if (!kvmeld::run(exec, plan, workspace, out.mutable_ref())) std::abort();
  }
};

template <class M>
Render<M> rendering(const kvmeld::FragmentSet& set,
                    const std::shared_ptr<const kvmeld::Geometry>& geometry, const M& merger) {
  kvmeld::Target target{*geometry};
  target.first_position = 100;  // so that every key is rotated
  auto plan = kvmeld::plan(set, merger, target);
  if (!plan) std::abort();
  const std::int64_t tokens = plan->tokens();
  std::vector<std::byte> workspace(plan->workspace_bytes());
  return {*std::move(plan), kvmeld::HostCache(geometry, tokens), std::move(workspace)};
}

/// Source and destination of plain copies.
struct Copy {
  std::vector<std::byte> from, to;

  explicit Copy(std::int64_t bytes)
      : from(static_cast<std::size_t>(bytes), std::byte{1}), to(from.size()) {}
  void operator()() { std::memcpy(to.data(), from.data(), from.size()); }
};

}  // namespace bench
