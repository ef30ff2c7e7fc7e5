#pragma once

/// Anchors and offsets: what a segment's cache differs by in another context, as it was measured.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/rope.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

// K/V in the local frame: keys as they were before their position was put into them.

namespace detail {

/// Reads rows of one payload as f32, rotary ones un-rotated to position 0.
class LocalRows {
 public:
  /// `context_length` picks frequencies that depend on it; 0: the payload's last position + 1.
  /// Keeps references.
  [[nodiscard]] static Result<LocalRows> open(const Geometry& geometry, const Payload& payload,
                                              std::int64_t context_length) {
    LocalRows rows(geometry, payload);
    if (payload.bytes == nullptr)
      return extend::error(ErrorCode::payload_missing, "an evicted payload of ",
                           payload.positions.size(), " tokens cannot be turned back");
    std::vector<std::int64_t> shifts;
    for (const std::int64_t position : payload.positions) shifts.push_back(-position);
    rows.rotated_ =
        std::any_of(shifts.begin(), shifts.end(), [](std::int64_t s) { return s != 0; });
    if (context_length == 0 && !shifts.empty()) context_length = payload.positions.back() + 1;
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      const LayerShape& layer = geometry.layers[l];
      std::int32_t table = -1;
      for (const PlaneShape& shape : layer.planes) {
        if (shape.scales != ScaleScheme::none)
          return extend::error(
              ErrorCode::unsupported, "layer ", l,
              ": planes with scales apart have no offsets; seal them as f16 or q8_0");
        if (shape.channels > 1024)
          return extend::error(ErrorCode::unsupported, "layer ", l, ": head size ", shape.channels,
                               " is above 1024");
        const bool rotates = rows.rotated_ && shape.rotary && layer.rope.kind != RopeKind::none &&
                             layer.key_form == KeyForm::post_rope;
        if (!rotates) continue;
        if (shape.hadamard != 0)
          return extend::error(ErrorCode::unsupported, "layer ", l,
                               ": keys in a Hadamard basis of ", shape.hadamard,
                               " cannot be turned back");
        for (std::size_t m = 0; m < l && table < 0; ++m) {
          if (rows.layer_table_[m] >= 0 && geometry.layers[m].rope == layer.rope)
            table = rows.layer_table_[m];
        }
        if (table >= 0) continue;
        auto built = RopeTable::build(layer.rope, shifts, context_length);
        if (!built) return built.error();
        table = static_cast<std::int32_t>(rows.tables_.size());
        rows.tables_.push_back(*std::move(built));
      }
      rows.layer_table_.push_back(table);
    }
    return rows;
  }

  /// Whether rows of this plane are other than they lie.
  [[nodiscard]] bool rotates(std::size_t layer, const PlaneShape& shape) const noexcept {
    return shape.rotary && layer_table_[layer] >= 0;
  }
  /// Canonical bytes of one row: `row` counts the tokens that the layer holds, `plane` all planes
  /// of all layers.
  [[nodiscard]] const std::byte* stored(std::size_t plane, const PlaneShape& shape,
                                        std::int64_t row, std::int32_t head) const noexcept {
    return payload_->bytes.get() + payload_->plane_offsets[plane] +
           (row * shape.heads + head) * extend::row_bytes(shape);
  }
  void read(std::size_t layer, std::size_t plane, const PlaneShape& shape, std::int64_t token,
            std::int64_t row, std::int32_t head, Isa isa, float* out) const noexcept {
    extend::load_row(shape.type, isa, stored(plane, shape, row, head), shape.channels, out);
    if (!rotates(layer, shape)) return;
    const RopeSpec& rope = geometry_->layers[layer].rope;
    const RopeTable& table = tables_[static_cast<std::size_t>(layer_table_[layer])];
    extend::rotate_channels({table.row(static_cast<std::size_t>(token)), shape.channels,
                             rope.first_channel, rope.rotary_channels, rope.pairing},
                            isa, out);
  }

