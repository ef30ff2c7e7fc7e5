#pragma once

/// The application of projection maps to the rows of a cache.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/policies/projection_map.hpp>
#include <kvmeld/rope.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Tokens whose source rows are held in f32 at once: enough that matrices are read from memory
/// seldom.
inline constexpr std::int64_t gather_tokens = 8 * tile_tokens;

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
      const Rotation rotation{table->row(static_cast<std::size_t>(t)), shape.channels,
                              layer.rope.first_channel, layer.rope.rotary_channels,
                              layer.rope.pairing};
      for (std::int32_t h = 0; h < shape.heads; ++h)
        rotate_channels(rotation, isa_, out + std::ptrdiff_t{h} * shape.channels);
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

// A fragment's K/V through a map: products by tiles of tokens, rounded to the target's elements.

namespace detail {

/// Fills in where the planes of a payload lie, whose token sets are known, and makes memory for
/// them; what lies between is zero.
[[nodiscard]] inline std::shared_ptr<std::byte[]> lay_out(const Geometry& geometry,
                                                          Payload& payload) {
  std::vector<std::pair<std::size_t, std::size_t>> gaps;
  std::size_t total = 0;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      const auto rows = static_cast<std::size_t>(payload.layer_tokens(l) * shape.heads);
      const std::size_t bytes = rows * static_cast<std::size_t>(row_bytes(shape));
      payload.plane_offsets.push_back(total);
      gaps.emplace_back(total + bytes, (bytes + 3) / 4 * 4 - bytes);
      total += (bytes + 3) / 4 * 4;
      payload.scale_offsets.push_back(total);
    }
  }
  payload.byte_count = total;
  std::shared_ptr<std::byte[]> memory(new std::byte[(std::max)(total, std::size_t{1})]);
  for (const auto& [at, bytes] : gaps) std::fill_n(memory.get() + at, bytes, std::byte{0});
  return memory;
}

/// Applies matrices to tiles; owns what lies between.
class TileProduct {
 public:
  explicit TileProduct(const ProjectionMap& map) {
    std::size_t floats = 0;
    for (const PackedMap& m : map.packed()) {
      input_.resize((std::max)(m.outer.inputs(), m.inner.inputs()));
      middle_.resize(m.outer.inputs());
      floats = (std::max)({floats, m.outer.padded_outputs(), m.inner.padded_outputs()});
    }
    between_.resize(floats * tile_tokens);
    out_.resize(floats * tile_tokens);
  }
  [[nodiscard]] InputTile& input() noexcept { return input_; }
  /// Outputs of the tile that was put in: (token, padded outputs).
  [[nodiscard]] const float* operator()(const PackedMap& map, std::int32_t tokens, Isa isa) {
    if (map.inner.outputs() == 0) {
      multiply(map.outer, input_, tokens, isa, out_.data());
      return out_.data();
    }
    multiply(map.inner, input_, tokens, isa, between_.data());
    for (std::int32_t t = 0; t < tokens; ++t) {
      middle_.put(t, 0, between_.data() + static_cast<std::size_t>(t) * map.inner.padded_outputs(),
                  map.inner.outputs());
    }
    multiply(map.outer, middle_, tokens, isa, out_.data());
    return out_.data();
  }

 private:
  InputTile input_;
  InputTile middle_;
  std::vector<float> between_;
  std::vector<float> out_;
};

/// The tokens that all inputs of a target layer hold.
[[nodiscard]] inline std::vector<std::int32_t> tokens_held(
    const LayerMap& layer, const Payload& payload,
    const std::vector<std::vector<std::int32_t>>& rows) {
  std::vector<std::uint8_t> needed(payload.token_sets.size(), 0);
  for (const std::vector<MapBlock>* blocks : {&layer.key, &layer.value}) {
    for (const MapBlock& block : *blocks) {
      for (const HeadRef& in : block.inputs)
        needed[payload.layer_set[static_cast<std::size_t>(in.layer)]] = 1;
    }
  }
  std::vector<std::int32_t> out;
  for (std::size_t t = 0; t < payload.positions.size(); ++t) {
    bool all = true;
    for (std::size_t s = 0; s < rows.size(); ++s)
      all = all && (needed[s] == 0 || rows[s].empty() || rows[s][t] >= 0);
    if (all) out.push_back(static_cast<std::int32_t>(t));
  }
  return out;
}

