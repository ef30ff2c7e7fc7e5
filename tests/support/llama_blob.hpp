#pragma once
// Sequence-state bytes written by hand, one word after the other, apart from the library's own
// writer.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <kvmeld/engine/detail/llama_state.hpp>

namespace test {

struct BlobSpec {
  kvmeld::llama::StateForm form;
  std::uint32_t stream = 0;  // which stream holds the cells
  // positions of each section, in the order of the bytes
  std::vector<std::vector<std::int32_t>> cells;
};

/// Byte `b` of a cell's row: tells layer, plane, position and place apart.
inline std::uint8_t pattern(std::size_t layer, std::size_t plane, std::int64_t position,
                            std::size_t b) {
  return static_cast<std::uint8_t>(layer * 101 + plane * 53 +
                                   static_cast<std::size_t>(position) * 31 + b * 7 + b / 256);
}

class Words {
 public:
  template <class Word>
  void add(Word word) {
    const auto* raw = reinterpret_cast<const std::byte*>(&word);
    bytes.insert(bytes.end(), raw, raw + sizeof word);
  }
  std::vector<std::byte> bytes;
};

inline std::size_t element_bytes(kvmeld::ElementType type) {
  switch (type) {
    case kvmeld::ElementType::f32:
      return 4;
    case kvmeld::ElementType::q8_0:
      return 34;
    default:
      return 2;
  }
}
inline std::int32_t engine_number(kvmeld::ElementType type) {
  switch (type) {
    case kvmeld::ElementType::f32:
      return 0;
    case kvmeld::ElementType::f16:
      return 1;
    case kvmeld::ElementType::q8_0:
      return 8;
    default:
      return 30;
  }
}

inline void add_plane(Words& out, const kvmeld::PlaneShape& shape, std::size_t layer,
                      std::size_t plane, bool transposed, const std::vector<std::int32_t>& cells) {
  const std::size_t element = element_bytes(shape.type);
  const std::size_t per_row = static_cast<std::size_t>(shape.heads * shape.channels) /
                              (shape.type == kvmeld::ElementType::q8_0 ? 32 : 1);
  out.add(engine_number(shape.type));
  if (!transposed) {
    out.add(static_cast<std::uint64_t>(per_row * element));
    for (const std::int32_t position : cells)
      for (std::size_t b = 0; b < per_row * element; ++b)
        out.add(pattern(layer, plane, position, b));
    return;
  }
  out.add(static_cast<std::uint32_t>(element));
  out.add(static_cast<std::uint32_t>(per_row));
  for (std::size_t row = 0; row < per_row; ++row)
    for (const std::int32_t position : cells)
      for (std::size_t b = 0; b < element; ++b)
        out.add(pattern(layer, plane, position, row * element + b));
}

inline std::vector<std::byte> write_blob(const kvmeld::Geometry& geometry, const BlobSpec& spec) {
  Words out;
  if (spec.form.prefix) {
    out.add(std::uint32_t{0xaf143cd8});
    out.add(std::int32_t{0});
  }
  for (std::size_t s = 0; s < spec.cells.size(); ++s) {
    const std::vector<std::int32_t>& cells = spec.cells[s];
    out.add(spec.form.streams);
    for (std::uint32_t stream = 0; stream < spec.form.streams; ++stream) {
      if (stream != spec.stream || cells.empty()) {
        out.add(std::uint32_t{0});
        continue;
      }
      out.add(static_cast<std::uint32_t>(cells.size()));
      for (const std::int32_t position : cells) {
        out.add(position);
        out.add(std::uint32_t{1});
        if (spec.form.cell_ext_bytes >= 8) {
          out.add(position);
          out.add(position);
        }
        if (spec.form.cell_ext_bytes >= 12) out.add(std::int32_t{1000 + position});
        out.add(std::int32_t{0});
      }
      std::vector<std::size_t> layers;
      for (std::size_t l = 0; l < geometry.layers.size(); ++l)
        if (spec.cells.size() == 1 || (geometry.layers[l].window > 0) == (s == 1))
          layers.push_back(l);
      out.add(static_cast<std::uint32_t>(spec.form.transposed_values ? 1 : 0));
      out.add(static_cast<std::uint32_t>(layers.size()));
      if (spec.form.basis_words) {
        out.add(spec.form.key_basis);
        out.add(spec.form.value_basis);
      }
      for (const std::size_t l : layers)
        add_plane(out, geometry.layers[l].planes[0], l, 0, false, cells);
      for (const std::size_t l : layers)
        add_plane(out, geometry.layers[l].planes[1], l, 1, spec.form.transposed_values, cells);
    }
  }
  return out.bytes;
}

inline std::shared_ptr<const kvmeld::Geometry> blob_geometry(kvmeld::ElementType key,
                                                             kvmeld::ElementType value,
                                                             std::int32_t window = 0) {
  kvmeld::Geometry geometry;
  const auto rope = kvmeld::RopeSpec::rotary(32, 10000.0, kvmeld::RopePairing::half_split);
  for (int l = 0; l < 3; ++l) {
    kvmeld::LayerShape layer = kvmeld::attention_layer(key, 2, 32, rope);
    layer.planes[1].type = value;
    if (l != 1) layer.window = window;  // layers 0 and 2 slide
    geometry.layers.push_back(layer);
  }
  return std::make_shared<const kvmeld::Geometry>(geometry);
}

}  // namespace test
