#pragma once

/// Least-squares fits of projections between models, of their gates, and of gains.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/anchors/gain.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fit/detail/normal_equations.hpp>
#include <kvmeld/policies/projection.hpp>
#include <kvmeld/policies/projection_map.hpp>

KVMELD_NAMESPACE_BEGIN

namespace fit {

/// Which target heads are made by one matrix.
enum class FitSharing : std::uint8_t {
  /// A matrix makes all heads of a layer from all heads of its source layers: most channels to draw
  /// on.
  per_layer,
  /// A matrix for each target head, from the source head at the same place of its source layers:
  /// fewest numbers. Where the source has n times as many heads, from every n-th, and where it has
  /// fewer, from one for n target heads.
  per_head,
  /// One matrix for keys and one for values serve all layers: for a few hundred paired tokens.
  per_model,
};

/// What a map between models is fitted from, and how strongly it is held back.
struct ProjectionFitOptions {
  /// Source layers for each target layer, the nearest by relative depth (`k_nearest`); 0: the one
  /// that `last_aligned` names.
  std::int32_t nearest = 6;
  /// Source layer 0 besides, whose rows say little but which token it is: for values of deep
  /// layers.
  bool with_first = false;
  FitSharing sharing = FitSharing::per_layer;
  bool bias = true;
  /// Source layers of every target layer, in the order in which their channels are inputs. Empty:
  /// by the two above.
  std::vector<std::vector<std::int32_t>> source_layers{};
};

namespace detail {

/// Source layers of every target layer, where options name none. Neither model is without layers.
[[nodiscard]] inline std::vector<std::vector<std::int32_t>> fit_source_layers(
    const ProjectionFitOptions& options, std::int32_t source_layers, std::int32_t target_layers) {
  std::vector<std::vector<std::int32_t>> out;
  for (std::int32_t l = 0; l < target_layers; ++l) {
    out.push_back(options.nearest == 0
                      ? last_aligned(l, target_layers, source_layers)
                      : k_nearest(l, target_layers, source_layers, options.nearest));
    if (options.with_first && out.back().front() != 0) out.back().insert(out.back().begin(), 0);
  }
  return out;
}

}  // namespace detail

// Fits a ProjectionMap to fragments of two models that read the same text. Component
// kvmeld::eigen.

/// Gathers paired tokens and solves for a map; what is kept does not grow with their number.
///
/// Keys are fitted without rotation, keys apart from values. Memory: for every matrix (inputs +
/// outputs) · inputs doubles. Not thread-safe.
class ProjectionFit {
 public:
  /// Errors: `invalid_argument` (layers that are not there; counts of heads that do not divide for
  /// `per_head`; shapes that differ by layer for `per_model`), `unsupported` (planes other than
  /// keys and values).
  template <class Lazy = void>
  [[nodiscard]] static Result<ProjectionFit> make(Geometry source, Geometry target,
                                                  ProjectionFitOptions options = {});

  /// Adds two encodings of one text: payload 0 of each, token i with token i unless `pairs` says
  /// otherwise (`pair_by_spans`).
  ///
  /// Pairs that a layer's sliding window no longer holds are left out for that layer. Errors:
  /// `geometry_mismatch`, `payload_missing`, `token_count_mismatch`, `invalid_argument`,
  /// `unsupported` (scaled planes), `rope_length_dependent` (rotated keys behind the original
  /// context of a rope that changes there); nothing is added then.
  template <class Lazy = void>
  [[nodiscard]] Status add(const Fragment& source, const Fragment& target,
                           std::span<const TokenPair> pairs = {});
  /// Paired tokens added so far, and what names them.
  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] Digest128 data_digest() const {
    return digests_.empty() ? Digest128{} : hashed(digests_);
  }

