#pragma once

/// How versions of llama.cpp lay out the bytes of one sequence: what differs between them, and
/// element type numbers.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/element.hpp>

KVMELD_NAMESPACE_BEGIN
namespace llama {

/// First word of the 8-byte prefix (then the sequence id) that newer versions write.
inline constexpr std::uint32_t state_magic = 0xaf143cd8U;
/// Most streams (unshared sequences) that any version allows.
inline constexpr std::uint32_t max_streams = 256;

/// What differs between versions and settings of the engine. The bytes carry no version:
/// `parse_state` finds the form that closes.
///
/// The layout was read from `llama_kv_cache::state_write` and its callees (llama.cpp,
/// src/llama-kv-cache.cpp): [magic, sequence]; then for each section: streams; for each stream:
/// cells, and where that is not 0: cells x (position, sequence count = 1, [extension], sequence);
/// transposed; layers; [key basis, value basis]; layers x (type i32, row bytes u64, cells x row);
/// layers x the same for values, or, transposed, (type i32, element bytes u32, row elements u32,
/// row elements x cells x element). Words are u32 unless said otherwise.
struct StateForm {
  bool prefix = true;  ///< the magic word and a sequence id come first
  /// Full-attention layers, then sliding-window layers, each with its own cells.
  bool two_sections = false;
  std::int32_t cell_ext_bytes = 0;  ///< 0; 8 (a 2-d position); 12 (a 2-d position and the token id)
  /// Two words after the layer count say in which basis K and V are stored.
  bool basis_words = false;
  std::uint32_t key_basis = 0;  ///< the words: 0 the model's own basis, otherwise Hadamard
  std::uint32_t value_basis = 0;
  /// V lies (channel, cell): the context runs without flash attention.
  bool transposed_values = false;
  std::uint32_t streams = 1;  ///< above 1: the context was made without `kv_unified`
  bool complete =
      /// False: the state held no cells, which leaves all but the prefix, sections and streams
      /// unknown.
      false;

  bool operator==(const StateForm&) const = default;
};

/// One cache of the engine inside the bytes: all layers, or those with or without a sliding window.
struct StateSection {
  std::vector<std::int64_t> positions{};    ///< one a cell, in the order of the bytes
  std::vector<std::int32_t> by_position{};  ///< cells in ascending order of position
  std::vector<std::size_t> layers{};  ///< the geometry's layers that this section holds, ascending
  std::vector<std::size_t> keys{};    ///< byte offset of each such layer's key rows
  /// Byte offset of each such layer's values; unread where the layer has none.
  std::vector<std::size_t> values{};

  [[nodiscard]] std::size_t cells() const noexcept { return positions.size(); }
};

/// Where everything lies in the bytes of one sequence.
struct StateLayout {
  StateForm form{};
  std::vector<StateSection> sections{};  ///< one or two
  std::size_t size_bytes = 0;
};

/// ggml's number of an element type, or -1 where the engine has none (ggml.h, `enum ggml_type`).
[[nodiscard]] constexpr std::int32_t ggml_type_number(ElementType type) noexcept {
  switch (type) {
    case ElementType::f32:
      return 0;
    case ElementType::f16:
      return 1;
    case ElementType::q8_0:
      return 8;
    case ElementType::bf16:
      return 30;
    default:
      return -1;
  }
}

/// The element type of a ggml number. Errors: `unsupported` (another quantisation; take f16 or q8_0
/// for K and V).
[[nodiscard]] inline Result<ElementType> element_type(std::int32_t ggml_number) {
  for (const ElementType type :
       {ElementType::f32, ElementType::f16, ElementType::q8_0, ElementType::bf16}) {
    if (ggml_type_number(type) == ggml_number) return type;
  }
  return ::kvmeld::detail::error(
      ErrorCode::unsupported, "llama state: ggml type ", ggml_number,
      " for K or V is not read; create the context with f32, f16, bf16 or q8_0");
}

namespace detail {
using ::kvmeld::detail::error;

/// A layer's key plane and, if it has one, its value plane.
struct LayerPlanes {
  const PlaneShape* key = nullptr;
  const PlaneShape* value = nullptr;
};

[[nodiscard]] inline std::int64_t cell_elements(const PlaneShape& shape) noexcept {
  return static_cast<std::int64_t>(shape.heads) * shape.channels;
}
[[nodiscard]] inline std::uint64_t cell_bytes(const PlaneShape& shape) noexcept {
  return static_cast<std::uint64_t>(byte_size(shape.type, cell_elements(shape)));
}

/// Checks that a layer is one that this engine can hold: a key plane, then perhaps a value plane.
[[nodiscard]] inline Result<LayerPlanes> layer_planes(const Geometry& geometry, std::size_t layer) {
  const std::vector<PlaneShape>& planes = geometry.layers[layer].planes;
  const bool known = !planes.empty() && planes.size() <= 2 && planes[0].plane == Plane::key &&
                     (planes.size() == 1 || planes[1].plane == Plane::value);
  if (!known)
    return error(ErrorCode::unsupported, "llama state: layer ", layer, " has ", planes.size(),
                 " planes; the engine's bytes are read as a key plane and a value plane");
  LayerPlanes found{&planes[0], planes.size() == 2 ? &planes[1] : nullptr};
  for (const PlaneShape& shape : planes) {
    // 2^20 elements a row are beyond any model; with 2^31 cells and 2^10 planes every sum of bytes
    // stays in 64 bits.
    if (ggml_type_number(shape.type) < 0 || shape.scales != ScaleScheme::none ||
        cell_elements(shape) <= 0 || cell_elements(shape) > (std::int64_t{1} << 20))
      return error(ErrorCode::unsupported, "llama state: layer ", layer, " holds ", shape.heads,
                   " x ", shape.channels, " ", to_string(shape.type),
                   "; the engine stores f32, f16, bf16 or q8_0 without outer scales");
  }
  return found;
}

/// The layers of each section, and each section's window: without a window, or all layers where
/// `two_sections` is false.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> section_layers(const Geometry& geometry,
                                                                          bool two_sections) {
  std::vector<std::vector<std::size_t>> sections(two_sections ? 2 : 1);
  for (std::size_t l = 0; l < geometry.layers.size(); ++l)
    sections[two_sections && geometry.layers[l].window > 0 ? 1 : 0].push_back(l);
  return sections;
}

[[nodiscard]] inline bool has_window(const Geometry& geometry) noexcept {
  for (const LayerShape& layer : geometry.layers)
    if (layer.window > 0) return true;
  return false;
}

}  // namespace detail
}  // namespace llama
KVMELD_NAMESPACE_END
