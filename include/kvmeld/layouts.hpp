#pragma once

/// Views of the caches that engines keep: contiguous, paged, pooled, latent, and DLPack tensors.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/detail/layout_build.hpp>

KVMELD_NAMESPACE_BEGIN

// Caches whose slots are evenly spaced: one tensor for keys and one for values, in every layer.

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
    builder.fail(extend::error(ErrorCode::unknown_layout, "axis order ",
                               static_cast<int>(options.order), " is none that this build knows"));
  }
  if (options.batch < 1 || options.batch_index < 0 || options.batch_index >= options.batch) {
    builder.fail(extend::error(ErrorCode::invalid_argument, "batch index ", options.batch_index,
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
/// The tensor's extent is the maximum length, not the sequence's: rows after the last token are
/// stale.
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
/// blocks would be split.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> llama_view(std::shared_ptr<const Geometry> geometry,
                                                       const KeyValueBuffers<Byte>& buffers,
                                                       const LlamaOptions& options) {
  const ScaleTables none;  // its quantised types carry their scales inside
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, none);
  if (options.streams < 1 || options.stream < 0 || options.stream >= options.streams) {
    builder.fail(extend::error(ErrorCode::invalid_argument, "stream ", options.stream, " of ",
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

// Block pools: keys and values in one tensor or in two for each layer, or one tensor for all
// layers.

/// Order of the axes of a layer's tensors: B blocks, N tokens a block, H heads, D channels.
///
/// It is the order in memory; vLLM's `get_kv_cache_shape` is a logical one, which its stride order
/// then permutes.
enum class PagedLayout : std::uint8_t {
  kv_block_token_head,      ///< [2, B, N, H, D]: vLLM up to 0.25, FlashAttention
  kv_block_head_token,      ///< [2, B, H, N, D]: the same under its HND setting
  block_kv_token_head,      ///< [B, 2, N, H, D]: FlashInfer NHD, vLLM's Triton backend
  block_kv_head_token,      ///< [B, 2, H, N, D]: FlashInfer HND
  block_head_token_packed,  ///< [B, H, N, 2D]: vLLM from 0.26, key then value in one row
  /// [B, N, H, 2D]: the same under its NHD setting; also separate head sizes, Dk + Dv.
  block_token_head_packed,
  block_token_head,  ///< [B, N, H, D] twice: a key tensor and a value tensor (`KeyValueBuffers`)
  block_head_token,  ///< [B, H, N, D] twice
};

/// Order of the axes where one tensor holds all L layers, the layer inside the block.
enum class CrossLayerLayout : std::uint8_t {
  block_layer_kv_token_head,      ///< [B, L, 2, N, H, D]
  block_layer_kv_head_token,      ///< [B, L, 2, H, N, D]
  block_head_layer_kv_token,      ///< [B, H, L, 2, N, D]
  block_layer_token_head_packed,  ///< [B, L, N, H, 2D]
  block_head_layer_token_packed,  ///< [B, H, L, N, 2D]
};

/// Declares one paged tensor for each layer, or a key tensor and a value tensor.
struct PagedOptions {
  PerLayer<TokenPlacement> tokens = {};
  PagedLayout layout = PagedLayout::kv_block_token_head;
  PerLayer<std::int64_t> blocks = {};
  std::int64_t block_size = 0;  ///< tokens a block
  /// Elements from block to block where the engine pads them; 0: compact.
  std::int64_t block_stride = 0;
  ScaleTables scales = {};  ///< slots are block * block_size + offset
};

/// Declares one paged tensor for all layers.
struct CrossLayerOptions {
  PerLayer<TokenPlacement> tokens = {};
  CrossLayerLayout layout = CrossLayerLayout::block_layer_kv_token_head;
  std::int64_t blocks = 0;
  std::int64_t block_size = 0;
  ScaleTables scales = {};
};

namespace detail {

/// Axis orders in letters, outermost first: b block, l layer, k key or value, h head, n token, d
/// channel, p both rows' channels.
[[nodiscard]] constexpr std::string_view axes(PagedLayout layout) noexcept {
  switch (layout) {
    case PagedLayout::kv_block_token_head:
      return "kbnhd";
    case PagedLayout::kv_block_head_token:
      return "kbhnd";
    case PagedLayout::block_kv_token_head:
      return "bknhd";
    case PagedLayout::block_kv_head_token:
      return "bkhnd";
    case PagedLayout::block_head_token_packed:
      return "bhnp";
    case PagedLayout::block_token_head_packed:
      return "bnhp";
    case PagedLayout::block_token_head:
      return "bnhd";
    case PagedLayout::block_head_token:
      return "bhnd";
  }
  return {};
}
[[nodiscard]] constexpr std::string_view axes(CrossLayerLayout layout) noexcept {
  switch (layout) {
    case CrossLayerLayout::block_layer_kv_token_head:
      return "blknhd";
    case CrossLayerLayout::block_layer_kv_head_token:
      return "blkhnd";
    case CrossLayerLayout::block_head_layer_kv_token:
      return "bhlknd";
    case CrossLayerLayout::block_layer_token_head_packed:
      return "blnhp";
    case CrossLayerLayout::block_head_layer_token_packed:
      return "bhlnp";
  }
  return {};
}

struct PagedExtents {
  std::int64_t blocks = 0, layers = 1, block_size = 0, heads = 0, key_channels = 0,
               value_channels = 0;
  std::int64_t block_stride = 0;
};

/// Strides of every axis, counted up from the innermost; `total` is -1 where the extents are beyond
/// any memory.
struct PagedStrides {
  std::int64_t block = 0, layer = 0, kv = 0, head = 0, token = 0, total = 1;

  PagedStrides(std::string_view order, const PagedExtents& e) noexcept {
    for (std::size_t i = order.size(); i-- > 0;) {
      std::int64_t extent = 1;
      switch (order[i]) {
        case 'b':
          if (e.block_stride > total) total = e.block_stride;
          block = total, extent = e.blocks;
          break;
        case 'l':
          layer = total, extent = e.layers;
          break;
        case 'k':
          kv = total, extent = 2;
          break;
        case 'h':
          head = total, extent = e.heads;
          break;
        case 'n':
          token = total, extent = e.block_size;
          break;
        case 'd':
          extent = e.key_channels;
          break;
        default:
          extent = e.key_channels + e.value_channels, kv = e.key_channels;
          break;
      }
      total = extent_product({total, extent});
    }
  }
  [[nodiscard]] PlaneStrides plane(std::int64_t l, std::int64_t p,
                                   std::int64_t block_size) const noexcept {
    return {.offset = l * layer + p * kv,
            .token = token,
            .head = head,
            .block_size = block_size,
            .block = block};
  }
};

template <class Byte>
void expect_block_size(LayoutBuilder<Byte>& builder, std::int64_t block_size) {
  if (block_size < 1)
    builder.fail(error(ErrorCode::invalid_argument, "blocks of ", block_size, " tokens"));
}
/// Whether keys and values have tensors of their own.
[[nodiscard]] constexpr bool is_apart(PagedLayout layout) noexcept {
  return layout == PagedLayout::block_token_head || layout == PagedLayout::block_head_token;
}
/// Checks what a paged layout declares before any tensor is looked at; gives the order of its axes.
template <class Byte>
[[nodiscard]] std::string_view begin_paged(LayoutBuilder<Byte>& builder,
                                           const PagedOptions& options, bool apart) {
  const std::string_view order = axes(options.layout);
  if (order.empty()) {
    builder.fail(error(ErrorCode::unknown_layout, "paged layout ", static_cast<int>(options.layout),
                       " is none that this build knows"));
  } else if (is_apart(options.layout) != apart) {
    builder.fail(error(ErrorCode::invalid_argument, "paged layout ",
                       static_cast<int>(options.layout),
                       apart ? " has one tensor a layer, not keys and values apart"
                             : " has keys and values in tensors apart, not one a layer"));
  }
  expect_block_size(builder, options.block_size);
  expect_per_layer(builder, options.blocks, "block counts");
  return order;
}
/// Demands that a declared block stride holds a block, and that blocks are outermost.
template <class Byte>
void expect_block_stride(LayoutBuilder<Byte>& builder, std::string_view order,
                         const PagedStrides& strides, std::int64_t block_stride) {
  if (block_stride != 0 && (order[0] != 'b' || strides.block != block_stride)) {
    builder.fail(error(ErrorCode::invalid_argument, "block stride ", block_stride,
                       " is below a block's ", strides.block,
                       " elements, or the block is not the outermost axis"));
  }
}

}  // namespace detail

/// Views a sequence in one paged tensor a layer. O(layers + table entries).
///
/// Errors: those of `contiguous_view`; `geometry_mismatch` where key and value differ and the
/// layout cannot express it; `invalid_argument` for a layout with keys and values apart.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> paged_view(std::shared_ptr<const Geometry> geometry,
                                                       const Buffers<Byte>& buffers,
                                                       const PagedOptions& options) {
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, options.scales);
  const std::string_view order = detail::begin_paged(builder, options, false);
  if (!builder.ok()) return builder.finish();
  builder.expect_count(buffers.size(), builder.layers(), "tensors");
  builder.expect_apart({&buffers});
  for (std::size_t l = 0; l < builder.layers() && builder.ok(); ++l) {
    builder.expect(detail::expect_key_value(builder.layer(l), true, order.back() != 'p'), l,
                   "planes");
    if (!builder.ok()) break;
    const PlaneShape& key = builder.layer(l).planes[0];
    const detail::PagedExtents extents{.blocks = options.blocks[l],
                                       .block_size = options.block_size,
                                       .heads = key.heads,
                                       .key_channels = key.channels,
                                       .value_channels = builder.layer(l).planes[1].channels,
                                       .block_stride = options.block_stride};
    const detail::PagedStrides strides(order, extents);
    detail::expect_block_stride(builder, order, strides, options.block_stride);
    builder.expect(detail::expect_elements(buffers[l], key.type, strides.total), l, "tensor");
    if (!builder.ok()) break;
    for (std::size_t p = 0; p < 2; ++p) {
      builder.add(l, p, buffers[l],
                  strides.plane(0, static_cast<std::int64_t>(p), options.block_size),
                  extents.blocks * options.block_size);
    }
  }
  return builder.finish();
}

/// Views a sequence in a paged key tensor and a paged value tensor a layer. O(layers + table
/// entries).
///
/// Errors: those of `contiguous_view`; `invalid_argument` for a layout with one tensor a layer,
/// which the default is.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> paged_view(std::shared_ptr<const Geometry> geometry,
                                                       const KeyValueBuffers<Byte>& buffers,
                                                       const PagedOptions& options) {
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, options.scales);
  const std::string_view order = detail::begin_paged(builder, options, true);
  if (!detail::begin_key_value(builder, buffers)) return builder.finish();
  for (std::size_t l = 0; l < builder.layers() && builder.ok(); ++l) {
    for (std::size_t p = 0; p < 2; ++p) {
      const PlaneShape& shape = builder.layer(l).planes[p];
      const std::span<Byte> buffer = (p == 0 ? buffers.keys : buffers.values)[l];
      const detail::PagedExtents extents{.blocks = options.blocks[l],
                                         .block_size = options.block_size,
                                         .heads = shape.heads,
                                         .key_channels = shape.channels,
                                         .block_stride = options.block_stride};
      const detail::PagedStrides strides(order, extents);
      detail::expect_block_stride(builder, order, strides, options.block_stride);
      builder.expect(detail::expect_elements(buffer, shape.type, strides.total), l,
                     p == 0 ? "keys" : "values");
      if (!builder.ok()) break;
      builder.add(l, p, buffer, strides.plane(0, 0, options.block_size),
                  extents.blocks * options.block_size);
    }
  }
  return builder.finish();
}

/// Views a sequence in one paged tensor that holds all layers, all of one shape. O(layers + table
/// entries).
///
/// Errors: those of `paged_view`; `geometry_mismatch` where layers differ.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> cross_layer_view(
    std::shared_ptr<const Geometry> geometry, std::span<Byte> buffer,
    const CrossLayerOptions& options) {
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, options.scales);
  const std::string_view order = detail::axes(options.layout);
  if (order.empty()) {
    builder.fail(extend::error(ErrorCode::unknown_layout, "cross-layer layout ",
                               static_cast<int>(options.layout), " is none that this build knows"));
  }
  detail::expect_block_size(builder, options.block_size);
  for (std::size_t l = 0; builder.ok() && l < builder.layers(); ++l) {
    builder.expect(detail::expect_key_value(builder.layer(l), true, order.back() != 'p'), l,
                   "planes");
    if (builder.ok() && builder.layer(l).planes != builder.layer(0).planes) {
      builder.fail(extend::error(ErrorCode::geometry_mismatch, "layer ", l,
                                 " differs from layer 0, and one tensor holds both"));
    }
  }
  if (!builder.ok() || builder.layers() == 0) return builder.finish();
  const auto& planes = builder.layer(0).planes;
  const detail::PagedStrides strides(order, {.blocks = options.blocks,
                                             .layers = static_cast<std::int64_t>(builder.layers()),
                                             .block_size = options.block_size,
                                             .heads = planes[0].heads,
                                             .key_channels = planes[0].channels,
                                             .value_channels = planes[1].channels});
  builder.expect(detail::expect_elements(buffer, planes[0].type, strides.total), 0, "tensor");
  if (!builder.ok()) return builder.finish();
  for (std::size_t l = 0; l < builder.layers(); ++l) {
    for (std::size_t p = 0; p < 2; ++p) {
      builder.add(l, p, buffer,
                  strides.plane(static_cast<std::int64_t>(l), static_cast<std::int64_t>(p),
                                options.block_size),
                  options.blocks * options.block_size);
    }
  }
  return builder.finish();
}

