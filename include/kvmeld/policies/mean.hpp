#pragma once

/// Means as fusers: weighted, norm-preserving, by history; sums, maxima; and their gradients.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

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
  void digest(Hasher& hasher) const {
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
  void digest(Hasher& hasher) const { hasher.text("kvmeld.Sum"); }
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
  void digest(Hasher& hasher) const { hasher.text("kvmeld.Max"); }
};

/// How much one agent's fragments weigh.
struct AgentWeight {
  std::uint64_t agent = 0;
  float weight = 1.0F;
};

/// How much one fragment weighs: the attention mass that fell on it, or what a predictor says of
/// it.
struct FragmentWeight {
  FragmentId fragment{};
  float weight = 1.0F;
};

/// A weighted mean by who made the fragment: Σ w·x / Σ w over the contributions that are there.
///
/// A fragment that several agents sealed counts as the one of the largest weight; agents that the
/// table does not name, and fragments without provenance, weigh `otherwise`. A weight of 0 leaves
/// an agent out. O(marks · log agents) a fragment. Errors: `invalid_argument` (weights not
/// ascending by agent), `non_finite` (negative, NaN, or all of a row's zero).
struct AgentWeights {
  static constexpr bool reproducible = true;
  static constexpr MetadataFields metadata = MetadataFields::provenance;
  std::vector<AgentWeight> weights{};  ///< ascending by agent
  float otherwise = 1.0F;

  [[nodiscard]] Result<float> weight(const Source& source) const {
    for (std::size_t i = 1; i < weights.size(); ++i) {
      if (weights[i].agent <= weights[i - 1].agent) {
        return extend::error(ErrorCode::invalid_argument, "AgentWeights: agent ", weights[i].agent,
                             " follows agent ", weights[i - 1].agent, "; the table ascends");
      }
    }
    const auto of = [&](std::uint64_t agent) {
      const auto at =
          std::lower_bound(weights.begin(), weights.end(), agent,
                           [](const AgentWeight& w, std::uint64_t a) { return w.agent < a; });
      return at != weights.end() && at->agent == agent ? at->weight : otherwise;
    };
    if (source.metadata->marks.empty()) return otherwise;
    float best = of(source.metadata->marks[0].dot.agent);
    for (const Mark& mark : source.metadata->marks) {
      const float w = of(mark.dot.agent);
      if (best == best && !(w <= best)) best = w;  // a NaN is found, wherever it stands, and stays
    }
    return best;
  }
  /// Whether some source is an agent's that the table names; true of an empty table, which asks for
  /// nobody.
  [[nodiscard]] bool names_any(std::span<const Source> sources) const {
    const auto named = [&](const Mark& mark) {
      return std::any_of(weights.begin(), weights.end(),
                         [&](const AgentWeight& w) { return w.agent == mark.dot.agent; });
    };
    return weights.empty() || std::any_of(sources.begin(), sources.end(), [&](const Source& s) {
             return std::any_of(s.metadata->marks.begin(), s.metadata->marks.end(), named);
           });
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.AgentWeights");
    hasher.value(otherwise);
    hasher.value(static_cast<std::uint64_t>(weights.size()));
    for (const AgentWeight& w : weights) {
      hasher.value(w.agent);
      hasher.value(w.weight);
    }
  }
};

/// A weighted mean by fragment, by weights that the caller measured: Σ w·x / Σ w over the
/// contributions that are there.
///
/// Every replica gives the same weights: they are part of the merger's digest. Fragments that the
/// table does not name weigh `otherwise`. O(weights) a fragment: the table is checked. Errors:
/// `invalid_argument` (weights not ascending by id), `non_finite` (negative, NaN, or all of a row's
/// zero).
struct FragmentWeights {
  static constexpr bool reproducible = true;
  std::vector<FragmentWeight> weights{};  ///< ascending by fragment
  float otherwise = 1.0F;

