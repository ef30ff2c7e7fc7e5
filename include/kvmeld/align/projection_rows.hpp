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

/// Tokens whose source rows are held in f32 at once: enough that matrices are read from memory
/// seldom.
inline constexpr std::int64_t gather_tokens = 8 * tile_tokens;

/// Numbers a plane among all planes of a geometry, layer by layer; −1: the layer has none of the
/// kind.
[[nodiscard]] inline std::vector<std::ptrdiff_t> plane_indices(const Geometry& geometry,
                                                               Plane plane) {
  std::vector<std::ptrdiff_t> out;
  std::ptrdiff_t first = 0;
  for (const LayerShape& layer : geometry.layers) {
    const PlaneShape* const shape = find_plane(layer, plane);
    out.push_back(shape == nullptr ? -1 : first + (shape - layer.planes.data()));
    first += std::ssize(layer.planes);
  }
  return out;
}

/// For each distinct token set of a payload, the row of every token, −1 where there is none. Empty:
/// all tokens, in order.
[[nodiscard]] inline std::vector<std::vector<std::int32_t>> token_rows(const Payload& payload) {
  std::vector<std::vector<std::int32_t>> out;
  for (const TokenSet& set : payload.token_sets) {
    std::vector<std::int32_t>& rows = out.emplace_back();
    if (set.all) continue;
    rows.assign(payload.positions.size(), -1);
    for (std::size_t i = 0; i < set.present.size(); ++i)
      rows[static_cast<std::size_t>(set.present[i])] = static_cast<std::int32_t>(i);
  }
  return out;
}

/// The source rows of one plane that the target layers at hand are made of, for some consecutive
/// tokens: f32, keys without their rotation. A source layer is gathered when the first target layer
/// asks for it and its memory is used again after the last.
class SourceRows {
 public:
  using TokenRows = std::vector<std::vector<std::int32_t>>;

  SourceRows(const ProjectionMap& map, const Geometry& from, const Payload& payload,
             const TokenRows& rows, Plane plane, Isa isa)
      : map_(map),
        from_(from),
        payload_(payload),
        rows_(rows),
        plane_(plane),
        isa_(isa),
        index_(plane_indices(from, plane)),
        slot_(from.layers.size(), nullptr),
        last_use_(from.layers.size(), 0) {
    std::int64_t widest = 0;
    for (std::size_t l = 0; l < map.layers().size(); ++l) {
      for (const MapBlock& block : blocks(l)) {
        for (const HeadRef& in : block.inputs) {
          last_use_[static_cast<std::size_t>(in.layer)] = l;
          widest = (std::max)(widest, width(static_cast<std::size_t>(in.layer)));
        }
      }
    }
    slot_floats_ =
        static_cast<std::size_t>(widest * (std::min)(gather_tokens, std::ssize(payload.positions)));
  }