 private:
  LocalRows(const Geometry& geometry, const Payload& payload)
      : geometry_(&geometry), payload_(&payload) {}

  const Geometry* geometry_;
  const Payload* payload_;
  bool rotated_ = false;
  std::vector<RopeTable> tables_;          // a row for each token
  std::vector<std::int32_t> layer_table_;  // (layers) −1: nothing turns
};

/// Fills in where the planes of a payload lie, whose token sets are known, and makes zeros for
/// them.
[[nodiscard]] inline std::shared_ptr<std::vector<std::byte>> local_storage(const Geometry& geometry,
                                                                           Payload& payload) {
  std::size_t total = 0;
  payload.plane_offsets.clear();
  payload.scale_offsets.clear();
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      const auto rows = static_cast<std::size_t>(payload.layer_tokens(l) * shape.heads);
      payload.plane_offsets.push_back(total);
      total += (rows * static_cast<std::size_t>(extend::row_bytes(shape)) + 3) / 4 * 4;
      payload.scale_offsets.push_back(total);
    }
  }
  payload.byte_count = total;
  return std::make_shared<std::vector<std::byte>>((std::max)(total, std::size_t{1}));
}

/// Normalises the rows of a derived plane. Errors: `non_finite`, by layer and row, where its
/// elements cannot hold one.
inline Status normalise_plane(const PlaneShape& shape, std::byte* bytes, std::size_t rows,
                              std::size_t layer, const char* what) {
  const auto size = static_cast<std::size_t>(extend::row_bytes(shape) * shape.heads);
  if (extend::is_finite(extend::normalise(shape.type, bytes, rows * size))) return {};
  return extend::error(ErrorCode::non_finite, "layer ", layer, ", ",
                       shape.plane == Plane::value ? "values" : "keys", " of row ",
                       extend::first_non_finite(shape.type, bytes, rows * size, size),
                       " of those it holds: ", what, " is beyond ", to_string(shape.type));
}

/// Tokens that a set holds, ascending.
[[nodiscard]] inline std::vector<std::int32_t> held_tokens(const TokenSet& set,
                                                           std::int64_t tokens) {
  std::vector<std::int32_t> out = set.present;
  if (!set.all) return out;
  out.clear();
  for (std::int64_t t = 0; t < tokens; ++t) out.push_back(static_cast<std::int32_t>(t));
  return out;
}

/// A fragment that is derived from others: the first one's tokens and role, one payload, an id that
/// no sealed fragment has.
[[nodiscard]] inline Fragment derived_fragment(const Fragment& from, Payload payload,
                                               std::vector<TokenId> tokens, const Hasher& name) {
  auto body = std::make_shared<Fragment::Body>();
  body->geometry = from.shared_geometry();
  body->role = Role::span;
  body->prefix = from.prefix();
  body->tokens = std::move(tokens);
  body->token_count = static_cast<std::int64_t>(payload.positions.size());
  body->payloads.push_back(std::move(payload));
  const auto rest = name.hash().finish();
  body->id.bytes[0] = Xxh3_128::tag;
  std::copy(rest.begin(), rest.end(), body->id.bytes.begin() + 1);
  return Fragment(std::move(body));
}

}  // namespace detail

/// Whether a fragment's keys are in the local frame: all positions 0.
[[nodiscard]] inline bool is_unrotated(const Fragment& fragment) noexcept {
  const std::vector<std::int64_t>& positions = fragment.payloads()[0].positions;
  return std::all_of(positions.begin(), positions.end(), [](std::int64_t at) { return at == 0; });
}

