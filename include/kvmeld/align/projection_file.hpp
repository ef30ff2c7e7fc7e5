#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/align/projection_map.hpp>
#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/codec/geometry_codec.hpp>
#include <kvmeld/codec/safetensors.hpp>
#include <kvmeld/codec/safetensors_writer.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

KVMELD_LAZY void write_blocks(ByteWriter& w, const std::vector<MapBlock>& blocks) {
  w.varint(blocks.size());
  for (const MapBlock& block : blocks) {
    w.value(block.first_head);
    w.value(block.matrix);
    w.varint(block.inputs.size());
    for (const HeadRef& in : block.inputs) {
      w.value(in.layer);
      w.value(in.head);
    }
  }
}
KVMELD_LAZY [[nodiscard]] std::vector<MapBlock> read_blocks(ByteReader& r) {
  std::vector<MapBlock> out;
  for (std::size_t n = r.count(9); r.ok() && n > 0; --n) {
    MapBlock& block = out.emplace_back();
    block.first_head = r.value<std::int32_t>();
    block.matrix = r.value<std::uint32_t>();
    for (std::size_t m = r.count(8); r.ok() && m > 0; --m) {
      HeadRef in;
      in.layer = r.value<std::int32_t>();
      in.head = r.value<std::int32_t>();
      block.inputs.push_back(in);
    }
  }
  return out;
}

/// Numbers as f32 where that loses nothing, else as f64.
KVMELD_LAZY void write_numbers(SafetensorsWriter& w, const std::string& name,
                               std::vector<std::uint64_t> shape,
                               const std::vector<double>& numbers) {
  std::vector<float> narrow;
  for (const double x : numbers) {
    const auto f = static_cast<float>(x);
    if (static_cast<double>(f) != x) return w.floats<double>(name, std::move(shape), numbers);
    narrow.push_back(f);
  }
  w.floats<float>(name, std::move(shape), narrow);
}
/// A tensor of a given shape.
KVMELD_LAZY [[nodiscard]] Result<const StoredTensor*> find_shaped(const Safetensors& file,
                                                                  const std::string& name,
                                                                  std::size_t dimensions) {
  const StoredTensor* const tensor = file.find(name);
  if (tensor == nullptr || tensor->shape.size() != dimensions) {
    return error(ErrorCode::corrupt, "projection file: no tensor '", name, "' of ", dimensions,
                 " dimensions");
  }
  for (const std::uint64_t n : tensor->shape) {
    if (n > (std::uint64_t{1} << 31U) - 1)
      return error(ErrorCode::oversized, "projection file: '", name, "' has a dimension of ", n);
  }
  return tensor;
}

KVMELD_LAZY [[nodiscard]] Result<LinearMap> read_matrix(const Safetensors& file,
                                                        const std::string& prefix) {
  LinearMap out;
  const bool low_rank = file.find(prefix + "inner") != nullptr;
  const auto weight = find_shaped(file, prefix + "weight", 2);
  if (!weight) return weight.error();
  auto numbers = to_floats<double>(**weight);
  if (!numbers) return numbers.error();
  out.outputs = static_cast<std::int32_t>((*weight)->shape[0]);
  out.inputs = static_cast<std::int32_t>((*weight)->shape[1]);
  out.weight = *std::move(numbers);
  if (low_rank) {
    const auto inner = find_shaped(file, prefix + "inner", 2);
    if (!inner) return inner.error();
    auto more = to_floats<double>(**inner);
    if (!more) return more.error();
    out.rank = out.inputs;
    out.inputs = static_cast<std::int32_t>((*inner)->shape[1]);
    out.inner = *std::move(more);
  }
  if (const StoredTensor* const bias = file.find(prefix + "bias"); bias != nullptr) {
    auto more = to_floats<double>(*bias);
    if (!more) return more.error();
    out.bias = *std::move(more);
  }
  return out;
}

}  // namespace detail

