#pragma once

/// Pools of single slots (SGLang), of blocks behind pointer tables (TensorRT-LLM), and pools with
/// split channels.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <kvmeld/cache/layout_build.hpp>
#include <kvmeld/cache/layout_paged.hpp>

KVMELD_NAMESPACE_BEGIN

/// Declares key tensors [B, H, D/x, N, x] and value tensors [B, H, D, N]: x consecutive channels
/// fill `split_bytes`.
///
/// The layout of vLLM's first paged-attention kernels and of those that descend from them. Where
/// both halves lie in one tensor of [2, …], pass its halves.
struct SplitChannelOptions {
  PerLayer<TokenPlacement> tokens = {};
  PerLayer<std::int64_t> blocks = {};
  std::int64_t block_size = 0;
  std::int64_t split_bytes = 16;
  ScaleTables scales = {};
};

/// Views a sequence in a split-channel pool. O(layers + table entries).
///
/// Errors: those of `contiguous_view`; `unsupported` for block types, whose blocks would be cut.
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
        builder.fail(detail::error(ErrorCode::invalid_argument, "groups of ", options.split_bytes,
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
/// Slot 0 is where the engine writes the rows of padding tokens, so a list that names it is a list
/// with padding in it.
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

/// Which pool holds a layer, and as which of that pool's layers: a row of TensorRT-LLM's pool
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
/// `invalid_argument` for an offset that is none of a key (or value).
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
      builder.fail(detail::error(ErrorCode::invalid_argument, "layer ", l, " is mapped to layer ",
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
      builder.fail(detail::error(ErrorCode::token_count_mismatch, "layer ", l, ": offsets of ",
                                 options.keys[l].tokens, " keys and ", options.values[l].tokens,
                                 " values"));
    }
    if (where(l).layer >= layers) {
      builder.fail(detail::error(ErrorCode::invalid_argument, "layer ", l, " is layer ",
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

KVMELD_NAMESPACE_END
