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

/// A fragment's place in a context: the prefix that all agents share, or a span that one of them
/// read.
enum class Role : std::uint8_t { prefix, span };

/// Largest position of a token: far beyond any context, and far from overflow.
inline constexpr std::int64_t max_position = std::int64_t{1} << 48;

/// The tokens that preceded a fragment when it was encoded.
struct Context {
  FragmentId prefix{};  ///< the prefix fragment; empty: none
  Digest128 lead_in{};  ///< digest of the lead-in tokens that were dropped; zero: none

  bool operator==(const Context&) const = default;
};

/// The digest of a lead-in, by which a fragment's context refers to it. Ids alone do not
/// distinguish images: where a lead-in has placeholders, `contents` are the digests of their
/// contents, in order.
[[nodiscard]] KVMELD_API Digest128 lead_in_digest(std::span<const TokenId> tokens,
                                                  std::span<const Digest128> contents = {});

/// Which of a fragment's tokens one layer holds, as ascending indices. Sliding-window layers hold
/// fewer than full ones.
struct TokenSet {
  bool all = true;
  std::vector<std::int32_t> present{};  ///< read only where `all` is false

  bool operator==(const TokenSet&) const = default;
};

namespace detail {

/// The largest magnitude in each plane of a payload, computed by the first caller that needs it;
/// not part of the payload's content.
///
/// A copy starts empty, because its bytes may be replaced. Thread-safe.
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

  /// (planes); null: not computed yet.
  [[nodiscard]] const std::vector<double>* get() const noexcept {
    return planes_.load(std::memory_order_acquire);
  }
  /// Stores the measured values unless another thread was first; returns the stored ones.
  KVMELD_API const std::vector<double>& set(std::vector<double> planes) const;

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
  /// Digest of the lead-in that was dropped; zero: encoded directly behind the prefix.
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

  /// The number of tokens that a layer holds.
  [[nodiscard]] std::int64_t layer_tokens(std::size_t layer) const noexcept {
    const TokenSet& set = token_sets[layer_set[layer]];
    return static_cast<std::int64_t>(set.all ? positions.size() : set.present.size());
  }
};

/// Immutable, content-named K/V of some tokens: what replicas exchange and `render` reads. A copy
/// shares the bytes.
///
/// One or two payloads: the first is the one encoded behind the lead-in and decides order; the
/// second, if present, was encoded without it, and `render` reads it for the span that comes first.
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
  /// Whether equal token ids mean equal content: the fragment has ids, and none is a placeholder.
  /// O(tokens · log placeholders).
  [[nodiscard]] bool told_by_ids() const noexcept {
    return !latent() && std::none_of(body_->tokens.begin(), body_->tokens.end(), [&](TokenId id) {
      return id < 0 || geometry().is_placeholder(id);
    });
  }
  /// The id of token i where it determines the content; −1 in a latent fragment and for
  /// placeholders.
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

/// Combines two handles of one id: the result has the payload bytes that either of them has, since
/// bytes may be evicted in only one. O(payloads).
[[nodiscard]] KVMELD_API Fragment with_all_bytes(const Fragment& a, const Fragment& b);

/// What `seal` needs beside the bytes.
struct SealOptions {
  Role role = Role::span;
  std::span<const TokenId> tokens{};  ///< one for each token of the view; empty: a latent fragment
  /// The positions by which the engine rotated the view's keys: one for each of its tokens,
  /// strictly ascending; empty: 0, 1, 2, …, right where the view starts where the engine's sequence
  /// does.
  std::span<const std::int64_t> positions{};
  std::int64_t drop_first = 0;  ///< the view's first tokens, prefix and lead-in, that are left out
  Context context{};  ///< what stood before the rest, in the view or not; `seal` cannot check it
};

