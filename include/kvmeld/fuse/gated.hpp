#pragma once

#include <memory>
#include <span>

#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/fuse/gate_weights.hpp>
#include <kvmeld/fuse/gated_mix.hpp>
#include <kvmeld/fuse/gated_rows.hpp>

KVMELD_NAMESPACE_BEGIN

/// Lets a small network decide how much of each contribution enters: Σ gᵢ·xᵢ with g = softmax over
/// contributions of the network's logits plus the natural logarithm of the aligner's weights, gᵢ =
/// wᵢ·exp(lᵢ) / Σ wⱼ·exp(lⱼ).
///
/// One network for every agent, over [its row, the mean of all rows] of a head: permuting agents
/// permutes gates, and equal contributions fuse to themselves, to the bit in f32. Keys are
/// un-rotated. Keys and values, layers and heads each have gates of their own. A single
/// contribution is copied. Each sum over inputs is in f32 from its bias on, own and mean's inputs
/// apart, each ascending; exp and tanh are `kvmeld::math`'s; gates and the last sum are f64.
///
/// O(contributions · (2 · channels + outputs) · hidden) a row. Errors at the plan:
/// `geometry_mismatch` (weights of another model's sizes), `unsupported` (latent caches),
/// `invalid_argument` (no weights, or of the other kind), `oversized` (contributions). Shazeer et
/// al.: Outrageously Large Neural Networks, 2017 (softmax gates); Zaheer et al.: Deep Sets, 2017
/// (one network for all, beside a symmetric summary).
template <GateKind kind>
struct GatedBy {
  static constexpr bool reproducible = true;
  std::shared_ptr<const GateWeights> weights{};

  [[nodiscard]] detail::GateRows<kind> mixing() const {
    return weights == nullptr ? detail::GateRows<kind>{}
                              : detail::GateRows<kind>(weights->shape(), weights->laid_out());
  }
  [[nodiscard]] Status fits(const Geometry& geometry) const {
    if (weights == nullptr)
      return detail::error(ErrorCode::invalid_argument, "gate: no weights are given");
    if (weights->shape().kind != kind) {
      return detail::error(ErrorCode::invalid_argument, "gate: weights of ",
                           kind == GateKind::token ? "a gate per channel; take GatedChannels"
                                                   : "a gate per token; take Gated");
    }
    return weights->fits(geometry);
  }
  [[nodiscard]] Status check(std::int64_t contributions) const {
    if (weights == nullptr)
      return detail::error(ErrorCode::invalid_argument, "gate: no weights are given");
    const std::int64_t units = detail::whole_blocks(weights->shape().hidden);
    if (kind == GateKind::token || contributions * units <= detail::max_gate_units) return {};
    return detail::error(ErrorCode::oversized, contributions,
                         " contributions; a gate per channel with ", units,
                         " hidden units mixes at most ", detail::max_gate_units / units);
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Gated.v1");
    hasher.value(kind);
    const Digest128 name = weights == nullptr ? Digest128{} : weights->digest();
    hasher.value(name.low);
    hasher.value(name.high);
  }
};

/// A gate per head's row.
using Gated = GatedBy<GateKind::token>;
/// A gate per channel.
using GatedChannels = GatedBy<GateKind::channel>;

KVMELD_NAMESPACE_END