  [[nodiscard]] Result<float> weight(const Source& source) const {
    for (std::size_t i = 1; i < weights.size(); ++i) {
      if (!(weights[i - 1].fragment < weights[i].fragment)) {
        return extend::error(ErrorCode::invalid_argument, "FragmentWeights: entry ", i, " (",
                             weights[i].fragment.hex(), ") does not follow ",
                             weights[i - 1].fragment.hex(), "; the table ascends");
      }
    }
    const auto at = std::lower_bound(
        weights.begin(), weights.end(), source.fragment->id(),
        [](const FragmentWeight& w, const FragmentId& id) { return w.fragment < id; });
    return at != weights.end() && at->fragment == source.fragment->id() ? at->weight : otherwise;
  }
  /// Whether the table names some source; true of an empty table, which asks for none.
  [[nodiscard]] bool names_any(std::span<const Source> sources) const {
    return weights.empty() || std::any_of(sources.begin(), sources.end(), [&](const Source& s) {
             return std::any_of(weights.begin(), weights.end(), [&](const FragmentWeight& w) {
               return w.fragment == s.fragment->id();
             });
           });
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.FragmentWeights");
    hasher.value(otherwise);
    hasher.value(static_cast<std::uint64_t>(weights.size()));
    for (const FragmentWeight& w : weights) {
      hasher.bytes(std::as_bytes(std::span(w.fragment.bytes)));
      hasher.value(w.weight);
    }
  }
};

