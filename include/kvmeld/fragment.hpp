#pragma once

/// Fragments: sealed, content-addressed K/V of a span of tokens, and views of them.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a fragment is to a context: the text that several agents saw first, or something one of
/// them read.
enum class Role : std::uint8_t { prefix, span };

/// Last position that a token may have: far beyond any context, and far from overflow.
inline constexpr std::int64_t max_position = std::int64_t{1} << 48;

/// What stood before a fragment when it was encoded.
struct Context {
  FragmentId prefix{};  ///< the prefix fragment; empty: none
  Digest128 lead_in{};  ///< digest of the lead-in tokens that were dropped; zero: none

  bool operator==(const Context&) const = default;
};

/// The digest by which a lead-in is named in a fragment's context. Ids alone do not tell pictures
/// apart: where a lead-in holds placeholders, `contents` are digests of what they stand for, in
/// order.
[[nodiscard]] inline Digest128 lead_in_digest(std::span<const TokenId> tokens,
                                              std::span<const Digest128> contents = {}) {
  if (tokens.empty()) return {};
  Hasher hasher;
  hasher.text("kvmeld.lead_in");
  hasher.values(tokens);
  for (const Digest128& content : contents) {
    hasher.value(content.low);
    hasher.value(content.high);
  }
  return hasher.digest();
}

/// Which of a fragment's tokens one layer holds, as ascending indices. Sliding-window layers hold
/// fewer than full ones.
struct TokenSet {
  bool all = true;
  std::vector<std::int32_t> present{};  ///< read only where `all` is false

  bool operator==(const TokenSet&) const = default;
};

namespace detail {

/// The largest magnitude in each plane of a payload, worked out once by whoever asks first: no part
/// of its content.
///
/// A copy starts without, because what is copied may be given other bytes. Any number of threads
/// may ask.
class PayloadPeaks {
 public:
  PayloadPeaks() = default;
  PayloadPeaks(const PayloadPeaks&) noexcept {}
  PayloadPeaks(PayloadPeaks&& other) noexcept : planes_(other.planes_.exchange(nullptr)) {}
  PayloadPeaks& operator=(PayloadPeaks other) noexcept {
    delete planes_.exchange(other.planes_.exchange(nullptr));
    return *this;
  }
  ~PayloadPeaks() { delete planes_.load(); }

  /// (planes); null: not known yet.
  [[nodiscard]] const std::vector<double>* get() const noexcept {
    return planes_.load(std::memory_order_acquire);
  }
  /// Notes what was measured, unless somebody was faster; returns what is known.
  const std::vector<double>& set(std::vector<double> planes) const {
    auto* const mine = new std::vector<double>(std::move(planes));
    const std::vector<double>* known = nullptr;
    if (planes_.compare_exchange_strong(known, mine)) return *mine;
    delete mine;
    return *known;
  }

 private:
  mutable std::atomic<const std::vector<double>*> planes_{nullptr};
};

}  // namespace detail

/// One encoding of a fragment's tokens: canonical bytes in the order (layer, plane, token, head,
/// channel).
///
/// Immutable once sealed. Scales of a scaled plane follow its elements, f32, in the order (token,
/// head, group).
struct Payload {
  /// What this encoding's context dropped; zero: encoded right behind the prefix.
  Digest128 lead_in{};
  std::vector<std::int64_t> positions{};     ///< source position of every token, strictly ascending
  std::vector<TokenSet> token_sets{};        ///< distinct sets; `layer_set` points into it
  std::vector<std::uint16_t> layer_set{};    ///< one entry a layer
  std::vector<std::size_t> plane_offsets{};  ///< byte offset of each (layer, plane), layer-major
  std::vector<std::size_t> scale_offsets{};  ///< byte offset of each plane's scales
  std::shared_ptr<const std::byte[]> bytes{};  ///< null: evicted
  std::size_t byte_count = 0;
  std::array<std::uint8_t, 31> digest{};  ///< of positions, token sets and bytes
  detail::PayloadPeaks peaks{};           ///< of the bytes, for plans: neither hashed nor sent

  /// Tokens that a layer holds.
  [[nodiscard]] std::int64_t layer_tokens(std::size_t layer) const noexcept {
    const TokenSet& set = token_sets[layer_set[layer]];
    return static_cast<std::int64_t>(set.all ? positions.size() : set.present.size());
  }
};