  /// A ridge map; see `NormalEquations::ridge` for the unit of `strength`. Errors: those of
  /// `NormalEquations::ridge`.
  template <class Lazy = void>
  [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> ridge(double strength) const {
    return solved("ridge " + extend::decimal(strength),
                  [&](std::size_t i) { return units_[i].ridge(strength); });
  }
  /// For every matrix the strength that errs least on tokens that were held out. Errors: those of
  /// `ridge`; `invalid_argument` for no strengths, or a `held_out` of other shapes.
  template <class Lazy = void>
  [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> ridge(
      std::span<const double> strengths, const ProjectionFit& held_out) const;
  /// A ridge of low rank. Errors: those of `NormalEquations::low_rank`.
  template <class Lazy = void>
  [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> low_rank(double strength,
                                                                      std::int32_t rank) const {
    return solved("ridge " + extend::decimal(strength) + ", rank " + extend::decimal(rank),
                  [&](std::size_t i) { return units_[i].low_rank(strength, rank); });
  }
  /// The map that keeps norms. Errors: those of `NormalEquations::procrustes`.
  template <class Lazy = void>
  [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> procrustes() const {
    return solved("procrustes", [&](std::size_t i) { return units_[i].procrustes(); });
  }

  /// Mean over matrices of `NormalEquations::relative_error` of a map that this fit's shapes made:
  /// of keys, then of values.
  template <class Lazy = void>
  [[nodiscard]] Result<std::pair<double, double>> relative_errors(const ProjectionMap& map) const;

 private:
  ProjectionFit() = default;
  [[nodiscard]] static Digest128 hashed(const std::vector<Digest128>& digests) {
    Hasher hasher;
    hasher.text("kvmeld.fit");
    for (const Digest128& digest : digests) {
      hasher.value(digest.low);
      hasher.value(digest.high);
    }
    return hasher.digest();
  }
  [[nodiscard]] Status check_heads(std::size_t layer, const std::vector<std::int32_t>& from) const;
  void plan_layer(std::size_t layer, const std::vector<std::int32_t>& from);
  template <class Solve>
  [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> solved(std::string method,
                                                                    const Solve& solve) const;

  ProjectionParts parts_;
  ProjectionFitOptions options_;
  std::vector<NormalEquations> units_;      // by matrix number
  std::vector<Plane> planes_;               // of every matrix
  std::int32_t first_units_[2] = {-1, -1};  // of keys and of values: what per_model shares
  std::vector<Digest128> digests_;  // of what was added; folded into one when there are many
  std::int64_t tokens_ = 0;
};

/// Refuses heads that have no place of their own among the source's.
inline Status ProjectionFit::check_heads(std::size_t layer,
                                         const std::vector<std::int32_t>& from) const {
  if (options_.sharing != FitSharing::per_head) return {};
  for (const PlaneShape& shape : parts_.target.layers[layer].planes) {
    for (const std::int32_t s : from) {
      const PlaneShape* const source =
          extend::find_plane(parts_.source.layers[static_cast<std::size_t>(s)], shape.plane);
      if (source == nullptr || source->heads <= 0 || shape.heads <= 0) continue;
      if (source->heads % shape.heads == 0 || shape.heads % source->heads == 0) continue;
      return extend::error(ErrorCode::invalid_argument, "fit: ", source->heads,
                           " heads of source layer ", s, " and ", shape.heads, " of target layer ",
                           layer, " do not divide; fit per_layer");
    }
  }
  return {};
}

inline void ProjectionFit::plan_layer(std::size_t layer, const std::vector<std::int32_t>& from) {
  for (const Plane plane : {Plane::key, Plane::value}) {
    const PlaneShape* const shape = extend::find_plane(parts_.target.layers[layer], plane);
    if (shape == nullptr) continue;
    std::vector<MapBlock>& blocks =
        plane == Plane::key ? parts_.layers[layer].key : parts_.layers[layer].value;
    const std::vector<HeadRef> heads = heads_of(parts_.source, plane, from);
    const std::int32_t parts = options_.sharing == FitSharing::per_head ? shape->heads : 1;
    for (std::int32_t part = 0; part < parts; ++part) {
      MapBlock block{
          .first_head = part, .matrix = static_cast<std::uint32_t>(units_.size()), .inputs = {}};
      std::int32_t inputs = 0;
      for (const HeadRef& head : heads) {
        const PlaneShape& source =
            *extend::find_plane(parts_.source.layers[static_cast<std::size_t>(head.layer)], plane);
        if (parts > 1 && head.head != part * source.heads / parts) continue;
        block.inputs.push_back(head);
        inputs += source.channels;
      }
      std::int32_t& first = first_units_[plane == Plane::key ? 0 : 1];
      if (options_.sharing == FitSharing::per_model && first >= 0) {
        block.matrix = static_cast<std::uint32_t>(first);
      } else {
        if (first < 0) first = static_cast<std::int32_t>(units_.size());
        units_.emplace_back(inputs, shape->channels * (parts > 1 ? 1 : shape->heads),
                            options_.bias);
        planes_.push_back(plane);
      }
      blocks.push_back(std::move(block));
    }
  }
}

template <class Lazy>
Result<ProjectionFit> ProjectionFit::make(Geometry source, Geometry target,
                                          ProjectionFitOptions options) {
  KVMELD_TRY(extend::check_planes(source, "source"));
  KVMELD_TRY(extend::check_planes(target, "target"));
  ProjectionFit fit;
  const auto target_layers = static_cast<std::int32_t>(target.layers.size());
  const auto source_layers = static_cast<std::int32_t>(source.layers.size());
  if (target_layers == 0 || source_layers == 0 || options.nearest < 0) {
    return extend::error(ErrorCode::invalid_argument, "fit: ", source_layers, " source and ",
                         target_layers, " target layers, ", options.nearest, " nearest");
  }
  if (options.source_layers.empty())
    options.source_layers = detail::fit_source_layers(options, source_layers, target_layers);
  if (options.source_layers.size() != target.layers.size()) {
    return extend::error(ErrorCode::invalid_argument, "fit: source layers for ",
                         options.source_layers.size(), " of ", target_layers, " target layers");
  }
  fit.parts_.source = std::move(source);
  fit.parts_.target = std::move(target);
  fit.options_ = std::move(options);
  fit.parts_.layers.resize(fit.parts_.target.layers.size());
  for (std::size_t l = 0; l < fit.parts_.layers.size(); ++l) {
    const std::vector<std::int32_t>& from = fit.options_.source_layers[l];
    if (from.empty())
      return extend::error(ErrorCode::invalid_argument, "fit: target layer ", l,
                           " has no source layer");
    for (const std::int32_t s : from) {
      if (s < 0 || s >= source_layers)
        return extend::error(ErrorCode::invalid_argument, "fit: target layer ", l,
                             " wants source layer ", s, " of ", source_layers);
    }
    KVMELD_TRY(fit.check_heads(l, from));
    fit.plan_layer(l, from);
  }
  // What no fit could serve is refused now: a map of zeros has the same shapes.
  ProjectionParts trial = fit.parts_;
  for (const NormalEquations& unit : fit.units_) {
    LinearMap& map = trial.matrices.emplace_back();
    map.outputs = unit.outputs();
    map.inputs = unit.inputs();
    map.weight.assign(static_cast<std::size_t>(map.outputs) * static_cast<std::size_t>(map.inputs),
                      0.0);
  }
  if (auto made = ProjectionMap::make(std::move(trial)); !made) return made.error();
  return fit;
}

template <class Lazy>
Status ProjectionFit::add(const Fragment& source, const Fragment& target,
                          std::span<const TokenPair> pairs) {
  KVMELD_TRY(detail::check_fit_fragments(source, target, pairs));
  KVMELD_TRY(detail::check_fit_geometry(source.geometry(), parts_.source, "source"));
  KVMELD_TRY(detail::check_fit_geometry(target.geometry(), parts_.target, "target"));
  std::vector<TokenPair> equal;
  if (pairs.empty()) {
    auto made = detail::equal_pairs(source, target);
    if (!made) return made.error();
    equal = *std::move(made);
    pairs = equal;
  }
  constexpr std::size_t piece = 512;  // decoded rows are a few MiB, however long the fragment
  for (std::size_t at = 0; at < pairs.size(); at += piece) {
    const auto some = pairs.subspan(at, (std::min)(piece, pairs.size() - at));
    std::vector<std::int32_t> of_source, of_target;
    for (const TokenPair& pair : some) {
      of_source.push_back(pair.source);
      of_target.push_back(pair.target);
    }
    detail::FitInputs in(source, std::move(of_source)), out(target, std::move(of_target));
    std::vector<double> x, y;
    std::vector<bool> in_there, out_there;
    for (std::size_t l = 0; l < parts_.layers.size(); ++l) {
      for (const Plane plane : {Plane::key, Plane::value}) {
        for (const MapBlock& block :
             plane == Plane::key ? parts_.layers[l].key : parts_.layers[l].value) {
          NormalEquations& unit = units_[block.matrix];
          const PlaneShape& shape = *extend::find_plane(parts_.target.layers[l], plane);
          std::vector<HeadRef> heads;
          for (std::int32_t h = 0; h < unit.outputs() / shape.channels; ++h)
            heads.push_back({static_cast<std::int32_t>(l), block.first_head + h});
          KVMELD_TRY(in.gather(plane, block.inputs, x, in_there));
          KVMELD_TRY(out.gather(plane, heads, y, out_there));
          const auto inputs = static_cast<std::size_t>(unit.inputs()),
                     outputs = static_cast<std::size_t>(unit.outputs());
          std::size_t rows = 0;
          for (std::size_t i = 0; i < some.size(); ++i) {
            if (!in_there[i] || !out_there[i]) continue;
            if (rows != i) {
              std::copy_n(x.begin() + static_cast<std::ptrdiff_t>(i * inputs), inputs,
                          x.begin() + static_cast<std::ptrdiff_t>(rows * inputs));
              std::copy_n(y.begin() + static_cast<std::ptrdiff_t>(i * outputs), outputs,
                          y.begin() + static_cast<std::ptrdiff_t>(rows * outputs));
            }
            ++rows;
          }
          KVMELD_TRY(
              unit.add(std::span(x).first(rows * inputs), std::span(y).first(rows * outputs)));
        }
      }
    }
  }
  tokens_ += static_cast<std::int64_t>(pairs.size());
  Hasher hasher;
  hasher.values(std::span<const std::uint8_t>(source.id().bytes));
  hasher.values(std::span<const std::uint8_t>(target.id().bytes));
  for (const TokenPair& pair : pairs) {
    hasher.value(pair.source);
    hasher.value(pair.target);
  }
  digests_.push_back(hasher.digest());
  if (digests_.size() == 1024) digests_.assign(1, hashed(digests_));
  return {};
}

template <class Solve>
Result<std::shared_ptr<const ProjectionMap>> ProjectionFit::solved(std::string method,
                                                                   const Solve& solve) const {
  ProjectionParts parts = parts_;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    auto map = solve(i);
    if (!map) return map.error();
    parts.matrices.push_back(*std::move(map));
  }
  parts.record.method = std::move(method);
  parts.record.fit_data = data_digest();
  parts.record.fit_tokens = tokens_;
  return ProjectionMap::make(std::move(parts));
}

template <class Lazy>
Result<std::shared_ptr<const ProjectionMap>> ProjectionFit::ridge(
    std::span<const double> strengths, const ProjectionFit& held_out) const {
  if (strengths.empty() || held_out.units_.size() != units_.size()) {
    return extend::error(ErrorCode::invalid_argument, "fit: ", strengths.size(),
                         " strengths to choose from, by ", held_out.units_.size(),
                         " held-out matrices for ", units_.size());
  }
  const auto best = [&](std::size_t i) -> Result<LinearMap> {
    LinearMap chosen;
    double least = 0;
    for (const double strength : strengths) {
      auto map = units_[i].ridge(strength);
      if (!map) return map.error();
      const auto error = held_out.units_[i].relative_error(*map);
      if (!error) return error.error();
      if (!chosen.weight.empty() && *error >= least) continue;
      least = *error;
      chosen = *std::move(map);
    }
    return chosen;
  };
  return solved("ridge by held-out error", best);
}

template <class Lazy>
Result<std::pair<double, double>> ProjectionFit::relative_errors(const ProjectionMap& map) const {
  if (map.matrices().size() != units_.size()) {
    return extend::error(ErrorCode::invalid_argument, "fit: a map of ", map.matrices().size(),
                         " matrices against a fit of ", units_.size());
  }
  double sums[2] = {}, counts[2] = {};
  for (std::size_t i = 0; i < units_.size(); ++i) {
    const auto error = units_[i].relative_error(map.matrices()[i]);
    if (!error) return error.error();
    sums[planes_[i] == Plane::key ? 0 : 1] += *error;
    counts[planes_[i] == Plane::key ? 0 : 1] += 1;
  }
  return std::pair(counts[0] > 0 ? sums[0] / counts[0] : 0.0,
                   counts[1] > 0 ? sums[1] / counts[1] : 0.0);
}

// What a map is worth, on text that it was not fitted on: attention over mapped K/V against
// attention over the target's own.

/// How near attention outputs are: 1 is equal, 0 is unrelated.
struct AttentionScore {
  double cosine = 0;                    ///< mean over layers
  std::vector<double> layer_cosines{};  ///< mean over heads and queries of each target layer
  std::int64_t tokens = 0;              ///< held-out tokens attended over
};

/// Queries of the target model over the tokens of one fragment, rotated to their positions as the
/// engine rotated them.
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
        return extend::error(ErrorCode::invalid_argument, "gate: no attention output of layer ", l,
                             " to compare, of ", tokens_, " tokens");
      out.layer_cosines.push_back(sums_[l] / counts_[l]);
      out.cosine += out.layer_cosines.back() / static_cast<double>(sums_.size());
    }
    if (sums_.empty()) return extend::error(ErrorCode::invalid_argument, "gate: nothing was added");
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

/// One layer of a target's own cache and of the mapped one, both with keys rotated, and what their
/// attention is compared about.
struct GateLayer {
  FitPlane own_k, own_v, map_k, map_v;
  FitPlane unrotated;  ///< the target's keys as they are stored without position
  std::vector<double> frequencies, k_mean, v_mean;
  std::size_t heads = 0, k_size = 0, v_size = 0;
  double sum = 0, count = 0;  ///< of cosines

  /// Adds the cosine between what a query of a head reads in `seen` tokens of either cache.
  void compare(std::span<const double> query, std::size_t head, std::size_t seen) {
    attend_plainly(query, own_k, own_v, head * k_size, head * v_size, v_size, seen, weights_, a_);
    attend_plainly(query, map_k, map_v, head * k_size, head * v_size, v_size, seen, weights_, b_);
    sum += cosine_about(a_, b_, v_mean.data() + head * v_size);
    count += 1;
  }

 private:
  std::vector<double> weights_, a_, b_;
};

/// Tokens that a gate compares: rows of the source, of the target, and their positions.
struct GateTokens {
  std::vector<std::int32_t> of_source, of_target;
  std::vector<double> positions;
};

/// Reads layer `l` of both caches. Errors: `unsupported` for planes that attention cannot read, or
/// tokens that the layer no longer holds.
[[nodiscard]] inline Result<GateLayer> read_gate_layer(const Geometry& to, const Payload& own,
                                                       const Payload& mapped, std::size_t l,
                                                       const GateTokens& tokens) {
  const PlaneShape* const key = extend::find_plane(to.layers[l], Plane::key);
  const PlaneShape* const value = extend::find_plane(to.layers[l], Plane::value);
  if (key == nullptr || value == nullptr || key->heads == 0 || key->heads != value->heads) {
    return extend::error(ErrorCode::unsupported, "gate: layer ", l,
                         " has no keys and values of equal heads to attend over");
  }
  auto own_k = read_fit_plane(to, own, l, Plane::key, tokens.of_target);
  auto own_v = read_fit_plane(to, own, l, Plane::value, tokens.of_target);
  auto map_k = read_fit_plane(to, mapped, l, Plane::key, tokens.of_source);
  auto map_v = read_fit_plane(to, mapped, l, Plane::value, tokens.of_source);
  auto frequencies = plane_frequencies(to.layers[l], *key, own.positions.back() + 1);
  for (const Status* status :
       {&own_k.status(), &own_v.status(), &map_k.status(), &map_v.status(), &frequencies.status()})
    KVMELD_TRY(*status);
  const std::size_t count = tokens.positions.size();
  for (const FitPlane* plane : {&*own_k, &*own_v, &*map_k, &*map_v}) {
    for (std::size_t t = 0; t < count; ++t) {
      if (!plane->there[t])
        return extend::error(ErrorCode::unsupported, "gate: layer ", l, " no longer holds token ",
                             t, "; score on texts within its window");
    }
  }
  GateLayer out;
  out.own_k = *std::move(own_k);
  out.own_v = *std::move(own_v);
  out.map_k = *std::move(map_k);
  out.map_v = *std::move(map_v);
  out.frequencies = *std::move(frequencies);
  out.heads = static_cast<std::size_t>(key->heads);
  out.k_size = static_cast<std::size_t>(key->channels);
  out.v_size = static_cast<std::size_t>(value->channels);
  out.k_mean = mean_row(out.own_k, count);
  out.v_mean = mean_row(out.own_v, count);
  out.unrotated = out.own_k;
  for (FitPlane* plane : {&out.own_k, &out.map_k}) {
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t h = 0; h < out.heads; ++h)
        rotate_fit_row(to.layers[l].rope, out.frequencies, tokens.positions[t],
                       plane->values.data() + t * plane->width + h * out.k_size);
    }
  }
  return out;
}

/// Compares by held-out queries, which see every token.
[[nodiscard]] inline Status compare_queries(GateLayer& layer, std::size_t l, std::size_t layers,
                                            const HeldOutQueries& queries, std::size_t seen) {
  const auto q_heads = static_cast<std::size_t>((std::max)(queries.heads, 0)),
             count = static_cast<std::size_t>(queries.count);
  if (q_heads == 0 || q_heads % layer.heads != 0 ||
      queries.values.size() != layers * count * q_heads * layer.k_size) {
    return extend::error(ErrorCode::invalid_argument, "gate: ", queries.values.size(),
                         " numbers for ", queries.count, " queries of ", queries.heads,
                         " heads of ", layer.k_size, " channels in ", layers, " layers over ",
                         layer.heads, " KV heads");
  }
  std::vector<double> q(layer.k_size);
  for (std::size_t i = 0; i < count * q_heads; ++i) {
    std::copy_n(queries.values.data() + (l * count * q_heads + i) * layer.k_size, layer.k_size,
                q.begin());
    layer.compare(q, i % q_heads / (q_heads / layer.heads), seen);
  }
  return {};
}

/// Compares by the last tokens' own keys about their mean, which see what comes before them.
inline void compare_keys(GateLayer& layer, const RopeSpec& rope, std::span<const double> positions,
                         std::size_t last) {
  std::vector<double> q(layer.k_size);
  for (std::size_t t = positions.size() - last; t < positions.size(); ++t) {
    for (std::size_t h = 0; h < layer.heads; ++h) {
      for (std::size_t c = 0; c < layer.k_size; ++c)
        q[c] = layer.unrotated.values[t * layer.unrotated.width + h * layer.k_size + c] -
               layer.k_mean[h * layer.k_size + c];
      rotate_fit_row(rope, layer.frequencies, positions[t], q.data());
      layer.compare(q, h, t);
    }
  }
}

}  // namespace detail