namespace detail {

/// A mean shorter than this share of the mean norm has no direction but that of rounding errors.
inline constexpr double shortest_mean = 0x1p-20;

/// Sums by lane to a norm.
[[nodiscard]] KVMELD_HD KVMELD_ALWAYS_INLINE double norm_of_lanes(double* lanes) noexcept {
  for (int half = 16; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return math::sqrt(lanes[0]);
}

/// What makes a weighted sum of norm `length` as long as `norms / total`.
[[nodiscard]] KVMELD_HD inline double lengthening(double length, double norms,
                                                  double total) noexcept {
  return length > shortest_mean * norms ? norms / length / total : 0.0;
}

/// Mixes the rows of a head into a sum in f64, then gives it its length.
struct NormPreservingRows {
  static constexpr bool rotation_equivariant = true;
  static constexpr bool keeps_single = true;

  template <class Rows>
  [[nodiscard]] KVMELD_HD static double sum(const Rows& rows, int c) {
    double out = 0;
    for (int i = 0; i < rows.count(); ++i)
      out = fma(static_cast<double>(rows.weight(i)), static_cast<double>(rows.value(i, c)), out);
    return out;
  }
  template <class Rows>
  [[nodiscard]] KVMELD_HD double prepare(const Rows& rows) const {
    double lanes[32];
    double norms = 0;
    double total = 0;
    for (int i = 0; i <= rows.count(); ++i) {
      for (int l = 0; l < 32; ++l) lanes[l] = 0;
      for (int c = 0; c < rows.channels(); ++c) {
        const double x = i < rows.count() ? static_cast<double>(rows.value(i, c)) : sum(rows, c);
        lanes[c % 32] = fma(x, x, lanes[c % 32]);
      }
      const double norm = norm_of_lanes(lanes);
      if (i == rows.count()) return lengthening(norm, norms, total);
      norms = fma(static_cast<double>(rows.weight(i)), norm, norms);
      total += static_cast<double>(rows.weight(i));
    }
    return 0;
  }
  template <class Rows>
  [[nodiscard]] KVMELD_HD float channel(const Rows& rows, double factor, int c) const {
    return static_cast<float>(factor * sum(rows, c));
  }

  /// A row may lie in one channel, and then as long as all channels of another.
  [[nodiscard]] static double bound(double peak, double, int channels) noexcept {
    return peak * math::sqrt(static_cast<double>(channels));
  }

  /// Whole rows on a host; out: whole blocks of 32 channels.
  void mix(Isa isa, const HeadRows& rows, float* out) const;
};

/// The 32 lanes' sums of squares of a row of whole blocks.
KVMELD_ALWAYS_INLINE void add_square_lanes(const double* __restrict row,
                                           double* __restrict lanes) noexcept {
  KVMELD_KEEP_LOOP
  for (int l = 0; l < 32; ++l) lanes[l] = fma(row[l], row[l], lanes[l]);
}

KVMELD_ALWAYS_INLINE void mix_norm_preserving(const HeadRows& rows,
                                              float* __restrict out) noexcept {
  alignas(64) double sums[1024];
  alignas(64) double wide[32];
  alignas(64) double lanes[32];
  double norms = 0, total = 0;
  for (int i = 0; i < rows.contributions; ++i) {
    const auto weight = static_cast<double>(rows.weights[i]);
    for (int l = 0; l < 32; ++l) lanes[l] = 0;
    for (std::ptrdiff_t b = 0; b < rows.width; b += 32) {
      const float* __restrict const row = rows.values + i * rows.stride + b;
      double* __restrict const to = sums + b;
      for (int c = 0; c < 32; ++c) wide[c] = static_cast<double>(row[c]);
      add_square_lanes(wide, lanes);
      if (i == 0) {
        for (int c = 0; c < 32; ++c) to[c] = 0;
      }
      KVMELD_KEEP_LOOP
      for (int c = 0; c < 32; ++c) to[c] = fma(weight, wide[c], to[c]);
    }
    norms = fma(weight, norm_of_lanes(lanes), norms);
    total += weight;
  }
  for (int l = 0; l < 32; ++l) lanes[l] = 0;
  for (std::ptrdiff_t b = 0; b < rows.width; b += 32) add_square_lanes(sums + b, lanes);
  const double factor = lengthening(norm_of_lanes(lanes), norms, total);
  for (std::ptrdiff_t b = 0; b < rows.width; b += 32) {
    const double* __restrict const from = sums + b;
    for (int c = 0; c < 32; ++c) out[b + c] = static_cast<float>(factor * from[c]);
  }
}

inline KVMELD_NOINLINE void mix_norm_preserving_baseline(const HeadRows& rows,
                                                         float* out) noexcept {
  mix_norm_preserving(rows, out);
}
inline KVMELD_TARGET_AVX2 KVMELD_NOINLINE void mix_norm_preserving_avx2(const HeadRows& rows,
                                                                        float* out) noexcept {
  mix_norm_preserving(rows, out);
}
inline KVMELD_TARGET_AVX512 KVMELD_NOINLINE void mix_norm_preserving_avx512(const HeadRows& rows,
                                                                            float* out) noexcept {
  mix_norm_preserving(rows, out);
}

inline void NormPreservingRows::mix(Isa isa, const HeadRows& rows, float* out) const {
  if (isa == Isa::avx512) return mix_norm_preserving_avx512(rows, out);
  isa == Isa::avx2 ? mix_norm_preserving_avx2(rows, out) : mix_norm_preserving_baseline(rows, out);
}

}  // namespace detail

/// The weighted mean of a head's rows, as long as the rows are on average: x̄ · (Σ w·‖x‖ / Σ w) /
/// ‖x̄‖ with x̄ = Σ w·x / Σ w.
///
/// A plain mean of rows that point apart is shorter than they are, and a shorter key draws less
/// attention. A zero mean stays a zero row, and so does one shorter than 2^-20 of the mean norm,
/// whose direction is that of rounding errors. Equal rows fuse to themselves, to the bit in f32.
/// One pass, in f64; norms by 32 lanes. At most 64 contributions.
struct NormPreservingMean {
  static constexpr bool reproducible = true;

