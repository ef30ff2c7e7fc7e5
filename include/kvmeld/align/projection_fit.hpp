#pragma once

/// Fits a ProjectionMap to fragments of two models that read the same text. Component
/// kvmeld::eigen.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/align/projection_fit_normal.hpp>
#include <kvmeld/align/projection_fit_options.hpp>
#include <kvmeld/align/projection_fit_rows.hpp>
#include <kvmeld/align/projection_map.hpp>
#include <kvmeld/align/source_layers.hpp>

KVMELD_NAMESPACE_BEGIN

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
  /// `unsupported` (scaled planes), `rope_length_dependent` (turned keys behind the original
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
    return solved("ridge " + detail::decimal(strength),
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
    return solved("ridge " + detail::decimal(strength) + ", rank " + detail::decimal(rank),
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
          detail::find_plane(parts_.source.layers[static_cast<std::size_t>(s)], shape.plane);
      if (source == nullptr || source->heads <= 0 || shape.heads <= 0) continue;
      if (source->heads % shape.heads == 0 || shape.heads % source->heads == 0) continue;
      return detail::error(ErrorCode::invalid_argument, "fit: ", source->heads,
                           " heads of source layer ", s, " and ", shape.heads, " of target layer ",
                           layer, " do not divide; fit per_layer");
    }
  }
  return {};
}

inline void ProjectionFit::plan_layer(std::size_t layer, const std::vector<std::int32_t>& from) {
  for (const Plane plane : {Plane::key, Plane::value}) {
    const PlaneShape* const shape = detail::find_plane(parts_.target.layers[layer], plane);
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
            *detail::find_plane(parts_.source.layers[static_cast<std::size_t>(head.layer)], plane);
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
  KVMELD_TRY(detail::check_planes(source, "source"));
  KVMELD_TRY(detail::check_planes(target, "target"));
  ProjectionFit fit;
  const auto target_layers = static_cast<std::int32_t>(target.layers.size());
  const auto source_layers = static_cast<std::int32_t>(source.layers.size());
  if (target_layers == 0 || source_layers == 0 || options.nearest < 0) {
    return detail::error(ErrorCode::invalid_argument, "fit: ", source_layers, " source and ",
                         target_layers, " target layers, ", options.nearest, " nearest");
  }
  if (options.source_layers.empty())
    options.source_layers = detail::fit_source_layers(options, source_layers, target_layers);
  if (options.source_layers.size() != target.layers.size()) {
    return detail::error(ErrorCode::invalid_argument, "fit: source layers for ",
                         options.source_layers.size(), " of ", target_layers, " target layers");
  }
  fit.parts_.source = std::move(source);
  fit.parts_.target = std::move(target);
  fit.options_ = std::move(options);
  fit.parts_.layers.resize(fit.parts_.target.layers.size());
  for (std::size_t l = 0; l < fit.parts_.layers.size(); ++l) {
    const std::vector<std::int32_t>& from = fit.options_.source_layers[l];
    if (from.empty())
      return detail::error(ErrorCode::invalid_argument, "fit: target layer ", l,
                           " has no source layer");
    for (const std::int32_t s : from) {
      if (s < 0 || s >= source_layers)
        return detail::error(ErrorCode::invalid_argument, "fit: target layer ", l,
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
          const PlaneShape& shape = *detail::find_plane(parts_.target.layers[l], plane);
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
    return detail::error(ErrorCode::invalid_argument, "fit: ", strengths.size(),
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
    return detail::error(ErrorCode::invalid_argument, "fit: a map of ", map.matrices().size(),
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

KVMELD_NAMESPACE_END