/// Immutable, content-named K/V of some tokens: what replicas exchange and `render` reads. A copy
/// shares the bytes.
///
/// One or two payloads: the first is the one encoded behind the lead-in and decides order; the
/// second, if there, was encoded without it and is what `render` reads for whichever span comes
/// first.
class Fragment {
 public:
  struct Body {
    std::shared_ptr<const Geometry> geometry;
    Role role = Role::span;
    FragmentId prefix;            ///< context: the prefix that stood before
    std::vector<TokenId> tokens;  ///< empty for latent fragments
    std::int64_t token_count = 0;
    std::vector<Payload> payloads;  ///< one or two
    FragmentId id;
  };

  Fragment() = default;
  explicit Fragment(std::shared_ptr<const Body> body) : body_(std::move(body)) {}

  [[nodiscard]] bool valid() const noexcept { return body_ != nullptr; }
  [[nodiscard]] const FragmentId& id() const noexcept { return body_->id; }
  [[nodiscard]] Role role() const noexcept { return body_->role; }
  [[nodiscard]] const FragmentId& prefix() const noexcept { return body_->prefix; }
  [[nodiscard]] const Geometry& geometry() const noexcept { return *body_->geometry; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return body_->geometry;
  }
  [[nodiscard]] std::int64_t token_count() const noexcept { return body_->token_count; }
  [[nodiscard]] std::span<const TokenId> tokens() const noexcept {
    return extend::span_of(body_->tokens);
  }
  /// Whether equal ids are equal content: it has ids, and none is a placeholder. O(tokens · log
  /// placeholders).
  [[nodiscard]] bool told_by_ids() const noexcept {
    return !latent() && std::none_of(body_->tokens.begin(), body_->tokens.end(), [&](TokenId id) {
      return id < 0 || geometry().is_placeholder(id);
    });
  }
  /// What token i is, where its id says so; −1 in a latent fragment and for placeholders.
  [[nodiscard]] TokenId token_id(std::int64_t i) const noexcept {
    if (body_->tokens.empty()) return -1;
    const TokenId id = body_->tokens[static_cast<std::size_t>(i)];
    return geometry().is_placeholder(id) ? -1 : id;
  }
  [[nodiscard]] bool latent() const noexcept {
    return body_->tokens.empty() && body_->token_count > 0;
  }
  [[nodiscard]] std::span<const Payload> payloads() const noexcept {
    return extend::span_of(body_->payloads);
  }
  [[nodiscard]] const std::shared_ptr<const Body>& body() const noexcept { return body_; }

 private:
  std::shared_ptr<const Body> body_;
};

/// Of two handles of one id, the payload bytes that either has: what was evicted here may be there.
/// O(payloads).
[[nodiscard]] inline Fragment with_all_bytes(const Fragment& a, const Fragment& b) {
  std::shared_ptr<Fragment::Body> both;
  for (std::size_t p = 0; p < a.payloads().size(); ++p) {
    if (a.payloads()[p].bytes != nullptr || b.payloads()[p].bytes == nullptr) continue;
    if (both == nullptr) both = std::make_shared<Fragment::Body>(*a.body());
    both->payloads[p] = b.payloads()[p];
  }
  return both == nullptr ? a : Fragment(std::move(both));
}

/// What `seal` needs to know beside the bytes.
struct SealOptions {
  Role role = Role::span;
  std::span<const TokenId> tokens{};  ///< one for each token of the view; empty: a latent fragment
  /// One for each token of the view, strictly ascending; empty: 0, 1, 2, ….
  std::span<const std::int64_t> positions{};
  std::int64_t drop_first = 0;  ///< leading tokens (prefix, lead-in) that are context, not content
  Context context{};            ///< what the dropped tokens were
};

