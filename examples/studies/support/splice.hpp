#pragma once
// Caches of agents put together in sequence 0 by the library, one way a method; everything an agent
// encodes is encoded once.

#include "engine.hpp"
#include "method.hpp"

#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace example {

/// What a method took to fill sequence 0, and how many tokens it holds then.
struct Cost {
  /// Engine to sealed fragments, all agents; for `text_summary` the writing of the summaries.
  double export_ms = 0;
  double merge_ms = 0;      ///< Plan and run.
  double import_ms = 0;     ///< Rendered bytes into the engine.
  double recompute_ms = 0;  ///< Seams.
  double prefill_ms = 0;    ///< Text that the answering agent reads itself.
  /// Tokens that the answering agent computes beside the question.
  std::size_t prefilled_tokens = 0;
  std::size_t bytes = 0;  ///< Of K/V moved, or of text.
  llama_pos length = 0;
};

/// A model context as the library sees it, and the same one declared to have no positions in its
/// keys.
struct Geometries {
  std::shared_ptr<const kvmeld::Geometry> declared;
  /// Moves rows without rotating them: a wrong declaration, made on purpose to show what a
  /// forgotten rotation does.
  std::shared_ptr<const kvmeld::Geometry> unrotated;
};

inline kvmeld::Result<Geometries> make_geometries(const Engine& engine,
                                                  const std::string& model_path) {
  kvmeld::Result<kvmeld::Geometry> geometry =
      kvmeld::llama::geometry(engine.model(), engine.parameters(),
                              {.adapters = kvmeld::Adapters::none(), .gguf_path = model_path});
  if (!geometry) return geometry.error();
  kvmeld::Geometry bare = *geometry;
  for (kvmeld::LayerShape& layer : bare.layers) {
    layer.rope = kvmeld::RopeSpec::none();
    for (kvmeld::PlaneShape& plane : layer.planes) plane.rotary = false;
  }
  bare.model += " without rotation";
  return Geometries{std::make_shared<const kvmeld::Geometry>(*std::move(geometry)),
                    std::make_shared<const kvmeld::Geometry>(std::move(bare))};
}

/// Renders a set into sequence 0 of an engine and lets it compute the holes there; sequence 1 is
/// the spare. `cost` gains what that took.
template <class M>
kvmeld::Status render_into(Engine& engine, const kvmeld::exec::Threads& exec,
                           const kvmeld::FragmentSet& set, const M& merger,
                           const std::shared_ptr<const kvmeld::Geometry>& geometry,
                           const kvmeld::llama::StateForm& form, Cost& cost) {
  const Stopwatch merge;
  const auto plan = kvmeld::plan(set, merger, {.geometry = *geometry});
  if (!plan) return plan.error();
  kvmeld::Result<kvmeld::llama::StateBlob> blob =
      kvmeld::llama::make_state(geometry, form, plan->positions(), plan->token_ids());
  if (!blob) return blob.error();
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto report = kvmeld::run(exec, *plan, workspace, blob->mutable_ref());
  if (!report) return report.error();
  cost.merge_ms = merge.milliseconds();

  const Stopwatch import;
  if (kvmeld::Status status = kvmeld::llama::write(engine.context(), 0, 1, *blob); !status)
    return status;
  cost.import_ms = import.milliseconds();

  const Stopwatch recompute;
  const auto seams = kvmeld::llama::recompute(engine.context(), 0, 1, plan->holes());
  if (!seams) return seams.error();
  cost.recompute_ms = recompute.milliseconds();
  cost.prefilled_tokens = static_cast<std::size_t>(seams->tokens);
  cost.bytes = static_cast<std::size_t>(report->bytes);
  cost.length = static_cast<llama_pos>(report->tokens);
  return {};
}

/// The agents' caches of one fact set, sealed behind the shared prefix with or without a lead-in.
class Splicer {
 public:
  Splicer(Engine& engine, const Geometries& geometries, Tokens prefix, Tokens lead_in,
          std::vector<Tokens> notes, std::vector<kvmeld::TokenId> sentence_ends, bool two_variants,
          int threads)
      : engine_(engine),
        geometries_(geometries),
        prefix_(std::move(prefix)),
        lead_in_(std::move(lead_in)),
        notes_(std::move(notes)),
        sentence_ends_(std::move(sentence_ends)),
        two_variants_(two_variants),
        exec_(static_cast<std::size_t>(threads)) {}

