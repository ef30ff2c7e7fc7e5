#pragma once

/// The bytes of a llama.cpp sequence state, read and written within bounds.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

// How versions of llama.cpp lay out the bytes of one sequence: what differs between them, and
// element type numbers.

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
  return ::kvmeld::extend::error(
      ErrorCode::unsupported, "llama state: ggml type ", ggml_number,
      " for K or V is not read; create the context with f32, f16, bf16 or q8_0");
}

namespace detail {
using ::kvmeld::extend::error;

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
    return extend::error(ErrorCode::unsupported, "llama state: layer ", layer, " has ",
                         planes.size(),
                         " planes; the engine's bytes are read as a key plane and a value plane");
  LayerPlanes found{&planes[0], planes.size() == 2 ? &planes[1] : nullptr};
  for (const PlaneShape& shape : planes) {
    // 2^20 elements a row are beyond any model; with 2^31 cells and 2^10 planes every sum of bytes
    // stays in 64 bits.
    if (ggml_type_number(shape.type) < 0 || shape.scales != ScaleScheme::none ||
        cell_elements(shape) <= 0 || cell_elements(shape) > (std::int64_t{1} << 20))
      return extend::error(ErrorCode::unsupported, "llama state: layer ", layer, " holds ",
                           shape.heads, " x ", shape.channels, " ", to_string(shape.type),
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

// Reads the sequence-state bytes of llama.cpp, of any version that is known, without trusting a
// single length in them.

namespace llama {
namespace detail {

/// Reads little-endian words and never past the end.
class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  [[nodiscard]] std::size_t at() const noexcept { return at_; }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - at_; }

  /// Words that held what the form says they must: of several forms that fail, the one with most is
  /// the likely one.
  [[nodiscard]] std::size_t agreed() const noexcept { return agreed_; }
  void agree() noexcept { ++agreed_; }

  template <class Word>
  [[nodiscard]] Status word(Word& out, const char* what) {
    if (left() < sizeof(Word)) return cut(sizeof(Word), what);
    std::memcpy(&out, bytes_.data() + at_, sizeof(Word));
    at_ += sizeof(Word);
    return {};
  }
  [[nodiscard]] Status skip(std::uint64_t count, std::uint64_t each, const char* what) {
    if (each != 0 && left() / each < count) return cut(count, what);
    at_ += static_cast<std::size_t>(count * each);
    return {};
  }
  [[nodiscard]] Status cut(std::uint64_t wanted, const char* what) const {
    return extend::error(ErrorCode::truncated, "llama state: ends at byte ", bytes_.size(),
                         " inside ", what, " (", wanted, " announced at byte ", at_, ")");
  }

 private:
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  std::size_t agreed_ = 0;
};

/// Brings cells into ascending order of position and refuses a position that two cells claim.
[[nodiscard]] inline Status order_cells(StateSection& section) {
  section.by_position.resize(section.cells());
  std::iota(section.by_position.begin(), section.by_position.end(), 0);
  const auto position = [&](std::int32_t cell) {
    return section.positions[static_cast<std::size_t>(cell)];
  };
  if (!std::is_sorted(section.positions.begin(), section.positions.end()))
    std::sort(section.by_position.begin(), section.by_position.end(),
              [&](std::int32_t a, std::int32_t b) { return position(a) < position(b); });
  for (std::size_t i = 1; i < section.by_position.size(); ++i) {
    if (position(section.by_position[i - 1]) == position(section.by_position[i]))
      return extend::error(ErrorCode::duplicate_position, "llama state: position ",
                           position(section.by_position[i]),
                           " is held by two cells; the engine would attend to both");
  }
  return {};
}

[[nodiscard]] inline Status parse_cells(Cursor& cursor, const StateForm& form, std::uint32_t cells,
                                        StateSection& section) {
  const auto ext = static_cast<std::uint64_t>(form.cell_ext_bytes);
  if (cells > 0x7fffffffU || cursor.left() / (12 + ext) < cells)
    return cursor.cut(cells, "the cells");
  section.positions.reserve(cells);
  for (std::uint32_t c = 0; c < cells; ++c) {
    std::int32_t position = 0, sequence = 0;
    std::uint32_t sequences = 0;
    KVMELD_TRY(cursor.word(position, "a cell"));
    KVMELD_TRY(cursor.word(sequences, "a cell"));
    if (sequences != 1)
      return extend::error(
          ErrorCode::corrupt, "llama state: cell ", c, " belongs to ", sequences,
          " sequences; the bytes of one sequence have 1 (export with llama_state_seq_get_data)");
    if (position < 0)
      return extend::error(ErrorCode::corrupt, "llama state: cell ", c, " has position ", position);
    cursor.agree();
    KVMELD_TRY(cursor.skip(1, ext, "a cell"));
    KVMELD_TRY(cursor.word(sequence, "a cell"));
    section.positions.push_back(position);
  }
  return order_cells(section);
}

[[nodiscard]] inline Status parse_plane(Cursor& cursor, const PlaneShape& shape, std::size_t layer,
                                        bool transposed, std::uint64_t cells, std::size_t& offset) {
  std::int32_t type = 0;
  KVMELD_TRY(cursor.word(type, "a layer's type"));
  if (type != ggml_type_number(shape.type))
    return extend::error(ErrorCode::geometry_mismatch, "llama state: layer ", layer,
                         " stores ggml type ", type, ", the geometry says ", to_string(shape.type));
  const auto elements = static_cast<std::uint64_t>(cell_elements(shape));
  if (transposed) {
    std::uint32_t element = 0, row = 0;
    KVMELD_TRY(cursor.word(element, "a layer's element size"));
    KVMELD_TRY(cursor.word(row, "a layer's row"));
    if (block_elements(shape.type) != 1 ||
        element != static_cast<std::uint32_t>(block_bytes(shape.type)))
      return extend::error(ErrorCode::corrupt, "llama state: layer ", layer, " has transposed ",
                           to_string(shape.type), " of ", element, " bytes");
    if (row != elements)
      return extend::error(ErrorCode::geometry_mismatch, "llama state: layer ", layer,
                           " has rows of ", row, " elements, the geometry says ", elements);
  } else {
    std::uint64_t row = 0;
    KVMELD_TRY(cursor.word(row, "a layer's row size"));
    if (row != cell_bytes(shape))
      return extend::error(ErrorCode::geometry_mismatch, "llama state: layer ", layer,
                           " has rows of ", row, " bytes, the geometry says ", cell_bytes(shape));
  }
  cursor.agree();
  offset = cursor.at();
  return cursor.skip(cells, cell_bytes(shape), "a layer's rows");
}

/// A basis word against the declared basis: 0 and 1 are flags, larger numbers the block size.
[[nodiscard]] inline Status check_basis(const char* plane, std::uint32_t word,
                                        const PlaneShape& shape) {
  const bool agrees = word <= 1 ? (word != 0) == (shape.hadamard != 0)
                                : static_cast<std::int64_t>(word) == shape.hadamard;
  if (agrees) return {};
  return extend::error(ErrorCode::geometry_mismatch, "llama state: ", plane,
                       " are stored in Hadamard basis ", word, ", the geometry says ",
                       shape.hadamard);
}

[[nodiscard]] inline Status parse_layers(Cursor& cursor, const Geometry& geometry, StateForm& form,
                                         StateSection& section) {
  std::uint32_t transposed = 0, layers = 0;
  KVMELD_TRY(cursor.word(transposed, "the transposed flag"));
  KVMELD_TRY(cursor.word(layers, "the layer count"));
  if (transposed > 1)
    return extend::error(ErrorCode::corrupt, "llama state: transposed flag is ", transposed);
  if (form.complete && form.transposed_values != (transposed == 1))
    return extend::error(ErrorCode::corrupt,
                         "llama state: one section has transposed values, the other has not");
  form.transposed_values = transposed == 1;
  if (layers != section.layers.size())
    return extend::error(ErrorCode::geometry_mismatch, "llama state: ", layers,
                         " layers, the geometry has ", section.layers.size(), " here");
  cursor.agree();
  if (form.basis_words) {
    KVMELD_TRY(cursor.word(form.key_basis, "the key basis"));
    KVMELD_TRY(cursor.word(form.value_basis, "the value basis"));
  }
  for (std::size_t i = 0; i < section.layers.size(); ++i) {
    const PlaneShape& key = geometry.layers[section.layers[i]].planes[0];
    if (form.basis_words) KVMELD_TRY(check_basis("keys", form.key_basis, key));
    KVMELD_TRY(
        parse_plane(cursor, key, section.layers[i], false, section.cells(), section.keys[i]));
  }
  for (std::size_t i = 0; i < section.layers.size(); ++i) {
    const std::vector<PlaneShape>& planes = geometry.layers[section.layers[i]].planes;
    if (planes.size() < 2) continue;
    if (form.basis_words) KVMELD_TRY(check_basis("values", form.value_basis, planes[1]));
    KVMELD_TRY(parse_plane(cursor, planes[1], section.layers[i], form.transposed_values,
                           section.cells(), section.values[i]));
  }
  form.complete = true;
  return {};
}

[[nodiscard]] inline Status parse_section(Cursor& cursor, const Geometry& geometry, StateForm& form,
                                          StateSection& section) {
  std::uint32_t streams = 0;
  KVMELD_TRY(cursor.word(streams, "the stream count"));
  if (streams == 0 || streams > max_streams)
    return extend::error(ErrorCode::corrupt, "llama state: ", streams, " streams; there are 1 to ",
                         max_streams);
  form.streams = streams;
  section.keys.resize(section.layers.size());
  section.values.resize(section.layers.size());
  for (std::uint32_t s = 0; s < streams; ++s) {
    std::uint32_t cells = 0;
    KVMELD_TRY(cursor.word(cells, "the cell count"));
    if (cells == 0) continue;
    if (!section.positions.empty())
      return extend::error(ErrorCode::corrupt, "llama state: stream ", s, " holds ", cells,
                           " cells beside another stream's; one sequence is in one");
    KVMELD_TRY(parse_cells(cursor, form, cells, section));
    KVMELD_TRY(parse_layers(cursor, geometry, form, section));
  }
  return {};
}

/// One attempt at one form. `agreed` tells which attempt's error is worth reporting.
[[nodiscard]] inline Status parse_form(std::span<const std::byte> bytes, const Geometry& geometry,
                                       const StateForm& form, StateLayout& layout,
                                       std::size_t& agreed) {
  Cursor cursor(bytes);
  layout.form = form;
  layout.size_bytes = bytes.size();
  layout.sections.clear();
  Status status = form.prefix ? cursor.skip(1, 8, "the prefix") : Status();
  for (std::vector<std::size_t>& layers : section_layers(geometry, form.two_sections)) {
    if (!status) break;
    StateSection& section = layout.sections.emplace_back();
    section.layers = std::move(layers);
    status = parse_section(cursor, geometry, layout.form, section);
  }
  agreed = cursor.agreed();
  if (status && cursor.left() != 0)
    status = extend::error(ErrorCode::oversized, "llama state: ", cursor.left(),
                           " bytes follow after byte ", cursor.at(), ", where it should end");
  return status;
}

}  // namespace detail

/// Finds out where everything lies in the bytes of one sequence, as `llama_state_seq_get_data`
/// writes them.
///
/// The bytes carry no version. Every known form is tried; one is accepted only if it ends exactly
/// where the bytes end and its layers, types and row sizes are the geometry's. A sequence without
/// cells is a valid state. O(cells + layers), nothing copied. Errors: `truncated`, `oversized`,
/// `corrupt`, `duplicate_position`, `geometry_mismatch`, of the form that explained most bytes;
/// `unknown_layout` where two forms fit; `unsupported` (a geometry that this engine cannot hold).
[[nodiscard]] inline Result<StateLayout> parse_state(std::span<const std::byte> bytes,
                                                     const Geometry& geometry) {
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const Result<detail::LayerPlanes> planes = detail::layer_planes(geometry, l);
    if (!planes) return planes.error();
  }
  std::uint32_t first = 0;
  if (bytes.size() >= sizeof first) std::memcpy(&first, bytes.data(), sizeof first);
  StateForm form;
  form.prefix = first == state_magic;
  Status best;
  std::size_t most_agreed = 0;
  StateLayout found, attempt;
  int fits = 0;
  const int section_forms = detail::has_window(geometry) ? 2 : 1;
  for (int two = section_forms - 1; two >= 0; --two) {
    for (const std::int32_t ext : {0, 8, 12}) {
      for (const bool basis : {false, true}) {
        form.two_sections = two == 1;
        form.cell_ext_bytes = ext;
        form.basis_words = basis;
        std::size_t agreed = 0;
        Status status = detail::parse_form(bytes, geometry, form, attempt, agreed);
        if (status) {
          // Without cells every extension and basis looks the same, which is no ambiguity.
          if (fits > 0 && !attempt.form.complete && !found.form.complete) continue;
          if (++fits == 1) std::swap(found, attempt);
        } else if (best.ok() || agreed > most_agreed) {
          best = std::move(status);
          most_agreed = agreed;
        }
      }
    }
  }
  if (fits == 1) return found;
  if (fits > 1)
    return extend::error(ErrorCode::unknown_layout, "llama state: ", fits, " forms fit these ",
                         bytes.size(), " bytes");
  return best;
}

}  // namespace llama

