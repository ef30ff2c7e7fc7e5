#pragma once

/// Readers and writers of bytes within bounds, of geometries, and of UTF-8.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace extend {

/// Reads what `ByteWriter` wrote, from untrusted bytes: every length is checked before it is used.
///
/// The first failure is kept, and later reads return zeros without reading, so that a parser checks
/// `status()` once at its end. Before it allocates by a count, it reads the count by `count`, which
/// checks it.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) noexcept
      : rest_(bytes), whole_(bytes.size()) {}

  [[nodiscard]] bool ok() const noexcept { return code_ == ErrorCode::ok; }
  [[nodiscard]] std::size_t remaining() const noexcept { return rest_.size(); }
  [[nodiscard]] std::size_t offset() const noexcept { return whole_ - rest_.size(); }

  template <class T>
  requires std::is_arithmetic_v<T>
  [[nodiscard]] T value() noexcept {
    T out{};
    if (const auto from = bytes(sizeof(T)); from.size() == sizeof(T))
      std::memcpy(&out, from.data(), sizeof(T));
    return out;
  }
  [[nodiscard]] std::uint64_t varint() noexcept {
    std::uint64_t out = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = value<std::uint8_t>();
      if (shift == 63 && byte > 1) break;
      out |= static_cast<std::uint64_t>(byte & 0x7FU) << shift;
      if (byte < 0x80U) {
        if (byte == 0 && shift > 0) break;  // one form for each number
        return ok() ? out : 0;
      }
    }
    fail(ErrorCode::corrupt);
    return 0;
  }
  /// A number of elements that follow, each of at least `element_bytes`: refused where the bytes
  /// cannot hold so many.
  [[nodiscard]] std::size_t count(std::size_t element_bytes) noexcept {
    const std::uint64_t n = varint();
    if (ok() && n > rest_.size() / (element_bytes == 0 ? 1 : element_bytes))
      fail(ErrorCode::truncated);
    return ok() ? static_cast<std::size_t>(n) : 0;
  }
  /// The next `n` bytes, empty where there are fewer.
  [[nodiscard]] std::span<const std::byte> bytes(std::size_t n) noexcept {
    if (ok() && n > rest_.size()) fail(ErrorCode::truncated);
    if (!ok()) return {};
    const auto out = rest_.first(n);
    rest_ = rest_.subspan(n);
    return out;
  }
  [[nodiscard]] std::string text() {
    const auto from = bytes(count(1));
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  [[nodiscard]] std::vector<T> values() {
    const std::size_t n = count(sizeof(T));
    const auto from = bytes(n * sizeof(T));
    std::vector<T> out(from.size() / sizeof(T));
    if (!from.empty()) std::memcpy(out.data(), from.data(), from.size());
    return out;
  }

  /// Records that what was read contradicts itself.
  void fail(ErrorCode code) noexcept {
    if (!ok()) return;
    code_ = code;
    failed_at_ = offset();
    rest_ = {};
  }
  /// The first failure, with its byte offset. `what` names the thing that was being read.
  [[nodiscard]] Status status(std::string_view what) const {
    if (ok()) return {};
    return extend::error(code_, what, ": ", to_string(code_), " at byte ", failed_at_, " of ",
                         whole_);
  }
  /// As `status`, and `oversized` where bytes are left.
  [[nodiscard]] Status finish(std::string_view what) const {
    if (ok() && !rest_.empty())
      return extend::error(ErrorCode::oversized, what, ": ", rest_.size(),
                           " bytes after its end at byte ", offset());
    return status(what);
  }

 private:
  std::span<const std::byte> rest_;
  std::size_t whole_ = 0;
  std::size_t failed_at_ = 0;
  ErrorCode code_ = ErrorCode::ok;
};