// Pools of single slots (SGLang), of blocks behind pointer tables (TensorRT-LLM), and pools with
// split channels.

/// Declares key tensors [B, H, D/x, N, x] and value tensors [B, H, D, N]: x consecutive channels
/// fill `split_bytes`.
///
/// The layout of vLLM's first paged-attention kernels and of those derived from them. Where both
/// halves lie in one tensor of [2, …], pass its halves.
struct SplitChannelOptions {
  PerLayer<TokenPlacement> tokens = {};
  PerLayer<std::int64_t> blocks = {};
  std::int64_t block_size = 0;
  std::int64_t split_bytes = 16;
  ScaleTables scales = {};
};

/// Views a sequence in a split-channel pool. O(layers + table entries).
///
/// Errors: those of `contiguous_view`; `unsupported` for block types, whose blocks would be split.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> split_channel_view(
    std::shared_ptr<const Geometry> geometry, const KeyValueBuffers<Byte>& buffers,
    const SplitChannelOptions& options) {
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, options.scales);
  detail::expect_block_size(builder, options.block_size);
  detail::expect_per_layer(builder, options.blocks, "block counts");
  if (!detail::begin_key_value(builder, buffers)) return builder.finish();
  for (std::size_t l = 0; l < builder.layers() && builder.ok(); ++l) {
    const std::int64_t n = options.block_size;
    for (std::size_t p = 0; p < 2; ++p) {
      const PlaneShape& shape = builder.layer(l).planes[p];
      const std::span<Byte> buffer = (p == 0 ? buffers.keys : buffers.values)[l];
      const std::int64_t heads = shape.heads, channels = shape.channels,
                         size = block_bytes(shape.type);
      builder.expect(
          detail::expect_elements(buffer, shape.type,
                                  detail::extent_product({options.blocks[l], heads, channels, n})),
          l, p == 0 ? "keys" : "values");
      if (builder.ok() && (options.split_bytes < size || options.split_bytes % size != 0)) {
        builder.fail(extend::error(ErrorCode::invalid_argument, "groups of ", options.split_bytes,
                                   " bytes do not hold elements of ", size));
      }
      if (!builder.ok()) break;
      const std::int64_t x = options.split_bytes / size, head = channels * n;
      const std::int64_t slots = options.blocks[l] * n;
      if (p == 0) {
        builder.add(l, p, buffer,
                    {.token = x,
                     .head = head,
                     .channel_split = x,
                     .split = n * x,
                     .block_size = n,
                     .block = heads * head},
                    slots);
      } else {
        builder.add(
            l, p, buffer,
            {.token = 1, .head = head, .channel = n, .block_size = n, .block = heads * head},
            slots);
      }
    }
  }
  return builder.finish();
}

