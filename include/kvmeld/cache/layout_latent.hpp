#pragma once

/// Latent caches of multi-head latent attention: one row a token, no value plane.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <kvmeld/cache/layout_build.hpp>
#include <kvmeld/cache/layout_paged.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a token's row holds, first to last.
enum class LatentRow : std::uint8_t {
  latent_rope,         ///< vLLM and SGLang: the compressed latent, then the shared rotary key
  rope_latent,         ///< llama.cpp, which turns the front of the row in place
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
    builder.fail(detail::error(ErrorCode::unknown_layout, "latent row ",
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
      builder.fail(detail::error(ErrorCode::geometry_mismatch, "layer ", l,
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
          builder.fail(detail::error(ErrorCode::invalid_argument, "layer ", l,
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

KVMELD_NAMESPACE_END
