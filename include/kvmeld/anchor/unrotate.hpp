#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/normalise.hpp>
#include <kvmeld/cache/rope_table.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/cache/turn_rows.hpp>
#include <kvmeld/tensor/float_environment.hpp>
#include <kvmeld/tensor/rows.hpp>

/// K/V in the local frame: keys as they were before their position was put into them.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Reads rows of one payload as f32, rotary ones turned back to position 0.
class LocalRows {
 public:
  /// `context_length` picks frequencies that depend on it; 0: the payload's last position + 1.
  /// Keeps references.
  KVMELD_LAZY [[nodiscard]] static Result<LocalRows> open(const Geometry& geometry,
                                                          const Payload& payload,
                                                          std::int64_t context_length) {
    LocalRows rows(geometry, payload);
    if (payload.bytes == nullptr)
      return error(ErrorCode::payload_missing, "an evicted payload of ", payload.positions.size(),
                   " tokens cannot be turned back");
    std::vector<std::int64_t> shifts;
    for (const std::int64_t position : payload.positions) shifts.push_back(-position);
    rows.turned_ = std::any_of(shifts.begin(), shifts.end(), [](std::int64_t s) { return s != 0; });
    if (context_length == 0 && !shifts.empty()) context_length = payload.positions.back() + 1;
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      const LayerShape& layer = geometry.layers[l];
      std::int32_t table = -1;
      for (const PlaneShape& shape : layer.planes) {
        if (shape.scales != ScaleScheme::none)
          return error(ErrorCode::unsupported, "layer ", l,
                       ": planes with scales apart have no offsets; seal them as f16 or q8_0");
        if (shape.channels > 1024)
          return error(ErrorCode::unsupported, "layer ", l, ": head size ", shape.channels,
                       " is above 1024");
        const bool turns = rows.turned_ && shape.rotary && layer.rope.kind != RopeKind::none &&
                           layer.key_form == KeyForm::post_rope;
        if (!turns) continue;
        if (shape.hadamard != 0)
          return error(ErrorCode::unsupported, "layer ", l, ": keys in a Hadamard basis of ",
                       shape.hadamard, " cannot be turned back");
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
  [[nodiscard]] bool turns(std::size_t layer, const PlaneShape& shape) const noexcept {
    return shape.rotary && layer_table_[layer] >= 0;
  }
  /// Canonical bytes of one row: `row` counts the tokens that the layer holds, `plane` all planes
  /// of all layers.
  [[nodiscard]] const std::byte* stored(std::size_t plane, const PlaneShape& shape,
                                        std::int64_t row, std::int32_t head) const noexcept {
    return payload_->bytes.get() + payload_->plane_offsets[plane] +
           (row * shape.heads + head) * row_bytes(shape);
  }
  void read(std::size_t layer, std::size_t plane, const PlaneShape& shape, std::int64_t token,
            std::int64_t row, std::int32_t head, Isa isa, float* out) const noexcept {
    load_row(shape.type, isa, stored(plane, shape, row, head), shape.channels, out);
    if (!turns(layer, shape)) return;
    const RopeSpec& rope = geometry_->layers[layer].rope;
    const RopeTable& table = tables_[static_cast<std::size_t>(layer_table_[layer])];
    turn_row({table.row(static_cast<std::size_t>(token)), shape.channels, rope.first_channel,
              rope.rotary_channels, rope.pairing},
             isa, out);
  }

 private:
  LocalRows(const Geometry& geometry, const Payload& payload)
      : geometry_(&geometry), payload_(&payload) {}

  const Geometry* geometry_;
  const Payload* payload_;
  bool turned_ = false;
  std::vector<RopeTable> tables_;          // a row for each token
  std::vector<std::int32_t> layer_table_;  // (layers) −1: nothing turns
};

/// Fills in where the planes of a payload lie, whose token sets are known, and makes zeros for
/// them.
KVMELD_LAZY [[nodiscard]] std::shared_ptr<std::vector<std::byte>> local_storage(
    const Geometry& geometry, Payload& payload) {
  std::size_t total = 0;
  payload.plane_offsets.clear();
  payload.scale_offsets.clear();
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      const auto rows = static_cast<std::size_t>(payload.layer_tokens(l) * shape.heads);
      payload.plane_offsets.push_back(total);
      total += (rows * static_cast<std::size_t>(row_bytes(shape)) + 3) / 4 * 4;
      payload.scale_offsets.push_back(total);
    }
  }
  payload.byte_count = total;
  return std::make_shared<std::vector<std::byte>>((std::max)(total, std::size_t{1}));
}

/// Normalises the rows of a derived plane. Errors: `non_finite`, by layer and row, where its
/// elements cannot hold one.
KVMELD_LAZY Status normalise_plane(const PlaneShape& shape, std::byte* bytes, std::size_t rows,
                                   std::size_t layer, const char* what) {
  const auto size = static_cast<std::size_t>(row_bytes(shape) * shape.heads);
  if (is_finite(normalise(shape.type, bytes, rows * size))) return {};
  return error(ErrorCode::non_finite, "layer ", layer, ", ",
               shape.plane == Plane::value ? "values" : "keys", " of row ",
               first_non_finite(shape.type, bytes, rows * size, size), " of those it holds: ", what,
               " is beyond ", to_string(shape.type));
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

/// The fragment with its keys turned back to no position: every `Payload::positions` is 0, and one
/// turn takes a key to any place.
///
/// Its id is derived from the fragment's, so it is never taken for it; it belongs in anchors and
/// plans, not in a set. Payload 0 is read. Turned in f32 and rounded once to the cache's elements.
/// O(bytes). Errors: `payload_missing`, `unsupported` (scales apart, Hadamard bases),
/// `rope_unsupported`, `non_finite`.
/// @param context_length tokens of the context that it was made in, where frequencies depend on it;
/// 0: its last position + 1.
KVMELD_LAZY [[nodiscard]] Result<Fragment> unrotated(const Fragment& fragment,
                                                     std::int64_t context_length = 0) {
  if (!fragment.valid())
    return detail::error(ErrorCode::invalid_argument, "an empty Fragment has no keys to turn back");
  if (fragment.token_count() > 0 && is_unrotated(fragment) && fragment.token_count() > 1)
    return fragment;
  const FloatEnvironmentGuard guard;
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
      const std::int64_t size = detail::row_bytes(shape);
      const std::size_t bytes = held.size() * static_cast<std::size_t>(size * shape.heads);
      if (!rows->turns(l, shape)) {
        std::copy_n(from.bytes.get() + from.plane_offsets[plane], bytes, to);
      } else {
        for (std::size_t i = 0; i < held.size(); ++i) {
          for (std::int32_t head = 0; head < shape.heads; ++head, to += size) {
            rows->read(l, plane, shape, held[i], static_cast<std::int64_t>(i), head, isa, row);
            detail::store_row(shape.type, isa, row, shape.channels, to);
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

KVMELD_NAMESPACE_END