// The bytes of a llama.cpp sequence as a cache view, and new ones made to be rendered into. Needs
// no llama.h.

namespace llama {

/// A view over the bytes of one sequence: tokens in ascending position order, sliding-window layers
/// with holes.
///
/// K rows lie (cell, head, channel), V rows too or, transposed, (head, channel, cell). The bytes
/// are the caller's and outlive it. Move-only: the cache view points into the slot lists.
template <class Byte>
struct StateView {
  StateLayout layout{};
  std::vector<std::int64_t> positions{};  ///< one a token of the view, ascending
  /// For each section: the cell of every token, or -1.
  std::vector<std::vector<std::int32_t>> slots{};
  BasicKvCacheRef<Byte> cache{};

  StateView() = default;
  StateView(StateView&&) = default;
  StateView& operator=(StateView&&) = default;
};

namespace detail {

template <class Byte>
[[nodiscard]] BasicPlaneRef<Byte> state_plane(Byte* data, const PlaneShape& shape, bool transposed,
                                              std::int64_t cells, std::int64_t tokens,
                                              const std::vector<std::int32_t>& slots) {
  BasicPlaneRef<Byte> plane;
  plane.data = data;
  plane.shape = shape;
  plane.tokens = tokens;
  plane.token_stride = transposed ? 1 : cell_elements(shape);
  plane.head_stride = transposed ? cells * shape.channels : shape.channels;
  plane.channel_stride = transposed ? cells : 1;
  if (!slots.empty()) {
    plane.slots.kind = SlotKind::slot_list_i32;
    plane.slots.table = slots.data();
  }
  return plane;
}

/// The cell of every token; empty where token i is cell i.
[[nodiscard]] inline std::vector<std::int32_t> token_slots(
    const StateSection& section, std::span<const std::int64_t> positions) {
  if (section.positions.size() == positions.size() &&
      std::equal(positions.begin(), positions.end(), section.positions.begin()))
    return {};
  std::vector<std::int32_t> slots(positions.size(), -1);
  std::size_t t = 0;
  for (const std::int32_t cell : section.by_position) {
    while (positions[t] != section.positions[static_cast<std::size_t>(cell)]) ++t;
    slots[t++] = cell;
  }
  return slots;
}

template <class Byte>
[[nodiscard]] StateView<Byte> make_view(std::span<Byte> bytes, StateLayout layout,
                                        std::shared_ptr<const Geometry> geometry) {
  StateView<Byte> view;
  view.layout = std::move(layout);
  for (const StateSection& section : view.layout.sections)
    for (const std::int32_t cell : section.by_position)
      view.positions.push_back(section.positions[static_cast<std::size_t>(cell)]);
  if (view.layout.sections.size() > 1) {
    std::sort(view.positions.begin(), view.positions.end());
    view.positions.erase(std::unique(view.positions.begin(), view.positions.end()),
                         view.positions.end());
  }
  for (const StateSection& section : view.layout.sections)
    view.slots.push_back(token_slots(section, view.positions));

  const auto tokens = static_cast<std::int64_t>(view.positions.size());
  std::vector<BasicPlaneRef<Byte>> planes;
  std::vector<std::size_t> next(view.layout.sections.size(), 0);
  for (std::size_t l = 0; l < geometry->layers.size(); ++l) {
    const LayerShape& layer = geometry->layers[l];
    const std::size_t s = view.layout.form.two_sections && layer.window > 0 ? 1 : 0;
    const StateSection& section = view.layout.sections[s];
    const std::size_t i = next[s]++;
    const auto cells = static_cast<std::int64_t>(section.cells());
    planes.push_back(state_plane(bytes.data() + section.keys[i], layer.planes[0], false, cells,
                                 tokens, view.slots[s]));
    if (layer.planes.size() > 1)
      planes.push_back(state_plane(bytes.data() + section.values[i], layer.planes[1],
                                   view.layout.form.transposed_values, cells, tokens,
                                   view.slots[s]));
  }
  view.cache = BasicKvCacheRef<Byte>(std::move(geometry), std::move(planes), tokens);
  return view;
}

}  // namespace detail

/// Parses the bytes of one sequence and views them without copying an element.
///
/// Errors: those of `parse_state`. O(cells + layers).
template <class Byte>
[[nodiscard]] Result<StateView<Byte>> view_state(std::span<Byte> bytes,
                                                 std::shared_ptr<const Geometry> geometry) {
  if (geometry == nullptr)
    return extend::error(ErrorCode::invalid_argument, "llama state: no geometry was given");
  KVMELD_TRY(validate(*geometry));
  Result<StateLayout> layout = parse_state(bytes, *geometry);
  if (!layout) return layout.error();
  return detail::make_view(bytes, *std::move(layout), std::move(geometry));
}

/// Bytes of one sequence that are still to be filled: header, cells and positions are there, every
/// K and V element is 0.
///
/// `view.cache` is what `run` renders into; then `write` hands `bytes()` to the engine. Move-only.
class StateBlob {
 public:
  StateBlob() = default;
  StateBlob(std::unique_ptr<std::byte[]> storage, std::size_t capacity, StateView<std::byte> view)
      : storage_(std::move(storage)), capacity_(capacity), view_(std::move(view)) {}

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return {storage_.get(), view_.layout.size_bytes};
  }
  [[nodiscard]] std::span<std::byte> mutable_bytes() noexcept {
    return {storage_.get(), view_.layout.size_bytes};
  }
  [[nodiscard]] const MutableKvCacheRef& mutable_ref() noexcept { return view_.cache; }
  [[nodiscard]] KvCacheRef kv_cache_ref() const { return view_.cache; }
  [[nodiscard]] std::span<const std::int64_t> positions() const noexcept { return view_.positions; }
  [[nodiscard]] const StateLayout& layout() const noexcept { return view_.layout; }

