#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/state/merger.hpp>
#include <kvmeld/state/plan_check.hpp>
#include <kvmeld/state/plan_compile.hpp>
#include <kvmeld/state/plan_core.hpp>
#include <kvmeld/state/plan_local.hpp>
#include <kvmeld/state/plan_range.hpp>
#include <kvmeld/state/plan_rows.hpp>
#include <kvmeld/state/plan_score.hpp>
#include <kvmeld/state/plan_warnings.hpp>
#include <kvmeld/tensor/float_environment.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// Everything a render needs but the memory: the merger, the payloads, the compiled alignment, and
/// what will come out.
///
/// Made by `plan`, read by `run`, any number of times. Owns handles of the payloads, so the set may
/// change meanwhile.
template <class M>
class Plan {
 public:
  Plan(M merger, detail::PlanCore core) : merger_(std::move(merger)), core_(std::move(core)) {}

  [[nodiscard]] const M& merger() const noexcept { return merger_; }
  /// Output tokens, holes included: rows that `out` must have.
  [[nodiscard]] std::int64_t tokens() const noexcept { return core_.outputs(); }
  /// Position of each output token.
  KVMELD_LAZY [[nodiscard]] std::span<const std::int64_t> positions() const noexcept {
    return detail::span_of(core_.positions);
  }
  /// Id of each output token; −1 where it is not known.
  KVMELD_LAZY [[nodiscard]] std::span<const TokenId> token_ids() const noexcept {
    return detail::span_of(core_.tokens);
  }
  /// Output tokens that the engine computes after the render, ascending.
  KVMELD_LAZY [[nodiscard]] std::span<const Hole> holes() const noexcept {
    return detail::span_of(core_.holes);
  }
  /// Output tokens, holes left out, that had two contributions or more.
  [[nodiscard]] std::int64_t fused() const noexcept { return core_.fused; }
  [[nodiscard]] RenderWarnings warnings() const noexcept { return core_.warnings; }
  /// Bytes of K/V that a run writes.
  [[nodiscard]] std::int64_t bytes() const noexcept { return core_.bytes; }
  /// Bytes of workspace that `run` needs on a host, aligned to 64.
  [[nodiscard]] std::size_t workspace_bytes() const noexcept {
    const std::size_t tasks = core_.planes() * (sizeof(detail::PlaneTask) +
                                                core_.sources.size() * sizeof(const std::byte*));
    // slots are checked before tasks are laid out
    return (std::max)(tasks, core_.positions.size() * sizeof(std::int64_t)) + 64;
  }
  /// H(merger ‖ target ‖ ordered ids ‖ metadata read): cheap, and equal where equal things were
  /// asked.
  [[nodiscard]] const Digest128& render_id() const noexcept { return core_.render_id; }
  [[nodiscard]] const Geometry& geometry() const noexcept { return *core_.geometry; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return core_.geometry;
  }
  [[nodiscard]] const detail::PlanCore& core() const noexcept { return core_; }

 private:
  M merger_;
  detail::PlanCore core_;
};

namespace detail {

template <class M>
[[nodiscard]] Digest128 render_id(const M& merger, const Target& target,
                                  const FragmentSet::Entry* prefix, std::span<const Source> ordered,
                                  const FragmentId& local) {
  Hasher h;
  h.text("kvmeld.render.v1");
  const Digest128 policies = merger.digest();
  h.value(policies.low);
  h.value(policies.high);
  hash_append(h, target.geometry);
  h.value(target.first_position);
  h.values(detail::span_of(target.layers.layers));
  h.values(detail::span_of(target.heads.heads));
  h.value(static_cast<std::uint8_t>(target.prefix_in_place));
  h.value(target.context_length);
  h.bytes(std::as_bytes(std::span(local.bytes)));
  h.bytes(std::as_bytes(
      std::span(prefix != nullptr ? prefix->fragment.id().bytes : FragmentId{}.bytes)));
  h.value(static_cast<std::uint64_t>(ordered.size()));
  for (const Source& source : ordered) {
    h.bytes(std::as_bytes(std::span(source.fragment->id().bytes)));
    if (reads(M::metadata, MetadataFields::provenance)) {
      h.value(static_cast<std::uint64_t>(source.metadata->marks.size()));
      for (const Mark& mark : source.metadata->marks) {
        h.value(mark.dot.agent);
        h.value(mark.dot.epoch);
        h.value(mark.dot.sequence);
      }
    }
    if (reads(M::metadata, MetadataFields::confidence)) h.value(source.metadata->best_confidence());
  }
  return h.digest();
}

}  // namespace detail

