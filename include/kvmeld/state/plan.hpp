#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/merger.hpp>
#include <kvmeld/state/plan_core.hpp>

KVMELD_NAMESPACE_BEGIN

/// Everything a render needs but the memory: the merger, the payloads, the compiled alignment, and what will come out.
///
/// Made by `plan`, read by `run`, any number of times. Owns handles of the payloads, so the set may change meanwhile.
template <class M>
class Plan {
 public:
  Plan(M merger, detail::PlanCore core) : merger_(std::move(merger)), core_(std::move(core)) {}

  [[nodiscard]] const M& merger() const noexcept { return merger_; }
  /// Output tokens, holes included: rows that `out` must have.
  [[nodiscard]] std::int64_t tokens() const noexcept { return core_.outputs(); }
  /// Position of each output token.
  [[nodiscard]] std::span<const std::int64_t> positions() const noexcept { return core_.positions; }
  /// Id of each output token; −1 where it is not known.
  [[nodiscard]] std::span<const TokenId> token_ids() const noexcept { return core_.tokens; }
  /// Output tokens that the engine computes after the render, ascending.
  [[nodiscard]] std::span<const Hole> holes() const noexcept { return core_.holes; }
  /// Bytes of K/V that a run writes.
  [[nodiscard]] std::int64_t bytes() const noexcept { return core_.bytes; }
  /// Bytes of workspace that `run` needs on a host, aligned to 64.
  [[nodiscard]] std::size_t workspace_bytes() const noexcept {
    return core_.planes() * (sizeof(detail::PlaneTask) + core_.sources.size() * sizeof(const std::byte*)) + 64;
  }
  /// H(merger ‖ target ‖ ordered ids ‖ metadata read): cheap, and equal where equal things were asked.
  [[nodiscard]] const Digest128& render_id() const noexcept { return core_.render_id; }
  [[nodiscard]] const Geometry& geometry() const noexcept { return *core_.geometry; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept { return core_.geometry; }
  [[nodiscard]] const detail::PlanCore& core() const noexcept { return core_; }

 private:
  M merger_;
  detail::PlanCore core_;
};

namespace detail {

/// The prefix and the spans of a set, checked against each other and the target.
struct SetParts {
  const FragmentSet::Entry* prefix = nullptr;
  std::vector<const FragmentSet::Entry*> spans;
};

inline Result<SetParts> split(const FragmentSet& set, const Target& target) {
  SetParts parts;
  for (const FragmentSet::Entry& entry : set.entries()) {
    KVMELD_TRY(check_same(entry.fragment.geometry(), target.geometry));
    if (entry.fragment.role() == Role::prefix) {
      if (parts.prefix != nullptr) {
        return error(ErrorCode::prefix_conflict, "two prefixes in one set: ", parts.prefix->fragment.id().hex(), " and ", entry.fragment.id().hex());
      }
      parts.prefix = &entry;
    } else {
      parts.spans.push_back(&entry);
    }
  }
  const FragmentId* named = nullptr;
  for (const FragmentSet::Entry* span : parts.spans) {
    const FragmentId& prefix = span->fragment.prefix();
    if (prefix.empty()) continue;
    if (named != nullptr && *named != prefix) {
      return error(ErrorCode::prefix_conflict, "spans were sealed behind two prefixes: ", named->hex(), " and ", prefix.hex());
    }
    named = &prefix;
  }
  if (named != nullptr && parts.prefix != nullptr && *named != parts.prefix->fragment.id()) {
    return error(ErrorCode::prefix_conflict, "spans were sealed behind prefix ", named->hex(), ", the set holds ", parts.prefix->fragment.id().hex());
  }
  if (named != nullptr && parts.prefix == nullptr && !target.prefix_in_place) {
    return error(ErrorCode::prefix_missing, "spans name prefix ", named->hex(), ", which is not in the set; insert it, or set prefix_in_place");
  }
  if (target.prefix_in_place) parts.prefix = nullptr;
  return parts;
}

inline Status check_positions(const Geometry& geometry, const std::vector<PlanSource>& sources, const PlanCore& core, std::int64_t context_length) {
  std::int64_t target_length = core.positions.empty() ? 0 : core.positions.back() + 1;
  std::int64_t source_length = 0;
  for (const PlanSource& source : sources) {
    if (!source.payload().positions.empty()) source_length = std::max(source_length, source.payload().positions.back() + 1);
  }
  if (context_length > 0) target_length = source_length = context_length;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      if (shape.rotary) KVMELD_TRY(check_shift(geometry.layers[l].rope, source_length, target_length));
      if (shape.channels > max_channels) {
        return error(ErrorCode::unsupported, "layer ", l, ": head size ", shape.channels, " is above ", max_channels);
      }
      if (shape.scales != ScaleScheme::none) {
        return error(ErrorCode::unsupported, "layer ", l, ": rendering planes with scales apart is not possible; seal them as f16 or q8_0");
      }
    }
  }
  std::int64_t bos_seen = 0;
  for (const TokenId token : core.tokens) bos_seen += geometry.bos >= 0 && token == geometry.bos ? 1 : 0;
  if (bos_seen > 1) {
    return error(ErrorCode::duplicate_bos, bos_seen, " beginning-of-sequence tokens (id ", geometry.bos,
                 ") would enter one context; seal it once, in the prefix");
  }
  return {};
}

