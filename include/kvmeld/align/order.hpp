#pragma once

#include <algorithm>
#include <numeric>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/exec/row_work.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

KVMELD_LAZY [[nodiscard]] std::vector<std::uint32_t> indices(std::size_t count) {
  std::vector<std::uint32_t> out(count);
  std::iota(out.begin(), out.end(), 0U);
  return out;
}

/// The Euclidean norm of one contiguous row, f64: lane l sums the squares of channels l, l + 32, …
/// and the lanes join by the tree.
KVMELD_LAZY [[nodiscard]] double row_norm(ElementType type, const std::byte* row,
                                          std::int64_t channels) noexcept {
  struct Sum {
    using State = double;
    static State join(State a, State b) noexcept { return a + b; }
  };
  double lanes[lanes_per_row] = {};
  for (std::int64_t c = 0; c < channels; ++c) {
    const auto x = static_cast<double>(load_element(type, row, c));
    lanes[c % lanes_per_row] = fma(x, x, lanes[c % lanes_per_row]);
  }
  return __builtin_sqrt(join_lanes<Sum>(lanes));
}

/// Mean over the tokens and heads of one layer's first rotary plane (or its first plane) of the
/// norm of stored rows.
KVMELD_LAZY [[nodiscard]] double mean_key_norm(const Fragment& fragment, const Payload& payload,
                                               std::size_t layer) {
  const Geometry& geometry = fragment.geometry();
  std::size_t index = 0;
  for (std::size_t l = 0; l < layer; ++l) index += geometry.layers[l].planes.size();
  if (geometry.layers[layer].planes.empty()) return 0;
  // key or latent: canonical order puts it first
  const PlaneShape& shape = geometry.layers[layer].planes[0];
  const std::int64_t rows = payload.layer_tokens(layer) * shape.heads;
  const std::byte* bytes = payload.bytes.get() + payload.plane_offsets[index];
  const std::int64_t stride = byte_size(shape.type, shape.channels);
  double sum = 0;
  for (std::int64_t row = 0; row < rows; ++row)
    sum += row_norm(shape.type, bytes + row * stride, shape.channels);
  return rows == 0 ? 0.0 : sum / static_cast<double>(rows);
}

}  // namespace detail

/// Orders spans by the mean norm of their stored keys at one layer, smallest first, then by id.
///
/// A canonical order that needs no metadata; it buys determinism, not answer quality
/// (docs/quality.md). O(bytes of the layer).
struct ByKeyNorm {
  static constexpr bool reproducible = true;
  std::int32_t layer = -1;  ///< whose keys are measured; −1: ⌊layers / 2⌋

  KVMELD_LAZY [[nodiscard]] Result<std::vector<std::uint32_t>> order(
      std::span<const Source> sources) const {
    std::vector<double> norms;
    for (const Source& source : sources) {
      const auto layers = static_cast<std::int32_t>(source.fragment->geometry().layers.size());
      const std::int32_t at = layer < 0 ? layers / 2 : layer;
      if (at >= layers && !(at == 0 && layers == 0)) {
        return detail::error(ErrorCode::invalid_argument, "ByKeyNorm: layer ", at,
                             " of a model with ", layers, " layers");
      }
      norms.push_back(layers == 0 ? 0.0
                                  : detail::mean_key_norm(*source.fragment, *source.payload,
                                                          static_cast<std::size_t>(at)));
    }
    std::vector<std::uint32_t> out = detail::indices(sources.size());
    std::sort(out.begin(), out.end(), [&](std::uint32_t a, std::uint32_t b) {
      if (norms[a] != norms[b]) return norms[a] < norms[b];
      return sources[a].fragment->id() < sources[b].fragment->id();
    });
    return out;
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.ByKeyNorm");
    hasher.value(layer);
  }
};

/// Orders spans by id: the cheapest canonical order.
struct ById {
  static constexpr bool reproducible = true;

  KVMELD_LAZY [[nodiscard]] Result<std::vector<std::uint32_t>> order(
      std::span<const Source> sources) const {
    std::vector<std::uint32_t> out = detail::indices(sources.size());
    std::sort(out.begin(), out.end(), [&](std::uint32_t a, std::uint32_t b) {
      return sources[a].fragment->id() < sources[b].fragment->id();
    });
    return out;
  }
  KVMELD_LAZY void digest(Hasher& hasher) const { hasher.text("kvmeld.ById"); }
};

/// Orders spans by their smallest provenance dot (agent, epoch, sequence), then by id: the order in
/// which a conversation was had.
struct ByProvenance {
  static constexpr bool reproducible = true;
  static constexpr MetadataFields metadata = MetadataFields::provenance;
  bool reversed = false;  ///< largest dot first

  KVMELD_LAZY [[nodiscard]] Result<std::vector<std::uint32_t>> order(
      std::span<const Source> sources) const {
    std::vector<std::uint32_t> out = detail::indices(sources.size());
    const auto dot = [&](std::uint32_t i) {
      const auto& marks = sources[i].metadata->marks;
      return marks.empty() ? Provenance{} : marks.front().dot;
    };
    std::sort(out.begin(), out.end(), [&](std::uint32_t a, std::uint32_t b) {
      if (dot(a) != dot(b)) return reversed ? dot(b) < dot(a) : dot(a) < dot(b);
      return sources[a].fragment->id() < sources[b].fragment->id();
    });
    return out;
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.ByProvenance");
    hasher.value(static_cast<std::uint8_t>(reversed));
  }
};

KVMELD_NAMESPACE_END
