#pragma once

/// The self-check that tells whether a declared rope is the one by which an engine turned its keys.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <kvmeld/cache/rope.hpp>
#include <kvmeld/cache/rope_frequencies.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN

/// How well a declared rope carries keys from one position to another. Errors are L2 norms relative
/// to the keys at the target.
struct RopeCheck {
  double relative_error = 0.0;          ///< Declared rope.
  double error_without_rotation = 0.0;  ///< Keys left as they are.
  double error_other_pairing = 0.0;     ///< Same frequencies, the other pairing.
  std::int64_t shift = 0;               ///< q - p.
  /// Factor on the turned keys that fits best; 1 where the engine kept the magnitude.
  double common_scale = 1.0;
};

namespace detail {

/// Residual of `scale * rotate(at_p)` against `at_q`, and the scale that would make it smallest.
struct RopeFit {
  double error = 0.0;         // relative to at_q, scale 1
  double scale = 1.0;         // best
  double scaled_error = 0.0;  // relative to at_q, best scale
};

/// Plain f64, a pair at a time: this is a check of the fast path's declaration, so it shares no
/// code with the fast path.
KVMELD_LAZY [[nodiscard]] RopeFit fit_rope(const RopeSpec& rope, RopePairing pairing,
                                           std::int32_t channels,
                                           const std::vector<double>& cosines,
                                           const std::vector<double>& sines,
                                           std::span<const float> at_p,
                                           std::span<const float> at_q) {
  const auto width = static_cast<std::size_t>(channels);
  const auto first = static_cast<std::size_t>(rope.first_channel);
  const std::size_t pairs = cosines.size();
  double turned_q = 0.0, turned_turned = 0.0, q_q = 0.0, off = 0.0;
  const auto add = [&](double turned, double target) {
    turned_q = fma(turned, target, turned_q);
    turned_turned = fma(turned, turned, turned_turned);
    q_q = fma(target, target, q_q);
    off = fma(turned - target, turned - target, off);
  };
  for (std::size_t row = 0; row + width <= at_p.size(); row += width) {
    for (std::size_t c = 0; c < width; ++c)
      if (c < first || c >= first + 2 * pairs)
        add(static_cast<double>(at_p[row + c]), static_cast<double>(at_q[row + c]));
    for (std::size_t i = 0; i < pairs; ++i) {
      const bool adjacent = pairing == RopePairing::interleaved;
      const std::size_t a = row + first + (adjacent ? 2 * i : i);
      const std::size_t b = row + first + (adjacent ? 2 * i + 1 : i + pairs);
      const double x = static_cast<double>(at_p[a]), y = static_cast<double>(at_p[b]);
      add(fma(x, cosines[i], -(y * sines[i])), static_cast<double>(at_q[a]));
      add(fma(x, sines[i], y * cosines[i]), static_cast<double>(at_q[b]));
    }
  }
  RopeFit fit;
  if (q_q <= 0.0 || turned_turned <= 0.0) return fit;
  fit.error = __builtin_sqrt(off / q_q);
  fit.scale = turned_q / turned_turned;
  const double rest = fma(-fit.scale, turned_q, q_q);
  fit.scaled_error = rest > 0.0 ? __builtin_sqrt(rest / q_q) : 0.0;
  return fit;
}

}  // namespace detail

/// Smallest distance at which pairings and bases can be told apart: near each other, wrong
/// rotations look right.
inline constexpr std::int64_t verify_rope_min_distance = 64;

