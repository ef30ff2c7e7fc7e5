#pragma once
// Segments of an engine as bases, offsets and anchors, and blends of them back in the engine: what
// the library needs of llama.cpp to reuse a segment in another context.

#include "engine.hpp"
#include "readers.hpp"

#include <kvmeld/anchors/pool.hpp>
#include <kvmeld/anchors/reuse.hpp>
#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace example {

/// Segments of one model share most of their direction, so hyperplanes over values tell them apart
/// better than their tokens do.
using Pool =
    kvmeld::anchors::AnchorPool<kvmeld::anchors::EmbeddingHash, kvmeld::anchors::WindowLFU>;

/// What a blend took, in milliseconds.
struct BlendCost {
  double plan = 0;    ///< Weights into rows, tables of angles.
  double blend = 0;   ///< Sums and rotation, one pass.
  double import = 0;  ///< Bytes into the engine.
  [[nodiscard]] double total() const { return plan + blend + import; }
};

/// One context of an engine in which segments are met: prefixes are read once and kept, sequence 0
/// is what is worked on.
///
/// Sequence 0 begins as a kept prefix (`start`); then segments come behind it, read by the engine
/// (`encode`) or put there from bases and offsets (`place`), in any order. Prefix 0 is the one
/// behind which bases are encoded: their *stated context*.
class Anchored {
 public:
  Anchored(Engine& engine, std::shared_ptr<const kvmeld::Geometry> geometry, int threads)
      : engine_(engine), geometry_(std::move(geometry)), exec_(static_cast<std::size_t>(threads)) {}

  [[nodiscard]] const std::shared_ptr<const kvmeld::Geometry>& geometry() const {
    return geometry_;
  }
  [[nodiscard]] Engine& engine() { return engine_; }
  /// Tokens in sequence 0, and so the position of the next one.
  [[nodiscard]] llama_pos length() const { return length_; }
  [[nodiscard]] const Tokens& prefix(std::size_t number) const { return prefixes_[number]; }

  /// Reads a prefix and keeps it. Returns its number: 0 for the bases' own, then 1, 2, …
  kvmeld::Result<std::size_t> add_prefix(Tokens tokens) {
    const std::size_t number = prefixes_.size();
    if (!engine_.prefill(tokens, 0, kept(number))) return refused("a prefix");
    if (number == 0) {
      auto state = kvmeld::llama::read(engine_.context(), kept(0), geometry_);
      if (!state) return state.error();
      form_ = state->form();
    }
    prefixes_.push_back(std::move(tokens));
    return number;
  }
  /// Names the place behind a prefix, for offsets: `slot` tells apart what else may stand before a
  /// segment there.
  [[nodiscard]] kvmeld::Digest128 place_of(std::size_t number, std::uint32_t slot = 0) const {
    return kvmeld::anchors::place_digest(
        {.prefix = {}, .lead_in = kvmeld::lead_in_digest(prefixes_[number])}, {}, slot);
  }

  /// Of anchors whose bases stood behind a prefix.
  [[nodiscard]] kvmeld::anchors::AnchorSpace space(std::size_t number = 0) const {
    return kvmeld::anchors::AnchorSpace::of(
        *geometry_, {.prefix = {}, .lead_in = kvmeld::lead_in_digest(prefixes_[number])});
  }