  /// Bytes that a later `make_state` can use again.
  [[nodiscard]] std::size_t capacity_bytes() const noexcept { return storage_ ? capacity_ : 0; }
  /// Gives the memory away and leaves an empty blob behind.
  [[nodiscard]] std::unique_ptr<std::byte[]> release() noexcept {
    view_ = {};
    capacity_ = 0;
    return std::move(storage_);
  }

 private:
  std::unique_ptr<std::byte[]> storage_;
  std::size_t capacity_ = 0;
  StateView<std::byte> view_;
};

namespace detail {

/// Lays words out after each other; with no storage it only counts, so that size and bytes come
/// from one piece of code.
class Emitter {
 public:
  explicit Emitter(std::byte* storage) noexcept : storage_(storage) {}
  template <class Word>
  void word(Word value) noexcept {
    if (storage_ != nullptr) std::memcpy(storage_ + at_, &value, sizeof value);
    at_ += sizeof value;
  }
  [[nodiscard]] std::size_t at() const noexcept { return at_; }
  void skip(std::size_t bytes) noexcept { at_ += bytes; }

 private:
  std::byte* storage_;
  std::size_t at_ = 0;
};

inline void emit_section(Emitter& out, const Geometry& geometry, const StateForm& form,
                         StateSection& section, std::span<const TokenId> tokens) {
  const std::size_t cells = section.cells();
  out.word(form.streams);
  out.word(static_cast<std::uint32_t>(cells));
  if (cells > 0) {
    for (std::size_t c = 0; c < cells; ++c) {
      const auto position = static_cast<std::int32_t>(section.positions[c]);
      out.word(position);
      out.word(std::uint32_t{1});
      if (form.cell_ext_bytes >= 8) {  // text has one position on every axis
        out.word(position);
        out.word(position);
      }
      if (form.cell_ext_bytes >= 12) out.word(tokens[tokens.size() - cells + c]);
      out.word(std::int32_t{0});  // a sequence id, which the engine replaces by its target's
    }
    out.word(static_cast<std::uint32_t>(form.transposed_values ? 1 : 0));
    out.word(static_cast<std::uint32_t>(section.layers.size()));
    if (form.basis_words) {
      out.word(form.key_basis);
      out.word(form.value_basis);
    }
    const auto plane = [&](const PlaneShape& shape, bool transposed, std::size_t& offset) {
      out.word(ggml_type_number(shape.type));
      if (transposed) {
        out.word(static_cast<std::uint32_t>(block_bytes(shape.type)));
        out.word(static_cast<std::uint32_t>(cell_elements(shape)));
      } else {
        out.word(cell_bytes(shape));
      }
      offset = out.at();
      out.skip(cells * cell_bytes(shape));
    };
    for (std::size_t i = 0; i < section.layers.size(); ++i)
      plane(geometry.layers[section.layers[i]].planes[0], false, section.keys[i]);
    for (std::size_t i = 0; i < section.layers.size(); ++i)
      if (const auto& planes = geometry.layers[section.layers[i]].planes; planes.size() > 1)
        plane(planes[1], form.transposed_values, section.values[i]);
  }
  for (std::uint32_t s = 1; s < form.streams; ++s) out.word(std::uint32_t{0});
}

[[nodiscard]] inline StateLayout emit_state(std::byte* storage, const Geometry& geometry,
                                            const StateForm& form,
                                            std::span<const std::int64_t> positions,
                                            std::span<const TokenId> tokens) {
  Emitter out(storage);
  StateLayout layout;
  layout.form = form;
  if (form.prefix) {
    out.word(state_magic);
    out.word(std::int32_t{0});
  }
  for (std::vector<std::size_t>& layers : section_layers(geometry, form.two_sections)) {
    StateSection& section = layout.sections.emplace_back();
    std::int64_t window = 0;
    if (form.two_sections && layout.sections.size() == 2)
      for (const std::size_t l : layers)
        window = (std::max<std::int64_t>)(window, geometry.layers[l].window);
    // the engine keeps no cell that its next token cannot see
    for (const std::int64_t position : positions)
      if (window == 0 || positions.back() - position < window)
        section.positions.push_back(position);
    section.layers = std::move(layers);
    section.keys.resize(section.layers.size());
    section.values.resize(section.layers.size());
    (void)order_cells(section);
    emit_section(out, geometry, form, section, tokens);
  }
  layout.size_bytes = out.at();
  return layout;
}

}  // namespace detail