/// Declares SGLang's pool: key and value tensors [slots, heads, channels], a slot for each token
/// wherever the allocator put it.
///
/// The engine writes the rows of padding tokens to slot 0, so a list that names slot 0 contains
/// padding.
struct SglangOptions {
  PerLayer<TokenPlacement> tokens = {};
  PerLayer<std::int64_t> slots = {};  ///< the pool's size, the reserved ones counted
  std::int64_t reserved_slots = 1;    ///< slots below this hold no token
  ScaleTables scales = {};
};

namespace detail {

/// Refuses tokens in slots that the engine keeps for itself.
[[nodiscard]] inline Status expect_unreserved(const TokenPlacement& placement,
                                              std::int64_t reserved) {
  const TokenSlots slots{
      .kind = placement.kind, .table = placement.table, .first = placement.first};
  const bool listed =
      placement.kind == SlotKind::slot_list_i32 || placement.kind == SlotKind::slot_list_i64;
  if (!listed && placement.kind != SlotKind::identity)
    return error(ErrorCode::unsupported,
                 "a pool of slots is reached by slot list, not by block table");
  if (listed) KVMELD_TRY(check_table(placement, 0));
  for (std::int64_t t = 0; t < (listed || placement.tokens < 1 ? placement.tokens : 1); ++t) {
    const std::int64_t slot = listed ? table_entry(slots, t) : placement.first;
    if (slot >= 0 && slot < reserved)
      return error(ErrorCode::invalid_argument, "token ", t, " is in slot ", slot,
                   ", which is padding");
  }
  return {};
}

}  // namespace detail

