#pragma once

/// Bodies of fragment.hpp: sealing, hashing, views.

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

KVMELD_API Digest128 lead_in_digest(std::span<const TokenId> tokens,
                                    std::span<const Digest128> contents) {
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

namespace detail {

KVMELD_API const std::vector<double>& PayloadPeaks::set(std::vector<double> planes) const {
  auto* const mine = new std::vector<double>(std::move(planes));
  const std::vector<double>* known = nullptr;
  if (planes_.compare_exchange_strong(known, mine)) return *mine;
  delete mine;
  return *known;
}

}  // namespace detail

KVMELD_API Fragment with_all_bytes(const Fragment& a, const Fragment& b) {
  std::shared_ptr<Fragment::Body> both;
  for (std::size_t p = 0; p < a.payloads().size(); ++p) {
    if (a.payloads()[p].bytes != nullptr || b.payloads()[p].bytes == nullptr) continue;
    if (both == nullptr) both = std::make_shared<Fragment::Body>(*a.body());
    both->payloads[p] = b.payloads()[p];
  }
  return both == nullptr ? a : Fragment(std::move(both));
}

namespace detail {

KVMELD_API Status check_seal(const KvCacheRef& view, const SealOptions& options) {
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

/// The tokens from `first` on that a layer holds; its planes must agree.
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

KVMELD_API Result<Payload> gather_payload(const KvCacheRef& view, const SealOptions& options) {
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

KVMELD_API const std::vector<double>& payload_peaks(const Geometry& geometry,
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

KVMELD_API FragmentView::FragmentView(const Fragment& fragment, std::size_t payload)
    : fragment_(fragment) {
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

namespace detail {

KVMELD_API Digest128 content_digest_of(const KvCacheRef& cache,
                                       bool (*present)(const void*, std::size_t, std::int64_t),
                                       const void* of) {
  Xxh3_128 hash;
  std::vector<std::byte> rows;
  std::vector<float> scales;
  const auto each_row = [&](std::size_t layer, const PlaneRef& plane, const auto& use) {
    for (std::int64_t t = 0; t < cache.tokens(); ++t) {
      const std::int64_t slot = plane.slots.slot(t);
      if (slot >= 0 && (present == nullptr || present(of, layer, t))) use(slot);
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

KVMELD_API Result<Digest128> content_digest(const KvCacheRef& cache) {
  KVMELD_TRY(extend::check_on_host(cache, "content_digest"));
  KVMELD_TRY(validate(cache.geometry()));
  for (const PlaneRef& plane : cache.planes())
    KVMELD_TRY(extend::check_scales(plane, "content_digest"));
  return detail::content_digest_of(cache);
}

KVMELD_API HostCache::HostCache(std::shared_ptr<const Geometry> geometry, std::int64_t tokens) {
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
  if (!counted)
    total = (std::numeric_limits<std::size_t>::max)() / 2;  // larger than any allocation
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

KVMELD_NAMESPACE_END