/// Makes the bytes of a sequence at the given positions, all elements 0, in the form that an
/// engine's own export had.
///
/// Positions ascend strictly and are below 2^31; gaps are allowed. Sliding-window layers hold the
/// cells that are less than the window before the last one, as the engine keeps them. `tokens` (one
/// a position) is needed only where cells carry their token (12-byte extension). Errors:
/// `invalid_argument` (positions out of range or order; an incomplete form), `duplicate_position`,
/// `tokens_required`, `token_count_mismatch`, `unsupported` (a geometry that this engine cannot
/// hold). O(bytes) to clear; one allocation, or none where `recycled`, an earlier state, is large
/// enough: new memory costs more than clearing old.
[[nodiscard]] inline Result<StateBlob> make_state(std::shared_ptr<const Geometry> geometry,
                                                  const StateForm& form,
                                                  std::span<const std::int64_t> positions,
                                                  std::span<const TokenId> tokens = {},
                                                  StateBlob recycled = {}) {
  using extend::error;
  if (geometry == nullptr)
    return extend::error(ErrorCode::invalid_argument, "llama state: no geometry was given");
  KVMELD_TRY(validate(*geometry));
  if (geometry->layers.size() > 512)
    return extend::error(ErrorCode::unsupported, "llama state: ", geometry->layers.size(),
                         " layers, more than 512");
  for (std::size_t l = 0; l < geometry->layers.size(); ++l) {
    const Result<detail::LayerPlanes> planes = detail::layer_planes(*geometry, l);
    if (!planes) return planes.error();
    if (form.transposed_values && planes->value != nullptr &&
        block_elements(planes->value->type) != 1)
      return extend::error(ErrorCode::unsupported, "llama state: layer ", l,
                           " cannot hold transposed ", to_string(planes->value->type));
  }
  if (!form.complete && !positions.empty())
    return extend::error(
        ErrorCode::invalid_argument,
        "llama state: the form was read from a sequence of 0 cells and does not say how ",
        positions.size(), " are laid out; read it from a sequence that holds a token");
  if (form.streams == 0 || form.streams > max_streams ||
      (form.cell_ext_bytes != 0 && form.cell_ext_bytes != 8 && form.cell_ext_bytes != 12))
    return extend::error(ErrorCode::unknown_layout, "llama state: ", form.streams, " streams and ",
                         form.cell_ext_bytes, " bytes of cell extension");
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < 0 || positions[i] > 0x7fffffff)
      return extend::error(ErrorCode::invalid_argument, "llama state: position ", positions[i],
                           " of token ", i, " does not fit the engine");
    if (i > 0 && positions[i] == positions[i - 1])
      return extend::error(ErrorCode::duplicate_position, "llama state: tokens ", i - 1, " and ", i,
                           " both claim position ", positions[i]);
    if (i > 0 && positions[i] < positions[i - 1])
      return extend::error(ErrorCode::invalid_argument, "llama state: position ", positions[i],
                           " of token ", i, " is below its predecessor's");
  }
  if (form.cell_ext_bytes == 12 && tokens.empty() && !positions.empty())
    return extend::error(ErrorCode::tokens_required,
                         "llama state: this engine's cells carry token ids; give the ",
                         positions.size(), " tokens");
  if (!tokens.empty() && tokens.size() != positions.size())
    return extend::error(ErrorCode::token_count_mismatch, "llama state: ", tokens.size(),
                         " tokens for ", positions.size(), " positions");

  const std::size_t size =
      detail::emit_state(nullptr, *geometry, form, positions, tokens).size_bytes;
  const std::size_t had = recycled.capacity_bytes();
  const bool reuse = had >= size;
  std::unique_ptr<std::byte[]> storage =
      reuse ? recycled.release() : std::make_unique<std::byte[]>(size);
  if (reuse && size > 0) std::memset(storage.get(), 0, size);
  StateLayout layout = detail::emit_state(storage.get(), *geometry, form, positions, tokens);
  StateView<std::byte> view =
      detail::make_view(std::span(storage.get(), size), std::move(layout), std::move(geometry));
  return StateBlob(std::move(storage), reuse ? had : size, std::move(view));
}

}  // namespace llama

