#pragma once

#include <cstddef>
#include <string_view>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// One code point read from the front of a text, and how many bytes it took: 0 bytes where the text
/// is empty or not UTF-8 there (RFC 3629: no overlong forms, no surrogates, nothing above
/// U+10FFFF).
struct CodePoint {
  char32_t value = 0;
  std::size_t bytes = 0;
};

[[nodiscard]] inline CodePoint first_code_point(std::string_view text) noexcept {
  if (text.empty()) return {};
  const auto byte = [&](std::size_t i) {
    return static_cast<char32_t>(static_cast<unsigned char>(text[i]));
  };
  const char32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return {};
  char32_t value = lead & (0x7FU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return {};
    value = (value << 6U) | (byte(i) & 0x3FU);
  }
  constexpr char32_t lowest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (value < lowest[bytes] || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) return {};
  return {value, bytes};
}

[[nodiscard]] inline bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const CodePoint c = first_code_point(text);
    if (c.bytes == 0) return false;
    text.remove_prefix(c.bytes);
  }
  return true;
}

}  // namespace detail
KVMELD_NAMESPACE_END