/// A payload through a linear map. `from` and `to` fit the map. Target keys are un-rotated and all
/// positions 0.
[[nodiscard]] inline Result<Payload> project_payload(const ProjectionMap& map, const Geometry& from,
                                                     const Payload& payload, const Geometry& to,
                                                     Isa isa) {
  const auto tokens = std::ssize(payload.positions);
  const std::vector<std::vector<std::int32_t>> token_row = token_rows(payload);
  Payload out;
  out.lead_in = payload.lead_in;
  out.positions.assign(payload.positions.size(), 0);
  std::vector<std::vector<std::int32_t>> held;  // (layers)
  for (const LayerMap& layer : map.layers()) {
    held.push_back(tokens_held(layer, payload, token_row));
    TokenSet set;
    if (std::ssize(held.back()) != tokens) set = {.all = false, .present = held.back()};
    const auto same = std::find(out.token_sets.begin(), out.token_sets.end(), set);
    out.layer_set.push_back(static_cast<std::uint16_t>(same - out.token_sets.begin()));
    if (same == out.token_sets.end()) out.token_sets.push_back(std::move(set));
  }
  const auto storage = lay_out(to, out);
  TileProduct product(map);
  for (const Plane plane : {Plane::key, Plane::value}) {
    SourceRows rows(map, from, payload, token_row, plane, isa);
    const std::vector<std::ptrdiff_t> index = plane_indices(to, plane);
    std::vector<std::size_t> done(to.layers.size(), 0);  // rows written
    for (std::int64_t first = 0; first < tokens; first += gather_tokens) {
      const std::int64_t last = (std::min)(first + gather_tokens, tokens);
      rows.begin(first, last - first);
      for (std::size_t l = 0; l < to.layers.size(); ++l) {
        if (index[l] < 0) continue;
        KVMELD_TRY(rows.need(l));
        const PlaneShape& shape = *find_plane(to.layers[l], plane);
        std::byte* const bytes =
            storage.get() + out.plane_offsets[static_cast<std::size_t>(index[l])];
        while (done[l] < held[l].size() && held[l][done[l]] < last) {
          std::size_t count = 1;
          while (count < tile_tokens && done[l] + count < held[l].size() &&
                 held[l][done[l] + count] < last)
            ++count;
          const std::vector<HeadRef>* loaded = nullptr;
          for (const MapBlock& block : rows.blocks(l)) {
            if (loaded == nullptr || *loaded != block.inputs)
              rows.put(block.inputs, std::span(held[l]).subspan(done[l], count), product.input());
            loaded = &block.inputs;
            const PackedMap& matrix = map.packed()[block.matrix];
            const float* const y = product(matrix, static_cast<std::int32_t>(count), isa);
            const std::int64_t size = byte_size(shape.type, matrix.outer.outputs());
            for (std::size_t t = 0; t < count; ++t) {
              std::byte* const to_row =
                  bytes +
                  (static_cast<std::int64_t>(done[l] + t) * shape.heads + block.first_head) *
                      row_bytes(shape);
              store_row(shape.type, isa, y + t * matrix.outer.padded_outputs(),
                        matrix.outer.outputs(), to_row);
              if (is_finite(normalise(shape.type, to_row, static_cast<std::size_t>(size))))
                continue;
              return error(ErrorCode::non_finite, "projection: target layer ", l, ", ",
                           plane == Plane::key ? "keys" : "values", " of token ",
                           held[l][done[l] + t], ", heads from ", block.first_head,
                           " on: the result is beyond ", to_string(shape.type));
            }
          }
          done[l] += count;
        }
        rows.release(l);
      }
    }
  }
  out.bytes = storage;
  return out;
}

/// A payload whose keys change the order of their channels from one pairing to another, bit by bit.
/// Positions stay.
[[nodiscard]] inline Result<Payload> permute_payload(const Geometry& from, const Payload& payload,
                                                     const Geometry& to) {
  Payload out = payload;
  out.digest = {};
  const auto storage = std::make_shared<std::vector<std::byte>>(
      payload.bytes.get(), payload.bytes.get() + (std::max)(payload.byte_count, std::size_t{1}));
  const std::vector<std::ptrdiff_t> index = plane_indices(from, Plane::key);
  for (std::size_t l = 0; l < from.layers.size(); ++l) {
    const RopeSpec& a = from.layers[l].rope;
    if (index[l] < 0 || a.kind == RopeKind::none || a.pairing == to.layers[l].rope.pairing)
      continue;
    const PlaneShape& shape = *find_plane(from.layers[l], Plane::key);
    if (!shape.rotary) continue;
    const std::size_t offset = payload.plane_offsets[static_cast<std::size_t>(index[l])];
    const auto size = static_cast<std::size_t>(block_bytes(shape.type));
    const std::int64_t row_size = row_bytes(shape);
    for (std::int64_t row = 0; row < payload.layer_tokens(l) * shape.heads; ++row) {
      const std::byte* const in = payload.bytes.get() + offset + row * row_size;
      std::byte* const moved = storage->data() + offset + row * row_size;
      const std::int32_t half = a.rotary_channels / 2;
      for (std::int32_t i = 0; i < a.rotary_channels; ++i) {
        const std::int32_t halves = a.first_channel + i;
        const std::int32_t pairs = a.first_channel + (i < half ? 2 * i : 2 * (i - half) + 1);
        const bool to_halves = a.pairing == RopePairing::interleaved;
        std::memcpy(moved + static_cast<std::size_t>(to_halves ? halves : pairs) * size,
                    in + static_cast<std::size_t>(to_halves ? pairs : halves) * size, size);
      }
    }
  }
  out.bytes = std::shared_ptr<const std::byte[]>(storage, storage->data());
  return out;
}

}  // namespace detail

KVMELD_NAMESPACE_END
