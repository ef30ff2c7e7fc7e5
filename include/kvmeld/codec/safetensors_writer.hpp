#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/codec/safetensors.hpp>

KVMELD_NAMESPACE_BEGIN

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
      return detail::error(ErrorCode::invalid_argument, "safetensors: ", tensor->bytes.size(),
                           " bytes do not fit type, shape or name of '", tensor->entry.name, "'");
    }
    if (header.size() > 1) header += ',';
    detail::append_json(header, tensor->entry.name);
    header.append(":{\"dtype\":\"").append(to_string(tensor->entry.type)).append("\",\"shape\":[");
    for (std::size_t d = 0; d < tensor->entry.shape.size(); ++d) {
      if (d > 0) header += ',';
      header += detail::decimal(tensor->entry.shape[d]);
    }
    header.append("],\"data_offsets\":[")
        .append(detail::decimal(at))
        .append(",")
        .append(detail::decimal(at + *bytes))
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

KVMELD_NAMESPACE_END
