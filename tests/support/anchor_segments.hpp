#pragma once
// Segments with numbers of the test's own: what they are alone, and what a context makes of them,
// at any place.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include <kvmeld/anchors/anchor.hpp>
#include <kvmeld/anchors/reuse.hpp>
#include <kvmeld/render.hpp>

#include "random_cache.hpp"
#include "reference.hpp"

namespace test {

/// Un-rotated numbers of a segment, plane by plane, as `TestCache::dense` orders them.
struct Segment {
  std::shared_ptr<const kvmeld::Geometry> geometry;
  std::int64_t tokens = 0;
  Dense values;

  Segment(std::shared_ptr<const kvmeld::Geometry> g, std::int64_t n, std::uint64_t seed)
      : geometry(std::move(g)), tokens(n) {
    TestCache cache(geometry, tokens);
    cache.fill(seed);
    values = cache.dense();
  }
  /// The numbers of plane p belong to this layer.
  [[nodiscard]] std::size_t layer_of(std::size_t plane) const {
    std::size_t l = 0;
    while (plane >= geometry->layers[l].planes.size()) plane -= geometry->layers[l++].planes.size();
    return l;
  }
  /// This plus `scale` times numbers of another seed, in the layers from 1 on: what a context does.
  [[nodiscard]] Segment in_context(std::uint64_t seed, double scale = 0.25) const {
    Segment out = *this;
    const Segment other(geometry, tokens, seed);
    for (std::size_t p = 0; p < values.size(); ++p) {
      for (std::size_t i = 0; layer_of(p) > 0 && i < values[p].size(); ++i)
        out.values[p][i] += scale * other.values[p][i];
    }
    return out;
  }
  /// Writes the segment with its keys rotated in double to `position`, `position + 1`, ….
  void write(TestCache& cache, std::int64_t position) const {
    for (std::size_t p = 0; p < cache.planes(); ++p) {
      const kvmeld::PlaneShape& shape = cache.shape(p);
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          std::vector<double> row;
          const auto begin = static_cast<std::size_t>((t * shape.heads + h) * shape.channels);
          for (std::size_t c = 0; c < static_cast<std::size_t>(shape.channels); ++c)
            row.push_back(values[p][begin + c]);
          const kvmeld::RopeSpec& rope = geometry->layers[cache.layer_of(p)].rope;
          if (shape.rotary) reference::rotation(rope, static_cast<double>(position + t), row);
          for (std::size_t c = 0; c < row.size(); ++c)
            cache.set(p, t, h, static_cast<std::int64_t>(c), static_cast<float>(row[c]));
        }
      }
    }
  }
  [[nodiscard]] kvmeld::Fragment at(std::int64_t position,
                                    const std::vector<std::int64_t>& hidden = {}) const {
    TestCache cache(geometry, tokens, hidden.empty() ? Layout::canonical : Layout::slot_list,
                    hidden);
    write(cache, position);
    std::vector<std::int64_t> positions;
    for (std::int64_t t = 0; t < tokens; ++t) positions.push_back(position + t);
    const auto ids = token_ids(tokens);
    const auto made = kvmeld::seal(cache.ref(), {.tokens = ids, .positions = positions});
    return made ? *made : kvmeld::Fragment{};
  }
};

inline kvmeld::FragmentId anchor_id(std::uint8_t n) {
  kvmeld::FragmentId id;
  id.bytes[0] = 1;
  id.bytes[31] = n;
  return id;
}

/// Renders parts into a fresh cache of `tokens` tokens; empty where anything was refused.
template <class Exec = kvmeld::exec::Sequential>
std::vector<std::vector<std::byte>> rendered(
    std::span<const kvmeld::anchors::ReusePart> parts,
    const std::shared_ptr<const kvmeld::Geometry>& g,
    kvmeld::anchors::ReuseOptions options = {.compute_last = false},
    const Exec& exec = kvmeld::exec::seq) {
  const auto plan = kvmeld::anchors::plan_reuse(parts, *g, options);
  if (!plan) return {};
  TestCache out(g, plan->tokens());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  if (!kvmeld::run(exec, *plan, workspace, out.out())) return {};
  return out.buffers();
}

/// Largest difference of two renders relative to the largest number in the second; f32 caches.
/// Slots that the second leaves untouched the first must leave so, too; their pattern is no number
/// to compare with.
inline double difference(const std::vector<std::vector<std::byte>>& a,
                         const std::vector<std::vector<std::byte>>& b) {
  if (a.empty() || a.size() != b.size()) return HUGE_VAL;
  double most = 0, size = 0;
  for (std::size_t p = 0; p < a.size(); ++p) {
    for (std::size_t i = 0; i + 4 <= a[p].size(); i += 4) {
      float x, y;
      if (std::all_of(&b[p][i], &b[p][i] + 4,
                      [](std::byte byte) { return byte == TestCache::untouched; })) {
        if (std::memcmp(&a[p][i], &b[p][i], 4) != 0) return HUGE_VAL;
        continue;
      }
      std::memcpy(&x, &a[p][i], 4);
      std::memcpy(&y, &b[p][i], 4);
      most = std::max(most, static_cast<double>(std::abs(x - y)));
      size = std::max(size, static_cast<double>(std::abs(y)));
    }
  }
  return most / size;
}

}  // namespace test
