#pragma once

/// Reads the sequence-state bytes of llama.cpp, of any version that is known, without trusting a
/// single length in them.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/engine/llama_form.hpp>

KVMELD_NAMESPACE_BEGIN
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
    return error(ErrorCode::truncated, "llama state: ends at byte ", bytes_.size(), " inside ",
                 what, " (", wanted, " announced at byte ", at_, ")");
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
      return error(ErrorCode::duplicate_position, "llama state: position ",
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
      return error(
          ErrorCode::corrupt, "llama state: cell ", c, " belongs to ", sequences,
          " sequences; the bytes of one sequence have 1 (export with llama_state_seq_get_data)");
    if (position < 0)
      return error(ErrorCode::corrupt, "llama state: cell ", c, " has position ", position);
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
    return error(ErrorCode::geometry_mismatch, "llama state: layer ", layer, " stores ggml type ",
                 type, ", the geometry says ", to_string(shape.type));
  const auto elements = static_cast<std::uint64_t>(cell_elements(shape));
  if (transposed) {
    std::uint32_t element = 0, row = 0;
    KVMELD_TRY(cursor.word(element, "a layer's element size"));
    KVMELD_TRY(cursor.word(row, "a layer's row"));
    if (block_elements(shape.type) != 1 ||
        element != static_cast<std::uint32_t>(block_bytes(shape.type)))
      return error(ErrorCode::corrupt, "llama state: layer ", layer, " has transposed ",
                   to_string(shape.type), " of ", element, " bytes");
    if (row != elements)
      return error(ErrorCode::geometry_mismatch, "llama state: layer ", layer, " has rows of ", row,
                   " elements, the geometry says ", elements);
  } else {
    std::uint64_t row = 0;
    KVMELD_TRY(cursor.word(row, "a layer's row size"));
    if (row != cell_bytes(shape))
      return error(ErrorCode::geometry_mismatch, "llama state: layer ", layer, " has rows of ", row,
                   " bytes, the geometry says ", cell_bytes(shape));
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
  return error(ErrorCode::geometry_mismatch, "llama state: ", plane,
               " are stored in Hadamard basis ", word, ", the geometry says ", shape.hadamard);
}

[[nodiscard]] inline Status parse_layers(Cursor& cursor, const Geometry& geometry, StateForm& form,
                                         StateSection& section) {
  std::uint32_t transposed = 0, layers = 0;
  KVMELD_TRY(cursor.word(transposed, "the transposed flag"));
  KVMELD_TRY(cursor.word(layers, "the layer count"));
  if (transposed > 1)
    return error(ErrorCode::corrupt, "llama state: transposed flag is ", transposed);
  if (form.complete && form.transposed_values != (transposed == 1))
    return error(ErrorCode::corrupt,
                 "llama state: one section has transposed values, the other has not");
  form.transposed_values = transposed == 1;
  if (layers != section.layers.size())
    return error(ErrorCode::geometry_mismatch, "llama state: ", layers,
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
    return error(ErrorCode::corrupt, "llama state: ", streams, " streams; there are 1 to ",
                 max_streams);
  form.streams = streams;
  section.keys.resize(section.layers.size());
  section.values.resize(section.layers.size());
  for (std::uint32_t s = 0; s < streams; ++s) {
    std::uint32_t cells = 0;
    KVMELD_TRY(cursor.word(cells, "the cell count"));
    if (cells == 0) continue;
    if (!section.positions.empty())
      return error(ErrorCode::corrupt, "llama state: stream ", s, " holds ", cells,
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
    status = error(ErrorCode::oversized, "llama state: ", cursor.left(),
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
    return detail::error(ErrorCode::unknown_layout, "llama state: ", fits, " forms fit these ",
                         bytes.size(), " bytes");
  return best;
}

}  // namespace llama
KVMELD_NAMESPACE_END