/// The fragment with its keys un-rotated to no position: every `Payload::positions` is 0, and one
/// turn takes a key to any place.
///
/// Its id is derived from the fragment's, so it is never taken for it; it belongs in anchors and
/// plans, not in a set. Payload 0 is read. Rotated in f32 and rounded once to the cache's elements.
/// O(bytes). Errors: `payload_missing`, `unsupported` (scales apart, Hadamard bases),
/// `rope_unsupported`, `non_finite`.
/// @param context_length tokens of the context that it was made in, where frequencies depend on it;
/// 0: its last position + 1.
[[nodiscard]] inline Result<Fragment> unrotated(const Fragment& fragment,
                                                std::int64_t context_length = 0) {
  if (!fragment.valid())
    return extend::error(ErrorCode::invalid_argument, "an empty Fragment has no keys to turn back");
  if (fragment.token_count() > 0 && is_unrotated(fragment) && fragment.token_count() > 1)
    return fragment;
  const exec::FloatEnvironmentGuard guard;
  const Geometry& geometry = fragment.geometry();
  const Payload& from = fragment.payloads()[0];
  auto rows = detail::LocalRows::open(geometry, from, context_length);
  if (!rows) return rows.error();
  Payload out = from;
  out.digest = {};
  out.positions.assign(from.positions.size(), 0);
  const auto storage = detail::local_storage(geometry, out);
  const Isa isa = best_isa();
  std::size_t plane = 0;
  alignas(64) float row[1024];
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const std::vector<std::int32_t> held =
        detail::held_tokens(from.token_sets[from.layer_set[l]], fragment.token_count());
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      std::byte* to = storage->data() + out.plane_offsets[plane];
      const std::int64_t size = extend::row_bytes(shape);
      const std::size_t bytes = held.size() * static_cast<std::size_t>(size * shape.heads);
      if (!rows->rotates(l, shape)) {
        std::copy_n(from.bytes.get() + from.plane_offsets[plane], bytes, to);
      } else {
        for (std::size_t i = 0; i < held.size(); ++i) {
          for (std::int32_t head = 0; head < shape.heads; ++head, to += size) {
            rows->read(l, plane, shape, held[i], static_cast<std::int64_t>(i), head, isa, row);
            extend::store_row(shape.type, isa, row, shape.channels, to);
          }
        }
        KVMELD_TRY(detail::normalise_plane(shape, storage->data() + out.plane_offsets[plane],
                                           held.size(), l, "a key turned back"));
      }
      ++plane;
    }
  }
  out.bytes = std::shared_ptr<const std::byte[]>(storage, storage->data());
  Hasher name;
  name.text("kvmeld.anchor.base");
  name.bytes(std::as_bytes(std::span(fragment.id().bytes)));
  return detail::derived_fragment(fragment, std::move(out),
                                  {fragment.tokens().begin(), fragment.tokens().end()}, name);
}

/// How an offset is measured.
struct OffsetOptions {
  /// Leading layers whose K/V depend on the token alone, so that their offset is 0 and is not kept.
  /// 0 measures every layer.
  std::int32_t context_free_layers = 1;
  /// The base's id, by which the caller vouches that `real` is the base's content in a context.
  /// Needed where tokens are placeholders, whose ids do not tell; latent segments have no ids to go
  /// by, and are the caller's word anyway.
  FragmentId of{};
  /// Tokens of the contexts, where frequencies depend on it; 0: each one's last position + 1.
  std::int64_t context_length = 0;
};

