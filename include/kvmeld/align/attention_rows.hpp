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

[[nodiscard]] constexpr std::size_t padded_channels(std::int32_t channels) noexcept {
  return (static_cast<std::size_t>(channels) + 31) / 32 * 32;
}

/// Checked queries and caches; rows as f32 with heads padded to 32 channels, keys in the queries'
/// frame.
class AttentionReader {
 public:
  struct Layer {
    std::size_t heads = 0;
    std::size_t key_width = 0;  ///< channels of a head, padded
    std::size_t value_width = 0;
    std::int32_t value_channels = 0;
    double factor = 0;  ///< logit / (q·k)
    ElementType key_type = ElementType::f32;
    ElementType value_type = ElementType::f32;
    AlignedRows<float> queries;  ///< (head, query, key_width)
    std::int32_t table = -1;     ///< of `tables_`, where keys are turned
  };

  /// No layers where there are no sources. Both spans, and what they point to, outlive the reader.
  KVMELD_LAZY static Result<AttentionReader> of(const AttentionQueries& queries,
                                                std::span<const AttendSource> sources) {
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
    KVMELD_TRY(validate(geometry));
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
    const std::int64_t n = source.selected.all
                               ? source.cache.tokens()
                               : static_cast<std::int64_t>(source.selected.present.size());
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t t =
          source.selected.all ? i : source.selected.present[static_cast<std::size_t>(i)];
      if (slots.slot(t) >= 0)
        out.push_back({static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(t)});
    }
  }

  /// Keys (plane 0, in the queries' frame) or values (plane 1) of some tokens: all heads of each,
  /// (head, width). `rows` points to where they lie, if they may come raw and all can, and
  /// otherwise to f32 copies in `scratch`, which gets room for `attended_rows` tokens. Whether they
  /// are raw.
  KVMELD_LAZY bool gather(std::size_t l, std::size_t p, std::span<const AttendedToken> tokens,
                          bool raw, const std::byte** rows, AlignedRows<float>& scratch) const {
    const Layer& layer = layers_[l];
    const std::size_t width = p == 0 ? layer.key_width : layer.value_width;
    const bool turned = p == 0 && layer.table >= 0;
    raw = raw && !turned;
    for (std::size_t i = 0; i < tokens.size();) {
      const PlaneRef& plane = sources_[tokens[i].source].cache.plane(l, p);
      const bool lies =
          width == static_cast<std::size_t>(plane.shape.channels) && contiguous_heads(plane);
      if (raw && !lies) {  // caches of several layouts: all over again
        raw = false;
        i = 0;
        continue;
      }
      const bool narrow = block_elements(plane.shape.type) == 1;  // others divide
      const std::int64_t size = block_bytes(plane.shape.type);
      for (const std::uint32_t source = tokens[i].source;
           i < tokens.size() && tokens[i].source == source; ++i) {
        const std::int64_t row = plane.row_offset(plane.slots.slot(tokens[i].token), 0);
        const std::byte* const from = plane.data + (narrow ? row * size : plane.byte_offset(row));
        rows[i] = from;
        if (raw) continue;
        // The loops ask for what lies behind copies: so here for the rows of later tokens.
        for (std::int64_t b = 0;
             lies && narrow && b < plane.shape.heads * plane.shape.channels * size; b += 64) {
          ask_for(from + b, plane.token_stride * size * static_cast<std::int64_t>(attended_rows));
        }
        if (scratch.size() == 0) scratch = AlignedRows<float>(attended_rows * layer.heads * width);
        float* const to = scratch.data() + i * layer.heads * width;
        rows[i] = reinterpret_cast<const std::byte*>(to);
        Turn turn;
        if (turned) {
          const RopeSpec& rope = sources_[source].cache.geometry().layers[l].rope;
          turn = {tables_[static_cast<std::size_t>(layer.table)].row(
                      shift_of_[source][tokens[i].token]),
                  plane.shape.channels, rope.first_channel, rope.rotary_channels, rope.pairing};
        }
        if (!lies) {
          copy(plane, tokens[i].token, width, turned ? &turn : nullptr, to);
        } else if (turned) {
          load_turned(plane.shape.type, isa_, turn, from, plane.shape.heads, to);
        } else {
          load_row(plane.shape.type, isa_, from,
                   static_cast<std::ptrdiff_t>(width) * plane.shape.heads, to);
        }
      }
    }
    return raw;
  }

 private:
  /// One token's rows as f32, head by head, padded with zeros and turned.
  void copy(const PlaneRef& plane, std::uint32_t token, std::size_t width, const Turn* turn,
            float* to) const noexcept {
    const std::int64_t slot = plane.slots.slot(token);
    const PlaneShape& shape = plane.shape;
    for (std::int32_t h = 0; h < shape.heads; ++h, to += width) {
      const std::int64_t row = plane.row_offset(slot, h);
      if (plane.contiguous_rows()) {
        load_row(shape.type, isa_, plane.data + plane.byte_offset(row), shape.channels, to);
      } else {
        for (std::int32_t c = 0; c < shape.channels; ++c) {
          to[c] = load_element(shape.type,
                               plane.data + plane.byte_offset(row + plane.channel_offset(c)), 0);
        }
      }
      std::fill(to + shape.channels, to + width, 0.0F);
      if (turn != nullptr) turn_row(*turn, isa_, to);
    }
  }

  KVMELD_LAZY Status add_layer(const AttentionQueries& queries, std::size_t l, std::size_t width,
                               std::size_t& first) {
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
    const double scale = queries.scale > 0.0F ? static_cast<double>(queries.scale)
                                              : 1.0 / math::sqrt(static_cast<double>(key.channels));
    layer.factor = scale / static_cast<double>(queries.temperature);
    layer.queries = AlignedRows<float>(layer.heads * m * layer.key_width);
    for (std::size_t q = 0; q < m; ++q) {
      for (std::size_t h = 0; h < layer.heads; ++h) {
        std::memcpy(layer.queries.data() + (h * m + q) * layer.key_width,
                    queries.values.data() + q * width + first + h * channels,
                    channels * sizeof(float));
      }
    }
    first += layer.heads * channels;
    if (!key.rotary || shape.rope.kind == RopeKind::none) return {};
    if (queries.frame == QueryFrame::at_positions) {
      auto table = RopeTable::build(shape.rope, queries.positions, longest(shape.rope));
      if (!table) return table.error();
      for (std::size_t h = 0; h < layer.heads; ++h) {
        for (std::size_t q = 0; q < m; ++q) {
          const Turn turn{table->row(q), key.channels, shape.rope.first_channel,
                          shape.rope.rotary_channels, shape.rope.pairing};
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
          return error(ErrorCode::token_count_mismatch, "attention: ", source.positions.size(),
                       " positions for ", source.cache.tokens(), " tokens of cache ", s,
                       ", whose keys have to be turned");
        }
        shifts_.insert(shifts_.end(), source.positions.begin(), source.positions.end());
      }
      std::sort(shifts_.begin(), shifts_.end());
      shifts_.erase(std::unique(shifts_.begin(), shifts_.end()), shifts_.end());
      for (const AttendSource& source : sources_) {
        std::vector<std::uint32_t>& index = shift_of_.emplace_back();
        for (const std::int64_t p : source.positions) {
          index.push_back(static_cast<std::uint32_t>(
              std::lower_bound(shifts_.begin(), shifts_.end(), p) - shifts_.begin()));
        }
      }
    }
    if (shifts_.empty()) return {};
    if (length_dependent(rope)) {
      for (std::size_t s = 0; s < sources_.size(); ++s) {
        const auto& positions = sources_[s].positions;
        if (!positions.empty())
          KVMELD_TRY(
              check_shift(rope, *std::max_element(positions.begin(), positions.end()) + 1, 0));
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
  std::vector<std::int64_t> shifts_;                  // distinct positions, ascending
  std::vector<std::vector<std::uint32_t>> shift_of_;  // (source)(token)
  std::vector<const RopeSpec*> specs_;
  std::vector<std::int64_t> signs_;
  std::vector<RopeTable> tables_;
};

}  // namespace detail
KVMELD_NAMESPACE_END
