#pragma once

/// Planes from DLPack tensors, read by their fields alone: any type shaped like `DLTensor` will do,
/// and no dlpack.h is needed.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/layout_build.hpp>

KVMELD_NAMESPACE_BEGIN

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
        builder.fail(detail::error(ErrorCode::geometry_mismatch, "layer ", l, " plane ", p,
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
