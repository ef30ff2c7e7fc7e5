#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/anchor/unrotate.hpp>

KVMELD_NAMESPACE_BEGIN

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
KVMELD_LAZY [[nodiscard]] Result<Fragment> measure_offset(const Fragment& real,
                                                          const Fragment& base,
                                                          const OffsetOptions& options = {}) {
  if (!real.valid() || !base.valid())
    return detail::error(ErrorCode::invalid_argument,
                         "an offset needs two fragments, one is empty");
  KVMELD_TRY(check_same(base.geometry(), real.geometry()));
  if (real.token_count() != base.token_count() ||
      !std::ranges::equal(real.tokens(), base.tokens())) {
    return detail::error(ErrorCode::token_count_mismatch, "offset of ", real.token_count(),
                         " tokens against a base of ", base.token_count(),
                         "; both must be of the same tokens");
  }
  if (options.of.empty() ? !base.latent() && !base.told_by_ids() : options.of != base.id()) {
    return detail::error(ErrorCode::tokens_required, "an offset of ", base.token_count(),
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
    return detail::error(ErrorCode::invalid_argument, options.context_free_layers,
                         " context-free layers of ", geometry.layers.size());
  }
  const FloatEnvironmentGuard guard;
  KVMELD_TRY(check_float_environment());
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
      const std::int64_t size = detail::row_bytes(shape);
      for (const std::int32_t token : held[l]) {
        const auto row_a = std::lower_bound(rows_a.begin(), rows_a.end(), token) - rows_a.begin();
        const auto row_b = std::lower_bound(rows_b.begin(), rows_b.end(), token) - rows_b.begin();
        for (std::int32_t head = 0; head < shape.heads; ++head, to += size) {
          in_context->read(l, plane, shape, token, row_a, head, isa, x);
          alone->read(l, plane, shape, token, row_b, head, isa, y);
          for (std::int32_t c = 0; c < shape.channels; ++c) x[c] -= y[c];
          detail::store_row(shape.type, isa, x, shape.channels, to);
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

KVMELD_NAMESPACE_END
