#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// All bytes of a file, at most `max_bytes`. For weights and maps; caches go through stores.
///
/// Errors: `not_found`, `unavailable` (reading failed), `oversized`.
KVMELD_LAZY [[nodiscard]] Result<std::vector<std::byte>> read_file_bytes(
    const std::string& path, std::size_t max_bytes = std::size_t{8} << 30U) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return detail::error(ErrorCode::not_found, "cannot open ", path);
  std::vector<std::byte> out;
  std::vector<std::byte> piece(std::size_t{1} << 20U);
  std::size_t got = 0;
  while ((got = std::fread(piece.data(), 1, piece.size(), file)) > 0 &&
         out.size() + got <= max_bytes) {
    out.insert(out.end(), piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(got));
  }
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  if (failed)
    return detail::error(ErrorCode::unavailable, "cannot read ", path, " after byte ", out.size());
  if (got > 0)
    return detail::error(ErrorCode::oversized, path, " has more than ", max_bytes, " bytes");
  return out;
}

/// Makes or replaces a file. Errors: `unavailable`, where the file may be cut short.
KVMELD_LAZY [[nodiscard]] Status write_file_bytes(const std::string& path,
                                                  std::span<const std::byte> bytes) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return detail::error(ErrorCode::unavailable, "cannot create ", path);
  const std::size_t put = bytes.empty() ? 0 : std::fwrite(bytes.data(), 1, bytes.size(), file);
  const bool closed = std::fclose(file) == 0;
  if (put != bytes.size() || !closed)
    return detail::error(ErrorCode::unavailable, "wrote ", put, " of ", bytes.size(), " bytes to ",
                         path);
  return {};
}

KVMELD_NAMESPACE_END
