#pragma once

/// Error codes, messages and results: how every function of the library says that it failed.

#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

// Numbers as text, for identities, files, metrics pages and messages. No header calls `printf`,
// `strtod`, streams or `std::to_string` (tests/unit/locale.cpp checks it), because they follow the
// process's locale and print six digits of a double.

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

}  // namespace detail

namespace extend {

/// The shortest digits that read back as the same number, in every locale.
template <class Number>
requires std::is_arithmetic_v<Number>
[[nodiscard]] std::string decimal(Number number) {
  std::string out;
  detail::append_decimal(out, number);
  return out;
}

/// Parses the whole text as a number, with '.' as decimal point in every locale. Empty where the
/// text is anything else, or the number is out of range.
template <class Number>
requires std::is_arithmetic_v<Number>
[[nodiscard]] std::optional<Number> parse_decimal(std::string_view text) noexcept {
  Number number{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace extend

/// Why a call failed. Each cause has its own code; the message of the `Status` holds the offending
/// number.
enum class ErrorCode : std::uint8_t {
  ok = 0,
  invalid_argument,   ///< a parameter outside its documented range
  geometry_mismatch,  ///< two caches, fragments or targets differ in model, shape, dtype, rope or
                      ///< tenant
  unknown_field,      ///< an enumerator or version that this build does not know
  unsupported,        ///< known, but not possible here (the message says what to do instead)
  unknown_layout,     ///< this build does not know the declared layout
  truncated,          ///< bytes end before their declared length
  oversized,          ///< bytes continue past their declared end, or declare more than the bound
  corrupt,            ///< bytes contradict themselves
  token_count_mismatch,  ///< the numbers of token ids, positions and K/V rows differ
  duplicate_position,    ///< two tokens claim one position
  position_gap,          ///< positions are not consecutive where they must be
  duplicate_bos,         ///< a second beginning-of-sequence token would enter the context
  non_finite,            ///< NaN or infinity in a payload, weight or score
  aliasing,              ///< output overlaps an input
  output_too_small,      ///< the output view holds fewer tokens or bytes than the plan needs
  workspace_too_small,   ///< the workspace is smaller than `Plan::workspace_bytes()`
  prefix_conflict,       ///< two prefixes in one set, or fragments sealed behind different ones
  prefix_missing,   ///< fragments name a prefix that is neither in the set nor held by the engine
  payload_missing,  ///< the set knows the id, but its bytes are evicted
  id_mismatch,      ///< bytes do not hash to the id that they claim
  hash_mismatch,    ///< sets or fragments were identified by different content hashes
  tokens_required,  ///< the policy needs token ids and a fragment carries none
  rope_length_dependent,  ///< frequencies would change with the new length, so stored keys cannot
                          ///< be shifted
  rope_unsupported,       ///< a position scheme that cannot be shifted (several axes)
  rope_mismatch,          ///< the declared rope does not explain the engine's keys
  float_environment,      ///< the process computes with flush-to-zero or value-changing options
  engine_failure,         ///< the inference engine returned an error
  probe_failed,           ///< the engine did not return the rows that were written
  dot_reused,  ///< one dot names two operations: a restarted agent took an old epoch, or a peer is
               ///< Byzantine
  quota_exceeded,   ///< an author published more operations or bytes than the replica accepts from
                    ///< one author
  merger_mismatch,  ///< replicas or members of a round render with different mergers
  not_found,        ///< the store or peer does not have what was asked for
  unavailable,  ///< a store, peer or server cannot be reached now; nothing that was acknowledged is
                ///< lost
  timed_out,    ///< the deadline passed first
  store_full,   ///< a store or disk refuses more bytes
  unauthenticated,   ///< a message carries no valid authentication tag, or another namespace
  version_mismatch,  ///< bytes of a newer major version than this build reads
  gate_refused,      ///< a projection between models fails its threshold on held-out data
  template_syntax,   ///< a prompt template with a brace that does not pair, or a slot that is no
                     ///< name
  slot_unknown,      ///< a value for a slot that the template does not have
  slot_missing,      ///< a slot without a value
  history_missing,   ///< a slot asks for an earlier turn than are kept
  context_exceeded,  ///< a prompt reaches beyond the positions that the model was trained on
  memory_space,      ///< a view's elements are in memory that this function cannot access (device
                     ///< memory on a host, or host memory in a kernel)
};

namespace detail {

/// In the order of the enumerators.
inline constexpr std::string_view error_names[] = {"ok",
                                                   "invalid_argument",
                                                   "geometry_mismatch",
                                                   "unknown_field",
                                                   "unsupported",
                                                   "unknown_layout",
                                                   "truncated",
                                                   "oversized",
                                                   "corrupt",
                                                   "token_count_mismatch",
                                                   "duplicate_position",
                                                   "position_gap",
                                                   "duplicate_bos",
                                                   "non_finite",
                                                   "aliasing",
                                                   "output_too_small",
                                                   "workspace_too_small",
                                                   "prefix_conflict",
                                                   "prefix_missing",
                                                   "payload_missing",
                                                   "id_mismatch",
                                                   "hash_mismatch",
                                                   "tokens_required",
                                                   "rope_length_dependent",
                                                   "rope_unsupported",
                                                   "rope_mismatch",
                                                   "float_environment",
                                                   "engine_failure",
                                                   "probe_failed",
                                                   "dot_reused",
                                                   "quota_exceeded",
                                                   "merger_mismatch",
                                                   "not_found",
                                                   "unavailable",
                                                   "timed_out",
                                                   "store_full",
                                                   "unauthenticated",
                                                   "version_mismatch",
                                                   "gate_refused",
                                                   "template_syntax",
                                                   "slot_unknown",
                                                   "slot_missing",
                                                   "history_missing",
                                                   "context_exceeded",
                                                   "memory_space"};
static_assert(std::size(error_names) == static_cast<std::size_t>(ErrorCode::memory_space) + 1);

}  // namespace detail

/// The name of a code as it is written in this header.
[[nodiscard]] constexpr std::string_view to_string(ErrorCode code) noexcept {
  const auto at = static_cast<std::size_t>(code);
  return at < std::size(detail::error_names) ? detail::error_names[at] : "unknown";
}

/// Success, or a code with a sentence that names the offending number and what to do.
class KVMELD_NODISCARD_CLASS Status {
 public:
  Status() = default;
  Status(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] bool ok() const noexcept { return code_ == ErrorCode::ok; }
  [[nodiscard]] explicit operator bool() const noexcept { return ok(); }
  /// Itself, so that a `Status` and a `Result` are read alike.
  [[nodiscard]] const Status& error() const noexcept { return *this; }
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

  /// The error that stands for a success `Status` returned where a value was expected.
  static Status no_value() {
    return {ErrorCode::invalid_argument, "a Result was made of a success without a value"};
  }

 private:
  ErrorCode code_ = ErrorCode::ok;
  std::string message_;
};

/// A value, or the `Status` that says why there is none. Reading the value of an error is
/// undefined.
template <class T>
class KVMELD_NODISCARD_CLASS Result {
 public:
  using value_type = T;

  Result(T value) : value_(std::move(value)), has_value_(true) {}  // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) {             // NOLINT: implicit on purpose
    if (status_.ok()) (void)(status_ = Status::no_value());
  }
  Result(ErrorCode code, std::string message) : status_(code, std::move(message)) {}

  Result(const Result& other) requires std::is_copy_constructible_v<T> : status_(other.status_) {
    if (other.has_value_) hold(other.value_);
  }
  Result(Result&& other) noexcept(std::is_nothrow_move_constructible_v<T>)
      : status_(std::move(other.status_)) {
    if (other.has_value_) hold(std::move(other.value_));
  }
  Result& operator=(const Result& other) requires std::is_copy_constructible_v<T> {
    return *this = Result(other);
  }
  Result& operator=(Result&& other) noexcept(std::is_nothrow_move_constructible_v<T>) {
    if (this == &other) return *this;
    Result taken(std::move(other));  // the old value may own `other`
    drop();
    (void)(status_ = std::move(taken.status_));
    if (taken.has_value_) hold(std::move(taken.value_));
    return *this;
  }
  ~Result() { drop(); }

  [[nodiscard]] bool ok() const noexcept { return has_value_; }
  [[nodiscard]] explicit operator bool() const noexcept { return has_value_; }
  [[nodiscard]] const Status& error() const noexcept { return status_; }
  [[nodiscard]] const Status& status() const noexcept { return status_; }

  [[nodiscard]] T& operator*() & noexcept { return expect(), value_; }
  [[nodiscard]] const T& operator*() const& noexcept { return expect(), value_; }
  [[nodiscard]] T&& operator*() && noexcept { return expect(), std::move(value_); }
  [[nodiscard]] T* operator->() noexcept { return expect(), __builtin_addressof(value_); }
  [[nodiscard]] const T* operator->() const noexcept {
    return expect(), __builtin_addressof(value_);
  }

 private:
  static_assert(!std::is_const_v<T> && !std::is_reference_v<T>);

  // Traps under the same option as `std::optional` of libstdc++.
  void expect() const noexcept {
#if defined(_GLIBCXX_ASSERTIONS)
    if (!has_value_) __builtin_trap();
#endif
  }
  template <class V>
  void hold(V&& value) {
    ::new (static_cast<void*>(__builtin_addressof(value_))) T(std::forward<V>(value));
    has_value_ = true;
  }
  void drop() noexcept {
    if (has_value_) value_.~T();
    has_value_ = false;
  }

  // Not std::optional: the compiler would instantiate its five base classes for every result type.
  union {
    T value_;
  };
  Status status_;
  bool has_value_ = false;
};

namespace extend {

/// One part of a message: a text, a number, or an enumerator's name. Refers to its argument without
/// a copy.
class MessagePart {
 public:
  MessagePart(const char* text) noexcept : kind_(Kind::literal) { text_ = text; }  // NOLINT
  template <class Text>
  requires std::convertible_to<const Text&, std::string_view> MessagePart(const Text& text)
  noexcept : kind_(Kind::text) {  // NOLINT: implicit on purpose
    const std::string_view view = text;
    text_ = view.data();
    size_ = view.size();
  }
  template <class Number>
  requires std::is_arithmetic_v<Number> MessagePart(Number number)
  noexcept {  // NOLINT: implicit on purpose
    if constexpr (std::same_as<Number, float>) {
      kind_ = Kind::single_number;
      float_ = number;
    } else if constexpr (std::floating_point<Number>) {
      kind_ = Kind::double_number;
      double_ = static_cast<double>(number);
    } else if constexpr (std::is_signed_v<Number>) {
      kind_ = Kind::signed_number;
      signed_ = number;
    } else {
      kind_ = Kind::unsigned_number;
      unsigned_ = number;
    }
  }
  /// An enumerator by its name, and by its number too where this build has no name for it.
  template <class Enum>
  requires std::is_enum_v<Enum> MessagePart(Enum value)
  noexcept : MessagePart(to_string(value)) {  // NOLINT
    kind_ = Kind::enumerator;
    signed_ = static_cast<std::int64_t>(value);
  }

  /// Appends the part to a message. O(its length).
  KVMELD_API void append_to(std::string& message) const;

 private:
  enum class Kind : std::uint8_t {
    literal,
    text,
    enumerator,
    signed_number,
    unsigned_number,
    single_number,
    double_number
  };

  const char* text_ = nullptr;
  std::size_t size_ = 0;
  union {
    std::int64_t signed_ = 0;
    std::uint64_t unsigned_;
    float float_;
    double double_;
  };
  Kind kind_ = Kind::text;
};

/// The error whose message is the concatenation of `count` parts. O(length of the message).
[[nodiscard]] KVMELD_API KVMELD_COLD Status error_of(ErrorCode code, const MessagePart* parts,
                                                     std::size_t count);

/// Builds an error whose message is the concatenation of texts, numbers and enumerators.
template <class... Parts>
[[nodiscard]] KVMELD_COLD Status error(ErrorCode code, const Parts&... parts) {
  const MessagePart all[] = {MessagePart(parts)..., MessagePart("")};  // an array has an element
  return error_of(code, all, sizeof...(parts));
}

// The elements of a vector, or of a pointer and a count, as a span. With `std::span`'s constructors
// the compiler checks the concepts of contiguous ranges wherever they are written, also in
// functions that nobody calls, and takes 2 to 3 MB of memory for each element type. With these
// functions it checks nothing before the calling function is instantiated.
/// The elements of a vector, to read.
template <class T>
[[nodiscard]] inline std::span<const T> span_of(const std::vector<T>& elements) noexcept {
  return {elements.data(), elements.size()};
}

template <class T>
[[nodiscard]] inline std::span<T> span_of(std::vector<T>& elements) noexcept {
  return {elements.data(), elements.size()};
}

template <class T>
[[nodiscard]] inline std::span<T> span_of(T* elements, std::size_t count) noexcept {
  return {elements, count};
}

}  // namespace extend

#if KVMELD_BODIES
namespace extend {

KVMELD_API void MessagePart::append_to(std::string& message) const {
  switch (kind_) {
    case Kind::literal:
      message += text_;
      return;
    case Kind::enumerator:
      message.append(text_, size_);
      if (std::string_view(text_, size_) == "unknown")
        detail::append_decimal(message += ' ', signed_);
      return;
    case Kind::text:
      message.append(text_, size_);
      return;
    case Kind::signed_number:
      detail::append_decimal(message, signed_);
      return;
    case Kind::unsigned_number:
      detail::append_decimal(message, unsigned_);
      return;
    case Kind::single_number:
      detail::append_decimal(message, float_);
      return;
    case Kind::double_number:
      detail::append_decimal(message, double_);
      return;
  }
}

KVMELD_API Status error_of(ErrorCode code, const MessagePart* parts, std::size_t count) {
  std::string message;
  for (std::size_t i = 0; i < count; ++i) parts[i].append_to(message);
  return Status(code, std::move(message));
}

}  // namespace extend
#endif

KVMELD_NAMESPACE_END

/// Returns from the enclosing function with the error of an expression that yields a `Status`.
#define KVMELD_TRY(expression)                                                               \
  do {                                                                                       \
    if (::kvmeld::Status kvmeld_status = (expression); !kvmeld_status) return kvmeld_status; \
  } while (false)