namespace detail {

[[nodiscard]] inline Status check_seal(const KvCacheRef& view, const SealOptions& options) {
  KVMELD_TRY(check_on_host(view, "seal"));
  const auto n = static_cast<std::size_t>(view.tokens());
  if (!options.tokens.empty() && options.tokens.size() != n) {
    return error(ErrorCode::token_count_mismatch, options.tokens.size(), " token ids for ", n,
                 " rows of K/V");
  }
  if (!options.positions.empty() && options.positions.size() != n) {
    return error(ErrorCode::token_count_mismatch, options.positions.size(), " positions for ", n,
                 " rows of K/V");
  }
  for (std::size_t i = 1; i < options.positions.size(); ++i) {
    if (options.positions[i] <= options.positions[i - 1]) {
      return error(ErrorCode::duplicate_position, "position ", options.positions[i], " of token ",
                   i, " follows position ", options.positions[i - 1],
                   "; source positions must ascend strictly");
    }
  }
  if (!options.positions.empty() &&
      (options.positions.front() < 0 || options.positions.back() > max_position)) {
    return error(ErrorCode::invalid_argument, "positions ", options.positions.front(), " to ",
                 options.positions.back(), " are not in [0, ", max_position, "]");
  }
  if (options.drop_first < 0 || options.drop_first > view.tokens()) {
    return error(ErrorCode::invalid_argument, "drop_first ", options.drop_first, " of ", n,
                 " tokens");
  }
  if (options.role > Role::span)
    return error(ErrorCode::unknown_field, "role unknown to this build");
  if (options.role == Role::prefix &&
      (options.drop_first != 0 || !options.context.prefix.empty())) {
    return error(ErrorCode::invalid_argument,
                 "a prefix stands first: it drops nothing and names no prefix");
  }
  for (const PlaneRef& plane : view.planes()) KVMELD_TRY(check_scales(plane, "seal"));
  return validate(view.geometry());
}

/// Which of the tokens from `first` on a layer holds; its planes must agree.
[[nodiscard]] inline Result<TokenSet> present_tokens(const KvCacheRef& view, std::size_t layer,
                                                     std::int64_t first) {
  const std::size_t planes = view.geometry().layers[layer].planes.size();
  TokenSet set;
  if (planes == 0) return set;
  std::vector<std::int32_t> present;
  const std::int64_t n = view.tokens();
  for (std::int64_t t = first; t < n; ++t) {
    const bool here = view.plane(layer, 0).slots.slot(t) >= 0;
    for (std::size_t p = 1; p < planes; ++p) {
      if ((view.plane(layer, p).slots.slot(t) >= 0) != here) {
        return error(ErrorCode::token_count_mismatch, "layer ", layer, ": plane ", p,
                     " and plane 0 disagree about token ", t);
      }
    }
    if (here) present.push_back(static_cast<std::int32_t>(t - first));
  }
  if (static_cast<std::int64_t>(present.size()) == n - first) return set;
  set.all = false;
  set.present = std::move(present);
  return set;
}

/// Copies a view into a payload; digest and context are the caller's.
[[nodiscard]] inline Result<Payload> gather_payload(const KvCacheRef& view,
                                                    const SealOptions& options) {
  Payload payload;
  const std::int64_t first = options.drop_first;
  const std::int64_t count = view.tokens() - first;
  for (std::int64_t t = 0; t < count; ++t) {
    payload.positions.push_back(options.positions.empty()
                                    ? first + t
                                    : options.positions[static_cast<std::size_t>(first + t)]);
  }
  const Geometry& geometry = view.geometry();
  std::size_t total = 0;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    auto set = present_tokens(view, l, first);
    if (!set) return set.error();
    const auto same = std::find(payload.token_sets.begin(), payload.token_sets.end(), *set);
    payload.layer_set.push_back(static_cast<std::uint16_t>(same - payload.token_sets.begin()));
    if (same == payload.token_sets.end()) payload.token_sets.push_back(*std::move(set));
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      const auto rows = static_cast<std::size_t>(payload.layer_tokens(l) * shape.heads);
      payload.plane_offsets.push_back(total);
      total += (rows * static_cast<std::size_t>(row_bytes(shape)) + 3) / 4 * 4;
      payload.scale_offsets.push_back(total);
      total += rows * static_cast<std::size_t>(row_scales(shape)) * sizeof(float);
    }
  }
  // Zero-filled, so that padding hashes alike; never empty, since null bytes mean an evicted
  // payload.
  const auto storage = std::make_shared<std::vector<std::byte>>(std::max<std::size_t>(total, 1));
  std::vector<double> peaks;
  std::size_t index = 0;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (std::size_t p = 0; p < geometry.layers[l].planes.size(); ++p, ++index) {
      const PlaneRef& plane = view.plane(l, p);
      const std::int64_t heads_bytes = row_bytes(plane.shape) * plane.shape.heads;
      std::byte* out = storage->data() + payload.plane_offsets[index];
      auto* scales = reinterpret_cast<float*>(storage->data() + payload.scale_offsets[index]);
      std::byte* const begin = out;
      float* const scales_begin = scales;
      for (std::int64_t t = first; t < view.tokens(); ++t) {
        const std::int64_t slot = plane.slots.slot(t);
        if (slot < 0) continue;
        gather_heads(plane, slot, out);
        out += heads_bytes;
        if (plane.shape.scales != ScaleScheme::none) {
          gather_scales(plane, slot, scales);
          scales += row_scales(plane.shape) * plane.shape.heads;
        }
      }
      const double scale =
          normalise(ElementType::f32, reinterpret_cast<std::byte*>(scales_begin),
                    static_cast<std::size_t>(scales - scales_begin) * sizeof(float));
      peaks.push_back(normalise(plane.shape.type, begin, static_cast<std::size_t>(out - begin)));
      if (!is_finite(peaks.back()) || !is_finite(scale)) {
        return error(ErrorCode::non_finite, "layer ", l, " plane ", p,
                     " holds a NaN or an infinity");
      }
    }
  }
  payload.bytes = std::shared_ptr<const std::byte[]>(storage, storage->data());
  payload.byte_count = total;
  (void)payload.peaks.set(std::move(peaks));
  return payload;
}