/// Works out what a merger makes of a set: selects, orders, aligns, marks seams, weighs, compiles
/// rows, and makes sure that the output's elements can hold them.
///
/// Reads K/V where the policies do (for a fuser with a `score`, the keys of every token that
/// several fragments hold); once for the largest magnitudes of a payload that was not sealed in
/// this process; and the rows of planes whose results may be beyond their elements, which are
/// computed (docs/numerics.md, "Range"). Copies the rows of layers that the target keeps from its
/// local cache, and maps fragments of other models where the aligner does.
///
/// O(tokens · fragments), O(n² · channels) for each scored token of n contributions, and O(bytes)
/// of what is read. Errors: `geometry_mismatch`, `prefix_conflict`, `prefix_missing`,
/// `payload_missing` (with the ids), `duplicate_bos`, `rope_length_dependent`, `rope_unsupported`,
/// `unsupported`, `non_finite` (weights; a result beyond the output's elements, by layer, plane and
/// output), `oversized` (contributions), `invalid_argument` (a warning that `Target::refuse` names,
/// among others), and those of the policies.
template <class M>
[[nodiscard]] Result<Plan<M>> plan(const FragmentSet& set, const M& merger, const Target& target) {
  const FloatEnvironmentGuard guard;  // orders and rope tables are computed here
  KVMELD_TRY(check_float_environment());
  KVMELD_TRY(validate(target.geometry));
  if (target.first_position < 0 || target.first_position > max_position) {
    return detail::error(ErrorCode::invalid_argument, "first_position ", target.first_position,
                         " is not in [0, ", max_position, "]");
  }
  const detail::TransformCall transform = detail::transform_call(merger.align.policy());
  const auto parts = detail::split(set, target, transform);
  if (!parts) return parts.error();
  std::string missing;
  std::vector<Source> sources;
  for (const FragmentSet::Entry* entry : parts->spans) {
    // nothing to order, and nothing that could come first
    if (entry->fragment.token_count() == 0) continue;
    Source source{&entry->fragment, &entry->fragment.payloads()[0], &entry->metadata, {}};
    if (source.payload->bytes == nullptr) {
      missing.append(" ").append(entry->fragment.id().hex());
      continue;
    }
    auto selected = merger.select.select(source);
    if (!selected) return selected.error();
    KVMELD_TRY(detail::check_selection(*selected, entry->fragment));
    source.selected = *std::move(selected);
    if (source.selected_count() > 0) sources.push_back(std::move(source));
  }
  if (parts->prefix != nullptr && parts->prefix->fragment.payloads()[0].bytes == nullptr)
    missing.append(" ").append(parts->prefix->fragment.id().hex());
  if (!missing.empty())
    return detail::error(ErrorCode::payload_missing, "evicted payloads:", missing,
                         "; fetch them and plan again");
  if constexpr (requires { merger.fuse.policy().fits(target.geometry); })
    KVMELD_TRY(merger.fuse.policy().fits(target.geometry));
  const auto order = merger.order.order(sources);
  if (!order) return order.error();
  KVMELD_TRY(detail::check_order(*order, sources.size()));
  std::vector<Source> ordered;
  for (const std::uint32_t i : *order) ordered.push_back(sources[i]);

  detail::PlanCore core;
  core.geometry = std::make_shared<const Geometry>(target.geometry);
  std::int64_t first_position = core.first_position = target.first_position;
  if (parts->prefix != nullptr) {
    core.sources.push_back({parts->prefix->fragment, 0, 1.0F, false});
    first_position += parts->prefix->fragment.token_count();
  }
  // Whichever span comes first is read in its encoding without lead-in, if it has one.
  const std::size_t first_payload =
      !ordered.empty() && ordered[0].fragment->payloads().size() > 1 ? 1 : 0;
  if (first_payload == 1 && ordered[0].fragment->payloads()[1].bytes == nullptr) {
    return detail::error(ErrorCode::payload_missing,
                         "evicted payloads: ", ordered[0].fragment->id().hex(),
                         " (the encoding without lead-in, which the first span is read in); fetch "
                         "it and plan again");
  }
  std::vector<Fragment> mapped;
  mapped.reserve(ordered.size());
  std::vector<std::uint8_t> is_mapped(ordered.size(), 0);
  for (std::size_t s = 0; s < ordered.size(); ++s) {
    if (!parts->maps(*ordered[s].fragment)) continue;
    auto made = detail::mapped_fragment(transform, *ordered[s].fragment, s == 0 ? first_payload : 0,
                                        core.geometry);
    if (!made) return made.error();
    mapped.push_back(*std::move(made));
    ordered[s].fragment = &mapped.back();
    ordered[s].payload = &mapped.back().payloads()[0];
    is_mapped[s] = 1;
  }
  auto alignment = merger.align.policy().align(ordered, first_position);
  if (!alignment) return alignment.error();
  KVMELD_TRY(detail::check_alignment(*alignment, target.geometry, ordered, first_position));
  for (AlignmentGroup& group : alignment->groups) group.head_rows.clear();
  detail::number_head_rows(target.geometry, *alignment);
  std::vector<std::uint8_t> recompute(alignment->positions.size(), 0);
  KVMELD_TRY(merger.seam.mark(ordered, *alignment, recompute));
  for (std::size_t s = 0; s < ordered.size(); ++s) {
    const auto weight = detail::source_weight(merger.fuse.policy(), ordered[s]);
    if (!weight) return weight.error();
    core.sources.push_back({*ordered[s].fragment,
                            s == 0 && is_mapped[0] == 0 ? first_payload : std::size_t{0}, *weight,
                            is_mapped[s] != 0});
  }
  if (parts->prefix != nullptr) {
    detail::prepend_prefix(*alignment, parts->prefix->fragment, target.first_position);
    recompute.insert(recompute.begin(),
                     static_cast<std::size_t>(parts->prefix->fragment.token_count()), 0);
  }
  const std::vector<std::uint8_t> several =
      detail::with_several(target.geometry, *alignment, recompute.size());
  core.positions = std::move(alignment->positions);
  core.tokens = std::move(alignment->tokens);
  KVMELD_TRY(detail::check_positions(target.geometry, core.sources, core, parts->in_place,
                                     target.context_length));
  const std::size_t from_set = core.sources.size();
  const auto layer_parts = detail::layer_parts(target);
  if (!layer_parts) return layer_parts.error();
  KVMELD_TRY(detail::add_local(core, *alignment, target, *layer_parts));
  const FragmentId local =
      core.sources.size() > from_set ? core.sources.back().fragment.id() : FragmentId{};
  std::int64_t length = target.context_length;
  if (length == 0 && !core.positions.empty()) length = core.positions.back() + 1;
  using Fuse = typename decltype(merger.fuse)::policy_type;
  using Rows = detail::RowForm<Fuse>;
  if constexpr (ScoreForm<Fuse> || MixForm<Rows> || std::is_same_v<Rows, detail::MeanRows>) {
    KVMELD_TRY(detail::weigh(core, *alignment, detail::score_call(merger.fuse.policy()), recompute,
                             length));
  }
  detail::add_local_heads(core, *alignment, target, *layer_parts);
  KVMELD_TRY(detail::compile(core, *alignment,
                             {detail::rotation_equivariant<Rows>(), detail::keeps_single<Rows>()},
                             recompute, length));
  KVMELD_TRY(detail::check_rows<Fuse>(core, merger.fuse.policy()));
  if constexpr (std::is_same_v<Rows, detail::MeanRows>) detail::scale_weights(core);
  KVMELD_TRY(detail::check_range(core, detail::row_form(merger.fuse.policy())));
  KVMELD_TRY(detail::warn(core, several, target.refuse, detail::chosen(merger.fuse.policy()),
                          detail::names_nobody(merger.fuse.policy(), detail::span_of(ordered))));
  core.render_id = detail::render_id(merger, target, parts->prefix, ordered, local);
  return Plan<M>(merger, std::move(core));
}

KVMELD_NAMESPACE_END
