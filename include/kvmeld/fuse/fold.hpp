#pragma once

#include <kvmeld/fuse/fuser.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a weighted mean weighs its contributions by, beside the aligner's weights.
enum class Weighting : std::uint8_t {
  uniform,     ///< every fragment alike
  confidence,  ///< the highest confidence that an agent gave the fragment
};

/// Σ w·x / Σ w over the contributions that are there, so that missing ones renormalise.
///
/// The mean of keys is taken where they share a position (docs/numerics.md). Means of unrelated
/// tokens destroy answers (docs/quality.md): use it for tokens that several agents read alike.
/// Weights are at least 0; see also `AgentWeights` and `FragmentWeights`.
struct WeightedMean {
  static constexpr bool reproducible = true;
  static constexpr MetadataFields metadata = MetadataFields::confidence;
  Weighting weighting = Weighting::uniform;

  [[nodiscard]] float weight(const Source& source) const {
    return weighting == Weighting::confidence ? source.metadata->best_confidence() : 1.0F;
  }
  KVMELD_LAZY void digest(Hasher& hasher) const {
    hasher.text("kvmeld.WeightedMean");
    hasher.value(weighting);
  }
};

/// Σ w·x, not normalised: base plus offsets, or residuals that add up.
struct Sum {
  static constexpr bool reproducible = true;
  static constexpr bool rotation_equivariant = true;

  [[nodiscard]] KVMELD_HD constexpr float init() const noexcept { return 0.0F; }
  [[nodiscard]] KVMELD_HD float absorb(float acc, float value, float weight) const noexcept {
    return fma(weight, value, acc);
  }
  [[nodiscard]] KVMELD_HD constexpr float join(float a, float b) const noexcept { return a + b; }
  [[nodiscard]] KVMELD_HD constexpr float finish(float acc, float, int) const noexcept {
    return acc;
  }
  [[nodiscard]] static constexpr double bound(double peak, double weights, int) noexcept {
    return peak * weights;
  }
  KVMELD_LAZY void digest(Hasher& hasher) const { hasher.text("kvmeld.Sum"); }
};

/// The largest value of each channel, weights left aside: it acts per channel, so keys are compared
/// un-rotated.
struct Max {
  static constexpr bool reproducible = true;
  static constexpr bool rotation_equivariant = false;
  static constexpr bool keeps_single = true;

  [[nodiscard]] KVMELD_HD constexpr float init() const noexcept { return -__builtin_inff(); }
  [[nodiscard]] KVMELD_HD constexpr float absorb(float acc, float value, float) const noexcept {
    return acc < value ? value : acc;
  }
  [[nodiscard]] KVMELD_HD constexpr float join(float a, float b) const noexcept {
    return a < b ? b : a;
  }
  [[nodiscard]] KVMELD_HD constexpr float finish(float acc, float, int) const noexcept {
    return acc;
  }
  [[nodiscard]] static constexpr double bound(double peak, double, int) noexcept { return peak; }
  KVMELD_LAZY void digest(Hasher& hasher) const { hasher.text("kvmeld.Max"); }
};

KVMELD_NAMESPACE_END
