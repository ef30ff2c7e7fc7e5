#pragma once

/// What a map is worth, on text that it was not fitted on: attention over mapped K/V against
/// attention over the target's own.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/projection.hpp>
#include <kvmeld/align/projection_fit_rows.hpp>

KVMELD_NAMESPACE_BEGIN

/// How near attention outputs are: 1 is equal, 0 is unrelated.
struct AttentionScore {
  double cosine = 0;                    ///< mean over layers
  std::vector<double> layer_cosines{};  ///< mean over heads and queries of each target layer
  std::int64_t tokens = 0;              ///< held-out tokens attended over
};

/// Queries of the target model over the tokens of one fragment, turned to their positions as the
/// engine turned them.
struct HeldOutQueries {
  /// (layer, query, query head, channel); query heads in groups, as many for each KV head.
  std::span<const float> values{};
  std::int32_t count = 0;  ///< queries; each sees all tokens of the fragment
  std::int32_t heads = 0;  ///< query heads of a layer, a multiple of its KV heads
};

/// Compares attention outputs, fragment by fragment; holds sums only.
///
/// For each query q of the target, and each layer and KV head: o = Σ softmax(q·k / √D)·v over the
/// target's own K/V and over the mapped ones; the score is the mean cosine of both o, less the mean
/// of the target's own v over the fragment, which any map of means would hit. An engine that hands
/// out no queries leaves the target's own keys at the last tokens, less their mean over the
/// fragment, which stand for queries: what a model looks for is described in the space of its keys,
/// and a bias that all keys share moves no softmax.
///
/// Not R²: a map may miss most of the variance of keys in directions that no query asks for, or
/// little of it in those that all do.
class AttentionGate {
 public:
  /// @param map is scored whatever its own record says. @param last queries taken from the last
  /// tokens where none are given.
  explicit AttentionGate(std::shared_ptr<const ProjectionMap> map, std::int32_t last = 16)
      : projection_{std::move(map), -1.0F}, last_(last) {}

  /// Adds a text that both models read, token i with token i unless `pairs` says otherwise.
  /// O(layers · heads · queries · tokens).
  ///
  /// Errors: `geometry_mismatch`, `payload_missing`, `token_count_mismatch`, `unsupported`,
  /// `invalid_argument` (queries that do not fit the target); nothing is added then.
  template <class Lazy = void>
  [[nodiscard]] Status add(const Fragment& source, const Fragment& target,
                           std::span<const TokenPair> pairs = {},
                           const HeldOutQueries& queries = {});

  /// The mean so far. Errors: `invalid_argument` where nothing could be compared.
  [[nodiscard]] Result<AttentionScore> score() const {
    AttentionScore out{.tokens = tokens_};
    for (std::size_t l = 0; l < sums_.size(); ++l) {
      if (!(counts_[l] > 0))
        return detail::error(ErrorCode::invalid_argument, "gate: no attention output of layer ", l,
                             " to compare, of ", tokens_, " tokens");
      out.layer_cosines.push_back(sums_[l] / counts_[l]);
      out.cosine += out.layer_cosines.back() / static_cast<double>(sums_.size());
    }
    if (sums_.empty()) return detail::error(ErrorCode::invalid_argument, "gate: nothing was added");
    return out;
  }
  /// The map with the score in its record, and the bar that it was measured against. Errors: those
  /// of `score`.
  [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> recorded(
      double bar, double downstream = -1) const {
    const auto scored = score();
    if (!scored) return scored.error();
    MapRecord record = projection_.map->record();
    record.attention_cosine = scored->cosine;
    record.held_out_tokens = scored->tokens;
    record.downstream = downstream;
    record.bar = bar;
    return projection_.map->with_record(std::move(record));
  }

 private:
  Projection projection_;
  std::int32_t last_;
  std::vector<double> sums_, counts_;  // (layer)
  std::int64_t tokens_ = 0;
};

namespace detail {

/// softmax(q·k / √D)·v over tokens 0 to `tokens` − 1 of one head. (channel of v)
inline void attend_plainly(std::span<const double> q, const FitPlane& k, const FitPlane& v,
                           std::size_t k_at, std::size_t v_at, std::size_t v_size,
                           std::size_t tokens, std::vector<double>& weights,
                           std::vector<double>& out) {
  weights.resize(tokens);
  double top = -1e300, total = 0;
  for (std::size_t t = 0; t < tokens; ++t) {
    double sum = 0;
    for (std::size_t c = 0; c < q.size(); ++c)
      sum = fma(q[c], k.values[t * k.width + k_at + c], sum);
    weights[t] = sum / math::sqrt(static_cast<double>(q.size()));
    top = (std::max)(top, weights[t]);
  }
  out.assign(v_size, 0.0);
  for (std::size_t t = 0; t < tokens; ++t) {
    const double w = math::exp(weights[t] - top);
    total += w;
    for (std::size_t c = 0; c < v_size; ++c)
      out[c] = fma(w, v.values[t * v.width + v_at + c], out[c]);
  }
  for (double& x : out) x /= total;
}

/// Mean row of a plane. (channel of all heads)
[[nodiscard]] inline std::vector<double> mean_row(const FitPlane& plane, std::size_t tokens) {
  std::vector<double> mean(plane.width, 0.0);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t c = 0; c < plane.width; ++c)
      mean[c] += plane.values[t * plane.width + c] / static_cast<double>(tokens);
  }
  return mean;
}

