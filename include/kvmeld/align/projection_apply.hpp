#pragma once

/// A fragment's K/V through a map: products by tiles of tokens, rounded to the target's elements.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/packed_matrix.hpp>
#include <kvmeld/align/projection_map.hpp>
#include <kvmeld/align/projection_rows.hpp>
#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/normalise.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/tensor/row_codecs.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Fills in where the planes of a payload lie, whose token sets are known, and makes memory for
/// them; what lies between is zero.
KVMELD_LAZY [[nodiscard]] std::shared_ptr<std::byte[]> lay_out(const Geometry& geometry,
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
KVMELD_LAZY [[nodiscard]] std::vector<std::int32_t> tokens_held(
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
KVMELD_LAZY [[nodiscard]] Result<Payload> project_payload(const ProjectionMap& map,
                                                          const Geometry& from,
                                                          const Payload& payload,
                                                          const Geometry& to, Isa isa) {
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
KVMELD_LAZY [[nodiscard]] Result<Payload> permute_payload(const Geometry& from,
                                                          const Payload& payload,
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
