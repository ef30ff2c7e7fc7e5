#pragma once

/// Caches whose slots are evenly spaced: one tensor for keys and one for values, in every layer.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <kvmeld/cache/layout_build.hpp>

KVMELD_NAMESPACE_BEGIN

/// Which of the inner axes comes first in memory.
enum class AxisOrder : std::uint8_t {
  head_token_channel,  ///< HND: all tokens of head 0, then of head 1, …
  token_head_channel,  ///< NHD: all heads of token 0, then of token 1, …
};

/// Declares tensors of shape [batch, heads, max_tokens, channels] or [batch, max_tokens, heads,
/// channels].
///
/// Hugging Face caches and libtorch past keys are HND with `max_tokens` = their length.
/// `batch_index` picks one sequence, which in multi-agent batches is the agent.
struct ContiguousOptions {
  PerLayer<TokenPlacement> tokens = {};
  PerLayer<std::int64_t> max_tokens = {};
  AxisOrder order = AxisOrder::head_token_channel;
  std::int64_t batch = 1;
  std::int64_t batch_index = 0;
  ScaleTables scales = {};  ///< of the picked sequence
};

namespace detail {

template <class Byte>
[[nodiscard]] bool begin_key_value(LayoutBuilder<Byte>& builder,
                                   const KeyValueBuffers<Byte>& buffers) {
  if (!builder.ok()) return false;
  builder.expect_count(buffers.keys.size(), builder.layers(), "key tensors");
  builder.expect_count(buffers.values.size(), builder.layers(), "value tensors");
  for (std::size_t l = 0; l < builder.layers(); ++l)
    builder.expect(expect_key_value(builder.layer(l), false), l, "planes");
  builder.expect_apart({&buffers.keys, &buffers.values});
  return builder.ok();
}

template <class T, class Byte>
void expect_per_layer(LayoutBuilder<Byte>& builder, const PerLayer<T>& values, const char* what) {
  if (builder.ok() && !values.covers(builder.layers()))
    builder.expect_count(values.size(), builder.layers(), what);
}

}  // namespace detail

/// Views one sequence of contiguous HND or NHD tensors. O(layers).
///
/// Errors: `unknown_layout`, `truncated` or (to be written) `output_too_small`, `oversized`,
/// `invalid_argument`, `unsupported`, `token_count_mismatch`, `aliasing`; all with the layer and
/// the numbers.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> contiguous_view(
    std::shared_ptr<const Geometry> geometry, const KeyValueBuffers<Byte>& buffers,
    const ContiguousOptions& options) {
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, options.scales);
  if (options.order > AxisOrder::token_head_channel) {
    builder.fail(detail::error(ErrorCode::unknown_layout, "axis order ",
                               static_cast<int>(options.order), " is none that this build knows"));
  }
  if (options.batch < 1 || options.batch_index < 0 || options.batch_index >= options.batch) {
    builder.fail(detail::error(ErrorCode::invalid_argument, "batch index ", options.batch_index,
                               " of ", options.batch));
  }
  detail::expect_per_layer(builder, options.max_tokens, "max_tokens");
  if (!detail::begin_key_value(builder, buffers)) return builder.finish();
  for (std::size_t l = 0; l < builder.layers() && builder.ok(); ++l) {
    const std::int64_t n = options.max_tokens[l];
    for (std::size_t p = 0; p < 2; ++p) {
      const PlaneShape& shape = builder.layer(l).planes[p];
      const std::span<Byte> buffer = (p == 0 ? buffers.keys : buffers.values)[l];
      const std::int64_t heads = shape.heads, channels = shape.channels;
      builder.expect(
          detail::expect_elements(buffer, shape.type,
                                  detail::extent_product({options.batch, heads, n, channels})),
          l, p == 0 ? "keys" : "values");
      if (!builder.ok()) break;
      const bool hnd = options.order == AxisOrder::head_token_channel;
      builder.add(l, p, buffer,
                  {.offset = options.batch_index * heads * n * channels,
                   .token = hnd ? channels : heads * channels,
                   .head = hnd ? n * channels : channels},
                  n);
    }
  }
  return builder.finish();
}

/// Declares ONNX Runtime's past-present share buffer: [batch, heads, max_length, channels], filled
/// up to the tokens placed.
///
/// The tensor's extent is the maximum length, not the sequence's: what lies behind the last token
/// is stale.
struct OrtOptions {
  PerLayer<TokenPlacement> tokens = {};
  std::int64_t max_length = 0;
  std::int64_t batch = 1;
  std::int64_t batch_index = 0;
  ScaleTables scales = {};
};

/// Views one sequence of ONNX Runtime's share buffers. O(layers). Errors: those of
/// `contiguous_view`.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> ort_view(std::shared_ptr<const Geometry> geometry,
                                                     const KeyValueBuffers<Byte>& buffers,
                                                     const OrtOptions& options) {
  return contiguous_view(std::move(geometry), buffers,
                         ContiguousOptions{.tokens = options.tokens,
                                           .max_tokens = options.max_length,
                                           .batch = options.batch,
                                           .batch_index = options.batch_index,
                                           .scales = options.scales});
}

/// Declares llama.cpp's tensors: a key row is all heads of a cell, and so is a value row unless
/// values are transposed.
///
/// Cells are filled in any order: give the slot list of the sequence's cells, sorted by position.
/// Values are transposed ([streams, heads, channels, cells], token stride 1) whenever flash
/// attention is off.
struct LlamaOptions {
  PerLayer<TokenPlacement> tokens = {};
  PerLayer<std::int64_t> cells = {};  ///< of one stream
  bool transposed_values = false;
  std::int64_t streams = 1;  ///< 1 where the cache is unified
  std::int64_t stream = 0;
};

/// Views one stream of llama.cpp's cells. O(layers + tokens log tokens).
///
/// Errors: those of `contiguous_view`; `unsupported` for transposed values of a block type, whose
/// blocks would be cut.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> llama_view(std::shared_ptr<const Geometry> geometry,
                                                       const KeyValueBuffers<Byte>& buffers,
                                                       const LlamaOptions& options) {
  const ScaleTables none;  // its quantised types carry their scales inside
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, none);
  if (options.streams < 1 || options.stream < 0 || options.stream >= options.streams) {
    builder.fail(detail::error(ErrorCode::invalid_argument, "stream ", options.stream, " of ",
                               options.streams));
  }
  detail::expect_per_layer(builder, options.cells, "cell counts");
  if (!detail::begin_key_value(builder, buffers)) return builder.finish();
  for (std::size_t l = 0; l < builder.layers() && builder.ok(); ++l) {
    const std::int64_t n = options.cells[l];
    for (std::size_t p = 0; p < 2; ++p) {
      const PlaneShape& shape = builder.layer(l).planes[p];
      const std::span<Byte> buffer = (p == 0 ? buffers.keys : buffers.values)[l];
      const std::int64_t heads = shape.heads, channels = shape.channels;
      builder.expect(
          detail::expect_elements(buffer, shape.type,
                                  detail::extent_product({options.streams, n, heads, channels})),
          l, p == 0 ? "keys" : "values");
      if (!builder.ok()) break;
      const std::int64_t offset = options.stream * n * heads * channels;
      if (p == 1 && options.transposed_values) {
        builder.add(l, p, buffer,
                    {.offset = offset, .token = 1, .head = channels * n, .channel = n}, n);
      } else {
        builder.add(l, p, buffer, {.offset = offset, .token = heads * channels, .head = channels},
                    n);
      }
    }
  }
  return builder.finish();
}

KVMELD_NAMESPACE_END