  /// Sequence 0 becomes a kept prefix; its cells are shared, so this costs nothing.
  void start(std::size_t number) {
    engine_.forget(0);
    engine_.branch(kept(number), 0);
    before_ = prefixes_[number];
    length_ = static_cast<llama_pos>(before_.size());
  }
  /// The engine reads a segment behind sequence 0; no fragment is made of it.
  kvmeld::Status read(const Tokens& tokens) {
    if (!engine_.prefill(tokens, length_, 0)) return refused("a segment");
    append(before_, tokens);
    length_ += static_cast<llama_pos>(tokens.size());
    return {};
  }
  /// The engine reads a segment behind sequence 0, and what the cache holds of it then is sealed.
  kvmeld::Result<kvmeld::Fragment> encode(const Tokens& tokens) {
    const llama_pos at = length_;
    if (kvmeld::Status status = read(tokens); !status) return status;
    return taken(at);
  }
  /// Tokens of sequence 0 from a position on, as a fragment, however they came there. `misplaced`
  /// claims that they stand as much further behind than they do: a mistake, made on purpose to show
  /// what it does.
  kvmeld::Result<kvmeld::Fragment> taken(llama_pos from, std::int64_t misplaced = 0) {
    auto state = kvmeld::llama::read_since(engine_.context(), 0, scratch, from, geometry_);
    if (!state) return state.error();
    const auto head = before_.begin() + from;
    const Tokens tokens(head, before_.end());
    std::vector<std::int64_t> positions(state->positions().begin(), state->positions().end());
    for (std::int64_t& position : positions) position += misplaced;
    return kvmeld::seal(
        state->view(),
        {.tokens = tokens,
         .positions = positions,
         .context = {.lead_in = kvmeld::lead_in_digest(Tokens(before_.begin(), head))}});
  }

  /// A segment alone, behind a prefix for bases: an anchor without offsets, its vector the mean
  /// value row of layer `vector_layer`.
  kvmeld::Result<kvmeld::anchors::Anchor> base_of(const Tokens& tokens, std::size_t number = 0,
                                                  std::size_t vector_layer = 1) {
    start(number);
    const auto sealed = encode(tokens);
    if (!sealed) return sealed.error();
    auto vector = kvmeld::anchors::mean_value_row(*sealed, vector_layer);
    if (!vector) return vector.error();
    return kvmeld::anchors::make_anchor(*sealed, *std::move(vector));
  }

  /// Puts parts behind sequence 0, the first one at its end: planned, blended, rotated to their
  /// places, imported.
  kvmeld::Status place(std::span<const kvmeld::anchors::ReusePart> parts,
                       BlendCost* cost = nullptr) {
    const Stopwatch watch;
    // a question comes behind, with a last token of its own
    const auto plan = kvmeld::anchors::plan_reuse(parts, *geometry_, {.compute_last = false});
    if (!plan) return plan.error();
    const double planned = watch.milliseconds();
    auto blob = kvmeld::llama::make_state(geometry_, form_, plan->positions(), plan->token_ids(),
                                          std::move(recycled_));
    if (!blob) return blob.error();
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto report = kvmeld::run(exec_, *plan, workspace, blob->mutable_ref());
    if (!report) return report.error();
    const double blended = watch.milliseconds();
    if (!plan->holes().empty())
      return {kvmeld::ErrorCode::unsupported,
              "offsets lack tokens of a segment: the engine must read it"};
    if (kvmeld::Status status = kvmeld::llama::append(engine_.context(), 0, scratch, *blob);
        !status)
      return status;
    recycled_ = *std::move(blob);
    for (const kvmeld::TokenId id : plan->token_ids())
      before_.push_back(static_cast<llama_token>(id));
    length_ += static_cast<llama_pos>(report->tokens);
    if (cost != nullptr)
      *cost = {cost->plan + planned, cost->blend + blended - planned,
               cost->import + watch.milliseconds() - blended};
    return {};
  }

 private:
  // of the engine's 64: the last one, and prefixes before it
  static constexpr llama_seq_id scratch = 63;
  static llama_seq_id kept(std::size_t number) {
    return scratch - 1 - static_cast<llama_seq_id>(number);
  }
  static kvmeld::Status refused(const std::string& what) {
    return {kvmeld::ErrorCode::engine_failure,
            "the engine refused " + what + "; is the context too small?"};
  }

  Engine& engine_;
  std::shared_ptr<const kvmeld::Geometry> geometry_;
  kvmeld::exec::Threads exec_;
  kvmeld::llama::StateForm form_;
  kvmeld::llama::StateBlob recycled_;
  std::vector<Tokens> prefixes_;
  Tokens before_;
  llama_pos length_ = 0;
};

