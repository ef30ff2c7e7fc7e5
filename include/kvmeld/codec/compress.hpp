#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/element.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a compressor may know of a chunk's bytes: rows of numbers, one row a token, whose columns
/// resemble themselves.
struct ChunkForm {
  ElementType type = ElementType::i8;
  std::uint32_t row_elements = 0;  ///< numbers of one token in one plane, all heads; 0: not known
};

/// Makes the bytes of a chunk fewer without changing them; a chunk that it cannot shorten is stored
/// as it is.
///
/// Semantic requirements (tests/unit/wire_chunk.cpp checks them):
///  - `codec` names the stored form for ever: 0 is raw, 1 is `Zstd`; your own start at 128;
///  - `compress` appends to `out` and returns true, or returns false and leaves `out` as it was.
///    What `decompress` must know of the form stands in what it appends;
///  - `decompress` fills `raw` exactly or returns `corrupt`; it takes no memory beyond a constant
///    times `raw`, whatever `data` says.
template <class C>
concept Compressor = requires(const C& codec, std::span<const std::byte> data,
                              const ChunkForm& form, std::vector<std::byte>& out,
                              std::span<std::byte> raw) {
  { C::codec } -> std::convertible_to<std::uint8_t>;
  { codec.compress(data, form, out) } -> std::same_as<bool>;
  { codec.decompress(data, raw) } -> std::same_as<Status>;
};

/// Leaves chunks as they are; reads no other.
struct NoCompression {
  static constexpr std::uint8_t codec = 0;

  [[nodiscard]] bool compress(std::span<const std::byte>, const ChunkForm&,
                              std::vector<std::byte>&) const noexcept {
    return false;
  }
  [[nodiscard]] Status decompress(std::span<const std::byte>, std::span<std::byte>) const {
    return detail::error(ErrorCode::unsupported, "NoCompression reads no compressed chunk");
  }
};

KVMELD_NAMESPACE_END