/// Δ = real − base in the local frame: what a context did to a segment, whatever the places where
/// either was recorded.
///
/// `real` and `base` are the same tokens in a context and by themselves (sealed, or `unrotated`).
/// The offset is a fragment of the cache's geometry with all positions 0, without the context-free
/// layers and without tokens that a layer of either does not hold. Differences in f32, rounded once
/// to the cache's elements (a step of f16 is 2^-11 of the offset, which is smaller than K/V):
/// offsets of f32 caches are f32. O(bytes). KVCOMM (2025), equations of the offset. Errors:
/// `geometry_mismatch`, `token_count_mismatch`, `tokens_required` (ids that do not tell the
/// content, see `OffsetOptions::of`), `payload_missing`, `unsupported`, `non_finite`,
/// `invalid_argument`.
[[nodiscard]] inline Result<Fragment> measure_offset(const Fragment& real, const Fragment& base,
                                                     const OffsetOptions& options = {}) {
  if (!real.valid() || !base.valid())
    return extend::error(ErrorCode::invalid_argument,
                         "an offset needs two fragments, one is empty");
  KVMELD_TRY(check_same(base.geometry(), real.geometry()));
  if (real.token_count() != base.token_count() ||
      !std::ranges::equal(real.tokens(), base.tokens())) {
    return extend::error(ErrorCode::token_count_mismatch, "offset of ", real.token_count(),
                         " tokens against a base of ", base.token_count(),
                         "; both must be of the same tokens");
  }
  if (options.of.empty() ? !base.latent() && !base.told_by_ids() : options.of != base.id()) {
    return extend::error(ErrorCode::tokens_required, "an offset of ", base.token_count(),
                         " tokens from base ", base.id().hex(),
                         options.of.empty() ? ": some are placeholders, whose ids do not say what "
                                              "they are; if it is the same content, "
                                              "name the base in OffsetOptions::of"
                                            : ", and OffsetOptions::of names ",
                         options.of.empty() ? std::string() : options.of.hex());
  }
  const Geometry& geometry = base.geometry();
  if (options.context_free_layers < 0 ||
      options.context_free_layers > std::ssize(geometry.layers)) {
    return extend::error(ErrorCode::invalid_argument, options.context_free_layers,
                         " context-free layers of ", geometry.layers.size());
  }
  const exec::FloatEnvironmentGuard guard;
  KVMELD_TRY(exec::check_float_environment());
  const Payload& a = real.payloads()[0];
  const Payload& b = base.payloads()[0];
  const auto in_context = detail::LocalRows::open(geometry, a, options.context_length);
  if (!in_context) return in_context.error();
  const auto alone = detail::LocalRows::open(geometry, b, options.context_length);
  if (!alone) return alone.error();
  Payload out;
  out.positions.assign(b.positions.size(), 0);
  std::vector<std::vector<std::int32_t>> held;  // (layers)
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    TokenSet set;
    std::vector<std::int32_t>& both = held.emplace_back();
    if (std::cmp_greater_equal(l, options.context_free_layers)) {
      const auto x = detail::held_tokens(a.token_sets[a.layer_set[l]], real.token_count());
      const auto y = detail::held_tokens(b.token_sets[b.layer_set[l]], real.token_count());
      std::set_intersection(x.begin(), x.end(), y.begin(), y.end(), std::back_inserter(both));
    }
    if (std::ssize(both) != real.token_count()) set = {.all = false, .present = both};
    const auto same = std::find(out.token_sets.begin(), out.token_sets.end(), set);
    out.layer_set.push_back(static_cast<std::uint16_t>(same - out.token_sets.begin()));
    if (same == out.token_sets.end()) out.token_sets.push_back(std::move(set));
  }
  const auto storage = detail::local_storage(geometry, out);
  const Isa isa = best_isa();
  alignas(64) float x[1024];
  alignas(64) float y[1024];
  std::size_t plane = 0;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    const auto rows_a = detail::held_tokens(a.token_sets[a.layer_set[l]], real.token_count());
    const auto rows_b = detail::held_tokens(b.token_sets[b.layer_set[l]], real.token_count());
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      std::byte* to = storage->data() + out.plane_offsets[plane];
      const std::int64_t size = extend::row_bytes(shape);
      for (const std::int32_t token : held[l]) {
        const auto row_a = std::lower_bound(rows_a.begin(), rows_a.end(), token) - rows_a.begin();
        const auto row_b = std::lower_bound(rows_b.begin(), rows_b.end(), token) - rows_b.begin();
        for (std::int32_t head = 0; head < shape.heads; ++head, to += size) {
          in_context->read(l, plane, shape, token, row_a, head, isa, x);
          alone->read(l, plane, shape, token, row_b, head, isa, y);
          for (std::int32_t c = 0; c < shape.channels; ++c) x[c] -= y[c];
          extend::store_row(shape.type, isa, x, shape.channels, to);
        }
      }
      KVMELD_TRY(detail::normalise_plane(shape, storage->data() + out.plane_offsets[plane],
                                         held[l].size(), l, "an offset"));
      ++plane;
    }
  }
  out.bytes = std::shared_ptr<const std::byte[]>(storage, storage->data());
  Hasher name;
  name.text("kvmeld.anchor.offset");
  name.bytes(std::as_bytes(std::span(real.id().bytes)));
  name.bytes(std::as_bytes(std::span(base.id().bytes)));
  name.value(options.context_free_layers);
  name.value(options.context_length);
  return detail::derived_fragment(base, std::move(out),
                                  {base.tokens().begin(), base.tokens().end()}, name);
}