/// A map with every number rounded to f32: half the file, and the same bytes when it is applied.
KVMELD_LAZY [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> rounded_to_f32(
    const ProjectionMap& map) {
  ProjectionParts parts = map.parts();
  for (LinearMap& m : parts.matrices) {
    for (std::vector<double>* numbers : {&m.weight, &m.inner, &m.bias}) {
      for (double& x : *numbers) x = static_cast<double>(static_cast<float>(x));
    }
  }
  return ProjectionMap::make(std::move(parts));
}

/// A map as a safetensors file: matrices as `matrix.N.weight` (and `.inner`, `.bias`), geometries
/// and blocks as bytes (docs/wire.md describes geometries), and metadata for people: models,
/// method, data digest, scores. Exact: the digest survives.
///
/// O(numbers). Errors: those of `SafetensorsWriter::finish`.
KVMELD_LAZY [[nodiscard]] Result<std::vector<std::byte>> to_safetensors(const ProjectionMap& map) {
  const ProjectionParts& parts = map.parts();
  const MapRecord& record = parts.record;
  SafetensorsWriter out;
  out.metadata("kvmeld.projection", "2");  // 1 had no placeholders
  out.metadata("kvmeld.digest", map.digest().hex());
  out.metadata("source_model", parts.source.model);
  out.metadata("target_model", parts.target.model);
  out.metadata("source_tokenizer", parts.source.tokenizer);
  out.metadata("target_tokenizer", parts.target.tokenizer);
  out.metadata("method", record.method);
  out.metadata("fit_data", record.fit_data.hex());
  out.metadata("fit_tokens", detail::decimal(record.fit_tokens));
  out.metadata("held_out_tokens", detail::decimal(record.held_out_tokens));
  out.metadata("attention_cosine", detail::decimal(record.attention_cosine));
  out.metadata("downstream", detail::decimal(record.downstream));
  out.metadata("bar", detail::decimal(record.bar));
  ByteWriter head;
  head.value(parts.kind);
  detail::visit_record(
      record, [&](const std::string& text) { head.text(text); },
      [&](const auto& value) { head.value(value); });
  detail::write_geometry(head, parts.source);
  detail::write_geometry(head, parts.target);
  head.varint(parts.matrices.size());
  head.varint(parts.layers.size());
  for (const LayerMap& layer : parts.layers) {
    detail::write_blocks(head, layer.key);
    detail::write_blocks(head, layer.value);
  }
  out.tensor("kvmeld.head", StoredType::u8, {head.size()}, head.written());
  for (std::size_t i = 0; i < parts.matrices.size(); ++i) {
    const LinearMap& m = parts.matrices[i];
    const std::string prefix = "matrix." + detail::decimal(i) + ".";
    const auto size = [](std::int32_t n) { return static_cast<std::uint64_t>(n); };
    detail::write_numbers(out, prefix + "weight",
                          {size(m.outputs), size(m.rank == 0 ? m.inputs : m.rank)}, m.weight);
    if (m.rank != 0)
      detail::write_numbers(out, prefix + "inner", {size(m.rank), size(m.inputs)}, m.inner);
    if (!m.bias.empty()) detail::write_numbers(out, prefix + "bias", {size(m.outputs)}, m.bias);
  }
  return out.finish();
}

/// Reads what `to_safetensors` wrote and checks that it is the map that its digest names.
///
/// O(numbers). Errors: those of `parse_safetensors` and `ProjectionMap::make`; `unsupported` for a
/// file that is no map; `id_mismatch`.
KVMELD_LAZY [[nodiscard]] Result<std::shared_ptr<const ProjectionMap>> projection_from_safetensors(
    std::span<const std::byte> bytes) {
  using detail::error;
  const auto file = parse_safetensors(bytes);
  if (!file) return file.error();
  const std::string* const version = file->find_metadata("kvmeld.projection");
  const std::string* const digest = file->find_metadata("kvmeld.digest");
  if (version == nullptr || digest == nullptr)
    return error(ErrorCode::unsupported, "a file of ", file->tensors.size(),
                 " tensors without the metadata of a map");
  if (*version != "2")
    return error(ErrorCode::version_mismatch, "a map of version ", *version,
                 "; this build reads 2");
  const auto head = detail::find_shaped(*file, "kvmeld.head", 1);
  if (!head) return head.error();
  ByteReader in((*head)->bytes);
  ProjectionParts parts;
  parts.kind = detail::read_enum(in, MapKind::permutation);
  detail::visit_record(
      parts.record, [&](std::string& text) { text = in.text(); },
      [&](auto& value) { value = in.value<std::remove_reference_t<decltype(value)>>(); });
  parts.source = detail::read_geometry(in);
  parts.target = detail::read_geometry(in);
  const std::uint64_t matrices = in.varint();
  for (std::size_t n = in.count(2); in.ok() && n > 0; --n) {
    LayerMap& layer = parts.layers.emplace_back();
    layer.key = detail::read_blocks(in);
    layer.value = detail::read_blocks(in);
  }
  KVMELD_TRY(in.finish("projection file"));
  if (matrices > file->tensors.size())
    return error(ErrorCode::corrupt, "projection file: ", matrices, " matrices in ",
                 file->tensors.size(), " tensors");
  for (std::uint64_t i = 0; i < matrices; ++i) {
    auto matrix = detail::read_matrix(*file, "matrix." + detail::decimal(i) + ".");
    if (!matrix) return matrix.error();
    parts.matrices.push_back(*std::move(matrix));
  }
  auto map = ProjectionMap::make(std::move(parts));
  if (map && (*map)->digest().hex() != *digest) {
    return error(ErrorCode::id_mismatch, "projection file: its numbers have the digest ",
                 (*map)->digest().hex(), ", its metadata says ", *digest);
  }
  return map;
}

KVMELD_NAMESPACE_END