/// Checks a declared rope against an engine's own keys for the same tokens at two positions.
///
/// Token t of `keys_at_p` was encoded at position p + t, of `keys_at_q` at q + t, so every key
/// moves by q - p. Take layer 0 of the model, where keys depend on nothing before them. Any first
/// position is good; the distance must be at least 64. `tolerance` bounds the relative L2 error:
/// 0.01 passes f16 and bf16 caches and engines that compute angles in f32, and is a hundredth of
/// what a wrong pairing leaves. `context_length` as for `inverse_frequencies`. Errors: those of
/// `validate`; `token_count_mismatch` (spans unequal, or not whole tokens); `non_finite`;
/// `invalid_argument` (distance below 64, no keys, all keys zero, or keys that hardly move and so
/// tell nothing); `rope_mismatch` with the figures and what would fit instead. O(keys).
KVMELD_LAZY [[nodiscard]] Result<RopeCheck> verify_rope(const RopeSpec& rope, std::int32_t heads,
                                                        std::int32_t channels,
                                                        // (token, head, channel)
                                                        std::span<const float> keys_at_p,
                                                        // (token, head, channel)
                                                        std::span<const float> keys_at_q,
                                                        std::int64_t p, std::int64_t q,
                                                        double tolerance = 0.01,
                                                        std::int64_t context_length = 0) {
  using detail::error;
  if (Status status = validate(rope, channels); !status) return status;
  if (heads <= 0) return error(ErrorCode::invalid_argument, "verify_rope: ", heads, " heads");
  if (!detail::finite_positive(tolerance))
    return error(ErrorCode::invalid_argument, "verify_rope: tolerance is ", tolerance,
                 "; it is finite and above 0");
  if (p < 0 || q < 0 || p > max_rope_shift || q > max_rope_shift)
    return error(ErrorCode::invalid_argument, "verify_rope: positions ", p, " and ", q,
                 "; they lie between 0 and ", max_rope_shift);
  const std::int64_t distance = q > p ? q - p : p - q;
  if (distance < verify_rope_min_distance)
    return error(ErrorCode::invalid_argument, "verify_rope: positions ", p, " and ", q, " are ",
                 distance, " apart; wrong pairings look right nearby, take at least ",
                 verify_rope_min_distance);
  const auto token = static_cast<std::size_t>(heads) * static_cast<std::size_t>(channels);
  if (keys_at_p.size() != keys_at_q.size() || keys_at_p.size() % token != 0)
    return error(ErrorCode::token_count_mismatch, "verify_rope: ", keys_at_p.size(), " and ",
                 keys_at_q.size(), " key values; both hold the same whole number of tokens of ",
                 token);
  if (keys_at_p.empty()) return error(ErrorCode::invalid_argument, "verify_rope: no keys to check");
  double size_p = 0.0, size_q = 0.0;
  for (std::size_t i = 0; i < keys_at_p.size(); ++i) {
    const double x = static_cast<double>(keys_at_p[i]), y = static_cast<double>(keys_at_q[i]);
    if (!(x - x == 0.0) || !(y - y == 0.0))
      return error(ErrorCode::non_finite, "verify_rope: key value ", i, " is not finite");
    size_p = fma(x, x, size_p);
    size_q = fma(y, y, size_q);
  }
  if (size_p <= 0.0 || size_q <= 0.0)
    return error(ErrorCode::invalid_argument, "verify_rope: all keys at position ",
                 size_p <= 0.0 ? p : q, " are zero");

  const Result<std::vector<double>> frequencies = inverse_frequencies(rope, context_length);
  if (!frequencies) return frequencies.error();
  const std::size_t pairs = frequencies->size();
  std::vector<double> cosines(pairs), sines(pairs);
  for (std::size_t i = 0; i < pairs; ++i) {
    const auto [sine, cosine] = math::sin_cos(static_cast<double>(q - p) * (*frequencies)[i]);
    cosines[i] = cosine;
    sines[i] = sine;
  }
  std::vector<double> backward(sines);
  for (double& s : backward) s = -s;
  const std::vector<double> ones(pairs, 1.0), zeros(pairs, 0.0);
  const RopePairing other =
      rope.pairing == RopePairing::interleaved ? RopePairing::half_split : RopePairing::interleaved;
  const detail::RopeFit declared =
      detail::fit_rope(rope, rope.pairing, channels, cosines, sines, keys_at_p, keys_at_q);
  const detail::RopeFit swapped =
      detail::fit_rope(rope, other, channels, cosines, sines, keys_at_p, keys_at_q);
  const detail::RopeFit still =
      detail::fit_rope(rope, rope.pairing, channels, ones, zeros, keys_at_p, keys_at_q);
  const detail::RopeFit reverse =
      detail::fit_rope(rope, rope.pairing, channels, cosines, backward, keys_at_p, keys_at_q);

  const RopeCheck check{declared.error, still.error, swapped.error, q - p, declared.scale};
  if (declared.error <= tolerance) {
    if (rope.kind == RopeKind::rotary && still.error <= tolerance)
      return error(ErrorCode::invalid_argument, "verify_rope: keys move by ", still.error, " over ",
                   distance, " positions, less than the tolerance ", tolerance,
                   ", and tell nothing; take a larger distance or other tokens");
    return check;
  }
  std::string hint =
      "neither pairing fits, nor no rotation: check base, scaling, rotary_channels and "
      "first_channel";
  if (still.error <= tolerance)
    hint =
        "the keys do not move at all: this layer has no rope, or its keys were taken before "
        "rotation";
  else if (rope.kind == RopeKind::none)
    hint = "the keys do move with position: declare the layer's rope";
  else if (swapped.error <= tolerance)
    hint = other == RopePairing::interleaved ? "the interleaved pairing fits"
                                             : "the half_split pairing fits";
  else if (reverse.error <= tolerance)
    hint = "the opposite direction fits: p and q, or the two spans, are swapped";
  else if (declared.scaled_error <= tolerance) {
    hint = "a common scale of ";
    detail::append(hint, declared.scale);
    hint +=
        " fits: the keys at the second position were scaled, as by an engine that applies YaRN's "
        "magnitude again in a "
        "shift";
  }
  return error(ErrorCode::rope_mismatch,
               "verify_rope: the declared rope leaves a relative error of ", declared.error,
               " over ", distance, " positions (", still.error, " without rotation, ",
               swapped.error, " with the other pairing); ", hint);
}

KVMELD_NAMESPACE_END