/// Why a segment is, or is not, made from anchors. Every decision has one.
enum class ReuseReason : std::uint8_t {
  reuse,              ///< blend the chosen anchors' offsets
  empty_segment,      ///< no tokens: nothing to reuse and nothing to prefill
  invalid_rule,       ///< a parameter of the rule outside its range
  model_differs,      ///< the pool is another model's
  tokenizer_differs,  ///< the pool is another tokenizer's
  layout_differs,     ///< the pool holds caches of another shape, dtype or rope
  tenant_differs,     ///< the pool is another tenant's
  /// The pool's bases were encoded behind something else: its offsets lead away from other bases.
  base_differs,
  unsigned_segment,  ///< the signature policy refused its input
  exact_required,    ///< the consumer takes no approximate K/V
  /// The segment would end behind the positions that the model was trained on.
  beyond_trained_context,
  empty_pool,           ///< no anchors yet
  below_threshold,      ///< none is similar enough
  too_short,            ///< every similar anchor is shorter than the segment
  no_offset,            ///< none of those that are long enough holds an offset for this context
  partly_evicted,       ///< their offsets lack tokens that a sliding-window layer dropped
  distance_not_finite,  ///< the distances to all that are left are NaN or infinite
  too_few_anchors,      ///< fewer than `min_anchors`
  uncertain,            ///< H(w) > γ log |A|: no anchor stands out, make a new one
  not_cheaper,          ///< blending would take as long as prefilling
};
/// Number of reasons.
inline constexpr std::size_t reuse_reasons = static_cast<std::size_t>(ReuseReason::not_cheaper) + 1;

/// The name of a reason as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(ReuseReason reason) noexcept {
  constexpr std::array<std::string_view, reuse_reasons> names = {"reuse",
                                                                 "empty_segment",
                                                                 "invalid_rule",
                                                                 "model_differs",
                                                                 "tokenizer_differs",
                                                                 "layout_differs",
                                                                 "tenant_differs",
                                                                 "base_differs",
                                                                 "unsigned_segment",
                                                                 "exact_required",
                                                                 "beyond_trained_context",
                                                                 "empty_pool",
                                                                 "below_threshold",
                                                                 "too_short",
                                                                 "no_offset",
                                                                 "partly_evicted",
                                                                 "distance_not_finite",
                                                                 "too_few_anchors",
                                                                 "uncertain",
                                                                 "not_cheaper"};
  const auto i = static_cast<std::size_t>(reason);
  return i < names.size() ? names[i] : "unknown";
}

