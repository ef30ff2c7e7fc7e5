#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/anchor_parts.hpp>

/// What each layer of a reuse plan sums; layers that hold and weigh the same share one group.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Contributions of one layer: base and offsets where all of them hold the token, a hole where one
/// does not. A base is never taken for a blend in silence: a token without offset is a hole in
/// every layer, those that need none too.
KVMELD_LAZY AlignmentGroup reuse_group(const PlanCore& core, std::span<const ReusePiece> pieces,
                                       std::size_t layer, std::int32_t context_free_layers) {
  AlignmentGroup group;
  const bool context_free = std::cmp_less(layer, context_free_layers),
             none_needed = std::cmp_equal(core.geometry->layers.size(), context_free_layers);
  const auto held = [&](const Contribution& c) {
    return payload_row(core.sources[c.source].payload(), layer, c.token) >= 0;
  };
  for (const ReusePiece& piece : pieces) {
    const bool bare = piece.part->rotated_only || none_needed;
    for (std::int64_t t = 0; t < piece.tokens; ++t) {
      const auto at = static_cast<std::size_t>(t);
      const std::size_t begin = group.contributions.size();
      bool complete =
          piece.base_begin[at] != piece.base_begin[at + 1] && (bare || piece.unmapped[at] == 0);
      for (std::uint32_t i = piece.base_begin[at]; complete && i < piece.base_begin[at + 1]; ++i) {
        complete = held(piece.base_taps[i].input);
        group.contributions.push_back(piece.base_taps[i].input);
      }
      for (std::uint32_t i = bare || context_free ? piece.offset_begin[at + 1]
                                                  : piece.offset_begin[at];
           complete && i < piece.offset_begin[at + 1]; ++i) {
        Contribution input = piece.offset_taps[i].input;
        input.weight =
            rounded_product(input.weight, piece.gain(piece.offset_taps[i].offset, layer, t));
        if (input.weight == 0.0F) continue;
        complete = held(input);
        group.contributions.push_back(input);
      }
      if (!complete) group.contributions.resize(begin);
      group.end_row();
    }
  }
  return group;
}

/// Whether two layers' offsets enter by the same gains.
KVMELD_LAZY bool same_gains(std::span<const ReusePiece> pieces, std::size_t a, std::size_t b) {
  for (const ReusePiece& piece : pieces) {
    const auto n = static_cast<std::size_t>(piece.tokens);
    for (const std::uint32_t i : piece.order) {
      const float* const gains = piece.part->offsets[i].gains.data();
      if (gains != nullptr && !std::equal(gains + a * n, gains + (a + 1) * n, gains + b * n))
        return false;
    }
  }
  return true;
}

/// Groups of layers for all pieces. Layers share one where the sources hold the same tokens in
/// both, and the base alone or the same gains enter.
KVMELD_LAZY Alignment reuse_alignment(const PlanCore& core, std::span<const ReusePiece> pieces,
                                      std::int32_t context_free_layers) {
  struct Key {
    bool context_free = false;
    std::size_t layer = 0;                // the first of the group
    std::vector<const TokenSet*> sets{};  // (sources)
  };
  Alignment alignment;
  std::vector<Key> keys;  // (groups)
  const std::size_t layers = core.geometry->layers.size();
  for (std::size_t l = 0; l < layers; ++l) {
    Key key{std::cmp_less(l, context_free_layers), l, {}};
    for (const PlanSource& source : core.sources)
      key.sets.push_back(&source.payload().token_sets[source.payload().layer_set[l]]);
    const auto alike = [&](const Key& other) {
      return other.context_free == key.context_free &&
             std::equal(other.sets.begin(), other.sets.end(), key.sets.begin(), key.sets.end(),
                        [](const TokenSet* a, const TokenSet* b) { return *a == *b; }) &&
             (key.context_free || same_gains(pieces, other.layer, l));
    };
    const auto g =
        static_cast<std::size_t>(std::find_if(keys.begin(), keys.end(), alike) - keys.begin());
    if (g == keys.size()) {
      keys.push_back(std::move(key));
      alignment.groups.push_back(reuse_group(core, pieces, l, context_free_layers));
      alignment.groups.back().layers.layers.assign(layers, 0);
    }
    alignment.groups[g].layers.layers[l] = 1;
  }
  return alignment;
}

}  // namespace detail
KVMELD_NAMESPACE_END