namespace detail {

[[nodiscard]] KVMELD_API Status check_seal(const KvCacheRef& view, const SealOptions& options);

/// Copies a view into a payload; the caller sets digest and context.
[[nodiscard]] KVMELD_API Result<Payload> gather_payload(const KvCacheRef& view,
                                                        const SealOptions& options);

/// The largest stored magnitude of each (layer, plane), infinity where one is not finite. O(bytes)
/// in the first call.
[[nodiscard]] KVMELD_API const std::vector<double>& payload_peaks(const Geometry& geometry,
                                                                  const Payload& payload);

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

/// Computes the id of a body: a hash of geometry, role, context, tokens, and each payload's own
/// digest, so that each payload can be fetched alone.
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

/// Adds a second encoding of the same tokens to a fragment: the one without lead-in, which is read
/// where the span renders first.
///
/// Token ids are compared; the caller guarantees that placeholders stand for the same content and
/// that latent tokens are the same. Errors: those of `seal`; `geometry_mismatch`,
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

/// A plane in canonical form: contiguous rows in the order (token, head), and scales likewise.
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

/// A read-only view of one payload of a fragment, with slot lists whose holes are the tokens that a
/// layer lacks.
///
/// Owns the lists and shares the payload's bytes; `ref()` is valid while this object lives. Where
/// there is nothing to view, because the fragment is empty, has no such payload, or its bytes are
/// evicted, `ref().valid()` is false, and every function refuses that view.
class FragmentView {
 public:
  KVMELD_API explicit FragmentView(const Fragment& fragment, std::size_t payload = 0);
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

/// Hashes the rows for which `present(of, layer, token)` holds; null: all that the view holds.
[[nodiscard]] KVMELD_API Digest128 content_digest_of(const KvCacheRef& cache,
                                                     bool (*present)(const void*, std::size_t,
                                                                     std::int64_t) = nullptr,
                                                     const void* of = nullptr);

}  // namespace detail

/// The digest of a cache's content: XXH3-128 of its rows in canonical order (layer, plane, token,
/// head, channel), then their scales.
///
/// Equal caches give equal digests whatever their layouts; rows that a view does not hold are
/// skipped. O(bytes). Errors: `invalid_argument`, `geometry_mismatch` or `token_count_mismatch` (a
/// view whose planes do not match it; scales that are declared and not given), `memory_space`,
/// those of `validate`.
[[nodiscard]] KVMELD_API Result<Digest128> content_digest(const KvCacheRef& cache);

/// Checks that a fragment's bytes and fields hash to its id, for fragments that crossed a trust
/// boundary.
///
/// Payloads whose bytes are absent are checked by their stored digest alone. O(bytes). Errors:
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
/// zero-filled. Planes begin at multiples of 64 bytes, so that whole lines can be written past the
/// processor's caches.
///
/// For hosts that have no cache of their own to render into, and for tests. O(bytes) to build. A
/// size that overflows fails like an allocation.
class HostCache {
 public:
  KVMELD_API HostCache(std::shared_ptr<const Geometry> geometry, std::int64_t tokens);
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;
  HostCache(HostCache&&) noexcept = default;  // the buffer does not move, so the views stay valid
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
  std::span<std::byte> used_;  // the used part, from the first whole line on
  MutableKvCacheRef ref_;
};

// The companion library holds the instances for the default hash.
#if defined(KVMELD_COMPILED)
KVMELD_INSTANCE Result<Fragment> seal<Xxh3_128>(const KvCacheRef&, const SealOptions&);
KVMELD_INSTANCE Result<Fragment> with_variant<Xxh3_128>(const Fragment&, const KvCacheRef&,
                                                        const SealOptions&);
KVMELD_INSTANCE Status verify_fragment<Xxh3_128>(const Fragment&);
namespace extend {
KVMELD_INSTANCE std::array<std::uint8_t, 31> payload_digest<Xxh3_128>(const Payload&);
KVMELD_INSTANCE FragmentId fragment_id<Xxh3_128>(const Fragment::Body&);
}  // namespace extend
#endif

KVMELD_NAMESPACE_END

#if KVMELD_BODIES
#include <kvmeld/detail/impl/fragment.hpp>
#endif
