#pragma once

/// Order and seam policies: in which order spans follow, and which tokens are computed again.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

[[nodiscard]] inline std::vector<std::uint32_t> indices(std::size_t count) {
  std::vector<std::uint32_t> out(count);
  std::iota(out.begin(), out.end(), 0U);
  return out;
}

/// The Euclidean norm of one contiguous row, f64: lane l sums the squares of channels l, l + 32, …
/// and the lanes join by the tree.
[[nodiscard]] inline double row_norm(ElementType type, const std::byte* row,
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
[[nodiscard]] inline double mean_key_norm(const Fragment& fragment, const Payload& payload,
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

  [[nodiscard]] Result<std::vector<std::uint32_t>> order(std::span<const Source> sources) const {
    std::vector<double> norms;
    for (const Source& source : sources) {
      const auto layers = static_cast<std::int32_t>(source.fragment->geometry().layers.size());
      const std::int32_t at = layer < 0 ? layers / 2 : layer;
      if (at >= layers && !(at == 0 && layers == 0)) {
        return extend::error(ErrorCode::invalid_argument, "ByKeyNorm: layer ", at,
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
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.ByKeyNorm");
    hasher.value(layer);
  }
};

/// Orders spans by id: the cheapest canonical order.
struct ById {
  static constexpr bool reproducible = true;

  [[nodiscard]] Result<std::vector<std::uint32_t>> order(std::span<const Source> sources) const {
    std::vector<std::uint32_t> out = detail::indices(sources.size());
    std::sort(out.begin(), out.end(), [&](std::uint32_t a, std::uint32_t b) {
      return sources[a].fragment->id() < sources[b].fragment->id();
    });
    return out;
  }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.ById"); }
};

/// Orders spans by their place (agent, epoch, sequence of the first insertion), then by id: the
/// order in which a conversation was had. What supersedes a span stands where that stood.
struct ByDot {
  static constexpr bool reproducible = true;
  static constexpr MetadataFields metadata = MetadataFields::provenance;
  bool reversed = false;  ///< largest dot first

  [[nodiscard]] Result<std::vector<std::uint32_t>> order(std::span<const Source> sources) const {
    std::vector<std::uint32_t> out = detail::indices(sources.size());
    const auto dot = [&](std::uint32_t i) { return sources[i].place; };
    std::sort(out.begin(), out.end(), [&](std::uint32_t a, std::uint32_t b) {
      if (dot(a) != dot(b)) return reversed ? dot(b) < dot(a) : dot(a) < dot(b);
      return sources[a].fragment->id() < sources[b].fragment->id();
    });
    return out;
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.ByProvenance");
    hasher.value(static_cast<std::uint8_t>(reversed));
  }
};

/// Recomputes nothing.
struct SeamNone {
  static constexpr bool reproducible = true;

  [[nodiscard]] Status mark(std::span<const Source>, const Alignment&,
                            std::span<std::uint8_t>) const {
    return {};
  }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.SeamNone"); }
};

/// Recomputes every output token: the cache that full text gives, at its price.
struct SeamAll {
  static constexpr bool reproducible = true;

  [[nodiscard]] Status mark(std::span<const Source>, const Alignment&,
                            std::span<std::uint8_t> recompute) const {
    std::fill(recompute.begin(), recompute.end(), std::uint8_t{1});
    return {};
  }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.SeamAll"); }
};

/// Recomputes the first sentences of every span but the first, up to the end of the sentence in
/// which `share` is reached.
///
/// Where a seam is cut matters: at a sentence end it helps, inside a sentence it can harm
/// (docs/quality.md). Without `boundary_tokens` the cut falls wherever `share` does. O(tokens · log
/// boundary tokens). Errors: `invalid_argument` for a share outside [0, 1], `tokens_required` where
/// boundaries are asked of a latent fragment.
struct SeamShare {
  static constexpr bool reproducible = true;
  float share = 0.25F;                     ///< part of each later span's tokens
  std::vector<TokenId> boundary_tokens{};  ///< ids that end a sentence or line, ascending
  /// Tokens recomputed beyond the cut: > 0 cuts inside the next sentence.
  std::int64_t past_boundary = 0;

  [[nodiscard]] Status mark(std::span<const Source> ordered, const Alignment& alignment,
                            std::span<std::uint8_t> recompute) const {
    if (!(share >= 0.0F && share <= 1.0F))
      return extend::error(ErrorCode::invalid_argument, "SeamShare: share ", share,
                           " is outside [0, 1]");
    if (!std::is_sorted(boundary_tokens.begin(), boundary_tokens.end())) {
      return extend::error(ErrorCode::invalid_argument, "SeamShare: the ", boundary_tokens.size(),
                           " boundary tokens must ascend");
    }
    // tokens of each fragment below this index are recomputed
    std::vector<std::int64_t> cut(ordered.size(), 0);
    for (std::size_t s = 1; s < ordered.size(); ++s) {
      auto end = cut_of(ordered[s]);
      if (!end) return end.error();
      cut[s] = *end;
    }
    for (const AlignmentGroup& group : alignment.groups) {
      for (std::size_t o = 0; o < recompute.size(); ++o) {
        for (const Contribution& c : group.row(o)) {
          if (static_cast<std::int64_t>(c.token) < cut[c.source]) recompute[o] = 1;
        }
      }
    }
    return {};
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.SeamShare");
    hasher.value(share);
    hasher.values(extend::span_of(boundary_tokens));
    hasher.value(past_boundary);
  }

 private:
  /// Tokens of the fragment below the index returned are recomputed; the share counts selected
  /// tokens.
  [[nodiscard]] Result<std::int64_t> cut_of(const Source& source) const {
    const std::int64_t count = source.selected_count();
    // In f32, so that 0.1 of 10 tokens is 1: in f64 the share is a little more than what its
    // decimal says.
    auto cut = static_cast<std::int64_t>(std::ceil(share * static_cast<float>(count)));
    if (cut == 0) return std::int64_t{0};
    if (!boundary_tokens.empty()) {
      if (source.fragment->latent()) {
        return extend::error(ErrorCode::tokens_required, "SeamShare: a fragment of ", count,
                             " tokens has no ids to find boundaries in");
      }
      while (cut < count && !std::binary_search(boundary_tokens.begin(), boundary_tokens.end(),
                                                source.token_id(source.selected_token(cut - 1))))
        ++cut;
    }
    cut = past_boundary < 0 ? (std::max)(cut + (std::max)(past_boundary, -count), std::int64_t{0})
                            : (std::min)(cut + (std::min)(past_boundary, count), count);
    return cut == 0 ? std::int64_t{0} : source.selected_token(cut - 1) + 1;
  }
};

KVMELD_NAMESPACE_END
