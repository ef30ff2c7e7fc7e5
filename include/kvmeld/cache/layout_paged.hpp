#pragma once

/// Block pools in which keys and values share a tensor, for each layer or for all layers.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include <kvmeld/cache/layout_build.hpp>
#include <kvmeld/cache/layout_contiguous.hpp>

KVMELD_NAMESPACE_BEGIN

/// Order of the axes of one layer's tensor: B blocks, N tokens a block, H heads, D channels.
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
};

/// Order of the axes where one tensor holds all L layers, the layer inside the block.
enum class CrossLayerLayout : std::uint8_t {
  block_layer_kv_token_head,      ///< [B, L, 2, N, H, D]
  block_layer_kv_head_token,      ///< [B, L, 2, H, N, D]
  block_head_layer_kv_token,      ///< [B, H, L, 2, N, D]
  block_layer_token_head_packed,  ///< [B, L, N, H, 2D]
  block_head_layer_token_packed,  ///< [B, H, L, N, 2D]
};

/// Declares one paged tensor for each layer.
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

}  // namespace detail

/// Views a sequence in one paged tensor a layer. O(layers + table entries).
///
/// Errors: those of `contiguous_view`; `geometry_mismatch` where key and value differ and the
/// layout cannot say so.
template <class Byte>
[[nodiscard]] Result<BasicKvCacheRef<Byte>> paged_view(std::shared_ptr<const Geometry> geometry,
                                                       const Buffers<Byte>& buffers,
                                                       const PagedOptions& options) {
  detail::LayoutBuilder<Byte> builder(std::move(geometry), options.tokens, options.scales);
  const std::string_view order = detail::axes(options.layout);
  if (order.empty()) {
    builder.fail(detail::error(ErrorCode::unknown_layout, "paged layout ",
                               static_cast<int>(options.layout), " is none that this build knows"));
  }
  detail::expect_block_size(builder, options.block_size);
  detail::expect_per_layer(builder, options.blocks, "block counts");
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
    if (options.block_stride != 0 && (order[0] != 'b' || strides.block != options.block_stride)) {
      builder.fail(detail::error(ErrorCode::invalid_argument, "block stride ", options.block_stride,
                                 " is below a block's ", strides.block,
                                 " elements, or the block is not the outermost axis"));
      break;
    }
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
    builder.fail(detail::error(ErrorCode::unknown_layout, "cross-layer layout ",
                               static_cast<int>(options.layout), " is none that this build knows"));
  }
  detail::expect_block_size(builder, options.block_size);
  for (std::size_t l = 0; builder.ok() && l < builder.layers(); ++l) {
    builder.expect(detail::expect_key_value(builder.layer(l), true, order.back() != 'p'), l,
                   "planes");
    if (builder.ok() && builder.layer(l).planes != builder.layer(0).planes) {
      builder.fail(detail::error(ErrorCode::geometry_mismatch, "layer ", l,
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

KVMELD_NAMESPACE_END