/// Views tokens of SGLang's pool. O(layers × tokens log tokens).
///
/// Errors: those of `contiguous_view`; `invalid_argument` for a token in a reserved slot;
/// `unsupported` for block tables.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> sglang_view(std::shared_ptr<const Geometry> geometry,
                                                        const KeyValueBuffers<Byte>& buffers,
                                                        const SglangOptions& options) {
  detail::LayoutBuilder<Byte> builder(geometry, options.tokens, options.scales);
  for (std::size_t l = 0; builder.ok() && l < options.tokens.size(); ++l) {
    builder.expect(detail::expect_unreserved(options.tokens[l], options.reserved_slots), l,
                   "slots");
  }
  if (!builder.ok()) return builder.finish();
  return contiguous_view(std::move(geometry), buffers,
                         ContiguousOptions{.tokens = options.tokens,
                                           .max_tokens = options.slots,
                                           .order = AxisOrder::token_head_channel,
                                           .scales = options.scales});
}

/// Which pool holds a layer, and the layer's index in that pool: a row of TensorRT-LLM's pool
/// mapping.
struct PoolLayer {
  std::int32_t pool = 0;
  std::int32_t layer = 0;
};

/// Declares TensorRT-LLM's primary pools, each [blocks, its layers, 2, heads, tokens a block,
/// channels], and one sequence's offsets.
///
/// An offset counts units of heads × tokens × channels from the layer's first, so that of a pool
/// with M layers the key of block b has offset 2 M b and its value 2 M b + 1. Key and value have
/// tables of their own, as in the engine's block offsets.
struct TrtllmOptions {
  PerLayer<TokenPlacement> keys = {};  ///< block tables
  PerLayer<TokenPlacement> values = {};
  std::vector<PoolLayer> mapping = {};    ///< one a layer; empty: one pool, layers in order
  std::vector<std::int64_t> blocks = {};  ///< one a pool
  std::int64_t block_size = 0;            ///< tokens a block
};

namespace detail {

[[nodiscard]] inline Status expect_offsets(const TokenPlacement& placement, std::int64_t layers,
                                           std::int64_t kv, std::int64_t block_size) {
  if (!is_block_table(placement.kind))
    return error(ErrorCode::unsupported, "pools are reached by block offsets");
  KVMELD_TRY(check_table(placement, block_size));
  const TokenSlots slots{
      .kind = placement.kind, .table = placement.table, .block_size = block_size};
  for (std::int64_t t = 0; t < placement.tokens; t += block_size) {
    const std::int64_t offset = table_entry(slots, t / block_size);
    if (offset < 0)
      return error(ErrorCode::unsupported, "block offset ", t / block_size,
                   " points into the secondary pool; bring it on board first");
    if (offset % (2 * layers) != kv) {
      return error(ErrorCode::invalid_argument, "block offset ", t / block_size, " is ", offset,
                   "; in a pool of ", layers, " layers those of ", kv == 0 ? "keys" : "values",
                   " are ", kv, " more than multiples of ", 2 * layers);
    }
  }
  return {};
}

}  // namespace detail

