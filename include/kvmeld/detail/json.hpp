#pragma once

/// A bounded JSON reader, and files as bytes.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Reads JSON of a known form, token by token, from untrusted bytes.
///
/// It reads strings, natural numbers and punctuation, which is all that headers of tensor files
/// hold. The first failure is kept, with its byte offset; later reads return nothing. It does not
/// recurse, so that no nesting exhausts the stack.
class JsonReader {
 public:
  explicit JsonReader(std::span<const std::byte> text) noexcept
      : text_(reinterpret_cast<const char*>(text.data()), text.size()) {}

  [[nodiscard]] bool ok() const noexcept { return why_ == nullptr; }
  /// Records an error at the current offset.
  void fail(const char* why) noexcept {
    if (ok()) why_ = why;
  }
  [[nodiscard]] Status status(std::string_view what) const {
    return ok() ? Status{}
                : error(ErrorCode::corrupt, what, ": ", why_, " at byte ", at_, " of ",
                        text_.size());
  }

  /// Consumes a character if it is the next one after blanks.
  [[nodiscard]] bool take(char wanted) noexcept {
    skip_blanks();
    if (!ok() || at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) noexcept {
    if (!take(wanted)) fail("a character that JSON does not have here");
  }
  /// Whether another element of a list follows; consumes the comma or the end.
  [[nodiscard]] bool more(char end) noexcept {
    if (take(',')) return ok();
    expect(end);
    return false;
  }
  /// Fails unless only blanks are left.
  void finish() noexcept {
    skip_blanks();
    if (at_ != text_.size()) fail("text after the end of the JSON value");
  }

  /// A string, its escapes resolved, as UTF-8.
  [[nodiscard]] std::string string() {
    std::string out;
    expect('"');
    while (ok()) {
      if (at_ == text_.size()) {
        fail("a string without end");
        break;
      }
      const char c = text_[at_++];
      if (c == '"') return out;
      if (static_cast<unsigned char>(c) < 0x20) {
        fail("a control character in a string");
      } else if (c != '\\') {
        out += c;
      } else {
        escape(out);
      }
    }
    return {};
  }
  /// A natural number below 2^63; no sign, fraction, exponent or leading zero.
  [[nodiscard]] std::uint64_t natural() noexcept {
    skip_blanks();
    const std::size_t begin = at_;
    std::uint64_t out = 0;
    while (ok() && at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
      if (out > ((std::uint64_t{1} << 63) - 1 - digit) / 10) fail("a number of 2^63 or more");
      out = out * 10 + digit;
      ++at_;
    }
    if (at_ == begin || (text_[begin] == '0' && at_ > begin + 1)) fail("not a natural number");
    return ok() ? out : 0;
  }

 private:
  void skip_blanks() noexcept {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t'))
      ++at_;
  }
  [[nodiscard]] std::uint32_t four_hex() noexcept {
    std::uint32_t out = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = at_ < text_.size() ? text_[at_++] : '\0';
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("not four hexadecimal digits");
      out = out << 4U | static_cast<std::uint32_t>(digit & 15);
    }
    return out;
  }
  void escape(std::string& out) {
    static constexpr std::string_view names = "\"\\/bfnrt";
    static constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
    const char c = at_ < text_.size() ? text_[at_++] : '\0';
    if (const std::size_t i = names.find(c); c != '\0' && i != std::string_view::npos) {
      out += meanings[i];
      return;
    }
    if (c != 'u') return fail("an escape that JSON does not have");
    std::uint32_t code = four_hex();
    if (code >= 0xD800U && code < 0xDC00U && text_.substr(at_, 2) == "\\u") {
      at_ += 2;
      const std::uint32_t low = four_hex();
      if (low < 0xDC00U || low > 0xDFFFU) return fail("half a surrogate pair");
      code = 0x10000U + ((code - 0xD800U) << 10U) + (low - 0xDC00U);
    }
    if (code >= 0xD800U && code <= 0xDFFFU) return fail("half a surrogate pair");
    const auto put = [&out](std::uint32_t byte) {
      out += static_cast<char>(static_cast<unsigned char>(byte));
    };
    if (code < 0x80U) {
      put(code);
    } else if (code < 0x800U) {
      put(0xC0U | code >> 6U);
      put(0x80U | (code & 0x3FU));
    } else {
      if (code < 0x10000U) {
        put(0xE0U | code >> 12U);
      } else {
        put(0xF0U | code >> 18U);
        put(0x80U | (code >> 12U & 0x3FU));
      }
      put(0x80U | (code >> 6U & 0x3FU));
      put(0x80U | (code & 0x3FU));
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
  const char* why_ = nullptr;
};

/// Appends a text as a JSON string.
inline void append_json(std::string& out, std::string_view text) {
  static constexpr char digits[] = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out.append("\\u00");
      out += digits[static_cast<unsigned char>(c) >> 4U];
      out += digits[static_cast<unsigned char>(c) & 15U];
    } else {
      out += c;
    }
  }
  out += '"';
}

}  // namespace detail

KVMELD_NAMESPACE_END
