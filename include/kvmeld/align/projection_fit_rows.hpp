#pragma once

/// Rows of fragments as a fit sees them: f64, keys without their rotation.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/pair_by_spans.hpp>
#include <kvmeld/align/projection_map.hpp>
#include <kvmeld/align/projection_parts.hpp>
#include <kvmeld/align/projection_rows.hpp>
#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/rope_frequencies.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/tensor/math.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Whether a fragment is of the model that a fit or map is made for, in elements that it reads.
KVMELD_LAZY [[nodiscard]] Status check_fit_geometry(const Geometry& is, const Geometry& wanted,
                                                    const char* side) {
  KVMELD_TRY(check_side(is, wanted, side));
  for (std::size_t l = 0; l < is.layers.size(); ++l) {
    for (const PlaneShape& shape : is.layers[l].planes) {
      if (shape.scales != ScaleScheme::none || shape.hadamard != 0) {
        return error(ErrorCode::unsupported, "fit: ", side, " layer ", l,
                     " has scales or a Hadamard basis of ", shape.hadamard,
                     "; fit on floats in the model's own basis");
      }
    }
  }
  return {};
}

/// Turns one head's row from position 0 to `position`, in f64.
inline void turn_fit_row(const RopeSpec& rope, std::span<const double> frequencies, double position,
                         double* row) {
  const auto pairs = static_cast<std::int32_t>(frequencies.size());
  for (std::int32_t i = 0; i < pairs; ++i) {
    const bool split = rope.pairing == RopePairing::half_split;
    const std::int32_t first = rope.first_channel + (split ? i : 2 * i);
    const std::int32_t second = split ? first + pairs : first + 1;
    const math::SinCos at = math::sin_cos(position * frequencies[static_cast<std::size_t>(i)]);
    const double a = row[first], b = row[second];
    row[first] = fma(a, at.cos, -fma(b, at.sin, 0.0));
    row[second] = fma(a, at.sin, fma(b, at.cos, 0.0));
  }
}

/// The frequencies by which a plane's stored rows were turned; none where they carry no position.
/// Errors: `rope_length_dependent`, and those of `inverse_frequencies` (`rope_unsupported` for
/// several axes).
KVMELD_LAZY [[nodiscard]] Result<std::vector<double>> plane_frequencies(const LayerShape& layer,
                                                                        const PlaneShape& shape,
                                                                        std::int64_t length) {
  if (!shape.rotary || layer.key_form == KeyForm::pre_rope || layer.rope.kind == RopeKind::none)
    return std::vector<double>{};
  if (length_dependent(layer.rope) && length > layer.rope.original_context) {
    return error(ErrorCode::rope_length_dependent, "fit: keys up to position ", length - 1,
                 " behind an original context of ", layer.rope.original_context,
                 " do not say by which frequencies they were turned; seal them before rotation");
  }
  return inverse_frequencies(layer.rope, length);
}

/// A plane's rows of chosen tokens. (token, head · channel)
struct FitPlane {
  std::vector<double> values;
  std::size_t width = 0;
  std::vector<bool> there;  ///< whether the layer holds the token

  [[nodiscard]] std::span<const double> row(std::size_t i) const {
    return std::span(values).subspan(i * width, width);
  }
};

/// Reads the rows of `tokens` of one plane, de-rotated; a token that the layer does not hold is
/// marked.
KVMELD_LAZY [[nodiscard]] Result<FitPlane> read_fit_plane(const Geometry& geometry,
                                                          const Payload& payload, std::size_t layer,
                                                          Plane kind,
                                                          std::span<const std::int32_t> tokens) {
  const LayerShape& shape = geometry.layers[layer];
  const auto plane = static_cast<std::size_t>(plane_indices(geometry, kind)[layer]);
  const PlaneShape& of = *find_plane(shape, kind);
  const auto frequencies =
      plane_frequencies(shape, of, payload.positions.empty() ? 1 : payload.positions.back() + 1);
  if (!frequencies) return frequencies.error();

  FitPlane out;
  out.width = static_cast<std::size_t>(of.heads) * static_cast<std::size_t>(of.channels);
  out.values.resize(tokens.size() * out.width);
  out.there.assign(tokens.size(), true);
  const TokenSet& set = payload.token_sets[payload.layer_set[layer]];
  std::vector<float> row(out.width);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::int64_t at = tokens[i];
    if (!set.all) {
      const auto found = std::lower_bound(set.present.begin(), set.present.end(), tokens[i]);
      out.there[i] = found != set.present.end() && *found == tokens[i];
      if (!out.there[i]) continue;
      at = found - set.present.begin();
    }
    const std::byte* const stored =
        payload.bytes.get() + payload.plane_offsets[plane] + at * row_bytes(of) * of.heads;
    load_row(of.type, best_isa(), stored, static_cast<std::ptrdiff_t>(out.width), row.data());
    double* const to = out.values.data() + i * out.width;
    std::copy(row.begin(), row.end(), to);
    if (frequencies->empty()) continue;
    const double position =
        -static_cast<double>(payload.positions[static_cast<std::size_t>(tokens[i])]);
    for (std::int32_t h = 0; h < of.heads; ++h)
      turn_fit_row(shape.rope, *frequencies, position, to + std::ptrdiff_t{h} * of.channels);
  }
  return out;
}