/// Views a sequence in TensorRT-LLM's primary pools. @param pools one tensor a pool. O(layers ×
/// blocks).
///
/// Errors: those of `contiguous_view`; `unsupported` for an offset into the secondary pool;
/// `invalid_argument` for an offset that does not address a key (or a value).
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> trtllm_view(std::shared_ptr<const Geometry> geometry,
                                                        const Buffers<Byte>& pools,
                                                        const TrtllmOptions& options) {
  const ScaleTables none;
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.keys, none);
  detail::expect_block_size(builder, options.block_size);
  if (!builder.ok()) return builder.finish();
  builder.expect_count(options.blocks.size(), pools.size(), "block counts");
  if (!options.mapping.empty())
    builder.expect_count(options.mapping.size(), builder.layers(), "pool mappings");
  detail::expect_per_layer(builder, options.values, "value tables");
  builder.expect_apart({&pools});
  std::vector<std::int64_t> pool_layers(pools.size());
  const auto where = [&](std::size_t l) {
    return options.mapping.empty() ? PoolLayer{0, static_cast<std::int32_t>(l)}
                                   : options.mapping[l];
  };
  for (std::size_t l = 0; builder.ok() && l < builder.layers(); ++l) {
    builder.expect(detail::expect_key_value(builder.layer(l), true), l, "planes");
    const PoolLayer at = where(l);
    if (at.pool < 0 || static_cast<std::size_t>(at.pool) >= pools.size() || at.layer < 0) {
      builder.fail(extend::error(ErrorCode::invalid_argument, "layer ", l, " is mapped to layer ",
                                 at.layer, " of pool ", at.pool, "; there are ", pools.size()));
    } else {
      ++pool_layers[static_cast<std::size_t>(at.pool)];
    }
  }
  for (std::size_t l = 0; l < builder.layers() && builder.ok(); ++l) {
    const auto pool = static_cast<std::size_t>(where(l).pool);
    const PlaneShape& key = builder.layer(l).planes[0];
    const std::int64_t layers = pool_layers[pool], n = options.block_size,
                       unit = detail::extent_product({key.heads, n, key.channels});
    builder.expect(
        detail::expect_elements(pools[pool], key.type,
                                detail::extent_product({options.blocks[pool], layers, 2, unit})),
        l, "pool");
    if (!builder.ok()) break;
    if (options.values[l].tokens != options.keys[l].tokens) {
      builder.fail(extend::error(ErrorCode::token_count_mismatch, "layer ", l, ": offsets of ",
                                 options.keys[l].tokens, " keys and ", options.values[l].tokens,
                                 " values"));
    }
    if (where(l).layer >= layers) {
      builder.fail(extend::error(ErrorCode::invalid_argument, "layer ", l, " is layer ",
                                 where(l).layer, " of a pool of ", layers));
    }
    builder.expect(detail::expect_offsets(options.keys[l], layers, 0, n), l, "keys");
    builder.expect(detail::expect_offsets(options.values[l], layers, 1, n), l, "values");
    if (!builder.ok()) break;
    const detail::PlaneStrides strides{.offset = where(l).layer * 2 * unit,
                                       .token = key.channels,
                                       .head = n * key.channels,
                                       .block_size = n,
                                       .block = unit};
    const std::int64_t slots = (options.blocks[pool] * layers - where(l).layer) * 2 * n;
    builder.add(l, 0, pools[pool], strides, slots, options.keys[l], {});
    builder.add(l, 1, pools[pool], strides, slots, options.values[l], {});
  }
  return builder.finish();
}

// Latent caches of multi-head latent attention: one row a token, no value plane.

/// What a token's row holds, first to last.
enum class LatentRow : std::uint8_t {
  latent_rope,         ///< vLLM and SGLang: the compressed latent, then the shared rotary key
  rope_latent,         ///< llama.cpp, which rotates the front of the row in place
  latent_scales_rope,  ///< vLLM's 656 bytes: 512 e4m3, 4 f32 scales of 128 channels each, 64 bf16
};

/// Declares tensors [blocks, block_size, row], or with `layers_in_block` one tensor [blocks,
/// layers, block_size, row].
///
/// The geometry declares per layer a `latent` and a `rope_part` plane of one head each. Where slots
/// are single, as in SGLang's and llama.cpp's caches, blocks hold one token.
struct LatentOptions {
  PerLayer<TokenPlacement> tokens = {};
  LatentRow row = LatentRow::latent_rope;
  PerLayer<std::int64_t> blocks = {};
  std::int64_t block_size = 1;
  bool layers_in_block = false;
  ScaleTables scales = {};  ///< where they do not lie inside the rows
};

namespace detail {

/// Where in a row the planes and the scales begin, in bytes.
struct LatentBytes {
  std::int64_t latent = 0, rope = 0, scales = 0, row = 0;

  LatentBytes(const LayerShape& layer, LatentRow order) noexcept {
    const std::int64_t l = row_bytes(layer.planes[0]), r = row_bytes(layer.planes[1]);
    const std::int64_t s =
        order == LatentRow::latent_scales_rope ? row_scales(layer.planes[0]) * 4 : 0;
    row = l + r + s;
    scales = l;
    latent = order == LatentRow::rope_latent ? r : 0;
    rope = order == LatentRow::rope_latent ? 0 : l + s;
  }
};

[[nodiscard]] inline Status expect_latent(const LayerShape& layer, LatentRow order) {
  const auto& p = layer.planes;
  if (p.size() != 2 || p[0].plane != Plane::latent || p[1].plane != Plane::rope_part ||
      p[0].heads != 1 || p[1].heads != 1) {
    return error(ErrorCode::unsupported,
                 "this layout holds a latent and a rope part of one head; the geometry declares ",
                 p.size(), " planes, or others");
  }
  if (order == LatentRow::latent_scales_rope && p[0].scales != ScaleScheme::per_channel_group) {
    return error(ErrorCode::geometry_mismatch,
                 "rows with scales inside, and a latent plane without per_channel_group scales");
  }
  const LatentBytes bytes(layer, order);
  for (const PlaneShape& plane : p) {
    const std::int64_t unit = block_bytes(plane.type),
                       at = plane.plane == Plane::latent ? bytes.latent : bytes.rope;
    if (bytes.row % unit != 0 || at % unit != 0) {
      return error(ErrorCode::unsupported, "a row of ", bytes.row, " bytes with a part at ", at,
                   " does not count in elements of ", unit);
    }
  }
  return {};
}

}  // namespace detail

