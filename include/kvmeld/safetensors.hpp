#pragma once

/// Reading and writing of safetensors files, within bounds.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/detail/json.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>

KVMELD_NAMESPACE_BEGIN

// The safetensors format: a JSON header with names, types, shapes and offsets, then the tensors'
// bytes.
//
// Layout: header length (u64, little-endian), header (JSON, padded with blanks), data. Every data
// byte belongs to exactly one tensor. @see https://github.com/huggingface/safetensors for the
// format's description.

/// Element types of the format that this build knows.
enum class StoredType : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3,
  f8_e5m2,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean
};

/// The format's name of a type.
[[nodiscard]] constexpr std::string_view to_string(StoredType type) noexcept {
  constexpr std::string_view names[] = {"F64",     "F32", "F16", "BF16", "F8_E4M3",
                                        "F8_E5M2", "I64", "I32", "I16",  "I8",
                                        "U64",     "U32", "U16", "U8",   "BOOL"};
  return type <= StoredType::boolean ? names[static_cast<std::size_t>(type)]
                                     : std::string_view("unknown");
}
/// Bytes of one element.
[[nodiscard]] constexpr std::size_t element_bytes(StoredType type) noexcept {
  constexpr std::uint8_t sizes[] = {8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 8, 4, 2, 1, 1};
  return type <= StoredType::boolean ? sizes[static_cast<std::size_t>(type)] : 0;
}

/// One tensor of a file; its bytes are the file's.
struct StoredTensor {
  std::string name{};
  StoredType type = StoredType::f32;
  std::vector<std::uint64_t> shape{};  ///< row-major; empty: a scalar
  std::span<const std::byte> bytes{};

  [[nodiscard]] std::size_t elements() const noexcept { return bytes.size() / element_bytes(type); }
};

/// What a safetensors file holds: a view of its bytes, which must outlive it.
struct Safetensors {
  std::vector<std::pair<std::string, std::string>> metadata{};  ///< ascending by key
  std::vector<StoredTensor> tensors{};                          ///< ascending by name

  /// A tensor by name, or null. O(log tensors).
  [[nodiscard]] const StoredTensor* find(std::string_view name) const noexcept {
    const auto at =
        std::lower_bound(tensors.begin(), tensors.end(), name,
                         [](const StoredTensor& t, std::string_view n) { return t.name < n; });
    return at != tensors.end() && at->name == name ? &*at : nullptr;
  }
  /// The metadata under a key, or null.
  [[nodiscard]] const std::string* find_metadata(std::string_view key) const noexcept {
    for (const auto& [k, value] : metadata) {
      if (k == key) return &value;
    }
    return nullptr;
  }
};

namespace detail {

/// The longest header that the format's own reader takes.
inline constexpr std::uint64_t max_safetensors_header = 100'000'000;

struct TensorOffsets {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::size_t tensor = 0;
};

[[nodiscard]] inline StoredType stored_type(JsonReader& in) {
  const std::string name = in.string();
  for (std::uint8_t t = 0; t <= static_cast<std::uint8_t>(StoredType::boolean); ++t) {
    if (to_string(static_cast<StoredType>(t)) == name) return static_cast<StoredType>(t);
  }
  in.fail("an element type unknown to this build");
  return StoredType::u8;
}

/// The object behind a tensor's name.
inline TensorOffsets read_tensor_entry(JsonReader& in, StoredTensor& tensor) {
  TensorOffsets offsets;
  unsigned seen = 0;
  in.expect('{');
  do {
    const std::string key = in.string();
    in.expect(':');
    const unsigned field = key == "dtype"          ? 1U
                           : key == "shape"        ? 2U
                           : key == "data_offsets" ? 4U
                                                   : 0U;
    if (field == 0 || (seen & field) != 0)
      in.fail("a tensor's field that is unknown or there twice");
    seen |= field;
    if (field == 1) {
      tensor.type = stored_type(in);
    } else if (field == 2) {
      in.expect('[');
      if (in.take(']')) continue;
      do tensor.shape.push_back(in.natural());
      while (in.more(']'));
    } else if (field == 4) {
      in.expect('[');
      offsets.begin = in.natural();
      in.expect(',');
      offsets.end = in.natural();
      in.expect(']');
    }
  } while (in.ok() && in.more('}'));
  if (seen != 7) in.fail("a tensor without dtype, shape or data_offsets");
  return offsets;
}

/// Bytes that a type and shape need, or an error where they overflow.
[[nodiscard]] inline Result<std::uint64_t> stored_bytes(const StoredTensor& tensor) {
  std::uint64_t bytes = element_bytes(tensor.type);
  bool overflow = false;
  bool none = false;
  for (const std::uint64_t n : tensor.shape) {
    none = none || n == 0;
    if (n != 0) overflow = __builtin_mul_overflow(bytes, n, &bytes) || overflow;
  }
  if (none) return std::uint64_t{0};
  if (overflow)
    return error(ErrorCode::oversized, "safetensors: the shape of '", tensor.name,
                 "' has more elements than 64 bits count");
  return bytes;
}

}  // namespace detail