/// The largest stored magnitude of each (layer, plane), infinity where one is not finite. O(bytes)
/// for the first who asks.
[[nodiscard]] inline const std::vector<double>& payload_peaks(const Geometry& geometry,
                                                              const Payload& payload) {
  if (const std::vector<double>* const known = payload.peaks.get()) return *known;
  std::vector<double> peaks;
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      const auto bytes =
          static_cast<std::size_t>(payload.layer_tokens(l) * shape.heads * row_bytes(shape));
      peaks.push_back(
          peak_of(shape.type, payload.bytes.get() + payload.plane_offsets[peaks.size()], bytes));
    }
  }
  return payload.peaks.set(std::move(peaks));
}

}  // namespace detail

namespace extend {

template <ContentHash Hash>
[[nodiscard]] std::array<std::uint8_t, 31> payload_digest(const Payload& payload) {
  BasicHasher<Hash> h;
  h.text("kvmeld.payload.v1");
  h.value(payload.lead_in.low);
  h.value(payload.lead_in.high);
  h.values(span_of(payload.positions));
  h.values(span_of(payload.layer_set));
  for (const TokenSet& set : payload.token_sets) {
    h.value(static_cast<std::uint8_t>(set.all));
    h.values(span_of(set.present));
  }
  h.bytes(span_of(payload.bytes.get(), payload.byte_count));
  return h.hash().finish();
}

/// Names a body: geometry, role, context, tokens, and each payload's own digest, so that either is
/// fetched alone.
template <ContentHash Hash>
[[nodiscard]] FragmentId fragment_id(const Fragment::Body& body) {
  BasicHasher<Hash> h;
  h.text("kvmeld.fragment.v1");
  hash_append(h, *body.geometry);
  h.value(body.role);
  h.bytes(std::as_bytes(std::span(body.prefix.bytes)));
  h.value(body.token_count);
  h.values(span_of(body.tokens));
  h.value(static_cast<std::uint64_t>(body.payloads.size()));
  for (const Payload& payload : body.payloads) h.bytes(std::as_bytes(std::span(payload.digest)));
  FragmentId id;
  id.bytes[0] = Hash::tag;
  const std::array<std::uint8_t, 31> rest = h.hash().finish();
  std::copy(rest.begin(), rest.end(), id.bytes.begin() + 1);
  return id;
}

}  // namespace extend

/// Copies tokens `drop_first`… of a view into an immutable, content-named fragment.
///
/// Bytes are brought into canonical order and −0 becomes +0; the id names geometry, role, context,
/// tokens, positions and bytes. O(bytes), one pass to copy and one to hash. Errors:
/// `token_count_mismatch`, `duplicate_position`, `invalid_argument`, `non_finite`, `unknown_field`,
/// `geometry_mismatch` (planes that are not the geometry's), `memory_space`.
/// @tparam Hash names the content; XXH3-128 among processes that trust each other.
template <ContentHash Hash = Xxh3_128>
[[nodiscard]] Result<Fragment> seal(const KvCacheRef& view, const SealOptions& options = {}) {
  KVMELD_TRY(detail::check_seal(view, options));
  auto payload = detail::gather_payload(view, options);
  if (!payload) return payload.error();
  payload->lead_in = options.context.lead_in;
  payload->digest = extend::payload_digest<Hash>(*payload);
  auto body = std::make_shared<Fragment::Body>();
  body->geometry = view.shared_geometry();
  body->role = options.role;
  body->prefix = options.context.prefix;
  if (!options.tokens.empty()) {
    const auto content = options.tokens.subspan(static_cast<std::size_t>(options.drop_first));
    body->tokens.assign(content.begin(), content.end());
  }
  body->token_count = view.tokens() - options.drop_first;
  body->payloads.push_back(*std::move(payload));
  body->id = extend::fragment_id<Hash>(*body);
  return Fragment(std::move(body));
}

