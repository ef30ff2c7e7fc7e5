#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/packed_matrix.hpp>
#include <kvmeld/align/projection_map.hpp>
#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/rope_table.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/cache/turn_rows.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Tokens whose source rows are held in f32 at once: enough that matrices are read from memory seldom.
inline constexpr std::int64_t gather_tokens = 8 * tile_tokens;

/// Numbers a plane among all planes of a geometry, layer by layer; −1: the layer has none of the kind.
[[nodiscard]] inline std::vector<std::ptrdiff_t> plane_indices(const Geometry& geometry, Plane plane) {
  std::vector<std::ptrdiff_t> out;
  std::ptrdiff_t first = 0;
  for (const LayerShape& layer : geometry.layers) {
    const PlaneShape* const shape = find_plane(layer, plane);
    out.push_back(shape == nullptr ? -1 : first + (shape - layer.planes.data()));
    first += std::ssize(layer.planes);
  }
  return out;
}

/// For each distinct token set of a payload, the row of every token, −1 where there is none. Empty: all tokens, in order.
[[nodiscard]] inline std::vector<std::vector<std::int32_t>> token_rows(const Payload& payload) {
  std::vector<std::vector<std::int32_t>> out;
  for (const TokenSet& set : payload.token_sets) {
    std::vector<std::int32_t>& rows = out.emplace_back();
    if (set.all) continue;
    rows.assign(payload.positions.size(), -1);
    for (std::size_t i = 0; i < set.present.size(); ++i) rows[static_cast<std::size_t>(set.present[i])] = static_cast<std::int32_t>(i);
  }
  return out;
}

/// The source rows that a map reads of one plane, for some consecutive tokens: f32, keys without their rotation.
class SourceRows {
 public:
  SourceRows(const ProjectionMap& map, const Geometry& from, const Payload& payload, Plane plane, Isa isa)
      : from_(from), payload_(payload), plane_(plane), isa_(isa), index_(plane_indices(from, plane)), rows_(token_rows(payload)),
        at_(from.layers.size(), -1) {
    for (const LayerMap& layer : map.layers()) {
      for (const MapBlock& block : plane == Plane::key ? layer.key : layer.value) {
        for (const HeadRef& in : block.inputs) at_[static_cast<std::size_t>(in.layer)] = 0;
      }
    }
    std::ptrdiff_t floats = 0;
    for (std::size_t l = 0; l < at_.size(); ++l) {
      if (at_[l] < 0) continue;
      at_[l] = floats;
      floats += width(l) * (std::min)(gather_tokens, std::ssize(payload.positions));
    }
    values_.resize(static_cast<std::size_t>(floats));
  }

  /// Whether a layer holds a token.
  [[nodiscard]] bool holds(std::int32_t layer, std::int64_t token) const noexcept { return row_of(static_cast<std::size_t>(layer), token) >= 0; }

  /// Gathers tokens `first` to `first + count` − 1.
  [[nodiscard]] Status gather(std::int64_t first, std::int64_t count) {
    first_ = first;
    ropes_.clear();
    for (std::size_t l = 0; l < at_.size(); ++l) {
      if (at_[l] < 0) continue;
      const LayerShape& layer = from_.layers[l];
      const PlaneShape& shape = shape_of(l);
      const RopeTable* table = nullptr;
      if (shape.rotary && layer.key_form == KeyForm::post_rope && layer.rope.kind != RopeKind::none) {
        auto found = rope_table(layer.rope, first, count);
        if (!found) return found.error();
        table = *found;
      }
      const std::int64_t bytes = row_bytes(shape) * shape.heads;
      const std::byte* const plane = payload_.bytes.get() + payload_.plane_offsets[static_cast<std::size_t>(index_[l])];
      for (std::int64_t t = 0; t < count; ++t) {
        const std::int64_t row = row_of(l, first + t);
        if (row < 0) continue;
        float* const out = values_.data() + at_[l] + t * width(l);
        load_row(shape.type, isa_, plane + row * bytes, width(l), out);
        if (table == nullptr) continue;
        const Turn turn{table->row(static_cast<std::size_t>(t)), shape.channels, layer.rope.first_channel, layer.rope.rotary_channels, layer.rope.pairing};
        for (std::int32_t h = 0; h < shape.heads; ++h) turn_row(turn, isa_, out + h * shape.channels);
      }
    }
    return {};
  }
  /// Copies the inputs of a block, for one gathered token, into a tile.
  void put(std::span<const HeadRef> inputs, std::int64_t token, std::int32_t tile_token, InputTile& tile) const noexcept {
    std::int32_t channel = 0;
    for (const HeadRef& in : inputs) {
      const auto l = static_cast<std::size_t>(in.layer);
      const std::int32_t channels = shape_of(l).channels;
      tile.put(tile_token, channel, values_.data() + at_[l] + (token - first_) * width(l) + in.head * channels, channels);
      channel += channels;
    }
  }

 private:
  [[nodiscard]] const PlaneShape& shape_of(std::size_t l) const noexcept { return *find_plane(from_.layers[l], plane_); }
  [[nodiscard]] std::ptrdiff_t width(std::size_t l) const noexcept { return std::ptrdiff_t{shape_of(l).heads} * shape_of(l).channels; }
  [[nodiscard]] std::int64_t row_of(std::size_t l, std::int64_t token) const noexcept {
    const std::vector<std::int32_t>& rows = rows_[payload_.layer_set[l]];
    return rows.empty() ? token : rows[static_cast<std::size_t>(token)];
  }
  /// The turns of the gathered tokens back to position 0. Layers with equal ropes share them.
  [[nodiscard]] Result<const RopeTable*> rope_table(const RopeSpec& rope, std::int64_t first, std::int64_t count) {
    for (const auto& [known, table] : ropes_) {
      if (*known == rope) return table.get();
    }
    std::vector<std::int64_t> shifts;
    for (std::int64_t t = first; t < first + count; ++t) shifts.push_back(-payload_.positions[static_cast<std::size_t>(t)]);
    const std::int64_t length = payload_.positions.back() + 1;
    if (length_dependent(rope) && length > rope.original_context) {
      return error(ErrorCode::rope_length_dependent, "keys up to position ", length - 1, " behind an original context of ", rope.original_context,
                   " do not say by which frequencies they were turned; seal them before rotation");
    }
    auto table = RopeTable::build(rope, shifts, length);
    if (!table) return table.error();
    ropes_.emplace_back(&rope, std::make_unique<RopeTable>(*std::move(table)));
    return static_cast<const RopeTable*>(ropes_.back().second.get());
  }

  const Geometry& from_;
  const Payload& payload_;
  Plane plane_;
  Isa isa_;
  std::vector<std::ptrdiff_t> index_;             // (layers) plane number
  std::vector<std::vector<std::int32_t>> rows_;   // (token sets)
  std::vector<std::ptrdiff_t> at_;                // (layers) first float; −1: not read
  std::vector<float> values_;                     // (layer that is read, token, head, channel)
  std::vector<std::pair<const RopeSpec*, std::unique_ptr<RopeTable>>> ropes_;
  std::int64_t first_ = 0;
};

}  // namespace detail
KVMELD_NAMESPACE_END