/// A base rotated to its place and nothing else.
inline kvmeld::anchors::ReusePart rotated_part(const kvmeld::Fragment& base,
                                               std::int64_t position) {
  return {.base = base, .position = position, .rotated_only = true};
}

/// A base with the offsets that a look-up chose for `context`: of the segment, or of the text that
/// follows it.
inline kvmeld::anchors::ReusePart blended_part(const kvmeld::Fragment& base, std::int64_t position,
                                               const kvmeld::anchors::AnchorLookup& found,
                                               const kvmeld::Digest128& context,
                                               bool following = false) {
  kvmeld::anchors::ReusePart part{.base = base, .position = position};
  for (std::size_t i = 0; i < found.decision.chosen.size(); ++i) {
    const kvmeld::anchors::Anchor& anchor = *found.anchors[found.decision.chosen[i]];
    const kvmeld::anchors::ContextOffset* const offset = anchor.find(context);
    part.offsets.push_back({.anchor = anchor.id,
                            .delta = following ? offset->following : offset->segment,
                            .weight = found.decision.weights[i]});
  }
  return part;
}

/// The value rows of one layer, (token, channel of all heads).
inline std::vector<float> value_rows(const kvmeld::Fragment& fragment, std::size_t layer) {
  const kvmeld::FragmentView view(fragment);
  const kvmeld::PlaneRef& plane = view.ref().plane(layer, 1);
  std::vector<float> out(static_cast<std::size_t>(fragment.token_count() * plane.token_stride));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<float>(element(plane.data, static_cast<std::int64_t>(i)));
  return out;
}

/// Gives each token of a blended segment weights of its own, by the distances of its value row in
/// `layer` to those of the anchors.
inline void weigh_by_token(kvmeld::anchors::ReusePart& part,
                           const kvmeld::anchors::AnchorLookup& found, double temperature,
                           std::size_t layer = 1) {
  const std::vector<float> own = value_rows(part.base, layer);
  const auto tokens = static_cast<std::size_t>(part.base.token_count());
  const std::size_t channels = own.size() / tokens, anchors = part.offsets.size();
  std::vector<double> distances(anchors * tokens);
  for (std::size_t a = 0; a < anchors; ++a) {
    const std::vector<float> rows =
        value_rows(found.anchors[found.decision.chosen[a]]->base, layer);
    for (std::size_t t = 0; t < tokens; ++t)
      distances[a * tokens + t] =
          kvmeld::anchors::l2_distance(std::span(own).subspan(t * channels, channels),
                                       std::span(rows).subspan(t * channels, channels));
  }
  const std::vector<float> weights =
      kvmeld::anchors::token_weights(distances, anchors, temperature);
  for (std::size_t a = 0; a < anchors; ++a)
    part.offsets[a].token_weights.assign(
        weights.begin() + static_cast<std::ptrdiff_t>(a * tokens),
        weights.begin() + static_cast<std::ptrdiff_t>((a + 1) * tokens));
}

/// ‖x̂ − x‖ / ‖x‖ of keys and of values.
struct RelativeError {
  double key = 0, value = 0;
};

/// Over the layers from `first` to before `last`, all tokens and heads; both fragments stand at the
/// same positions.
inline RelativeError relative_error(const kvmeld::Fragment& real, const kvmeld::Fragment& like,
                                    std::size_t first = 0, std::size_t last = ~std::size_t{0}) {
  const kvmeld::FragmentView x(real), y(like);
  double off[2] = {}, size[2] = {};
  last = std::min(last, real.geometry().layers.size());
  for (std::size_t l = first; l < last; ++l)
    for (std::size_t p = 0; p < 2; ++p) {
      const kvmeld::PlaneRef& a = x.ref().plane(l, p);
      const kvmeld::PlaneRef& b = y.ref().plane(l, p);
      for (std::int64_t i = 0; i < real.token_count() * a.token_stride; ++i) {
        const double value = element(a.data, i), difference = element(b.data, i) - value;
        size[p] += value * value;
        off[p] += difference * difference;
      }
    }
  return {std::sqrt(off[0] / size[0]), std::sqrt(off[1] / size[1])};
}

}  // namespace example