/// Adds a second encoding of the same tokens to a fragment: the one without lead-in, for whichever
/// span renders first.
///
/// Ids are compared; that placeholders of both stand for the same picture, and that latent tokens
/// are the same, is the caller's word. Errors: those of `seal`; `geometry_mismatch`,
/// `token_count_mismatch` or `invalid_argument` where the encodings are not of the same tokens
/// behind the same prefix; `hash_mismatch` where `fragment` was named by another hash.
template <ContentHash Hash = Xxh3_128>
[[nodiscard]] Result<Fragment> with_variant(const Fragment& fragment, const KvCacheRef& view,
                                            const SealOptions& options) {
  if (options.context.lead_in != Digest128{}) {
    return extend::error(ErrorCode::invalid_argument,
                         "the variant is the encoding without lead-in, and a lead-in is named");
  }
  if (fragment.payloads().size() != 1) {
    return extend::error(ErrorCode::invalid_argument,
                         "a fragment has at most 2 payloads, this one has ",
                         fragment.payloads().size());
  }
  if (fragment.id().tag() != Hash::tag) {
    return extend::error(ErrorCode::hash_mismatch, "fragment named by hash ", fragment.id().tag(),
                         ", variant by ", Hash::tag);
  }
  auto other = seal<Hash>(view, options);
  if (!other) return other.error();
  KVMELD_TRY(check_same(fragment.geometry(), other->geometry()));
  const std::span<const TokenId> tokens = fragment.tokens(), others = other->tokens();
  if (!std::equal(tokens.begin(), tokens.end(), others.begin(), others.end()) ||
      fragment.token_count() != other->token_count()) {
    return extend::error(ErrorCode::token_count_mismatch, "the variant encodes ",
                         other->token_count(), " tokens that are not the fragment's ",
                         fragment.token_count());
  }
  if (fragment.prefix() != other->prefix() || fragment.role() != other->role()) {
    return extend::error(ErrorCode::invalid_argument, "the variant has another prefix or role");
  }
  auto body = std::make_shared<Fragment::Body>(*fragment.body());
  body->payloads.push_back(other->payloads()[0]);
  body->id = extend::fragment_id<Hash>(*body);
  return Fragment(std::move(body));
}

namespace extend {

/// A canonical plane: rows one after the other in the order (token, head), scales likewise.
template <class Byte>
[[nodiscard]] BasicPlaneRef<Byte> canonical_plane(const PlaneShape& shape, Byte* data,
                                                  const float* scales, std::int64_t tokens) {
  BasicPlaneRef<Byte> plane;
  plane.data = data;
  plane.shape = shape;
  plane.tokens = tokens;
  plane.head_stride = shape.channels;
  plane.token_stride = static_cast<std::int64_t>(shape.channels) * shape.heads;
  if (shape.scales != ScaleScheme::none) {
    const std::int64_t groups = row_scales(shape);
    plane.scales = {.data = scales,
                    .slot_stride = groups * shape.heads,
                    .head_stride = groups,
                    .group_stride = 1};
  }
  return plane;
}

}  // namespace extend

