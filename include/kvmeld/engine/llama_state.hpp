#pragma once

/// The bytes of a llama.cpp sequence as a cache view, and new ones made to be rendered into. Needs
/// no llama.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/engine/llama_form.hpp>
#include <kvmeld/engine/llama_parse.hpp>

KVMELD_NAMESPACE_BEGIN
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
    return detail::error(ErrorCode::invalid_argument, "llama state: no geometry was given");
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
  using detail::error;
  if (geometry == nullptr)
    return error(ErrorCode::invalid_argument, "llama state: no geometry was given");
  KVMELD_TRY(validate(*geometry));
  if (geometry->layers.size() > 512)
    return error(ErrorCode::unsupported, "llama state: ", geometry->layers.size(),
                 " layers, more than 512");
  for (std::size_t l = 0; l < geometry->layers.size(); ++l) {
    const Result<detail::LayerPlanes> planes = detail::layer_planes(*geometry, l);
    if (!planes) return planes.error();
    if (form.transposed_values && planes->value != nullptr &&
        block_elements(planes->value->type) != 1)
      return error(ErrorCode::unsupported, "llama state: layer ", l, " cannot hold transposed ",
                   to_string(planes->value->type));
  }
  if (!form.complete && !positions.empty())
    return error(ErrorCode::invalid_argument,
                 "llama state: the form was read from a sequence of 0 cells and does not say how ",
                 positions.size(), " are laid out; read it from a sequence that holds a token");
  if (form.streams == 0 || form.streams > max_streams ||
      (form.cell_ext_bytes != 0 && form.cell_ext_bytes != 8 && form.cell_ext_bytes != 12))
    return error(ErrorCode::unknown_layout, "llama state: ", form.streams, " streams and ",
                 form.cell_ext_bytes, " bytes of cell extension");
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < 0 || positions[i] > 0x7fffffff)
      return error(ErrorCode::invalid_argument, "llama state: position ", positions[i],
                   " of token ", i, " does not fit the engine");
    if (i > 0 && positions[i] == positions[i - 1])
      return error(ErrorCode::duplicate_position, "llama state: tokens ", i - 1, " and ", i,
                   " both claim position ", positions[i]);
    if (i > 0 && positions[i] < positions[i - 1])
      return error(ErrorCode::invalid_argument, "llama state: position ", positions[i],
                   " of token ", i, " is below its predecessor's");
  }
  if (form.cell_ext_bytes == 12 && tokens.empty() && !positions.empty())
    return error(ErrorCode::tokens_required,
                 "llama state: this engine's cells carry token ids; give the ", positions.size(),
                 " tokens");
  if (!tokens.empty() && tokens.size() != positions.size())
    return error(ErrorCode::token_count_mismatch, "llama state: ", tokens.size(), " tokens for ",
                 positions.size(), " positions");

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
KVMELD_NAMESPACE_END