  [[nodiscard]] constexpr detail::NormPreservingRows mixing() const noexcept { return {}; }
  void digest(Hasher& hasher) const { hasher.text("kvmeld.NormPreservingMean.v1"); }
};

/// How well each agent did so far, old outcomes fading: (prior + Σ decayᵏ·success) / (1 + Σ
/// decayᵏ), k counting the agent's own later outcomes.
///
/// The same outcomes in the same order give the same bits everywhere; outcomes of different agents
/// may come in any order among each other. `weights()` is what a merger takes: every replica must
/// be given the same.
class AgentHistory {
 public:
  /// @param decay  in [0, 1]: 1 forgets nothing; @param prior  in [0, 1]: what one imagined outcome
  /// before all others was.
  explicit AgentHistory(double decay = 0.9, double prior = 0.5) : decay_(decay), prior_(prior) {}

  /// @param success  in [0, 1]. O(log agents), and O(agents) for an agent's first. Errors:
  /// `invalid_argument` (a number out of its range).
  [[nodiscard]] Status record(std::uint64_t agent, double success) {
    for (const double x : {decay_, prior_, success}) {
      if (!(x >= 0 && x <= 1))
        return extend::error(ErrorCode::invalid_argument, "AgentHistory: ", x, " for agent ", agent,
                             " is not in [0, 1]");
    }
    auto at = std::lower_bound(agents_.begin(), agents_.end(), agent,
                               [](const Past& p, std::uint64_t a) { return p.agent < a; });
    if (at == agents_.end() || at->agent != agent) at = agents_.insert(at, {agent, 0, 0});
    at->sum = fma(decay_, at->sum, success);
    at->count = fma(decay_, at->count, 1.0);
    return {};
  }
  /// Of one agent; the prior where nothing is known.
  [[nodiscard]] float weight(std::uint64_t agent) const noexcept {
    const auto at = std::lower_bound(agents_.begin(), agents_.end(), agent,
                                     [](const Past& p, std::uint64_t a) { return p.agent < a; });
    return at == agents_.end() || at->agent != agent ? static_cast<float>(prior_) : of(*at);
  }
  /// A fuser that weighs each agent by its history; unknown agents by the prior.
  [[nodiscard]] AgentWeights weights() const {
    AgentWeights out;
    for (const Past& past : agents_) out.weights.push_back({past.agent, of(past)});
    out.otherwise = static_cast<float>(prior_);
    return out;
  }

 private:
  struct Past {
    std::uint64_t agent;
    double sum;
    double count;
  };
  [[nodiscard]] float of(const Past& past) const noexcept {
    return static_cast<float>((prior_ + past.sum) / (1.0 + past.count));
  }