/// A read view of one payload of a fragment, with the slot lists that mark tokens which a layer
/// does not hold.
///
/// Owns the lists and shares the payload's bytes; `ref()` stays true while this lives. Where there
/// is nothing to view, because the fragment is empty, has no such payload, or its bytes are
/// evicted, `ref().valid()` is false, and whatever is given that view refuses it.
class FragmentView {
 public:
  explicit FragmentView(const Fragment& fragment, std::size_t payload = 0) : fragment_(fragment) {
    if (!fragment.valid() || payload >= fragment.payloads().size() ||
        fragment.payloads()[payload].bytes == nullptr)
      return;
    const Payload& source = fragment.payloads()[payload];
    for (const TokenSet& set : source.token_sets) {
      std::vector<std::int32_t> slots;
      if (!set.all) {
        slots.assign(static_cast<std::size_t>(fragment.token_count()), -1);
        for (std::size_t i = 0; i < set.present.size(); ++i) {
          slots[static_cast<std::size_t>(set.present[i])] = static_cast<std::int32_t>(i);
        }
      }
      slots_.push_back(std::move(slots));
    }
    std::vector<PlaneRef> planes;
    const Geometry& geometry = fragment.geometry();
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      const std::vector<std::int32_t>& slots = slots_[source.layer_set[l]];
      for (const PlaneShape& shape : geometry.layers[l].planes) {
        const std::size_t index = planes.size();
        PlaneRef plane = extend::canonical_plane(
            shape, static_cast<const std::byte*>(source.bytes.get() + source.plane_offsets[index]),
            reinterpret_cast<const float*>(source.bytes.get() + source.scale_offsets[index]),
            fragment.token_count());
        if (!source.token_sets[source.layer_set[l]].all)
          plane.slots = {.kind = SlotKind::slot_list_i32, .table = slots.data()};
        planes.push_back(plane);
      }
    }
    ref_ = KvCacheRef(fragment.shared_geometry(), std::move(planes), fragment.token_count());
  }
  FragmentView(const FragmentView&) = delete;
  FragmentView& operator=(const FragmentView&) = delete;

  [[nodiscard]] const KvCacheRef& ref() const noexcept { return ref_; }
  [[nodiscard]] const KvCacheRef& kv_cache_ref() const noexcept { return ref_; }

 private:
  Fragment fragment_;
  std::vector<std::vector<std::int32_t>> slots_;
  KvCacheRef ref_;
};

namespace detail {

/// Hashes the rows for which `present(layer, token)` holds.
template <class Present>
[[nodiscard]] Digest128 content_digest_of(const KvCacheRef& cache, const Present& present) {
  Xxh3_128 hash;
  std::vector<std::byte> rows;
  std::vector<float> scales;
  const auto each_row = [&](std::size_t layer, const PlaneRef& plane, const auto& use) {
    for (std::int64_t t = 0; t < cache.tokens(); ++t) {
      const std::int64_t slot = plane.slots.slot(t);
      if (slot >= 0 && present(layer, t)) use(slot);
    }
  };
  for (std::size_t layer = 0; layer < cache.geometry().layers.size(); ++layer) {
    for (std::size_t index = 0; index < cache.geometry().layers[layer].planes.size(); ++index) {
      const PlaneRef& plane = cache.plane(layer, index);
      const auto heads_bytes = static_cast<std::size_t>(row_bytes(plane.shape) * plane.shape.heads);
      rows.resize(heads_bytes);
      each_row(layer, plane, [&](std::int64_t slot) {
        if (contiguous_heads(plane)) {
          hash.update(extend::span_of(plane.data + plane.byte_offset(plane.row_offset(slot, 0)),
                                      heads_bytes));
        } else {
          gather_heads(plane, slot, rows.data());
          hash.update(extend::span_of(rows));
        }
      });
      if (plane.shape.scales == ScaleScheme::none) continue;
      scales.resize(static_cast<std::size_t>(row_scales(plane.shape) * plane.shape.heads));
      each_row(layer, plane, [&](std::int64_t slot) {
        gather_scales(plane, slot, scales.data());
        hash.update(std::as_bytes(extend::span_of(scales)));
      });
    }
  }
  return hash.digest();
}

}  // namespace detail

/// Says what a cache holds: XXH3-128 of its rows in canonical order (layer, plane, token, head,
/// channel), then their scales.
///
/// Equal caches give equal digests whatever their layouts; rows that a view does not hold are
/// skipped. O(bytes). Errors: `invalid_argument`, `geometry_mismatch` or `token_count_mismatch` (a
/// view that its planes belie; scales that are declared and not given), `memory_space`, those of
/// `validate`.
[[nodiscard]] inline Result<Digest128> content_digest(const KvCacheRef& cache) {
  KVMELD_TRY(extend::check_on_host(cache, "content_digest"));
  KVMELD_TRY(validate(cache.geometry()));
  for (const PlaneRef& plane : cache.planes())
    KVMELD_TRY(extend::check_scales(plane, "content_digest"));
  return detail::content_digest_of(cache, [](std::size_t, std::int64_t) { return true; });
}

