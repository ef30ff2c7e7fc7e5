#pragma once

/// Compressed chunks by Zstandard (CMake component kvmeld::zstd).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include <zstd.h>

#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/codec/compress.hpp>
#include <kvmeld/codec/exponent_split.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// How a chunk's bytes are arranged before zstd sees them; part of the wire.
enum class Arrangement : std::uint8_t { plain = 0, f16 = 1, bf16 = 2, f32 = 3 };

struct FreeZstd {
  void operator()(ZSTD_CCtx* context) const noexcept { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const noexcept { ZSTD_freeDCtx(context); }
};

/// One zstd frame behind its size; false where zstd fails.
inline bool zstd_append(ZSTD_CCtx* context, std::span<const std::uint8_t> bytes, int level,
                        std::vector<std::byte>& out) {
  const std::size_t bound = ZSTD_compressBound(bytes.size());
  const std::size_t at = out.size();
  out.resize(at + sizeof(std::uint32_t) + bound);
  const std::size_t size = ZSTD_compressCCtx(context, out.data() + at + sizeof(std::uint32_t),
                                             bound, bytes.data(), bytes.size(), level);
  if (ZSTD_isError(size) != 0) return false;
  const auto written = static_cast<std::uint32_t>(size);
  std::memcpy(out.data() + at, &written, sizeof(written));
  out.resize(at + sizeof(written) + size);
  return true;
}

/// Reads such a frame into exactly `out`.
inline void zstd_read(ByteReader& r, ZSTD_DCtx* context, std::span<std::uint8_t> out) {
  const auto frame = r.bytes(r.value<std::uint32_t>());
  if (!r.ok()) return;
  const std::size_t size =
      ZSTD_decompressDCtx(context, out.data(), out.size(), frame.data(), frame.size());
  if (ZSTD_isError(size) != 0 || size != out.size()) r.fail(ErrorCode::corrupt);
}

}  // namespace detail

/// Models `Compressor`: Zstandard (RFC 8878) over f16, bf16 and f32 whose exponents were taken
/// relative to their channel's, over other elements as they are.
///
/// Lossless. Mantissas of a cache are noise, so the ratio is what sign and exponent leave: about
/// 1.2 for f16, 1.5 for bf16, 1.2 for f32 (docs/wire.md has the figures). Worth it where the
/// network is slower than some hundred MB/s.
struct Zstd {
  static constexpr std::uint8_t codec = 1;

  int level = 1;  ///< zstd's; higher ones find nothing more in floats

  [[nodiscard]] bool compress(std::span<const std::byte> raw, const ChunkForm& form,
                              std::vector<std::byte>& out) const {
    const std::size_t before = out.size();
    const std::unique_ptr<ZSTD_CCtx, detail::FreeZstd> context(ZSTD_createCCtx());
    bool done = context != nullptr && !raw.empty();
    if (done) {
      switch (form.row_elements == 0 ? ElementType::i8 : form.type) {
        case ElementType::f16:
          done = split<detail::F16Fields>(context.get(), detail::Arrangement::f16, raw, form, out);
          break;
        case ElementType::bf16:
          done =
              split<detail::Bf16Fields>(context.get(), detail::Arrangement::bf16, raw, form, out);
          break;
        case ElementType::f32:
          done = split<detail::F32Fields>(context.get(), detail::Arrangement::f32, raw, form, out);
          break;
        default:
          out.push_back(static_cast<std::byte>(detail::Arrangement::plain));
          done = detail::zstd_append(
              context.get(), {reinterpret_cast<const std::uint8_t*>(raw.data()), raw.size()}, level,
              out);
      }
    }
    if (!done) out.resize(before);
    return done;
  }

  [[nodiscard]] Status decompress(std::span<const std::byte> data, std::span<std::byte> raw) const {
    ByteReader r(data);
    const std::unique_ptr<ZSTD_DCtx, detail::FreeZstd> context(ZSTD_createDCtx());
    if (context == nullptr)
      return detail::error(ErrorCode::unsupported, "zstd gives no context for ", raw.size(),
                           " bytes");
    const auto arrangement = r.value<std::uint8_t>();
    switch (static_cast<detail::Arrangement>(arrangement)) {
      case detail::Arrangement::plain:
        detail::zstd_read(r, context.get(),
                          {reinterpret_cast<std::uint8_t*>(raw.data()), raw.size()});
        break;
      case detail::Arrangement::f16:
        join<detail::F16Fields>(r, context.get(), raw);
        break;
      case detail::Arrangement::bf16:
        join<detail::Bf16Fields>(r, context.get(), raw);
        break;
      case detail::Arrangement::f32:
        join<detail::F32Fields>(r, context.get(), raw);
        break;
      default:
        return detail::error(ErrorCode::unknown_field, "compressed chunk: arrangement ",
                             arrangement, " is unknown to this build");
    }
    return r.finish("compressed chunk");
  }

 private:
  template <class F>
  [[nodiscard]] bool split(ZSTD_CCtx* context, detail::Arrangement arrangement,
                           std::span<const std::byte> raw, const ChunkForm& form,
                           std::vector<std::byte>& out) const {
    const std::size_t elements = raw.size() / F::bytes;
    if (elements == 0) return false;
    const std::size_t columns = (std::min<std::size_t>)(form.row_elements, elements);
    detail::SplitPlanes planes;
    detail::split<F>(raw.first(elements * F::bytes), columns, planes);
    ByteWriter head;
    head.value(arrangement);
    head.varint(columns);
    head.bytes(raw.subspan(elements * F::bytes));  // a last element's torn bytes
    out.insert(out.end(), head.written().begin(), head.written().end());
    bool done = detail::zstd_append(context, planes.bases, level, out);
    for (unsigned p = 0; p < F::bytes && done; ++p) {
      done = detail::zstd_append(
          context, std::span<const std::uint8_t>(planes.planes).subspan(p * elements, elements),
          level, out);
    }
    return done;
  }

  template <class F>
  static void join(ByteReader& r, ZSTD_DCtx* context, std::span<std::byte> raw) {
    const std::size_t elements = raw.size() / F::bytes;
    const std::uint64_t columns = r.varint();
    if (columns == 0 || columns > elements) r.fail(ErrorCode::corrupt);
    const auto torn = r.bytes(raw.size() % F::bytes);
    if (!r.ok()) return;
    detail::SplitPlanes planes;
    planes.resize(elements, static_cast<std::size_t>(columns), F::bytes);
    detail::zstd_read(r, context, planes.bases);
    for (unsigned p = 0; p < F::bytes; ++p)
      detail::zstd_read(r, context, std::span(planes.planes).subspan(p * elements, elements));
    if (!r.ok()) return;
    detail::join<F>(planes, static_cast<std::size_t>(columns), raw.first(elements * F::bytes));
    std::copy(torn.begin(), torn.end(),
              raw.begin() + static_cast<std::ptrdiff_t>(elements * F::bytes));
  }
};

KVMELD_NAMESPACE_END