/// Appends the local cache as a source for the layers that the target leaves out.
inline Status add_local(PlanCore& core, Alignment& alignment, const Target& target) {
  if (target.layers.all()) return {};
  if (!target.local) return error(ErrorCode::invalid_argument, "the target leaves layers out and gives no local cache for them");
  if (target.local->tokens() < core.outputs()) {
    return error(ErrorCode::token_count_mismatch, "the local cache holds ", target.local->tokens(), " tokens, the render ", core.outputs());
  }
  KVMELD_TRY(check_same(target.local->geometry(), target.geometry));
  std::vector<std::int64_t> positions = core.positions;
  for (std::int64_t t = core.outputs(); t < target.local->tokens(); ++t) positions.push_back(positions.empty() ? t : positions.back() + 1);
  auto sealed = seal(*target.local, {.positions = positions});
  if (!sealed) return sealed.error();
  AlignmentGroup kept;
  for (std::size_t l = 0; l < target.geometry.layers.size(); ++l) kept.layers.layers.push_back(target.layers.contains(l) ? 0 : 1);
  for (std::int64_t o = 0; o < core.outputs(); ++o) {
    kept.contributions.push_back({static_cast<std::uint32_t>(core.sources.size()), static_cast<std::uint32_t>(o), 1.0F});
    kept.end_row();
  }
  core.sources.push_back({*std::move(sealed), 0, 1.0F});
  alignment.groups.insert(alignment.groups.begin(), std::move(kept));  // the first group that covers a layer counts
  return {};
}

/// Puts the prefix's tokens, one contribution each, in front of the spans' alignment; the prefix becomes source 0.
inline void prepend_prefix(Alignment& alignment, const Fragment& prefix, std::int64_t first_position) {
  const auto count = static_cast<std::size_t>(prefix.token_count());
  std::vector<std::int64_t> positions;
  std::vector<TokenId> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    positions.push_back(first_position + static_cast<std::int64_t>(i));
    tokens.push_back(prefix.tokens().empty() ? -1 : prefix.tokens()[i]);
  }
  alignment.positions.insert(alignment.positions.begin(), positions.begin(), positions.end());
  alignment.tokens.insert(alignment.tokens.begin(), tokens.begin(), tokens.end());
  for (AlignmentGroup& group : alignment.groups) {
    for (Contribution& c : group.contributions) ++c.source;
    std::vector<Contribution> contributions;
    std::vector<std::uint32_t> row_begin{0};
    for (std::size_t i = 0; i < count; ++i) {
      contributions.push_back({0, static_cast<std::uint32_t>(i), 1.0F});
      row_begin.push_back(static_cast<std::uint32_t>(i + 1));
    }
    for (std::size_t o = 1; o < group.row_begin.size(); ++o) row_begin.push_back(group.row_begin[o] + static_cast<std::uint32_t>(count));
    contributions.insert(contributions.end(), group.contributions.begin(), group.contributions.end());
    group.contributions = std::move(contributions);
    group.row_begin = std::move(row_begin);
  }
}

