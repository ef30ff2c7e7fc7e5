#pragma once

/// What attention reads: queries in their frame, and key and value rows of any cache.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/attention_kernels.hpp>
#include <kvmeld/align/attention_queries.hpp>
#include <kvmeld/align/load_turned.hpp>
#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/rope_table.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/cache/turn_rows.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/rows.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// One token in one layer.
struct AttendedToken {
  std::uint32_t source = 0;
  std::uint32_t token = 0;
};

/// All heads of one token: f32 with heads padded to 32 channels, or as the cache has them.
struct AttendedRow {
  const std::byte* data = nullptr;
  bool raw = false;
};

[[nodiscard]] constexpr std::size_t padded_channels(std::int32_t channels) noexcept { return (static_cast<std::size_t>(channels) + 31) / 32 * 32; }

/// Checked queries and caches; rows as f32 with heads padded to 32 channels, keys in the queries' frame.
class AttentionReader {
 public:
  struct Layer {
    std::size_t heads = 0;
    std::size_t key_width = 0;    ///< channels of a head, padded
    std::size_t value_width = 0;
    std::int32_t value_channels = 0;
    double factor = 0;            ///< logit / (q·k)
    ElementType key_type = ElementType::f32;
    ElementType value_type = ElementType::f32;
    AlignedRows<float> queries;   ///< (head, query, key_width)
    std::int32_t table = -1;      ///< of `tables_`, where keys are turned
  };