/// Views a sequence of latent rows. O(layers + table entries).
///
/// Errors: those of `contiguous_view`; `geometry_mismatch` where the row and the planes' scales
/// disagree, or layers of one tensor differ; `invalid_argument` for scales inside rows that are not
/// aligned to 4 bytes.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> latent_view(std::shared_ptr<const Geometry> geometry,
                                                        const Buffers<Byte>& buffers,
                                                        const LatentOptions& options) {
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, options.scales);
  if (options.row > LatentRow::latent_scales_rope) {
    builder.fail(extend::error(ErrorCode::unknown_layout, "latent row ",
                               static_cast<int>(options.row), " is none that this build knows"));
  }
  detail::expect_block_size(builder, options.block_size);
  detail::expect_per_layer(builder, options.blocks, "block counts");
  if (!builder.ok()) return builder.finish();
  const auto layers = static_cast<std::int64_t>(builder.layers());
  builder.expect_count(buffers.size(), options.layers_in_block ? 1 : builder.layers(), "tensors");
  builder.expect_apart({&buffers});
  for (std::size_t l = 0; l < builder.layers() && builder.ok(); ++l) {
    builder.expect(detail::expect_latent(builder.layer(l), options.row), l, "planes");
    if (options.layers_in_block && (builder.layer(l).planes != builder.layer(0).planes ||
                                    options.blocks[l] != options.blocks[0])) {
      builder.fail(extend::error(ErrorCode::geometry_mismatch, "layer ", l,
                                 " differs from layer 0, and one tensor holds both"));
    }
    if (!builder.ok()) break;
    const detail::LatentBytes bytes(builder.layer(l), options.row);
    const std::span<Byte> buffer = buffers[options.layers_in_block ? 0 : l];
    const std::int64_t in_block = options.layers_in_block ? layers : 1, n = options.block_size;
    const std::int64_t page = detail::extent_product({bytes.row, n});
    builder.expect(
        detail::expect_elements(buffer, ElementType::i8,
                                detail::extent_product({options.blocks[l], in_block, page})),
        l, "tensor");
    if (!builder.ok()) break;
    const std::int64_t first = options.layers_in_block ? static_cast<std::int64_t>(l) * page : 0;
    for (std::size_t p = 0; p < 2; ++p) {
      const PlaneShape& shape = builder.layer(l).planes[p];
      const auto elements = [&](std::int64_t b) {
        return b / block_bytes(shape.type) * block_elements(shape.type);
      };
      const std::int64_t token = elements(bytes.row);
      ScaleRef inner;
      if (p == 0 && options.row == LatentRow::latent_scales_rope) {
        const auto* scales = reinterpret_cast<const float*>(buffer.data() + first + bytes.scales);
        if (reinterpret_cast<std::uintptr_t>(scales) % alignof(float) != 0 || bytes.row % 4 != 0 ||
            in_block != 1) {
          builder.fail(extend::error(ErrorCode::invalid_argument, "layer ", l,
                                     ": scales inside rows of ", bytes.row,
                                     " bytes must be aligned to 4 and evenly spaced"));
          break;
        }
        inner = {.data = scales, .slot_stride = bytes.row / 4, .head_stride = 0, .group_stride = 1};
      }
      builder.add(l, p, buffer,
                  {.offset = elements(first + (p == 0 ? bytes.latent : bytes.rope)),
                   .token = token,
                   .block_size = n,
                   .block = elements(page * in_block)},
                  options.blocks[l] * n, options.tokens[l], inner);
    }
  }
  return builder.finish();
}

// Planes from DLPack tensors, read by their fields alone: any type shaped like `DLTensor` will do,
// and no dlpack.h is needed.

/// A type with the fields of DLPack's `DLTensor` (version 0.6 or later).
///
/// Semantic requirements: `shape` has `ndim` entries; `strides` too, in elements, or is null, which
/// means compact row-major; the first element lies `byte_offset` bytes behind `data`.
template <class T>
concept DlpackTensor = requires(const T& t) {
  { t.data } -> std::convertible_to<void*>;
  { t.ndim } -> std::convertible_to<std::int64_t>;
  { t.shape[0] } -> std::convertible_to<std::int64_t>;
  { t.strides[0] } -> std::convertible_to<std::int64_t>;
  { t.byte_offset } -> std::convertible_to<std::uint64_t>;
  t.device.device_type;
  t.dtype.code;
  t.dtype.bits;
  t.dtype.lanes;
};

/// One axis held at one index: 0 for keys and 1 for values in [2, …], say, or one sequence of a
/// batch.
struct FixedAxis {
  std::int32_t axis = 0;
  std::int64_t index = 0;
};

