#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/align/attention_rows.hpp>
#include <kvmeld/align/attention_steps.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

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
  KVMELD_LAZY void take(std::span<const AttendedToken> tokens, std::size_t whole) {
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
  KVMELD_LAZY [[nodiscard]] const RowParts& head(std::size_t h) {
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
  KVMELD_LAZY void add(std::span<const AttendedToken> tokens) {
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