template <class Lazy>
Status AttentionGate::add(const Fragment& source, const Fragment& target,
                          std::span<const TokenPair> pairs, const HeldOutQueries& queries) {
  if (projection_.map == nullptr)
    return extend::error(ErrorCode::invalid_argument, "gate: there is no map");
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
    return extend::error(ErrorCode::invalid_argument, "gate: ", pairs.size(),
                         " paired tokens; attention needs two to choose from");
  Geometry to = target.geometry();
  to.tenant = source.geometry().tenant;
  const auto mapped = projection_.transform(source, 0, to);
  if (!mapped) return mapped.error();
  const Payload& own = target.payloads()[0];
  detail::GateTokens tokens;
  for (const TokenPair& pair : pairs) {
    tokens.of_source.push_back(pair.source);
    tokens.of_target.push_back(pair.target);
    tokens.positions.push_back(
        static_cast<double>(own.positions[static_cast<std::size_t>(pair.target)]));
  }
  const std::size_t last =
      (std::min)(pairs.size() - 1, static_cast<std::size_t>((std::max)(last_, 1)));
  std::vector<double> sums, counts;
  for (std::size_t l = 0; l < to.layers.size(); ++l) {
    auto layer = detail::read_gate_layer(to, own, *mapped, l, tokens);
    if (!layer) return layer.error();
    if (queries.count > 0) {
      KVMELD_TRY(
          detail::compare_queries(*layer, l, to.layers.size(), queries, tokens.positions.size()));
    } else {
      detail::compare_keys(*layer, to.layers[l].rope, tokens.positions, last);
    }
    sums.push_back(layer->sum);
    counts.push_back(layer->count);
  }
  sums_.resize(sums.size(), 0.0);
  counts_.resize(counts.size(), 0.0);
  for (std::size_t l = 0; l < sums.size(); ++l) {
    sums_[l] += sums[l];
    counts_[l] += counts[l];
  }
  tokens_ += static_cast<std::int64_t>(pairs.size());
  return {};
}