/// Refuses alignments that a policy (perhaps the user's) built wrong.
inline Status check_alignment(const Alignment& alignment, std::span<const Source> ordered) {
  const std::size_t n = alignment.positions.size();
  if (alignment.tokens.size() != n) return error(ErrorCode::token_count_mismatch, "alignment: ", alignment.tokens.size(), " ids for ", n, " outputs");
  for (std::size_t o = 1; o < n; ++o) {
    if (alignment.positions[o] <= alignment.positions[o - 1]) {
      return error(ErrorCode::duplicate_position, "alignment: output ", o, " at position ", alignment.positions[o], " follows position ",
                   alignment.positions[o - 1]);
    }
  }
  for (const AlignmentGroup& group : alignment.groups) {
    if (group.row_begin.size() != n + 1 || group.row_begin.back() != group.contributions.size() ||
        !std::is_sorted(group.row_begin.begin(), group.row_begin.end())) {
      return error(ErrorCode::invalid_argument, "alignment: ", group.row_begin.size(), " row offsets for ", n, " outputs and ",
                   group.contributions.size(), " contributions");
    }
    for (std::size_t o = 0; o < n; ++o) {
      if (group.row(o).size() > (std::size_t{chunk_inputs} << (max_levels - 1))) {
        return error(ErrorCode::oversized, "alignment: output ", o, " has ", group.row(o).size(), " contributions");
      }
    }
    for (const Contribution& c : group.contributions) {
      if (c.source >= ordered.size() || c.token >= static_cast<std::uint64_t>(ordered[c.source].fragment->token_count())) {
        return error(ErrorCode::invalid_argument, "alignment: contribution of token ", c.token, " of source ", c.source, " does not exist");
      }
      if (!std::isfinite(c.weight)) return error(ErrorCode::non_finite, "alignment: a weight of source ", c.source, " is not finite");
    }
  }
  return {};
}

template <class F>
[[nodiscard]] Result<float> source_weight(const F& fuser, const Source& source) {
  if constexpr (requires { fuser.weight(source); }) {
    const float w = fuser.weight(source);
    if (!std::isfinite(w)) return error(ErrorCode::non_finite, "the fuser's weight of fragment ", source.fragment->id().hex(), " is not finite");
    return w;
  } else {
    return 1.0F;
  }
}

template <class M>
[[nodiscard]] Digest128 render_id(const M& merger, const Target& target, const FragmentSet::Entry* prefix, std::span<const Source> ordered) {
  Hasher h;
  h.text("kvmeld.render.v1");
  const Digest128 policies = merger.digest();
  h.value(policies.low);
  h.value(policies.high);
  hash_append(h, target.geometry);
  h.value(target.first_position);
  h.values(std::span<const std::uint8_t>(target.layers.layers));
  h.value(static_cast<std::uint8_t>(target.prefix_in_place));
  if (prefix != nullptr) h.bytes(std::as_bytes(std::span(prefix->fragment.id().bytes)));
  for (const Source& source : ordered) {
    h.bytes(std::as_bytes(std::span(source.fragment->id().bytes)));
    if (reads(M::metadata, MetadataFields::provenance)) {
      for (const Provenance& dot : source.metadata->provenance) {
        h.value(dot.agent);
        h.value(dot.sequence);
      }
    }
    if (reads(M::metadata, MetadataFields::confidence)) h.value(source.metadata->best_confidence());
  }
  return h.digest();
}

}  // namespace detail