// Whether two states of one geometry hold the same cells and the same K and V bytes, wherever in
// the bytes each cell lies.

namespace llama {
namespace detail {

/// One plane of one layer in two states: key rows and plain values are rows, transposed values are
/// columns.
struct ComparedPlane {
  const std::byte* a = nullptr;
  const std::byte* b = nullptr;
  std::size_t row = 0;      // bytes a cell
  std::size_t element = 0;  // bytes of an element; 0 where rows are whole
  std::size_t cells = 0;
};

[[nodiscard]] inline bool same_cell(const ComparedPlane& plane, std::size_t in_a,
                                    std::size_t in_b) noexcept {
  if (plane.element == 0)
    return std::memcmp(plane.a + in_a * plane.row, plane.b + in_b * plane.row, plane.row) == 0;
  const std::size_t stride = plane.cells * plane.element;
  for (std::size_t c = 0; c < plane.row / plane.element; ++c) {
    if (std::memcmp(plane.a + c * stride + in_a * plane.element,
                    plane.b + c * stride + in_b * plane.element, plane.element) != 0)
      return false;
  }
  return true;
}

}  // namespace detail

/// Compares two states cell by cell in position order; sequence ids and the order of cells do not
/// count.
///
/// Both layouts are those of `parse_state` or `make_state` for this geometry. O(bytes).
/// Errors: `probe_failed` with the layer and position of the first difference.
[[nodiscard]] inline Status same_state(std::span<const std::byte> a, const StateLayout& layout_a,
                                       std::span<const std::byte> b, const StateLayout& layout_b,
                                       const Geometry& geometry) {
  using extend::error;
  if (layout_a.sections.size() != layout_b.sections.size() ||
      (layout_a.form.transposed_values != layout_b.form.transposed_values &&
       layout_a.form.complete && layout_b.form.complete))
    return extend::error(ErrorCode::probe_failed, "llama: the engine lays out ",
                         layout_b.sections.size(), " sections unlike the ",
                         layout_a.sections.size(), " written");
  for (std::size_t s = 0; s < layout_a.sections.size(); ++s) {
    const StateSection& x = layout_a.sections[s];
    const StateSection& y = layout_b.sections[s];
    if (x.cells() != y.cells())
      return extend::error(ErrorCode::probe_failed, "llama: ", x.cells(), " cells were written, ",
                           y.cells(), " are there");
    for (std::size_t i = 0; i < x.cells(); ++i) {
      const std::int64_t p = x.positions[static_cast<std::size_t>(x.by_position[i])];
      const std::int64_t q = y.positions[static_cast<std::size_t>(y.by_position[i])];
      if (p != q)
        return extend::error(ErrorCode::probe_failed, "llama: position ", p, " was written, ", q,
                             " is there");
    }
    const bool same_order = x.by_position == y.by_position;
    for (std::size_t l = 0; l < x.layers.size(); ++l) {
      const std::vector<PlaneShape>& planes = geometry.layers[x.layers[l]].planes;
      for (std::size_t k = 0; k < planes.size(); ++k) {
        detail::ComparedPlane plane;
        plane.a = a.data() + (k == 0 ? x.keys : x.values)[l];
        plane.b = b.data() + (k == 0 ? y.keys : y.values)[l];
        plane.row = static_cast<std::size_t>(detail::cell_bytes(planes[k]));
        plane.cells = x.cells();
        if (k == 1 && layout_a.form.transposed_values)
          plane.element = static_cast<std::size_t>(block_bytes(planes[k].type));
        if (same_order &&
            (plane.cells == 0 || std::memcmp(plane.a, plane.b, plane.cells * plane.row) == 0))
          continue;
        for (std::size_t i = 0; i < x.cells(); ++i) {
          if (!detail::same_cell(plane, static_cast<std::size_t>(x.by_position[i]),
                                 static_cast<std::size_t>(y.by_position[i])))
            return extend::error(ErrorCode::probe_failed, "llama: layer ", x.layers[l],
                                 k == 0 ? " keys" : " values", " at position ",
                                 x.positions[static_cast<std::size_t>(x.by_position[i])],
                                 " came back with other bytes");
        }
      }
    }
  }
  return {};
}

}  // namespace llama

KVMELD_NAMESPACE_END
