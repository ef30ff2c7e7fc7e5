#pragma once

/// One layer's attention over gathered rows.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/detail/attention_simd.hpp>
#include <kvmeld/extend/render_rows.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/math.hpp>
#include <kvmeld/policies/attention_state.hpp>
#include <kvmeld/rope.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

// What attention reads: queries in their frame, and key and value rows of any cache.

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
    std::int32_t table = -1;     ///< of `tables_`, where keys are rotated
  };

  /// No layers where there are no sources. Both spans, and what they point to, outlive the reader.
  static Result<AttentionReader> of(const AttentionQueries& queries,
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
  void tokens(std::size_t l, std::size_t s, std::vector<AttendedToken>& out) const {
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
  bool gather(std::size_t l, std::size_t p, std::span<const AttendedToken> tokens, bool raw,
              const std::byte** rows, AlignedRows<float>& scratch) const {
    const Layer& layer = layers_[l];
    const std::size_t width = p == 0 ? layer.key_width : layer.value_width;
    const bool rotated = p == 0 && layer.table >= 0;
    raw = raw && !rotated;
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
          prefetch(from + b, plane.token_stride * size * static_cast<std::int64_t>(attended_rows));
        }
        if (scratch.size() == 0) scratch = AlignedRows<float>(attended_rows * layer.heads * width);
        float* const to = scratch.data() + i * layer.heads * width;
        rows[i] = reinterpret_cast<const std::byte*>(to);
        Rotation rotation;
        if (rotated) {
          const RopeSpec& rope = sources_[source].cache.geometry().layers[l].rope;
          rotation = {tables_[static_cast<std::size_t>(layer.table)].row(
                          shift_of_[source][tokens[i].token]),
                      plane.shape.channels, rope.first_channel, rope.rotary_channels, rope.pairing};
        }
        if (!lies) {
          copy(plane, tokens[i].token, width, rotated ? &rotation : nullptr, to);
        } else if (rotated) {
          load_rotated(plane.shape.type, isa_, rotation, from, plane.shape.heads, to);
        } else {
          load_row(plane.shape.type, isa_, from,
                   static_cast<std::ptrdiff_t>(width) * plane.shape.heads, to);
        }
      }
    }
    return raw;
  }

 private:
  /// One token's rows as f32, head by head, padded with zeros and rotated.
  void copy(const PlaneRef& plane, std::uint32_t token, std::size_t width, const Rotation* rotation,
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
      if (rotation != nullptr) rotate_channels(*rotation, isa_, to);
    }
  }

  Status add_layer(const AttentionQueries& queries, std::size_t l, std::size_t width,
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
          const Rotation rotation{table->row(q), key.channels, shape.rope.first_channel,
                                  shape.rope.rotary_channels, shape.rope.pairing};
          rotate_channels(rotation, isa_, layer.queries.data() + (h * m + q) * layer.key_width);
        }
      }
    }
    const bool rotated = shape.key_form == KeyForm::post_rope;
    if (rotated != (queries.frame == QueryFrame::pre_rope)) return {};
    return add_table(shape.rope, layer, rotated ? -1 : 1);
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
  Status add_table(const RopeSpec& rope, Layer& layer, std::int64_t sign) {
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

/// Keys or values of a few tokens as the loops read them: where they lie, in f32 copies, or widened
/// head by head.
class RowsInHand {
 public:
  /// @param plane 0: keys, 1: values.
  RowsInHand(const AttentionReader& reader, std::size_t layer, std::size_t plane,
             std::size_t queries)
      : reader_(reader),
        index_(layer),
        plane_(plane),
        heads_(reader.layer(layer).heads),
        steps_(attention_steps(best_isa(), type(layer))),
        width_(plane == 0 ? reader.layer(layer).key_width : reader.layer(layer).value_width),
        size_(block_bytes(type(layer))),
        widens_(queries > paired_queries && steps_.widen != nullptr) {}

  [[nodiscard]] const AttentionSteps& steps() const noexcept { return steps_; }
  [[nodiscard]] AttentionSteps::Dots dots() const noexcept {
    return raw_ && !widens_ ? steps_.raw_dots : steps_.dots;
  }
  [[nodiscard]] AttentionSteps::Add sum() const noexcept {
    return raw_ && !widens_ ? steps_.raw_add : steps_.add;
  }

  /// @param whole tokens that are mostly taken: so far ahead are rows asked for.
  void take(std::span<const AttendedToken> tokens, std::size_t whole) {
    raw_ = reader_.gather(index_, plane_, tokens, steps_.raw_dots != nullptr, rows_, copies_);
    parts_ = {rows_, tokens.size(), 0, width_, 0};
    if (raw_ && tokens.size() > 1)
      parts_.ahead = static_cast<std::ptrdiff_t>(whole * (address(rows_[1]) - address(rows_[0])));
    if (plane_ == 0) return;
    // behind the last token: zeros, of every type, whose weights are 0
    for (; parts_.count % added_rows != 0; ++parts_.count) {
      if (zeros_.size() == 0) zeros_ = AlignedRows<float>(heads_ * width_);
      rows_[parts_.count] = reinterpret_cast<const std::byte*>(zeros_.data());
    }
  }
  /// The rows of one head, until the next call.
  [[nodiscard]] const RowParts& head(std::size_t h) {
    parts_.offset =
        static_cast<std::ptrdiff_t>(h * width_) * (raw_ ? size_ : block_bytes(ElementType::f32));
    if (!raw_ || !widens_) return parts_;
    if (wide_.size() == 0) {
      wide_ = AlignedRows<float>(attended_rows * width_);
      for (std::size_t i = 0; i < attended_rows; ++i)
        wide_rows_[i] = reinterpret_cast<const std::byte*>(wide_.data() + i * width_);
    }
    steps_.widen(parts_, wide_.data());
    wide_parts_ = {wide_rows_, parts_.count, 0, width_, 0};
    return wide_parts_;
  }

 private:
  [[nodiscard]] static std::uintptr_t address(const std::byte* at) noexcept {
    return reinterpret_cast<std::uintptr_t>(at);
  }
  [[nodiscard]] ElementType type(std::size_t layer) const noexcept {
    return plane_ == 0 ? reader_.layer(layer).key_type : reader_.layer(layer).value_type;
  }

  const AttentionReader& reader_;
  std::size_t index_, plane_, heads_;
  AttentionSteps steps_;
  std::size_t width_;
  std::ptrdiff_t size_;  // of an element where rows are raw
  bool widens_;  // more queries than share what is loaded: each row is widened once for all of them
  bool raw_ = false;
  RowParts parts_, wide_parts_;
  const std::byte* rows_[attended_rows] = {};
  const std::byte* wide_rows_[attended_rows] = {};
  AlignedRows<float> copies_;  // (attended_rows, head, width)
  AlignedRows<float> wide_;    // (attended_rows, width)
  AlignedRows<float> zeros_;   // (head, width)
};

/// One layer's running softmax: blocks of 64 tokens in f32, their sums in f64.
class LayerAttention {
 public:
  LayerAttention(const AttentionReader& reader, std::size_t layer, std::size_t queries)
      : layer_(reader.layer(layer)),
        rows_(layer_.heads * queries),
        queries_(queries),
        keys_(reader, layer, 0, queries),
        values_(reader, layer, 1, queries),
        dots_(rows_ * attended_block),
        weights_(rows_ * attended_block),
        block_(rows_ * layer_.value_width),
        scales_(rows_),
        at_once_(layer_.heads * layer_.key_width <= most_short ? attended_rows : attended_rows / 2),
        outputs(rows_ * layer_.value_width),
        sums(rows_),
        tops(rows_, -INFINITY) {}

  /// Adds up to `attended_block` tokens.
  void add(std::span<const AttendedToken> tokens) {
    if (tokens.size() < attended_block) std::fill_n(dots_.data(), dots_.size(), -INFINITY);
    for (std::size_t j = 0; j < tokens.size(); j += at_once_) {
      keys_.take(tokens.subspan(j, (std::min)(at_once_, tokens.size() - j)), at_once_);
      for (std::size_t h = 0; h < layer_.heads; ++h) {
        const RowParts& keys = keys_.head(h);
        keys_.dots()(layer_.queries.data() + h * queries_ * layer_.key_width, queries_, keys,
                     dots_.data() + h * queries_ * attended_block + j, attended_block);
      }
    }
    for (std::size_t r = 0; r < rows_; ++r) {
      const float* const dots = dots_.data() + r * attended_block;
      const double here = fma(static_cast<double>(keys_.steps().largest(dots)), layer_.factor, 0.0);
      const double top = here > tops[r] ? here : tops[r];
      scales_[r] = here > tops[r] ? math::exp(tops[r] - top) : 1.0;
      tops[r] = top;
      sums[r] =
          fma(sums[r], scales_[r],
              keys_.steps().weigh(dots, layer_.factor, top, weights_.data() + r * attended_block));
    }
    for (std::size_t j = 0; j < tokens.size(); j += at_once_) {
      values_.take(tokens.subspan(j, (std::min)(at_once_, tokens.size() - j)), at_once_);
      for (std::size_t h = 0; h < layer_.heads; ++h) {
        const RowParts& values = values_.head(h);
        values_.sum()(weights_.data() + h * queries_ * attended_block + j, attended_block, queries_,
                      values, block_.data() + h * queries_ * layer_.value_width);
      }
    }
    for (std::size_t r = 0; r < rows_; ++r) {
      values_.steps().carry(block_.data() + r * layer_.value_width, scales_[r], layer_.value_width,
                            outputs.data() + r * layer_.value_width);
    }
  }
  /// The mean of one row. out: (channels)
  void finish(std::size_t row, std::size_t channels, float* out) const noexcept {
    values_.steps().finish(outputs.data() + row * layer_.value_width, sums[row], channels, out);
  }

 private:
  // channels of a token's heads, of which more tokens are taken in hand
  static constexpr std::size_t most_short = 256;

  const AttentionReader::Layer& layer_;
  std::size_t rows_;  // head · queries + query
  std::size_t queries_;
  RowsInHand keys_, values_;
  AlignedRows<float> dots_;     // (row, attended_block)
  AlignedRows<float> weights_;  // (row, attended_block)
  AlignedRows<float> block_;    // (row, value_width)
  std::vector<double> scales_;  // (row)
  std::size_t at_once_;         // tokens

 public:
  AlignedRows<double> outputs;  // (row, value_width) not yet divided by `sums`
  std::vector<double> sums;     // (row) of e^(logit − top)
  std::vector<double> tops;     // (row) largest logit
};

}  // namespace detail

KVMELD_NAMESPACE_END