  /// Merges the notes into sequence 0 as `method` says; the context must be empty otherwise.
  kvmeld::Status merge(const Method& method, Cost& cost) {
    if (kvmeld::Status status = encode(method.lead_in); !status) return status;
    kvmeld::Result<kvmeld::FragmentSet> set = seal(method.lead_in, method.rotate, &cost);
    if (!set) return set.error();
    using namespace kvmeld;
    const ByDot given{.reversed = method.order == Method::Order::reversed};
    const SeamShare seam{.share = method.seam,
                         .boundary_tokens = sentence_ends_,
                         .past_boundary = method.seam_inside ? 5 : 0};
    const auto& geometry = method.rotate ? geometries_.declared : geometries_.unrotated;
    if (method.source == Method::Source::mean)
      return render(
          *set, merger(given, Aligner{TokenMatch{.mode = MatchMode::index}}, Fuser{WeightedMean{}}),
          geometry, cost);
    if (method.order == Method::Order::canonical)
      return render(*set, merger(ByKeyNorm{}), geometry, cost);
    return method.seam > 0 ? render(*set, merger(given, seam), geometry, cost)
                           : render(*set, merger(given), geometry, cost);
  }

  /// Renders canonically after inserting the fragments in the order given; says what came out.
  kvmeld::Result<kvmeld::Digest128> digest_of(bool lead_in,
                                              const std::vector<std::size_t>& insertion) {
    if (kvmeld::Status status = encode(lead_in); !status) return status;
    kvmeld::Result<kvmeld::FragmentSet> sealed = seal(lead_in, true, nullptr);
    if (!sealed) return sealed.error();
    const std::vector<kvmeld::Fragment>& spans = fragments(lead_in, true);
    kvmeld::FragmentSet set;
    for (const std::size_t i : insertion) {
      kvmeld::FragmentSet one;
      if (kvmeld::Status status = one.insert(spans[i], kvmeld::Dot{i, 0}); !status) return status;
      kvmeld::Result<kvmeld::FragmentSet> both = join(set, one);
      if (!both) return both.error();
      set = *std::move(both);
    }
    if (kvmeld::Status status = set.insert(prefix_fragment_[0]); !status) return status;
    const auto plan =
        kvmeld::plan(set, kvmeld::merger(kvmeld::ByKeyNorm{}), {.geometry = *geometries_.declared});
    if (!plan) return plan.error();
    kvmeld::Result<kvmeld::llama::StateBlob> blob = make_blob(*plan, geometries_.declared);
    if (!blob) return blob.error();
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto report =
        kvmeld::run(exec_, *plan, workspace, blob->mutable_ref(), {.content_digest = true});
    if (!report) return report.error();
    return *report->content_digest;
  }

 private:
  struct Exported {
    kvmeld::llama::SequenceState state;
    Tokens tokens;
    double read_ms = 0;
  };

  /// Prefills prefix, lead-in and notes of every agent, and takes each sequence out of the engine;
  /// empties the context.
  kvmeld::Status encode(bool lead_in) {
    if (lead_in && two_variants_)
      if (kvmeld::Status status = encode(false); !status) return status;
    std::vector<Exported>& exported = exported_[lead_in ? 1 : 0];
    if (!exported.empty()) return {};
    engine_.forget_all();
    Tokens head = prefix_;
    if (!engine_.prefill(prefix_, 0, 0)) return refused();
    if (!prefix_state_) {
      kvmeld::Result<kvmeld::llama::SequenceState> state =
          kvmeld::llama::read(engine_.context(), 0, geometries_.declared);
      if (!state) return state.error();
      prefix_state_ = *std::move(state);
    }
    if (lead_in) {
      if (!engine_.prefill(lead_in_, static_cast<llama_pos>(head.size()), 0)) return refused();
      append(head, lead_in_);
    }
    for (const Tokens& notes : notes_) {
      engine_.branch(0, 1);
      if (!engine_.prefill(notes, static_cast<llama_pos>(head.size()), 1)) return refused();
      const Stopwatch watch;
      kvmeld::Result<kvmeld::llama::SequenceState> state =
          kvmeld::llama::read(engine_.context(), 1, geometries_.declared);
      if (!state) return state.error();
      Tokens tokens = head;
      append(tokens, notes);
      exported.push_back({*std::move(state), std::move(tokens), watch.milliseconds()});
      engine_.forget(1);
    }
    engine_.forget_all();
    return {};
  }