  /// No layers where there are no sources. Both spans, and what they point to, outlive the reader.
  KVMELD_LAZY static Result<AttentionReader> of(const AttentionQueries& queries, std::span<const AttendSource> sources) {
    AttentionReader out;
    out.sources_ = sources;
    KVMELD_TRY(check_queries(queries));
    if (sources.empty()) return out;
    for (std::size_t s = 0; s < sources.size(); ++s) KVMELD_TRY(check_attended_source(sources, s));
    const Geometry& geometry = sources[0].cache.geometry();
    std::size_t width = 0;
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      KVMELD_TRY(check_attended_layer(geometry.layers[l], l));
      if (geometry.layers[l].planes.empty()) continue;
      const PlaneShape& key = geometry.layers[l].planes[0];
      width += static_cast<std::size_t>(key.heads) * static_cast<std::size_t>(key.channels);
    }
    KVMELD_TRY(check_query_numbers(queries, width));
    std::size_t first = 0;
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      KVMELD_TRY(out.add_layer(queries, l, width, first));
    }
    return out;
  }

  [[nodiscard]] std::size_t count() const noexcept { return layers_.size(); }
  [[nodiscard]] const Layer& layer(std::size_t l) const noexcept { return layers_[l]; }

  /// Appends the tokens of one source that a layer holds.
  KVMELD_LAZY void tokens(std::size_t l, std::size_t s, std::vector<AttendedToken>& out) const {
    const AttendSource& source = sources_[s];
    if (source.cache.geometry().layers[l].planes.empty()) return;
    const TokenSlots& slots = source.cache.plane(l, 0).slots;
    const std::int64_t n = source.tokens.all ? source.cache.tokens() : static_cast<std::int64_t>(source.tokens.present.size());
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t t = source.tokens.all ? i : source.tokens.present[static_cast<std::size_t>(i)];
      if (slots.slot(t) >= 0) out.push_back({static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(t)});
    }
  }

  /// A token's keys in the queries' frame, (head, key_width): copied to `scratch`, unless they may come raw and can.
  [[nodiscard]] AttendedRow keys(std::size_t l, AttendedToken at, bool raw, float* scratch) const noexcept {
    const Layer& layer = layers_[l];
    const PlaneRef& plane = sources_[at.source].cache.plane(l, 0);
    if (layer.table < 0) return read(plane, at.token, layer.key_width, raw, scratch);
    const RopeSpec& rope = sources_[at.source].cache.geometry().layers[l].rope;
    const Turn turn{tables_[static_cast<std::size_t>(layer.table)].row(shift_of_[at.source][at.token]), plane.shape.channels, rope.first_channel,
                    rope.rotary_channels, rope.pairing};
    if (layer.key_width == static_cast<std::size_t>(plane.shape.channels) && contiguous_heads(plane)) {
      load_turned(plane.shape.type, isa_, turn, plane.data + plane.byte_offset(plane.row_offset(plane.slots.slot(at.token), 0)), plane.shape.heads, scratch);
      return {reinterpret_cast<const std::byte*>(scratch), false};
    }
    const AttendedRow row = read(plane, at.token, layer.key_width, false, scratch);
    for (std::size_t h = 0; h < layer.heads; ++h) turn_row(turn, isa_, scratch + h * layer.key_width);
    return row;
  }
  /// A token's values, (head, value_width).
  [[nodiscard]] AttendedRow values(std::size_t l, AttendedToken at, bool raw, float* scratch) const noexcept {
    return read(sources_[at.source].cache.plane(l, 1), at.token, layers_[l].value_width, raw, scratch);
  }

 private:
  [[nodiscard]] AttendedRow read(const PlaneRef& plane, std::uint32_t token, std::size_t width, bool raw, float* scratch) const noexcept {
    const AttendedRow copied{reinterpret_cast<const std::byte*>(scratch), false};
    const std::int64_t slot = plane.slots.slot(token);
    const PlaneShape& shape = plane.shape;
    const bool whole = width == static_cast<std::size_t>(shape.channels);
    if (whole && contiguous_heads(plane)) {
      const std::byte* const from = plane.data + plane.byte_offset(plane.row_offset(slot, 0));
      if (raw) return {from, true};
      load_row(shape.type, isa_, from, static_cast<std::ptrdiff_t>(width) * shape.heads, scratch);
      return copied;
    }
    for (std::int32_t h = 0; h < shape.heads; ++h) {
      float* const to = scratch + static_cast<std::size_t>(h) * width;
      if (plane.contiguous_rows()) {
        load_row(shape.type, isa_, plane.data + plane.byte_offset(plane.row_offset(slot, h)), shape.channels, to);
      } else {
        const std::int64_t row = plane.row_offset(slot, h);
        for (std::int32_t c = 0; c < shape.channels; ++c) {
          to[c] = load_element(shape.type, plane.data + plane.byte_offset(row + plane.channel_offset(c)), 0);
        }
      }
      std::fill(to + shape.channels, to + width, 0.0F);
    }
    return copied;
  }

  KVMELD_LAZY Status add_layer(const AttentionQueries& queries, std::size_t l, std::size_t width, std::size_t& first) {
    const LayerShape& shape = sources_[0].cache.geometry().layers[l];
    Layer& layer = layers_.emplace_back();
    if (shape.planes.empty()) return {};
    const PlaneShape& key = shape.planes[0];
    const auto m = static_cast<std::size_t>(queries.count);
    const auto channels = static_cast<std::size_t>(key.channels);
    layer.heads = static_cast<std::size_t>(key.heads);
    layer.key_width = padded_channels(key.channels);
    layer.value_width = padded_channels(shape.planes[1].channels);
    layer.value_channels = shape.planes[1].channels;
    layer.key_type = key.type;
    layer.value_type = shape.planes[1].type;
    const double scale = queries.scale > 0.0F ? static_cast<double>(queries.scale) : 1.0 / math::sqrt(static_cast<double>(key.channels));
    layer.factor = scale / static_cast<double>(queries.temperature);
    layer.queries = AlignedRows<float>(layer.heads * m * layer.key_width);
    for (std::size_t q = 0; q < m; ++q) {
      for (std::size_t h = 0; h < layer.heads; ++h) {
        std::memcpy(layer.queries.data() + (h * m + q) * layer.key_width, queries.values.data() + q * width + first + h * channels, channels * sizeof(float));
      }
    }
    first += layer.heads * channels;
    if (!key.rotary || shape.rope.kind == RopeKind::none) return {};
    if (queries.frame == QueryFrame::at_positions) {
      auto table = RopeTable::build(shape.rope, queries.positions, longest(shape.rope));
      if (!table) return table.error();
      for (std::size_t h = 0; h < layer.heads; ++h) {
        for (std::size_t q = 0; q < m; ++q) {
          const Turn turn{table->row(q), key.channels, shape.rope.first_channel, shape.rope.rotary_channels, shape.rope.pairing};
          turn_row(turn, isa_, layer.queries.data() + (h * m + q) * layer.key_width);
        }
      }
    }
    const bool turned = shape.key_form == KeyForm::post_rope;
    if (turned != (queries.frame == QueryFrame::pre_rope)) return {};
    return add_table(shape.rope, layer, turned ? -1 : 1);
  }
  /// The frequencies' context: what the longest source had seen.
  [[nodiscard]] std::int64_t longest(const RopeSpec& rope) const noexcept {
    if (!length_dependent(rope)) return 0;
    std::int64_t length = 1;
    for (const AttendSource& source : sources_) {
      for (const std::int64_t p : source.positions) length = (std::max)(length, p + 1);
    }
    return (std::min)(length, std::int64_t{rope.original_context});
  }
  /// Tables are shared by layers of one rope, shifts by all tables.
  KVMELD_LAZY Status add_table(const RopeSpec& rope, Layer& layer, std::int64_t sign) {
    for (std::size_t t = 0; t < specs_.size(); ++t) {
      if (*specs_[t] == rope && signs_[t] == sign) layer.table = static_cast<std::int32_t>(t);
    }
    if (layer.table >= 0) return {};
    if (shifts_.empty()) {
      for (std::size_t s = 0; s < sources_.size(); ++s) {
        const AttendSource& source = sources_[s];
        if (static_cast<std::int64_t>(source.positions.size()) != source.cache.tokens()) {
          return error(ErrorCode::token_count_mismatch, "attention: ", source.positions.size(), " positions for ", source.cache.tokens(), " tokens of cache ", s,
                       ", whose keys have to be turned");
        }
        shifts_.insert(shifts_.end(), source.positions.begin(), source.positions.end());
      }
      std::sort(shifts_.begin(), shifts_.end());
      shifts_.erase(std::unique(shifts_.begin(), shifts_.end()), shifts_.end());
      for (const AttendSource& source : sources_) {
        std::vector<std::uint32_t>& index = shift_of_.emplace_back();
        for (const std::int64_t p : source.positions) {
          index.push_back(static_cast<std::uint32_t>(std::lower_bound(shifts_.begin(), shifts_.end(), p) - shifts_.begin()));
        }
      }
    }
    if (shifts_.empty()) return {};
    if (length_dependent(rope)) {
      for (std::size_t s = 0; s < sources_.size(); ++s) {
        const auto& positions = sources_[s].positions;
        if (!positions.empty()) KVMELD_TRY(check_shift(rope, *std::max_element(positions.begin(), positions.end()) + 1, 0));
      }
    }
    std::vector<std::int64_t> shifts = shifts_;
    for (std::int64_t& p : shifts) p *= sign;
    auto built = RopeTable::build(rope, shifts, longest(rope));
    if (!built) return built.error();
    layer.table = static_cast<std::int32_t>(tables_.size());
    specs_.push_back(&rope);
    signs_.push_back(sign);
    tables_.push_back(*std::move(built));
    return {};
  }

  Isa isa_ = best_isa();
  std::span<const AttendSource> sources_;
  std::vector<Layer> layers_;
  std::vector<std::int64_t> shifts_;                      // distinct positions, ascending
  std::vector<std::vector<std::uint32_t>> shift_of_;      // (source)(token)
  std::vector<const RopeSpec*> specs_;
  std::vector<std::int64_t> signs_;
  std::vector<RopeTable> tables_;
};

}  // namespace detail
KVMELD_NAMESPACE_END
