#pragma once
// Changes to the rows of a merged cache in the engine: keys scaled by a temperature, and the mean
// offset of recomputed tokens added to the others.

#include "engine.hpp"

#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace quality {

using example::Engine;
using example::Tokens;

/// Reads sequence 0, gives every row to `change(row, values)` to alter in place, and writes it back
/// by way of sequence 1.
template <class Change>
kvmeld::Status edit(Engine& engine, const std::shared_ptr<const kvmeld::Geometry>& geometry,
                    const Tokens& tokens, const Change& change) {
  auto state = kvmeld::llama::read(engine.context(), 0, geometry);
  if (!state) return state.error();
  auto blob = kvmeld::llama::make_state(geometry, state->form(), state->positions(), tokens);
  if (!blob) return blob.error();
  for (std::size_t l = 0; l < geometry->layers.size(); ++l)
    for (std::size_t p = 0; p < geometry->layers[l].planes.size(); ++p)
      for (std::int64_t t = 0; t < state->view().tokens(); ++t)
        for (std::int32_t h = 0; h < geometry->layers[l].planes[p].heads; ++h) {
          const kvmeld::CacheRow row{l, p, t, h};
          auto values = kvmeld::read_row(state->view(), row);
          if (!values) return values.error();
          change(row, *values);
          if (kvmeld::Status status = kvmeld::write_row(blob->mutable_ref(), row, *values); !status)
            return status;
        }
  return kvmeld::llama::write(engine.context(), 0, 1, *blob);
}

/// Divides the keys of every token from `first` on by a temperature, which is what it does to the
/// logits there: APE's (arXiv 2502.05431), without its factor on the weight of the context.
inline kvmeld::Status cool_keys(Engine& engine,
                                const std::shared_ptr<const kvmeld::Geometry>& geometry,
                                const Tokens& tokens, std::size_t first, float temperature) {
  return edit(engine, geometry, tokens,
              [&](const kvmeld::CacheRow& row, std::vector<float>& values) {
                if (static_cast<std::size_t>(row.token) < first) return;
                if (!geometry->layers[row.layer].planes[row.plane].rotary) return;
                for (float& x : values) x /= temperature;
              });
}

/// A stretch of a merged sequence that one agent's tokens fill, and which of them were computed
/// again.
struct Stretch {
  std::size_t first = 0;
  std::vector<std::uint8_t> recomputed{};  ///< one a token
};

/// Mean offsets between recomputed rows and cached ones, keys without position, for one stretch.
class MeanOffset {
 public:
  /// `before` and `after` hold the same tokens at the positions 0, 1, 2, …, before and after some
  /// of them were computed again.
  static kvmeld::Result<MeanOffset> measure(const kvmeld::KvCacheRef& before,
                                            const kvmeld::KvCacheRef& after,
                                            const Stretch& stretch) {
    MeanOffset out;
    const auto& layers = before.geometry().layers;
    std::size_t count = 0;
    for (const std::uint8_t mark : stretch.recomputed) count += mark;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      for (std::size_t p = 0; p < layers[l].planes.size(); ++p) {
        for (std::int32_t h = 0; h < layers[l].planes[p].heads; ++h) {
          std::vector<float> sum(static_cast<std::size_t>(layers[l].planes[p].channels));
          for (std::size_t i = 0; i < stretch.recomputed.size(); ++i) {
            if (stretch.recomputed[i] == 0) continue;
            const auto at = static_cast<std::int64_t>(stretch.first + i);
            auto a = kvmeld::read_row(before, {l, p, at, h});
            const auto b = kvmeld::read_row(after, {l, p, at, h});
            if (!a) return a.error();
            if (!b) return b.error();
            for (std::size_t c = 0; c < a->size(); ++c) (*a)[c] = (*b)[c] - (*a)[c];
            if (kvmeld::Status status = rotate(layers[l], p, -at, *a); !status) return status;
            for (std::size_t c = 0; c < a->size(); ++c)
              sum[c] += (*a)[c] / static_cast<float>(count);
          }
          out.rows_.push_back({l, p, h, std::move(sum)});
        }
      }
    }
    return out;
  }

  /// Adds the offset to a row.
  kvmeld::Status add(const kvmeld::Geometry& geometry, const kvmeld::CacheRow& row,
                     std::vector<float>& values) const {
    for (const Row& mean : rows_) {
      if (mean.layer != row.layer || mean.plane != row.plane || mean.head != row.head) continue;
      std::vector<float> offset = mean.values;
      if (kvmeld::Status status = rotate(geometry.layers[row.layer], row.plane, row.token, offset);
          !status)
        return status;
      for (std::size_t c = 0; c < values.size(); ++c) values[c] += offset[c];
    }
    return {};
  }

 private:
  struct Row {
    std::size_t layer, plane;
    std::int32_t head;
    std::vector<float> values;
  };

  static kvmeld::Status rotate(const kvmeld::LayerShape& layer, std::size_t plane,
                               std::int64_t shift, std::vector<float>& values) {
    if (!layer.planes[plane].rotary) return {};
    const std::int64_t shifts[] = {shift};
    const auto table = kvmeld::RopeTable::build(layer.rope, shifts);
    if (!table) return table.error();
    const std::vector<float> from = values;
    for (std::size_t c = 0; c < values.size(); ++c)
      values[c] = kvmeld::rotated_channel(layer.rope.pairing, layer.rope.first_channel,
                                          layer.rope.rotary_channels, table->row(0), from.data(),
                                          static_cast<std::int32_t>(c));
    return {};
  }

  std::vector<Row> rows_;
};

}  // namespace quality