/// Whether a fragment's bytes are there and every index lies among its tokens.
KVMELD_LAZY [[nodiscard]] Status check_fit_fragments(const Fragment& source, const Fragment& target,
                                                     std::span<const TokenPair> pairs) {
  for (const Fragment* fragment : {&source, &target}) {
    if (!fragment->valid())
      return error(ErrorCode::invalid_argument, "fit: an empty fragment handle");
    if (fragment->payloads()[0].bytes == nullptr && fragment->token_count() > 0) {
      return error(ErrorCode::payload_missing, "fit: a fragment of ", fragment->token_count(),
                   " tokens is evicted");
    }
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i].source < 0 || pairs[i].source >= source.token_count() || pairs[i].target < 0 ||
        pairs[i].target >= target.token_count()) {
      return error(ErrorCode::invalid_argument, "fit: pair ", i, " names tokens ", pairs[i].source,
                   " and ", pairs[i].target, " of ", source.token_count(), " and ",
                   target.token_count());
    }
  }
  return {};
}

/// Token i with token i, for fragments of one text and tokenizer.
KVMELD_LAZY [[nodiscard]] Result<std::vector<TokenPair>> equal_pairs(const Fragment& source,
                                                                     const Fragment& target) {
  if (source.token_count() != target.token_count()) {
    return error(ErrorCode::token_count_mismatch, "fit: fragments of ", source.token_count(),
                 " and ", target.token_count(),
                 " tokens; pair them by their character spans (pair_by_spans)");
  }
  std::vector<TokenPair> pairs(static_cast<std::size_t>(source.token_count()));
  for (std::size_t i = 0; i < pairs.size(); ++i)
    pairs[i] = {static_cast<std::int32_t>(i), static_cast<std::int32_t>(i)};
  return pairs;
}

/// The inputs of some blocks, gathered from planes that are read once a layer.
class FitInputs {
 public:
  FitInputs(const Fragment& fragment, std::vector<std::int32_t> tokens)
      : fragment_(&fragment), tokens_(std::move(tokens)) {
    planes_[0].resize(fragment.geometry().layers.size());
    planes_[1].resize(planes_[0].size());
  }
  /// Rows of the heads one behind the other, of tokens that every layer named holds. (token,
  /// channel of all heads)
  template <class Lazy = void>
  [[nodiscard]] Status gather(Plane plane, std::span<const HeadRef> heads, std::vector<double>& out,
                              std::vector<bool>& there) {
    there.assign(tokens_.size(), true);
    std::size_t width = 0;
    for (const HeadRef& head : heads) {
      FitPlane& from = planes_[plane == Plane::key ? 0 : 1][static_cast<std::size_t>(head.layer)];
      if (from.width == 0) {
        auto read = read_fit_plane(fragment_->geometry(), fragment_->payloads()[0],
                                   static_cast<std::size_t>(head.layer), plane, tokens_);
        if (!read) return read.error();
        from = *std::move(read);
      }
      for (std::size_t i = 0; i < tokens_.size(); ++i) there[i] = there[i] && from.there[i];
      width += channels(plane, head);
    }
    out.resize(tokens_.size() * width);
    std::size_t at = 0;
    for (const HeadRef& head : heads) {
      const FitPlane& from =
          planes_[plane == Plane::key ? 0 : 1][static_cast<std::size_t>(head.layer)];
      const std::size_t size = channels(plane, head);
      for (std::size_t i = 0; i < tokens_.size(); ++i) {
        const double* const row =
            from.values.data() + i * from.width + static_cast<std::size_t>(head.head) * size;
        std::copy(row, row + size, out.data() + i * width + at);
      }
      at += size;
    }
    return {};
  }

 private:
  [[nodiscard]] std::size_t channels(Plane plane, const HeadRef& head) const {
    return static_cast<std::size_t>(
        find_plane(fragment_->geometry().layers[static_cast<std::size_t>(head.layer)], plane)
            ->channels);
  }
  const Fragment* fragment_;
  std::vector<std::int32_t> tokens_;
  std::vector<FitPlane> planes_[2];
};

}  // namespace detail
KVMELD_NAMESPACE_END
