#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

// Numbers as text, for identity, files, pages and messages. `printf`, `strtod`, streams and
// `std::to_string` write and read what the process's locale says, and six digits of a double; no
// header calls them (tests/unit/locale.cpp looks).

/// Appends the shortest digits that read back as the same number, in every locale; `true` is 1.
/// O(digits).
template <class Number>
requires std::is_arithmetic_v<Number>
void append_decimal(std::string& out, Number number) {
  char digits[40];  // the longest: -1.7976931348623157e+308, or 20 digits and a sign
  std::to_chars_result end{};
  if constexpr (std::same_as<Number, long double>) {
    end = std::to_chars(digits, digits + sizeof digits, static_cast<double>(number));
  } else if constexpr (std::floating_point<Number>) {
    end = std::to_chars(digits, digits + sizeof digits, number);
  } else {
    // characters and truth values as integers
    end = std::to_chars(digits, digits + sizeof digits, +number);
  }
  out.append(digits, static_cast<std::size_t>(end.ptr - digits));
}

/// The shortest digits that read back as the same number, in every locale.
template <class Number>
requires std::is_arithmetic_v<Number>
[[nodiscard]] std::string decimal(Number number) {
  std::string out;
  append_decimal(out, number);
  return out;
}

/// The number that the whole text spells, with a point where it has one; none where it spells
/// anything else, or too large a one.
template <class Number>
requires std::is_arithmetic_v<Number>
[[nodiscard]] std::optional<Number> parse_decimal(std::string_view text) noexcept {
  Number number{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace detail
KVMELD_NAMESPACE_END