/// Which axis of a tensor means what. Axes that are not named must be fixed, or have extent 1.
struct DlpackAxes {
  std::int32_t token = 0;  ///< tokens, or tokens of a block where there is a block axis
  std::int32_t head = 1;   ///< -1: the plane has one head and the tensor no axis for it
  std::int32_t channel = 2;
  std::int32_t block = -1;          ///< -1: not paged
  std::int32_t channel_outer = -1;  ///< D/x of a split-channel tensor; -1: not split
  /// Where the plane begins in the channel axis: D for the value of a packed [.., 2D].
  std::int64_t first_channel = 0;
  std::vector<FixedAxis> fixed = {};
};

/// Declares a cache of DLPack tensors.
struct DlpackOptions {
  PerLayer<TokenPlacement> tokens = {};
  /// One for all planes, or one for each plane of a layer.
  std::vector<DlpackAxes> axes = {DlpackAxes{}};
  bool raw_bytes = false;  ///< accept uint8 tensors for planes of 8-bit floats, as vLLM stores them
  ScaleTables scales = {};
};

namespace detail {

/// The element type that DLPack's (code, bits) names; codes from dlpack.h 1.1.
[[nodiscard]] inline Result<ElementType> dlpack_type(std::int64_t code, std::int64_t bits,
                                                     ElementType declared, bool raw_bytes) {
  if (code == 2 && bits == 64) return ElementType::f64;
  if (code == 2 && bits == 32) return ElementType::f32;
  if (code == 2 && bits == 16) return ElementType::f16;
  if (code == 4 && bits == 16) return ElementType::bf16;
  if (code == 0 && bits == 8) return ElementType::i8;
  if (code == 10 && bits == 8) return ElementType::f8_e4m3;
  if (code == 12 && bits == 8) return ElementType::f8_e5m2;
  const bool eight = declared == ElementType::f8_e4m3 || declared == ElementType::f8_e5m2;
  if (code == 1 && bits == 8 && raw_bytes && eight) return declared;
  return error(ErrorCode::unsupported, "DLPack type code ", code, " of ", bits,
               " bits is no cache element of this build");
}

/// The memory that a DLPack device type names; codes from dlpack.h 1.1.
[[nodiscard]] inline Result<MemorySpace> dlpack_space(std::int64_t device) {
  switch (device) {
    case 1:
      return MemorySpace::host;
    case 2:
      return MemorySpace::device;
    case 3:
      return MemorySpace::pinned;
    case 13:
      return MemorySpace::managed;
    default:
      break;
  }
  return error(ErrorCode::unsupported, "DLPack device type ", device,
               "; host (1), CUDA (2), pinned (3) and managed (13) memory can be viewed");
}

/// A tensor's axes as read and checked: extents, element strides, and the elements it spans around
/// its first.
struct DlpackShape {
  std::vector<std::int64_t> extents, strides;
  std::int64_t low = 0, high = 0;
  bool empty = false;
};

template <DlpackTensor T>
[[nodiscard]] Result<DlpackShape> dlpack_shape(const T& t) {
  DlpackShape s;
  if (t.ndim < 1 || t.ndim > 16)
    return error(ErrorCode::invalid_argument, "a tensor of ", static_cast<std::int64_t>(t.ndim),
                 " axes");
  if (static_cast<std::int64_t>(t.dtype.lanes) != 1) {
    return error(ErrorCode::unsupported, "elements of ", static_cast<std::int64_t>(t.dtype.lanes),
                 " lanes");
  }
  const auto n = static_cast<std::size_t>(t.ndim);
  std::int64_t compact = 1;
  s.extents.resize(n);
  s.strides.resize(n);
  for (std::size_t a = n; a-- > 0;) {
    s.extents[a] = t.shape[a];
    s.strides[a] = t.strides == nullptr ? compact : static_cast<std::int64_t>(t.strides[a]);
    compact = extent_product({compact, s.extents[a]});
    if (compact < 0 || s.extents[a] > max_extent || !sane(s.strides[a])) {
      return error(ErrorCode::invalid_argument, "axis ", a, " has extent ", s.extents[a],
                   " and stride ", s.strides[a]);
    }
    s.empty = s.empty || s.extents[a] == 0;
  }
  for (std::size_t a = 0; a < n && !s.empty; ++a) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(s.extents[a] - 1, s.strides[a], &reach) || !sane(reach)) {
      return error(ErrorCode::invalid_argument, "axis ", a, " reaches beyond 2^48 elements");
    }
    (reach < 0 ? s.low : s.high) += reach;
  }
  return s;
}