[[nodiscard]] inline double cosine_about(const std::vector<double>& a, const std::vector<double>& b,
                                         const double* centre) {
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t c = 0; c < a.size(); ++c) {
    const double x = a[c] - centre[c], y = b[c] - centre[c];
    ab = fma(x, y, ab);
    aa = fma(x, x, aa);
    bb = fma(y, y, bb);
  }
  return aa > 0 && bb > 0 ? ab / math::sqrt(aa * bb) : (aa == bb ? 1.0 : 0.0);
}

}  // namespace detail

template <class Lazy>
Status AttentionGate::add(const Fragment& source, const Fragment& target,
                          std::span<const TokenPair> pairs, const HeldOutQueries& queries) {
  using detail::error;
  if (projection_.map == nullptr)
    return error(ErrorCode::invalid_argument, "gate: there is no map");
  KVMELD_TRY(detail::check_fit_fragments(source, target, pairs));
  KVMELD_TRY(detail::check_fit_geometry(source.geometry(), projection_.map->source(), "source"));
  KVMELD_TRY(detail::check_fit_geometry(target.geometry(), projection_.map->target(), "target"));
  std::vector<TokenPair> equal;
  if (pairs.empty()) {
    auto made = detail::equal_pairs(source, target);
    if (!made) return made.error();
    equal = *std::move(made);
    pairs = equal;
  }
  if (pairs.size() < 2)
    return error(ErrorCode::invalid_argument, "gate: ", pairs.size(),
                 " paired tokens; attention needs two to choose from");
  Geometry to = target.geometry();
  to.tenant = source.geometry().tenant;
  const auto mapped = projection_.transform(source, 0, to);
  if (!mapped) return mapped.error();

  std::vector<std::int32_t> of_source, of_target;
  for (const TokenPair& pair : pairs) {
    of_source.push_back(pair.source);
    of_target.push_back(pair.target);
  }
  const Payload& own = target.payloads()[0];
  const std::size_t tokens = pairs.size();
  const auto position = [&](std::size_t t) {
    return static_cast<double>(own.positions[static_cast<std::size_t>(of_target[t])]);
  };
  std::vector<double> sums(to.layers.size(), 0.0), counts(to.layers.size(), 0.0), weights, a, b;
  for (std::size_t l = 0; l < to.layers.size(); ++l) {
    const PlaneShape* const key = detail::find_plane(to.layers[l], Plane::key);
    const PlaneShape* const value = detail::find_plane(to.layers[l], Plane::value);
    if (key == nullptr || value == nullptr || key->heads == 0 || key->heads != value->heads) {
      return error(ErrorCode::unsupported, "gate: layer ", l,
                   " has no keys and values of equal heads to attend over");
    }
    auto own_k = detail::read_fit_plane(to, own, l, Plane::key, of_target);
    auto own_v = detail::read_fit_plane(to, own, l, Plane::value, of_target);
    auto map_k = detail::read_fit_plane(to, *mapped, l, Plane::key, of_source);
    auto map_v = detail::read_fit_plane(to, *mapped, l, Plane::value, of_source);
    const auto frequencies =
        detail::plane_frequencies(to.layers[l], *key, own.positions.back() + 1);
    for (const Status* status : {&own_k.status(), &own_v.status(), &map_k.status(), &map_v.status(),
                                 &frequencies.status()})
      KVMELD_TRY(*status);
    for (const detail::FitPlane* plane : {&*own_k, &*own_v, &*map_k, &*map_v}) {
      for (std::size_t t = 0; t < tokens; ++t) {
        if (!plane->there[t])
          return error(ErrorCode::unsupported, "gate: layer ", l, " no longer holds token ", t,
                       "; score on texts within its window");
      }
    }
    const auto k_size = static_cast<std::size_t>(key->channels),
               v_size = static_cast<std::size_t>(value->channels);
    const auto heads = static_cast<std::size_t>(key->heads);
    const std::vector<double> k_mean = detail::mean_row(*own_k, tokens),
                              v_mean = detail::mean_row(*own_v, tokens);
    const detail::FitPlane unturned = *own_k;
    for (detail::FitPlane* plane : {&*own_k, &*map_k}) {
      for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t h = 0; h < heads; ++h)
          detail::turn_fit_row(to.layers[l].rope, *frequencies, position(t),
                               plane->values.data() + t * plane->width + h * k_size);
      }
    }
    const auto compare = [&](std::span<const double> q, std::size_t head, std::size_t seen) {
      detail::attend_plainly(q, *own_k, *own_v, head * k_size, head * v_size, v_size, seen, weights,
                             a);
      detail::attend_plainly(q, *map_k, *map_v, head * k_size, head * v_size, v_size, seen, weights,
                             b);
      sums[l] += detail::cosine_about(a, b, v_mean.data() + head * v_size);
      counts[l] += 1;
    };
    std::vector<double> q(k_size);
    if (queries.count > 0) {
      const auto q_heads = static_cast<std::size_t>((std::max)(queries.heads, 0)),
                 count = static_cast<std::size_t>(queries.count);
      if (q_heads == 0 || q_heads % heads != 0 ||
          queries.values.size() != to.layers.size() * count * q_heads * k_size) {
        return error(ErrorCode::invalid_argument, "gate: ", queries.values.size(), " numbers for ",
                     queries.count, " queries of ", queries.heads, " heads of ", key->channels,
                     " channels in ", to.layers.size(), " layers over ", key->heads, " KV heads");
      }
      for (std::size_t i = 0; i < count * q_heads; ++i) {
        std::copy_n(queries.values.data() + (l * count * q_heads + i) * k_size, k_size, q.begin());
        compare(q, i % q_heads / (q_heads / heads), tokens);
      }
      continue;
    }
    for (std::size_t t =
             tokens - (std::min)(tokens - 1, static_cast<std::size_t>((std::max)(last_, 1)));
         t < tokens; ++t) {
      for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t c = 0; c < k_size; ++c)
          q[c] = unturned.values[t * unturned.width + h * k_size + c] - k_mean[h * k_size + c];
        detail::turn_fit_row(to.layers[l].rope, *frequencies, position(t), q.data());
        compare(q, h, t);  // what comes before it
      }
    }
  }
  sums_.resize(sums.size(), 0.0);
  counts_.resize(counts.size(), 0.0);
  for (std::size_t l = 0; l < sums.size(); ++l) {
    sums_[l] += sums[l];
    counts_[l] += counts[l];
  }
  tokens_ += static_cast<std::int64_t>(tokens);
  return {};
}

KVMELD_NAMESPACE_END