/// How often each reason was given. Any thread may count and read.
class ReasonCounters {
 public:
  void count(ReuseReason reason) noexcept {
    counts_[static_cast<std::size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t operator[](ReuseReason reason) const noexcept {
    return counts_[static_cast<std::size_t>(reason)].load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t total() const noexcept {
    std::uint64_t sum = 0;
    for (const auto& c : counts_) sum += c.load(std::memory_order_relaxed);
    return sum;
  }

 private:
  std::array<std::atomic<std::uint64_t>, reuse_reasons> counts_{};
};

/// Whose caches may meet in one pool. What differs here never matches, however alike the texts are.
///
/// Offsets lead from bases that stood behind one stated context to other places; added to a base
/// that stood behind something else they lead nowhere, so that context is part of the space.
struct AnchorSpace {
  std::string model{};
  std::string tokenizer{};
  Digest128 layout{};  ///< of layers, shapes, element types and ropes
  std::string tenant{};
  Context base{};  ///< what stood before every base when it was encoded

  bool operator==(const AnchorSpace&) const = default;

  [[nodiscard]] static AnchorSpace of(const Geometry& geometry, const Context& base = {}) {
    Geometry shape = geometry;
    shape.model.clear();
    shape.tokenizer.clear();
    shape.tenant.clear();
    Hasher hasher;
    hasher.text("kvmeld.anchor.layout");
    hash_append(hasher, shape);
    return {geometry.model, geometry.tokenizer, hasher.digest(), geometry.tenant, base};
  }
  /// The space that a base, which is valid(), belongs to. O(layers).
  [[nodiscard]] static AnchorSpace of(const Fragment& base) {
    return of(base.geometry(), {.prefix = base.prefix(), .lead_in = base.payloads()[0].lead_in});
  }
};

/// The first field in which a request's space differs from a pool's; `reuse` where none does.
[[nodiscard]] inline ReuseReason compare(const AnchorSpace& pool,
                                         const AnchorSpace& asked) noexcept {
  if (pool.model != asked.model) return ReuseReason::model_differs;
  if (pool.tokenizer != asked.tokenizer) return ReuseReason::tokenizer_differs;
  if (pool.layout != asked.layout) return ReuseReason::layout_differs;
  if (pool.tenant != asked.tenant) return ReuseReason::tenant_differs;
  if (pool.base != asked.base) return ReuseReason::base_differs;
  return ReuseReason::reuse;
}

/// The digest by which a place in an agent's prompt is named: what stood before a segment there,
/// and which slot of a template it fills.
[[nodiscard]] inline Digest128 place_digest(const Context& context, std::string_view agent = {},
                                            std::uint32_t slot = 0) {
  Hasher hasher;
  hasher.text("kvmeld.anchor.place");
  hasher.bytes(std::as_bytes(std::span(context.prefix.bytes)));
  hasher.value(context.lead_in.low);
  hasher.value(context.lead_in.high);
  hasher.text(agent);
  hasher.value(slot);
  return hasher.digest();
}

/// What one context did to an anchor's segment, and to the template text that follows it there.
struct ContextOffset {
  Digest128 context{};
  Fragment segment{};  ///< from `measure_offset`
  /// Likewise, against the template text's own base; not valid() where none follows.
  Fragment following{};
};

/// A segment seen before: an immutable base, and a Δ for each context in which it was measured.
///
/// Immutable once in a pool; a new Δ makes a new version that shares everything else.
struct Anchor {
  FragmentId id{};  ///< of the base as it was sealed, or any 32 bytes that name this content
  Fragment base{};  ///< keys un-rotated; alone, under a stated context
  /// For exact distances: mean token embedding, or mean value row of layer 1.
  std::vector<float> vector{};
  std::vector<float> embedding{};        ///< what `EmbeddingHash` signs; empty: `vector`
  std::vector<ContextOffset> offsets{};  ///< ascending by context
  bool approximate = false;              ///< its K/V was blended itself: never an exact answer

  /// The Δ of a context, or null: the answer is then a reason, never the base.
  [[nodiscard]] const ContextOffset* find(const Digest128& context) const noexcept {
    const auto at =
        std::lower_bound(offsets.begin(), offsets.end(), context,
                         [](const ContextOffset& o, const Digest128& c) { return o.context < c; });
    return at != offsets.end() && at->context == context ? &*at : nullptr;
  }
  /// Of K/V in base and offsets, and of vectors.
  [[nodiscard]] std::size_t bytes() const noexcept {
    const auto of = [](const Fragment& f) {
      return f.valid() ? f.payloads()[0].byte_count : std::size_t{0};
    };
    std::size_t sum = of(base) + (vector.size() + embedding.size()) * sizeof(float);
    for (const ContextOffset& o : offsets) sum += of(o.segment) + of(o.following);
    return sum;
  }
};

/// An anchor of a segment that was sealed by itself: its base un-rotated, no offsets yet.
///
/// Errors: those of `unrotated`; `invalid_argument` for a segment of 0 tokens.
[[nodiscard]] inline Result<Anchor> make_anchor(const Fragment& base, std::vector<float> vector,
                                                std::int64_t context_length = 0) {
  if (!base.valid() || base.token_count() == 0)
    return extend::error(ErrorCode::invalid_argument,
                         "an anchor needs a segment of at least 1 token");
  auto local = unrotated(base, context_length);
  if (!local) return local.error();
  return Anchor{base.id(), *std::move(local), std::move(vector), {}, {}, false};
}

/// Puts a Δ where the anchor has none for its context; false where it has one already, which stays.
/// Errors: `invalid_argument` for a segment offset that is not of the base's tokens.
[[nodiscard]] inline Result<bool> add_offset(Anchor& anchor, ContextOffset offset) {
  if (!offset.segment.valid() || offset.segment.token_count() != anchor.base.token_count()) {
    return extend::error(ErrorCode::invalid_argument, "an offset of ",
                         offset.segment.valid() ? offset.segment.token_count() : 0,
                         " tokens for an anchor of ", anchor.base.token_count());
  }
  KVMELD_TRY(check_same(anchor.base.geometry(), offset.segment.geometry()));
  const auto at =
      std::lower_bound(anchor.offsets.begin(), anchor.offsets.end(), offset.context,
                       [](const ContextOffset& o, const Digest128& c) { return o.context < c; });
  if (at != anchor.offsets.end() && at->context == offset.context) return false;
  anchor.offsets.insert(at, std::move(offset));
  return true;
}

/// The mean value row of one layer, all heads side by side: a vector for distances that needs no
/// embedding. f64 sums, tokens ascending.
///
/// Errors: `invalid_argument` for a layer without values; `payload_missing`.
[[nodiscard]] inline Result<std::vector<float>> mean_value_row(const Fragment& fragment,
                                                               std::size_t layer = 1) {
  if (!fragment.valid() || layer >= fragment.geometry().layers.size())
    return extend::error(ErrorCode::invalid_argument, "no layer ", layer, " to take values from");
  const Payload& payload = fragment.payloads()[0];
  if (payload.bytes == nullptr)
    return extend::error(ErrorCode::payload_missing, "evicted payload: ", fragment.id().hex());
  std::size_t plane = 0;
  for (std::size_t l = 0; l < layer; ++l) plane += fragment.geometry().layers[l].planes.size();
  for (const PlaneShape& shape : fragment.geometry().layers[layer].planes) {
    if (shape.plane != Plane::value || shape.scales != ScaleScheme::none) {
      ++plane;
      continue;
    }
    const std::int64_t channels = static_cast<std::int64_t>(shape.heads) * shape.channels;
    std::vector<double> sums(static_cast<std::size_t>(channels));
    std::vector<float> row(sums.size());
    const std::int64_t rows = payload.layer_tokens(layer);
    for (std::int64_t t = 0; t < rows; ++t) {
      extend::load_row(
          shape.type, best_isa(),
          payload.bytes.get() + payload.plane_offsets[plane] + t * byte_size(shape.type, channels),
          channels, row.data());
      for (std::size_t c = 0; c < row.size(); ++c) sums[c] += static_cast<double>(row[c]);
    }
    for (std::size_t c = 0; c < row.size(); ++c)
      row[c] = rows == 0 ? 0.0F : static_cast<float>(sums[c] / static_cast<double>(rows));
    return row;
  }
  return extend::error(ErrorCode::invalid_argument, "layer ", layer,
                       " has no value plane; give an embedding");
}

}  // namespace anchors

KVMELD_NAMESPACE_END