/// Sorts a tensor's axes into a plane's strides. `slots` receives how many the tensor has.
[[nodiscard]] inline Result<PlaneStrides> dlpack_strides(const DlpackShape& s,
                                                         const PlaneShape& shape,
                                                         const DlpackAxes& axes,
                                                         std::int64_t& slots) {
  std::vector<bool> used(s.extents.size());
  const auto take = [&](std::int32_t axis) {
    if (axis < 0 || static_cast<std::size_t>(axis) >= used.size() ||
        used[static_cast<std::size_t>(axis)])
      return false;
    used[static_cast<std::size_t>(axis)] = true;
    return true;
  };
  const auto extent = [&](std::int32_t axis) {
    return axis < 0 ? std::int64_t{1} : s.extents[static_cast<std::size_t>(axis)];
  };
  const auto stride = [&](std::int32_t axis) {
    return axis < 0 ? std::int64_t{0} : s.strides[static_cast<std::size_t>(axis)];
  };
  if (!take(axes.token) || !take(axes.channel) || (axes.head >= 0 && !take(axes.head)) ||
      (axes.block >= 0 && !take(axes.block)) ||
      (axes.channel_outer >= 0 && !take(axes.channel_outer))) {
    return error(ErrorCode::invalid_argument,
                 "token, head, channel and block are different axes below ", used.size());
  }
  PlaneStrides out{.offset = axes.first_channel * stride(axes.channel),
                   .token = stride(axes.token),
                   .head = stride(axes.head),
                   .channel = stride(axes.channel)};
  for (const FixedAxis& f : axes.fixed) {
    if (!take(f.axis))
      return error(ErrorCode::invalid_argument, "fixed axis ", f.axis,
                   " is none of the tensor's, or named twice");
    if (f.index < 0 || f.index >= extent(f.axis))
      return error(ErrorCode::invalid_argument, "index ", f.index, " of fixed axis ", f.axis,
                   " with extent ", extent(f.axis));
    out.offset += f.index * stride(f.axis);
  }
  for (std::size_t a = 0; a < used.size(); ++a) {
    if (!used[a] && s.extents[a] != 1)
      return error(ErrorCode::invalid_argument, "axis ", a, " of extent ", s.extents[a],
                   " has no meaning: name it or fix it");
  }
  const std::int64_t channels = extent_product({extent(axes.channel), extent(axes.channel_outer)});
  const bool fits = axes.channel_outer >= 0 ? axes.first_channel == 0 && channels == shape.channels
                                            : axes.first_channel >= 0 &&
                                                  axes.first_channel <= channels - shape.channels;
  if (extent(axes.head) != shape.heads || !fits) {
    return error(ErrorCode::geometry_mismatch, "the tensor has ", extent(axes.head), " heads of ",
                 channels, " channels, the plane ", shape.heads, " of ", shape.channels,
                 " from channel ", axes.first_channel);
  }
  if (axes.channel_outer >= 0) {
    out.channel_split = extent(axes.channel);
    out.split = stride(axes.channel_outer);
  }
  slots = extent(axes.token);
  if (axes.block >= 0) {
    out.block_size = slots;
    out.block = stride(axes.block);
    slots = extent_product({slots, extent(axes.block)});
    if (slots < 0)
      return error(ErrorCode::invalid_argument, extent(axes.block), " blocks of ", out.block_size,
                   " tokens");
  }
  return out;
}

}  // namespace detail

/// Views tensors of an engine or framework as a cache. @param tensors one for each plane,
/// layer-major. O(planes + table entries).
///
/// Each plane's memory space is its tensor's device type: a CUDA tensor is viewed, and refused by
/// what reads on the host.
/// @tparam Byte `std::byte` where the view may be written (a `DLTensor` does not say whether it
/// may), `const std::byte` otherwise. Errors: `geometry_mismatch` where a tensor's type, heads or
/// channels are not the plane's (bf16 handed in as f16, say); `unsupported` for devices, lanes and
/// types that this build cannot view; those of `contiguous_view`.
template <class Byte = const std::byte, DlpackTensor T>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> dlpack_view(std::shared_ptr<const Geometry> geometry,
                                                        const std::vector<T>& tensors,
                                                        const DlpackOptions& options) {
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, options.scales);
  if (!builder.ok()) return builder.finish();
  std::size_t index = 0;
  for (std::size_t l = 0; l < builder.layers(); ++l) index += builder.layer(l).planes.size();
  builder.expect_count(tensors.size(), index, "tensors");
  index = 0;
  for (std::size_t l = 0; l < builder.layers() && builder.ok(); ++l) {
    for (std::size_t p = 0; p < builder.layer(l).planes.size() && builder.ok(); ++p, ++index) {
      const T& tensor = tensors[index];
      const PlaneShape& shape = builder.layer(l).planes[p];
      if (options.axes.size() != 1 && p >= options.axes.size()) {
        builder.expect_count(options.axes.size(), p + 1, "axis declarations");
        break;
      }
      const auto type =
          detail::dlpack_type(tensor.dtype.code, tensor.dtype.bits, shape.type, options.raw_bytes);
      builder.expect(type.status(), l, "tensor");
      if (type.ok() && *type != shape.type) {
        builder.fail(extend::error(ErrorCode::geometry_mismatch, "layer ", l, " plane ", p,
                                   ": the tensor holds ", to_string(*type),
                                   ", the geometry declares ", to_string(shape.type)));
      }
      const auto s = detail::dlpack_shape(tensor);
      builder.expect(s.status(), l, "tensor");
      const auto space = detail::dlpack_space(static_cast<std::int64_t>(tensor.device.device_type));
      builder.expect(space.status(), l, "tensor");
      if (!builder.ok()) break;
      std::int64_t slots = 0;
      const DlpackAxes& axes = options.axes[options.axes.size() == 1 ? 0 : p];
      auto strides = detail::dlpack_strides(*s, shape, axes, slots);
      builder.expect(strides.status(), l, "tensor");
      if (!builder.ok()) break;
      const std::int64_t size = block_bytes(shape.type);
      std::span<Byte> buffer;
      if (!s->empty && tensor.data != nullptr) {
        auto* first = static_cast<Byte*>(static_cast<void*>(tensor.data)) +
                      static_cast<std::ptrdiff_t>(tensor.byte_offset) + s->low * size;
        buffer = std::span<Byte>(first, static_cast<std::size_t>((s->high - s->low + 1) * size));
      }
      strides->offset -= s->low;
      builder.lies_in(*space);
      builder.add(l, p, buffer, *strides, s->empty ? 0 : slots);
    }
  }
  return builder.finish();
}

KVMELD_NAMESPACE_END