/// Checks that a fragment's bytes and fields are those that its id names: for fragments that
/// crossed a trust boundary.
///
/// Payloads whose bytes are not there are checked by their stored digest alone. O(bytes). Errors:
/// `hash_mismatch` for an id of another content hash, `id_mismatch` with the payload or the two
/// ids.
/// @tparam Hash the content hash that named the fragment.
template <ContentHash Hash = Xxh3_128>
[[nodiscard]] Status verify_fragment(const Fragment& fragment) {
  if (!fragment.valid())
    return extend::error(ErrorCode::invalid_argument, "an empty Fragment has no id to verify");
  if (fragment.id().tag() != Hash::tag) {
    return extend::error(ErrorCode::hash_mismatch, "fragment named by hash ", fragment.id().tag(),
                         ", verified by ", Hash::tag);
  }
  for (std::size_t p = 0; p < fragment.payloads().size(); ++p) {
    const Payload& payload = fragment.payloads()[p];
    if (payload.bytes != nullptr && extend::payload_digest<Hash>(payload) != payload.digest) {
      return extend::error(ErrorCode::id_mismatch, "payload ", p, " of fragment ",
                           fragment.id().hex(), ": its ", payload.byte_count,
                           " bytes do not hash to its digest");
    }
  }
  const FragmentId id = extend::fragment_id<Hash>(*fragment.body());
  if (id == fragment.id()) return {};
  return extend::error(ErrorCode::id_mismatch, "the fragment claims id ", fragment.id().hex(),
                       ", its content has ", id.hex());
}

/// Owns a cache in host memory, in canonical order (layer, plane, token, head, channel),
/// zero-filled. Planes begin at multiples of 64 bytes, as whole lines can be written past the
/// processor's caches.
///
/// For hosts that have no cache of their own to render into, and for tests. O(bytes) to build. More
/// bytes than can be counted fail as an allocation does.
class HostCache {
 public:
  HostCache(std::shared_ptr<const Geometry> geometry, std::int64_t tokens) {
    std::vector<std::size_t> offsets;
    std::size_t total = 0;
    constexpr std::size_t line = 64;
    bool counted = true;
    const auto grow = [&](std::int64_t heads, std::int64_t row) {
      offsets.push_back(total);
      std::size_t bytes = 0;
      counted = counted && !__builtin_mul_overflow(tokens, heads, &bytes) &&
                !__builtin_mul_overflow(bytes, row, &bytes) &&
                !__builtin_add_overflow(bytes, line - 1, &bytes) &&
                !__builtin_add_overflow(bytes / line * line, total, &total);
    };
    for (const LayerShape& layer : geometry->layers) {
      for (const PlaneShape& shape : layer.planes) {
        grow(shape.heads, extend::row_bytes(shape));
        grow(shape.heads, extend::row_scales(shape) * std::int64_t{sizeof(float)});
      }
    }
    if (!counted) total = (std::numeric_limits<std::size_t>::max)() / 2;  // more than there can be
    bytes_.resize(total + line);
    void* begin = bytes_.data();
    std::size_t space = bytes_.size();
    std::align(line, total, begin, space);
    used_ = extend::span_of(static_cast<std::byte*>(begin), total);
    std::vector<MutablePlaneRef> planes;
    std::size_t index = 0;
    for (const LayerShape& layer : geometry->layers) {
      for (const PlaneShape& shape : layer.planes) {
        planes.push_back(extend::canonical_plane(
            shape, used_.data() + offsets[index],
            reinterpret_cast<const float*>(used_.data() + offsets[index + 1]), tokens));
        index += 2;
      }
    }
    ref_ = MutableKvCacheRef(std::move(geometry), std::move(planes), tokens);
  }
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;
  HostCache(HostCache&&) noexcept = default;  // the buffer does not move, so the views stay true
  HostCache& operator=(HostCache&&) noexcept = default;

  [[nodiscard]] KvCacheRef kv_cache_ref() const { return ref_; }
  [[nodiscard]] const MutableKvCacheRef& mutable_ref() noexcept { return ref_; }
  [[nodiscard]] std::span<std::byte> bytes() noexcept {
    return bytes_.empty() ? std::span<std::byte>() : used_;
  }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return bytes_.empty() ? std::span<std::byte>() : used_;
  }

 private:
  std::vector<std::byte> bytes_;
  std::span<std::byte> used_;  // of them, from the first whole line on
  MutableKvCacheRef ref_;
};

KVMELD_NAMESPACE_END