// Ridge regression of gains. Component kvmeld::eigen.

/// The ridge with the least Σ‖Δ' − g·Δ‖² + `strength`, each layer by itself; layers without offsets
/// get gain 1. `NormalEquations::ridge` has the unit of the strength. It carries no scores yet, so
/// that nothing trusts it: measure `held_out_scores` on other samples and `make` it again.
///
/// O(samples · tokens · features²) a layer. Errors: `invalid_argument` (no samples),
/// `geometry_mismatch` (unlike layers), those of `NormalEquations`.
template <class Lazy = void>
[[nodiscard]] Result<std::shared_ptr<const anchors::GainPredictor>> fit_gain_ridge(
    std::span<const anchors::GainSample> samples, double strength, std::string model) {
  if (samples.empty())
    return extend::error(ErrorCode::invalid_argument, "gain: no samples to fit a ridge to");
  const std::size_t layers = samples[0].layers;
  constexpr std::size_t inputs = anchors::gain_feature_count + 1;
  std::vector<float> parameters(layers * inputs);
  std::vector<double> x, y;
  for (std::size_t l = 0; l < layers; ++l) {
    x.clear();
    y.clear();
    for (const anchors::GainSample& sample : samples) {
      if (sample.layers != layers)
        return extend::error(ErrorCode::geometry_mismatch, "gain: samples of ", layers, " and of ",
                             sample.layers, " layers");
      const auto features = gain_features(sample.query);
      if (!features) return features.error();
      const auto n = static_cast<std::size_t>(sample.query.tokens);
      // ‖Δ' − (1 + w·x)·Δ‖² is ‖Δ‖²·(w·x − (Δ·Δ' ÷ ‖Δ‖² − 1))² and what no w changes
      for (std::size_t t = 0; t < n; ++t) {
        const double size = std::sqrt(sample.measured[l * n + t]);
        if (size == 0) continue;
        for (std::size_t k = 0; k < anchors::gain_feature_count; ++k)
          x.push_back(size * (*features)[t * anchors::gain_feature_count + k]);
        x.push_back(size);
        y.push_back((sample.both[l * n + t] - sample.measured[l * n + t]) / size);
      }
    }
    if (y.empty()) continue;
    NormalEquations equations(static_cast<std::int32_t>(inputs), 1, false);
    KVMELD_TRY(equations.add(x, y));
    const auto map = equations.ridge(strength);
    if (!map) return map.error();
    for (std::size_t k = 0; k < inputs; ++k)
      parameters[l * inputs + k] = static_cast<float>(map->weight[k]);
  }
  return anchors::GainPredictor::make(anchors::GainKind::ridge, 0, layers, parameters, {},
                                      std::move(model));
}

}  // namespace fit

KVMELD_NAMESPACE_END