  /// The set of all agents' fragments. `cost` gains what the agents spent to read and seal.
  kvmeld::Result<kvmeld::FragmentSet> seal(bool lead_in, bool rotate, Cost* cost) {
    using namespace kvmeld;
    std::vector<Fragment>& spans = fragments(lead_in, rotate);
    Fragment& prefix = prefix_fragment_[rotate ? 0 : 1];
    double& export_ms = export_ms_[lead_in ? 1 : 0][rotate ? 0 : 1];
    const auto& geometry = rotate ? geometries_.declared : geometries_.unrotated;
    if (!prefix.valid()) {
      const auto view = llama::view_state(prefix_state_->bytes(), geometry);
      if (!view) return view.error();
      Result<Fragment> sealed = kvmeld::seal(
          view->cache,
          {.role = Role::prefix, .tokens = prefix_, .positions = prefix_state_->positions()});
      if (!sealed) return sealed.error();
      prefix = *std::move(sealed);
    }
    if (spans.empty()) {
      for (std::size_t i = 0; i < notes_.size(); ++i) {
        const Stopwatch watch;
        const Exported& one = exported_[lead_in ? 1 : 0][i];
        const Exported* const other = lead_in && two_variants_ ? &exported_[0][i] : nullptr;
        SealOptions options{.context = {.prefix = prefix.id()}};
        const SealOptions plain =
            options_for(other != nullptr ? *other : one, notes_[i].size(), options);
        if (lead_in) options.context.lead_in = lead_in_digest(lead_in_);
        options = options_for(one, notes_[i].size(), options);
        const auto view = llama::view_state(one.state.bytes(), geometry);
        if (!view) return view.error();
        Result<Fragment> sealed = kvmeld::seal(view->cache, options);
        if (sealed && other != nullptr) {
          const auto plain_view = llama::view_state(other->state.bytes(), geometry);
          if (!plain_view) return plain_view.error();
          sealed = with_variant(*sealed, plain_view->cache, plain);
        }
        if (!sealed) return sealed.error();
        spans.push_back(*std::move(sealed));
        export_ms += one.read_ms + watch.milliseconds() + (other != nullptr ? other->read_ms : 0);
      }
    }
    FragmentSet set;
    if (Status status = set.insert(prefix); !status) return status;
    for (std::size_t i = 0; i < spans.size(); ++i)
      if (Status status = set.insert(spans[i], Dot{i, 0}); !status) return status;
    if (cost != nullptr) cost->export_ms = export_ms;
    return set;
  }

  /// `options` for the last `keep` tokens of an exported sequence.
  static kvmeld::SealOptions options_for(const Exported& one, std::size_t keep,
                                         kvmeld::SealOptions options) {
    options.tokens = one.tokens;
    options.positions = one.state.positions();
    options.drop_first = static_cast<std::int64_t>(one.tokens.size() - keep);
    return options;
  }

  template <class Plan>
  kvmeld::Result<kvmeld::llama::StateBlob> make_blob(
      const Plan& plan, const std::shared_ptr<const kvmeld::Geometry>& geometry) const {
    return kvmeld::llama::make_state(geometry, prefix_state_->form(), plan.positions(),
                                     plan.token_ids());
  }

  template <class M>
  kvmeld::Status render(const kvmeld::FragmentSet& set, const M& merger,
                        const std::shared_ptr<const kvmeld::Geometry>& geometry, Cost& cost) {
    return render_into(engine_, exec_, set, merger, geometry, prefix_state_->form(), cost);
  }

  static kvmeld::Status refused() {
    return {kvmeld::ErrorCode::engine_failure,
            "the engine refused a prompt; is the context too small?"};
  }
  std::vector<kvmeld::Fragment>& fragments(bool lead_in, bool rotate) {
    return spans_[lead_in ? 1 : 0][rotate ? 0 : 1];
  }

  Engine& engine_;
  const Geometries& geometries_;
  Tokens prefix_, lead_in_;
  std::vector<Tokens> notes_;
  std::vector<kvmeld::TokenId> sentence_ends_;
  bool two_variants_;
  kvmeld::exec::Threads exec_;
  std::optional<kvmeld::llama::SequenceState> prefix_state_;
  std::vector<Exported> exported_[2];
  kvmeld::Fragment prefix_fragment_[2];
  std::vector<kvmeld::Fragment> spans_[2][2];
  double export_ms_[2][2] = {};
};

}  // namespace example