  [[nodiscard]] const std::vector<MapBlock>& blocks(std::size_t target_layer) const noexcept {
    return plane_ == Plane::key ? map_.layers()[target_layer].key
                                : map_.layers()[target_layer].value;
  }
  /// From now on, tokens `first` to `first + count` − 1.
  void begin(std::int64_t first, std::int64_t count) {
    first_ = first;
    count_ = count;
    ropes_.clear();
  }
  /// Gathers what a target layer is made of.
  [[nodiscard]] Status need(std::size_t target_layer) {
    for (const MapBlock& block : blocks(target_layer)) {
      for (const HeadRef& in : block.inputs) {
        if (slot_[static_cast<std::size_t>(in.layer)] == nullptr)
          KVMELD_TRY(gather(static_cast<std::size_t>(in.layer)));
      }
    }
    return {};
  }
  /// Gives back what no target layer after this one is made of.
  void release(std::size_t target_layer) {
    for (std::size_t l = 0; l < slot_.size(); ++l) {
      if (slot_[l] == nullptr || last_use_[l] > target_layer) continue;
      free_.push_back(slot_[l]);
      slot_[l] = nullptr;
    }
  }
  /// Copies the inputs of a block, for some gathered tokens, into a tile.
  void put(std::span<const HeadRef> inputs, std::span<const std::int32_t> tokens,
           InputTile& tile) const noexcept {
    std::int32_t channel = 0;
    for (std::size_t i = 0; i < inputs.size();) {
      const auto l = static_cast<std::size_t>(inputs[i].layer);
      const std::int32_t channels = shape_of(l).channels;
      const std::int64_t stride = width(l);
      const float* const head = slot_[l] + std::ptrdiff_t{inputs[i].head} * channels;
      std::int32_t together = channels;  // heads that follow each other are copied at once
      for (++i; i < inputs.size() && inputs[i].layer == inputs[i - 1].layer &&
                inputs[i].head == inputs[i - 1].head + 1;
           ++i)
        together += channels;
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        tile.put(static_cast<std::int32_t>(t), channel, head + (tokens[t] - first_) * stride,
                 together);
      }
      channel += together;
    }
  }

 private:
  [[nodiscard]] const PlaneShape& shape_of(std::size_t l) const noexcept {
    return *find_plane(from_.layers[l], plane_);
  }
  [[nodiscard]] std::int64_t width(std::size_t l) const noexcept {
    return std::int64_t{shape_of(l).heads} * shape_of(l).channels;
  }

  [[nodiscard]] Status gather(std::size_t l) {
    const LayerShape& layer = from_.layers[l];
    const PlaneShape& shape = shape_of(l);
    const RopeTable* table = nullptr;
    if (shape.rotary && layer.key_form == KeyForm::post_rope && layer.rope.kind != RopeKind::none) {
      auto found = rope_table(layer.rope);
      if (!found) return found.error();
      table = *found;
    }
    if (free_.empty()) free_.push_back(memory_.emplace_back(new float[slot_floats_]).get());
    float* out = slot_[l] = free_.back();
    free_.pop_back();
    const std::int64_t bytes = row_bytes(shape) * shape.heads;
    const std::int64_t floats = width(l);
    const std::byte* const plane =
        payload_.bytes.get() + payload_.plane_offsets[static_cast<std::size_t>(index_[l])];
    const std::vector<std::int32_t>& rows = rows_[payload_.layer_set[l]];
    for (std::int64_t t = 0; t < count_; ++t, out += floats) {
      const std::int64_t row =
          rows.empty() ? first_ + t : rows[static_cast<std::size_t>(first_ + t)];
      if (row < 0) continue;
      load_row(shape.type, isa_, plane + row * bytes, floats, out);
      if (table == nullptr) continue;
      const Turn turn{table->row(static_cast<std::size_t>(t)), shape.channels,
                      layer.rope.first_channel, layer.rope.rotary_channels, layer.rope.pairing};
      for (std::int32_t h = 0; h < shape.heads; ++h)
        turn_row(turn, isa_, out + std::ptrdiff_t{h} * shape.channels);
    }
    return {};
  }
  /// The turns of the tokens back to position 0. Layers with equal ropes share them.
  [[nodiscard]] Result<const RopeTable*> rope_table(const RopeSpec& rope) {
    for (const auto& [known, table] : ropes_) {
      if (*known == rope) return table.get();
    }
    std::vector<std::int64_t> shifts;
    for (std::int64_t t = first_; t < first_ + count_; ++t)
      shifts.push_back(-payload_.positions[static_cast<std::size_t>(t)]);
    const std::int64_t length = payload_.positions.back() + 1;
    if (length_dependent(rope) && length > rope.original_context) {
      return error(ErrorCode::rope_length_dependent, "keys up to position ", length - 1,
                   " behind an original context of ", rope.original_context,
                   " do not say by which frequencies they were turned; seal them before rotation");
    }
    auto table = RopeTable::build(rope, shifts, length);
    if (!table) return table.error();
    ropes_.emplace_back(&rope, std::make_unique<RopeTable>(*std::move(table)));
    return static_cast<const RopeTable*>(ropes_.back().second.get());
  }

  const ProjectionMap& map_;
  const Geometry& from_;
  const Payload& payload_;
  const TokenRows& rows_;  // (token sets)
  Plane plane_;
  Isa isa_;
  std::vector<std::ptrdiff_t> index_;  // (layers) plane number
  std::vector<float*> slot_;           // (layers) rows (token, head, channel); null: not gathered
  std::vector<std::size_t> last_use_;  // (layers) last target layer made of it
  std::size_t slot_floats_ = 0;
  std::vector<std::unique_ptr<float[]>> memory_;
  std::vector<float*> free_;
  std::vector<std::pair<const RopeSpec*, std::unique_ptr<RopeTable>>> ropes_;
  std::int64_t first_ = 0;
  std::int64_t count_ = 0;
};

}  // namespace detail
KVMELD_NAMESPACE_END