  double decay_;
  double prior_;
  std::vector<Past> agents_;  // ascending by agent
};

// Gradients of means. Trainers are not byte-reproducible: sums are as the compiler makes them.

namespace gradients {

/// One fused row as it was computed, and the cotangent of its result. Contiguous, the caller's
/// memory.
template <std::floating_point T>
struct MixPullback {
  std::span<const T> values{};     ///< (contribution, channel) in the frame in which they are fused
  std::span<const T> weights{};    ///< (contribution) above 0
  std::span<const T> cotangent{};  ///< (channel)
};

/// What comes back: vector-Jacobian products, added to what the memory holds.
template <std::floating_point T>
struct MixGradients {
  std::span<T> values{};   ///< (contribution, channel)
  std::span<T> weights{};  ///< (contribution)
};

}  // namespace gradients

namespace detail {

template <class T>
[[nodiscard]] Status check_mix(const gradients::MixPullback<T>& p,
                               const gradients::MixGradients<T>& out) {
  if (p.weights.empty() || p.cotangent.empty() ||
      p.values.size() != p.weights.size() * p.cotangent.size()) {
    return error(ErrorCode::invalid_argument, "vjp of a fuser: ", p.values.size(), " values for ",
                 p.weights.size(), " contributions of ", p.cotangent.size(), " channels");
  }
  if (out.values.size() != p.values.size() || out.weights.size() != p.weights.size()) {
    return error(ErrorCode::invalid_argument, "vjp of a fuser: gradients of ", out.values.size(),
                 " values and ", out.weights.size(), " weights, where there are ", p.values.size(),
                 " and ", p.weights.size());
  }
  return {};
}

}  // namespace detail

namespace gradients {

/// Gradients through `WeightedMean`, y = Σ w·x / Σ w: dxᵢ += wᵢ/W·g and dwᵢ += (xᵢ − y)·g / W.
///
/// Of rows that are fused as they lie; where run rotates the result, turn the cotangent back first.
/// O(values); allocates nothing. Errors: `invalid_argument` (sizes).
template <std::floating_point T>
[[nodiscard]] Status weighted_mean_vjp(const gradients::MixPullback<T>& p,
                                       const gradients::MixGradients<T>& out) {
  KVMELD_TRY(detail::check_mix(p, out));
  const std::size_t n = p.weights.size(), channels = p.cotangent.size();
  T total = 0;
  for (const T w : p.weights) total += w;
  for (std::size_t c = 0; c < channels; ++c) {
    T mean = 0;
    for (std::size_t i = 0; i < n; ++i) mean += p.weights[i] * p.values[i * channels + c];
    mean /= total;
    const T g = p.cotangent[c] / total;
    for (std::size_t i = 0; i < n; ++i) {
      out.values[i * channels + c] += p.weights[i] * g;
      out.weights[i] += (p.values[i * channels + c] - mean) * g;
    }
  }
  return {};
}

/// Gradients through `NormPreservingMean`, y = u·N/W with s = Σ w·x, u = s/‖s‖, N = Σ w·‖x‖ and W =
/// Σ w.
///
/// A row of zeros takes no share of its norm's gradient, and where the mean counts as zero nothing
/// comes back. O(values); allocates nothing. Errors: `invalid_argument` (sizes).
template <std::floating_point T>
[[nodiscard]] Status norm_preserving_mean_vjp(const gradients::MixPullback<T>& p,
                                              const gradients::MixGradients<T>& out) {
  KVMELD_TRY(detail::check_mix(p, out));
  const std::size_t n = p.weights.size(), channels = p.cotangent.size();
  const auto sum = [&](std::size_t c) {
    T s = 0;
    for (std::size_t i = 0; i < n; ++i) s += p.weights[i] * p.values[i * channels + c];
    return s;
  };
  const auto norm = [&](std::size_t i) {
    T square = 0;
    for (std::size_t c = 0; c < channels; ++c)
      square += p.values[i * channels + c] * p.values[i * channels + c];
    return std::sqrt(square);
  };
  T total = 0, norms = 0, square = 0, along = 0;
  for (std::size_t i = 0; i < n; ++i) {
    total += p.weights[i];
    norms += p.weights[i] * norm(i);
  }
  for (std::size_t c = 0; c < channels; ++c) {
    const T s = sum(c);
    square += s * s;
    along += s * p.cotangent[c];
  }
  const T length = std::sqrt(square);
  if (!(length > static_cast<T>(detail::shortest_mean) * norms)) return {};
  along /= length;  // u·g
  const T d_norms = along / total;
  const T d_total = -along * norms / (total * total);
  const T scale = norms / total / length;
  for (std::size_t i = 0; i < n; ++i) {
    const T own = norm(i);
    out.weights[i] += d_total + d_norms * own;
    for (std::size_t c = 0; own > 0 && c < channels; ++c) {
      out.values[i * channels + c] += p.weights[i] * d_norms * p.values[i * channels + c] / own;
    }
  }
  for (std::size_t c = 0; c < channels; ++c) {
    const T d_sum = scale * (p.cotangent[c] - along / length * sum(c));
    for (std::size_t i = 0; i < n; ++i) {
      out.values[i * channels + c] += p.weights[i] * d_sum;
      out.weights[i] += p.values[i * channels + c] * d_sum;
    }
  }
  return {};
}

}  // namespace gradients

KVMELD_NAMESPACE_END