/// Works out what a merger makes of a set: selects, orders, aligns, marks seams, and compiles rows. Reads no K/V except what
/// the order policy reads.
///
/// O(tokens · fragments). Errors: `geometry_mismatch`, `prefix_conflict`, `prefix_missing`, `payload_missing` (with the ids),
/// `duplicate_bos`, `rope_length_dependent`, `rope_unsupported`, `unsupported`, and those of the policies.
template <class M>
[[nodiscard]] Result<Plan<M>> plan(const FragmentSet& set, const M& merger, const Target& target) {
  KVMELD_TRY(validate(target.geometry));
  if (target.first_position < 0) return detail::error(ErrorCode::invalid_argument, "first_position ", target.first_position, " is negative");
  const auto parts = detail::split(set, target);
  if (!parts) return parts.error();
  std::string missing;
  std::vector<Source> sources;
  for (const FragmentSet::Entry* entry : parts->spans) {
    Source source{&entry->fragment, &entry->fragment.payloads()[0], &entry->metadata, {}};
    if (source.payload->bytes == nullptr) missing += " " + entry->fragment.id().hex();
    auto selected = merger.select.select(source);
    if (!selected) return selected.error();
    source.selected = *std::move(selected);
    sources.push_back(std::move(source));
  }
  if (parts->prefix != nullptr && parts->prefix->fragment.payloads()[0].bytes == nullptr) missing += " " + parts->prefix->fragment.id().hex();
  if (!missing.empty()) return detail::error(ErrorCode::payload_missing, "evicted payloads:", missing, "; fetch them and plan again");
  const auto order = merger.order.order(sources);
  if (!order) return order.error();
  std::vector<Source> ordered;
  for (const std::uint32_t i : *order) {
    if (i >= sources.size()) return detail::error(ErrorCode::invalid_argument, "the order policy named span ", i, " of ", sources.size());
    ordered.push_back(sources[i]);
  }
  if (ordered.size() != sources.size()) return detail::error(ErrorCode::invalid_argument, "the order policy kept ", ordered.size(), " of ", sources.size(), " spans");

  detail::PlanCore core;
  core.geometry = std::make_shared<const Geometry>(target.geometry);
  std::int64_t first_position = target.first_position;
  if (parts->prefix != nullptr) {
    core.sources.push_back({parts->prefix->fragment, 0, 1.0F});
    first_position += parts->prefix->fragment.token_count();
  }
  auto alignment = merger.align.policy().align(ordered, first_position);
  if (!alignment) return alignment.error();
  KVMELD_TRY(detail::check_alignment(*alignment, ordered));
  std::vector<std::uint8_t> recompute(alignment->positions.size(), 0);
  KVMELD_TRY(merger.seam.mark(ordered, *alignment, recompute));
  for (std::size_t s = 0; s < ordered.size(); ++s) {
    const auto weight = detail::source_weight(merger.fuse.policy(), ordered[s]);
    if (!weight) return weight.error();
    // Whichever span comes first is read in its encoding without lead-in, if it has one.
    const bool variant = s == 0 && ordered[s].fragment->payloads().size() > 1 && ordered[s].fragment->payloads()[1].bytes != nullptr;
    core.sources.push_back({*ordered[s].fragment, variant ? std::size_t{1} : std::size_t{0}, *weight});
  }
  if (parts->prefix != nullptr) {
    detail::prepend_prefix(*alignment, parts->prefix->fragment, target.first_position);
    recompute.insert(recompute.begin(), static_cast<std::size_t>(parts->prefix->fragment.token_count()), 0);
  }
  core.positions = std::move(alignment->positions);
  core.tokens = std::move(alignment->tokens);
  KVMELD_TRY(detail::check_positions(target.geometry, core.sources, core, target.context_length));
  KVMELD_TRY(detail::add_local(core, *alignment, target));
  std::int64_t length = target.context_length;
  if (length == 0 && !core.positions.empty()) length = core.positions.back() + 1;
  KVMELD_TRY(detail::compile(core, *alignment, decltype(merger.fuse)::policy_type::rotation_equivariant, recompute, length));
  core.render_id = detail::render_id(merger, target, parts->prefix, ordered);
  return Plan<M>(merger, std::move(core));
}

KVMELD_NAMESPACE_END