/// Reads a file's header and checks all of it: lengths against the bytes that are there, shapes
/// against offsets, that tensors neither overlap nor leave bytes out, that no name is there twice.
///
/// O(header · log tensors); copies no tensor. Errors: `truncated`, `oversized`, `corrupt`.
[[nodiscard]] inline Result<Safetensors> parse_safetensors(std::span<const std::byte> file) {
  using extend::error;
  if (file.size() < 8)
    return error(ErrorCode::truncated, "safetensors: ", file.size(),
                 " bytes, the header's length takes 8");
  std::uint64_t header = 0;
  std::memcpy(&header, file.data(), 8);
  if (header > detail::max_safetensors_header) {
    return error(ErrorCode::oversized, "safetensors: a header of ", header, " bytes; at most ",
                 detail::max_safetensors_header);
  }
  if (header > file.size() - 8)
    return error(ErrorCode::truncated, "safetensors: a header of ", header, " bytes in a file of ",
                 file.size());
  const auto data = file.subspan(8 + static_cast<std::size_t>(header));
  detail::JsonReader in(file.subspan(8, static_cast<std::size_t>(header)));
  Safetensors out;
  std::vector<detail::TensorOffsets> offsets;
  bool has_metadata = false;
  in.expect('{');
  if (!in.take('}')) {
    do {
      std::string name = in.string();
      in.expect(':');
      if (name == "__metadata__") {
        if (has_metadata) in.fail("__metadata__ twice");
        has_metadata = true;
        in.expect('{');
        if (in.take('}')) continue;
        do {
          std::string key = in.string();
          in.expect(':');
          out.metadata.emplace_back(std::move(key), in.string());
        } while (in.ok() && in.more('}'));
        continue;
      }
      out.tensors.push_back({std::move(name), StoredType::u8, {}, {}});
      offsets.push_back(detail::read_tensor_entry(in, out.tensors.back()));
      offsets.back().tensor = out.tensors.size() - 1;
    } while (in.ok() && in.more('}'));
  }
  in.finish();
  KVMELD_TRY(in.status("safetensors header"));
  std::sort(offsets.begin(), offsets.end(), [](const auto& a, const auto& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  std::uint64_t covered = 0;
  for (const detail::TensorOffsets& at : offsets) {
    StoredTensor& tensor = out.tensors[at.tensor];
    const auto bytes = detail::stored_bytes(tensor);
    if (!bytes) return bytes.error();
    if (at.end < at.begin || at.end - at.begin != *bytes) {
      return error(ErrorCode::corrupt, "safetensors: '", tensor.name, "' lies at ", at.begin,
                   " to ", at.end, ", its type and shape take ", *bytes, " bytes");
    }
    if (at.begin != covered) {
      return error(ErrorCode::corrupt, "safetensors: '", tensor.name, "' begins at ", at.begin,
                   " where the tensors before end at ", covered);
    }
    if (at.end > data.size())
      return error(ErrorCode::truncated, "safetensors: '", tensor.name, "' ends at ", at.end,
                   " of ", data.size(), " data bytes");
    tensor.bytes =
        data.subspan(static_cast<std::size_t>(at.begin), static_cast<std::size_t>(*bytes));
    covered = at.end;
  }
  if (covered != data.size())
    return error(ErrorCode::oversized, "safetensors: ", data.size() - covered,
                 " bytes belong to no tensor");
  std::sort(out.tensors.begin(), out.tensors.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  std::sort(out.metadata.begin(), out.metadata.end());
  for (std::size_t i = 1; i < out.tensors.size(); ++i) {
    if (out.tensors[i].name == out.tensors[i - 1].name)
      return error(ErrorCode::corrupt, "safetensors: two tensors named '", out.tensors[i].name,
                   "'");
  }
  for (std::size_t i = 1; i < out.metadata.size(); ++i) {
    if (out.metadata[i].first == out.metadata[i - 1].first)
      return error(ErrorCode::corrupt, "safetensors: metadata '", out.metadata[i].first, "' twice");
  }
  return out;
}

/// The numbers of a tensor of floats, in row-major order. Exact into double; into float, f64 is
/// rounded to nearest even.
///
/// Errors: `unsupported` for integers and booleans.
template <class Float>
[[nodiscard]] Result<std::vector<Float>> to_floats(const StoredTensor& tensor) {
  std::vector<Float> out(tensor.elements());
  if (tensor.type > StoredType::f8_e5m2) {
    return extend::error(ErrorCode::unsupported, "safetensors: '", tensor.name, "' holds ",
                         to_string(tensor.type), ", not floats");
  }
  if (tensor.type == StoredType::f64 && sizeof(Float) == 8) {
    if (!out.empty()) std::memcpy(out.data(), tensor.bytes.data(), tensor.bytes.size());
    return out;
  }
  constexpr ElementType types[] = {ElementType::f64,  ElementType::f32,     ElementType::f16,
                                   ElementType::bf16, ElementType::f8_e4m3, ElementType::f8_e5m2};
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<Float>(detail::load_element(types[static_cast<std::size_t>(tensor.type)],
                                                     tensor.bytes.data(),
                                                     static_cast<std::ptrdiff_t>(i)));
  }
  return out;
}

/// Collects tensors and metadata and makes a file of them; equal contents give equal bytes, in
/// whatever order they were added.
class SafetensorsWriter {
 public:
  /// @param value any text.
  void metadata(std::string_view key, std::string_view value) {
    metadata_.emplace_back(key, value);
  }
  /// Copies the bytes of a row-major tensor.
  void tensor(std::string_view name, StoredType type, std::vector<std::uint64_t> shape,
              std::span<const std::byte> bytes) {
    tensors_.push_back(
        {{std::string(name), type, std::move(shape), {}}, {bytes.begin(), bytes.end()}});
  }
  template <class Float>
  void floats(std::string_view name, std::vector<std::uint64_t> shape,
              std::span<const Float> numbers) {
    tensor(name, sizeof(Float) == 8 ? StoredType::f64 : StoredType::f32, std::move(shape),
           std::as_bytes(numbers));
  }
  /// The file. Errors: `invalid_argument` where bytes do not fit a shape, or a name is there twice.
  [[nodiscard]] Result<std::vector<std::byte>> finish() const;

 private:
  struct Owned {
    StoredTensor entry;
    std::vector<std::byte> bytes;
  };
  std::vector<std::pair<std::string, std::string>> metadata_;
  std::vector<Owned> tensors_;
};

inline Result<std::vector<std::byte>> SafetensorsWriter::finish() const {
  std::vector<const Owned*> order;
  for (const Owned& tensor : tensors_) order.push_back(&tensor);
  // Widest elements first, so that every tensor is aligned to its own.
  std::sort(order.begin(), order.end(), [](const Owned* a, const Owned* b) {
    const std::size_t x = element_bytes(a->entry.type);
    const std::size_t y = element_bytes(b->entry.type);
    return x != y ? x > y : a->entry.name < b->entry.name;
  });
  auto metadata = metadata_;
  std::sort(metadata.begin(), metadata.end());
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (std::size_t i = 0; i < metadata.size(); ++i) {
      if (i > 0) header += ',';
      detail::append_json(header, metadata[i].first);
      header += ':';
      detail::append_json(header, metadata[i].second);
    }
    header += '}';
  }
  std::uint64_t at = 0;
  for (const Owned* tensor : order) {
    const auto bytes = detail::stored_bytes(tensor->entry);
    if (!bytes || *bytes != tensor->bytes.size() || tensor->entry.name == "__metadata__") {
      return extend::error(ErrorCode::invalid_argument, "safetensors: ", tensor->bytes.size(),
                           " bytes do not fit type, shape or name of '", tensor->entry.name, "'");
    }
    if (header.size() > 1) header += ',';
    detail::append_json(header, tensor->entry.name);
    header.append(":{\"dtype\":\"").append(to_string(tensor->entry.type)).append("\",\"shape\":[");
    for (std::size_t d = 0; d < tensor->entry.shape.size(); ++d) {
      if (d > 0) header += ',';
      header += extend::decimal(tensor->entry.shape[d]);
    }
    header.append("],\"data_offsets\":[")
        .append(extend::decimal(at))
        .append(",")
        .append(extend::decimal(at + *bytes))
        .append("]}");
    at += *bytes;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::vector<std::byte> file(8 + header.size() + static_cast<std::size_t>(at));
  const auto length = static_cast<std::uint64_t>(header.size());
  std::memcpy(file.data(), &length, 8);
  std::memcpy(file.data() + 8, header.data(), header.size());
  std::size_t to = 8 + header.size();
  for (const Owned* tensor : order) {
    if (!tensor->bytes.empty())
      std::memcpy(file.data() + to, tensor->bytes.data(), tensor->bytes.size());
    to += tensor->bytes.size();
  }
  KVMELD_TRY(parse_safetensors(file).status());  // names that are there twice, a header too long
  return file;
}

/// All bytes of a file, at most `max_bytes`. For weights and maps; caches go through stores.
///
/// Errors: `not_found`, `unavailable` (reading failed), `oversized`.
[[nodiscard]] inline Result<std::vector<std::byte>> read_file_bytes(
    const std::string& path, std::size_t max_bytes = std::size_t{8} << 30U) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return extend::error(ErrorCode::not_found, "cannot open ", path);
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
    return extend::error(ErrorCode::unavailable, "cannot read ", path, " after byte ", out.size());
  if (got > 0)
    return extend::error(ErrorCode::oversized, path, " has more than ", max_bytes, " bytes");
  return out;
}

/// Makes or replaces a file. Errors: `unavailable`, where the file may be cut short.
[[nodiscard]] inline Status write_file_bytes(const std::string& path,
                                             std::span<const std::byte> bytes) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return extend::error(ErrorCode::unavailable, "cannot create ", path);
  const std::size_t put = bytes.empty() ? 0 : std::fwrite(bytes.data(), 1, bytes.size(), file);
  const bool closed = std::fclose(file) == 0;
  if (put != bytes.size() || !closed)
    return extend::error(ErrorCode::unavailable, "wrote ", put, " of ", bytes.size(), " bytes to ",
                         path);
  return {};
}

KVMELD_NAMESPACE_END
