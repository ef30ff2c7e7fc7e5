#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/geometry_hash.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/normalise.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

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

KVMELD_LAZY [[nodiscard]] Status check_seal(const KvCacheRef& view, const SealOptions& options) {
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
KVMELD_LAZY [[nodiscard]] Result<TokenSet> present_tokens(const KvCacheRef& view, std::size_t layer,
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
KVMELD_LAZY [[nodiscard]] Result<Payload> gather_payload(const KvCacheRef& view,
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
KVMELD_LAZY [[nodiscard]] const std::vector<double>& payload_peaks(const Geometry& geometry,
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

}  // namespace detail

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
  payload->digest = detail::payload_digest<Hash>(*payload);
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
  body->id = detail::fragment_id<Hash>(*body);
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
    return detail::error(ErrorCode::invalid_argument,
                         "the variant is the encoding without lead-in, and a lead-in is named");
  }
  if (fragment.payloads().size() != 1) {
    return detail::error(ErrorCode::invalid_argument,
                         "a fragment has at most 2 payloads, this one has ",
                         fragment.payloads().size());
  }
  if (fragment.id().tag() != Hash::tag) {
    return detail::error(ErrorCode::hash_mismatch, "fragment named by hash ", fragment.id().tag(),
                         ", variant by ", Hash::tag);
  }
  auto other = seal<Hash>(view, options);
  if (!other) return other.error();
  KVMELD_TRY(check_same(fragment.geometry(), other->geometry()));
  const std::span<const TokenId> tokens = fragment.tokens(), others = other->tokens();
  if (!std::equal(tokens.begin(), tokens.end(), others.begin(), others.end()) ||
      fragment.token_count() != other->token_count()) {
    return detail::error(ErrorCode::token_count_mismatch, "the variant encodes ",
                         other->token_count(), " tokens that are not the fragment's ",
                         fragment.token_count());
  }
  if (fragment.prefix() != other->prefix() || fragment.role() != other->role()) {
    return detail::error(ErrorCode::invalid_argument, "the variant has another prefix or role");
  }
  auto body = std::make_shared<Fragment::Body>(*fragment.body());
  body->payloads.push_back(other->payloads()[0]);
  body->id = detail::fragment_id<Hash>(*body);
  return Fragment(std::move(body));
}

KVMELD_NAMESPACE_END