/// Appends values as the wire has them: integers and floats little-endian and unpadded, counts as
/// LEB128 varints.
class ByteWriter {
 public:
  template <class T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void value(T value) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  /// Seven bits a byte, low ones first: small numbers take one byte.
  void varint(std::uint64_t value) {
    for (; value >= 0x80U; value >>= 7U) bytes_.push_back(static_cast<std::byte>(value | 0x80U));
    bytes_.push_back(static_cast<std::byte>(value));
  }
  void reserve(std::size_t total) { bytes_.reserve(total); }
  void bytes(std::span<const std::byte> more) {
    bytes_.insert(bytes_.end(), more.begin(), more.end());
  }
  /// Count as varint, then the bytes.
  void text(std::string_view text) {
    varint(text.size());
    bytes(std::as_bytes(std::span(text.data(), text.size())));
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  void values(std::span<const T> all) {
    varint(all.size());
    bytes(std::as_bytes(all));
  }

  [[nodiscard]] std::span<const std::byte> written() const noexcept { return bytes_; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_.size(); }
  [[nodiscard]] std::vector<std::byte> take() noexcept { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace extend

namespace detail {

/// Largest memory of a decoded geometry: equal layers are written once and referred to, so few
/// bytes can describe many layers.
inline constexpr std::size_t max_geometry_bytes = std::size_t{64} << 20;

inline void write_rope(extend::ByteWriter& w, const RopeSpec& rope) {
  w.value(rope.kind);
  w.value(rope.pairing);
  w.value(rope.first_channel);
  w.value(rope.rotary_channels);
  w.value(rope.base);
  w.value(rope.scaling);
  w.value(rope.factor);
  w.value(rope.original_context);
  w.value(rope.low_freq_factor);
  w.value(rope.high_freq_factor);
  w.value(rope.beta_fast);
  w.value(rope.beta_slow);
  w.value(static_cast<std::uint8_t>(rope.yarn_truncate));
  w.value(rope.attention_factor);
  w.values(std::span<const float>(rope.short_factors));
  w.values(std::span<const float>(rope.long_factors));
  w.values(std::span<const float>(rope.factors));
}

}  // namespace detail

namespace extend {

/// An enumerator up to `last`; any other value fails the reader.
template <class E>
[[nodiscard]] E read_enum(extend::ByteReader& r, E last) noexcept {
  const auto raw = r.value<std::uint8_t>();
  if (raw > static_cast<std::uint8_t>(last)) {
    r.fail(ErrorCode::unknown_field);
    return E{};
  }
  return static_cast<E>(raw);
}

/// A byte that is 0 or 1; any other fails the reader as `corrupt`.
[[nodiscard]] inline bool read_bool(extend::ByteReader& r) noexcept {
  const auto raw = r.value<std::uint8_t>();
  if (raw > 1) r.fail(ErrorCode::corrupt);
  return raw == 1;
}

}  // namespace extend

namespace detail {

[[nodiscard]] inline RopeSpec read_rope(extend::ByteReader& r) {
  RopeSpec rope;
  rope.kind = read_enum(r, RopeKind::multi_axis);
  rope.pairing = read_enum(r, RopePairing::half_split);
  rope.first_channel = r.value<std::int32_t>();
  rope.rotary_channels = r.value<std::int32_t>();
  rope.base = r.value<double>();
  rope.scaling = read_enum(r, RopeScaling::explicit_factors);
  rope.factor = r.value<double>();
  rope.original_context = r.value<std::int32_t>();
  rope.low_freq_factor = r.value<double>();
  rope.high_freq_factor = r.value<double>();
  rope.beta_fast = r.value<double>();
  rope.beta_slow = r.value<double>();
  rope.yarn_truncate = read_bool(r);
  rope.attention_factor = r.value<double>();
  rope.short_factors = r.values<float>();
  rope.long_factors = r.values<float>();
  rope.factors = r.values<float>();
  // a NaN differs from itself, so such a cache could never be merged
  if (!(rope == rope)) r.fail(ErrorCode::corrupt);
  return rope;
}

inline void write_layer(extend::ByteWriter& w, const LayerShape& layer) {
  w.value(layer.key_form);
  w.value(layer.window);
  write_rope(w, layer.rope);
  w.varint(layer.planes.size());
  for (const PlaneShape& p : layer.planes) {
    w.value(p.plane);
    w.value(p.type);
    w.value(p.heads);
    w.value(p.channels);
    w.value(static_cast<std::uint8_t>(p.rotary));
    w.value(p.scales);
    w.value(p.scale_group);
    w.value(p.hadamard);
  }
}

[[nodiscard]] inline LayerShape read_layer(extend::ByteReader& r) {
  LayerShape layer;
  layer.key_form = read_enum(r, KeyForm::pre_rope);
  layer.window = r.value<std::int32_t>();
  layer.rope = read_rope(r);
  for (std::size_t n = r.count(20); r.ok() && n > 0; --n) {
    PlaneShape p;
    p.plane = read_enum(r, Plane::scale);
    p.type = read_enum(r, ElementType::q8_0);
    p.heads = r.value<std::int32_t>();
    p.channels = r.value<std::int32_t>();
    p.rotary = read_bool(r);
    p.scales = read_enum(r, ScaleScheme::per_channel_group);
    p.scale_group = r.value<std::int32_t>();
    p.hadamard = r.value<std::int32_t>();
    layer.planes.push_back(p);
  }
  return layer;
}

[[nodiscard]] inline std::size_t layer_memory(const LayerShape& layer) noexcept {
  const std::size_t factors =
      layer.rope.short_factors.size() + layer.rope.long_factors.size() + layer.rope.factors.size();
  return sizeof(LayerShape) + factors * sizeof(float) + layer.planes.size() * sizeof(PlaneShape);
}

}  // namespace detail

namespace extend {

/// Every field of a geometry in the order of its declaration; equal layers are written once.
/// docs/wire.md has the bytes.
inline void write_geometry(extend::ByteWriter& w, const Geometry& geometry) {
  w.text(geometry.model);
  w.text(geometry.tokenizer);
  w.text(geometry.tenant);
  w.value(geometry.bos);
  w.value(geometry.trained_context);
  w.values(std::span<const TokenId>(geometry.placeholders));
  std::vector<std::vector<std::byte>> distinct;
  std::vector<std::size_t> index;
  for (const LayerShape& layer : geometry.layers) {
    extend::ByteWriter
        one;  // bytes are compared, not values: 0 and -0 are equal but have different ids
    detail::write_layer(one, layer);
    const auto same = std::find_if(distinct.begin(), distinct.end(), [&](const auto& known) {
      return std::ranges::equal(known, one.written());
    });
    index.push_back(static_cast<std::size_t>(same - distinct.begin()));
    if (same == distinct.end()) distinct.push_back(one.take());
  }
  w.varint(distinct.size());
  for (const auto& layer : distinct) w.bytes(layer);
  w.varint(index.size());
  for (const std::size_t i : index) w.varint(i);
}

/// Reads what `write_geometry` wrote; a failure is kept in the reader. The caller runs `validate`
/// on the result.
[[nodiscard]] inline Geometry read_geometry(extend::ByteReader& r) {
  Geometry geometry;
  geometry.model = r.text();
  geometry.tokenizer = r.text();
  geometry.tenant = r.text();
  geometry.bos = r.value<TokenId>();
  geometry.trained_context = r.value<std::int64_t>();
  geometry.placeholders = r.values<TokenId>();
  std::vector<LayerShape> distinct;
  for (std::size_t n = r.count(81); r.ok() && n > 0; --n) distinct.push_back(detail::read_layer(r));
  std::size_t memory = 0;
  for (std::size_t n = r.count(1); r.ok() && n > 0; --n) {
    const std::uint64_t i = r.varint();
    if (i >= distinct.size()) r.fail(ErrorCode::corrupt);
    if (!r.ok()) break;
    memory += detail::layer_memory(distinct[static_cast<std::size_t>(i)]);
    if (memory > detail::max_geometry_bytes) {
      r.fail(ErrorCode::oversized);
      break;
    }
    geometry.layers.push_back(distinct[static_cast<std::size_t>(i)]);
  }
  return geometry;
}

/// The first code point of a text, and its length in bytes: 0 bytes where the text is empty or not
/// UTF-8 there (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF).
struct CodePoint {
  char32_t value = 0;
  std::size_t bytes = 0;
};

/// The first code point of a text, and its bytes; 0 bytes where the text is empty or no UTF-8.
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

/// Whether all of a text is UTF-8, without surrogates and overlong forms. O(bytes).
[[nodiscard]] inline bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const CodePoint c = first_code_point(text);
    if (c.bytes == 0) return false;
    text.remove_prefix(c.bytes);
  }
  return true;
}

}  // namespace extend

KVMELD_NAMESPACE_END
