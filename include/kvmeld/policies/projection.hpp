#pragma once

/// The Projection aligner: caches mapped from one model to another, chained, stored and composed.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/detail/projection.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/extend/bytes.hpp>
#include <kvmeld/policies/projection_map.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/safetensors.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// What the arithmetic of a map cannot read or write.
[[nodiscard]] inline Status check_elements(const Geometry& geometry, MapKind kind,
                                           const char* side) {
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      const bool moved = kind == MapKind::linear || shape.plane == Plane::key;
      const bool bad = kind == MapKind::linear ? shape.scales != ScaleScheme::none
                                               : block_elements(shape.type) > 1 ||
                                                     shape.scales == ScaleScheme::per_channel_group;
      if (moved && (shape.hadamard != 0 || bad)) {
        return error(
            ErrorCode::unsupported, "projection: ", side, " layer ", l, " holds ",
            to_string(shape.type), " in a Hadamard basis of ", shape.hadamard,
            ", or with scales that a map does not move; use floats in the model's own basis");
      }
    }
  }
  return {};
}

}  // namespace detail

/// Maps fragments of another model into the target's K/V, then puts them one after the other.
///
/// Y = W·X on de-rotated keys, and on values, of the source layers that the map names; keys are
/// rotated once, to their output position. Fragments that are the target's already pass untouched.
/// Token ids of another tokenizer are not known after it. What a source layer lacks of a token, the
/// target layers made of it lack too. Held back by the map's score: see `bar`.
///
/// O(tokens · numbers of the map), at plan time, in f32. `Chain{Projection{…}, TokenMatch{}}`
/// aligns otherwise. Errors of `accepts` and `transform`: `geometry_mismatch` (another model or
/// shape), `gate_refused` (a score below the bar, both figures in the message), `unsupported`,
/// `rope_length_dependent`, `payload_missing`, `non_finite`.
struct Projection {
  // the map is fixed by its digest, its application by the order of its sums
  static constexpr bool reproducible = true;

  std::shared_ptr<const ProjectionMap> map{};
  /// Least held-out attention cosine of the map; −1 takes any, measured or not. A permutation is
  /// exact and needs none.
  float bar = 0.9F;

  /// Whether the map leads from one geometry to the other and is good enough. O(layers).
  [[nodiscard]] Status accepts(const Geometry& from, const Geometry& to) const {
    if (map == nullptr)
      return extend::error(ErrorCode::invalid_argument, "projection: there is no map");
    if (from.tenant != to.tenant) {
      return extend::error(ErrorCode::geometry_mismatch, "projection: a cache of tenant '",
                           from.tenant, "' for one of '", to.tenant, "'");
    }
    KVMELD_TRY(extend::check_side(from, map->source(), "source"));
    KVMELD_TRY(extend::check_side(to, map->target(), "target"));
    KVMELD_TRY(detail::check_elements(from, map->kind(), "source"));
    KVMELD_TRY(detail::check_elements(to, map->kind(), "target"));
    if (map->kind() == MapKind::permutation)
      return check_same(detail::without_pairing(from), detail::without_pairing(to));
    const double score = map->record().attention_cosine;
    if (!(score >= static_cast<double>(bar))) {
      return extend::error(ErrorCode::gate_refused, "projection: the map's attention cosine on ",
                           map->record().held_out_tokens, " held-out tokens is ", score,
                           ", below the bar of ", bar, "; fit on more text, or lower the bar");
    }
    return {};
  }

  /// A payload in the target's geometry and element types: keys un-rotated and positions 0, or,
  /// from a permutation, rotated as they were at the positions that they had.
  [[nodiscard]] Result<Payload> transform(const Fragment& fragment, std::size_t payload,
                                          const Geometry& to) const {
    return transform(fragment, payload, to, best_isa());
  }
  /// The same by a given instruction set: bytes are equal.
  [[nodiscard]] Result<Payload> transform(const Fragment& fragment, std::size_t payload,
                                          const Geometry& to, Isa isa) const {
    const exec::FloatEnvironmentGuard guard;
    KVMELD_TRY(exec::check_float_environment());
    KVMELD_TRY(accepts(fragment.geometry(), to));
    if (payload >= fragment.payloads().size()) {
      return extend::error(ErrorCode::invalid_argument, "projection: payload ", payload, " of ",
                           fragment.payloads().size());
    }
    const Payload& source = fragment.payloads()[payload];
    if (source.bytes == nullptr)
      return extend::error(ErrorCode::payload_missing,
                           "projection: evicted payloads: ", fragment.id().hex());
    if (map->kind() == MapKind::permutation)
      return detail::permute_payload(fragment.geometry(), source, to);
    return detail::project_payload(*map, fragment.geometry(), source, to, isa);
  }

  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
                                        std::int64_t first_position) const {
    return Concat{}.align(ordered, first_position);
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Projection");
    const Digest128 named = map == nullptr ? Digest128{} : map->digest();
    hasher.value(named.low);
    hasher.value(named.high);
    hasher.value(bar);
  }
};

/// Several alignment policies as one: `Chain{Projection{map}, TokenMatch{}}` maps fragments of
/// another model, then lets matched tokens share an output token.
///
/// Transforms come from the one part that has them (`TransformForm`), the alignment from the last,
/// which sees mapped fragments in the target's geometry, without token ids where the tokenizers
/// differ. One pass: rows are projected when the plan is made and then read once.
template <class... Parts>
class Chain {
  static_assert(sizeof...(Parts) > 0, "kvmeld: a Chain needs at least one part");
  using Last = std::tuple_element_t<sizeof...(Parts) - 1, std::tuple<Parts...>>;
  static constexpr std::size_t transforms = (std::size_t{0} + ... + (TransformForm<Parts> ? 1 : 0));
  static constexpr std::size_t which = [] {
    constexpr bool has[] = {TransformForm<Parts>...};
    std::size_t i = 0;
    while (i + 1 < sizeof...(Parts) && !has[i]) ++i;
    return i;
  }();

 public:
  static_assert(AlignPolicy<Last>,
                "kvmeld: the last part of a Chain aligns, so it must be an AlignPolicy");
  static_assert(
      transforms <= 1,
      "kvmeld: two parts of a Chain transform; compose their maps into one: compose(a, b)");
  static_assert(transforms + 1 >= sizeof...(Parts),
                "kvmeld: a part of a Chain before the last neither aligns nor transforms: only the "
                "last part aligns");
  static_assert(sizeof...(Parts) == 1 || transforms == 0 || which + 1 < sizeof...(Parts),
                "kvmeld: a part of a Chain before the last does nothing: parts that transform come "
                "before the one that aligns");

  static constexpr bool reproducible = (Parts::reproducible && ...);
  static constexpr MetadataFields metadata = [] {
    MetadataFields all = MetadataFields::none;
    const auto add = [&]<class P>(std::type_identity<P>) {
      if constexpr (requires { P::metadata; }) all = all | P::metadata;
    };
    (add(std::type_identity<Parts>{}), ...);
    return all;
  }();

  Chain() = default;
  constexpr explicit(sizeof...(Parts) == 1) Chain(Parts... parts) : parts_(std::move(parts)...) {}

  [[nodiscard]] constexpr const std::tuple<Parts...>& parts() const noexcept { return parts_; }

  [[nodiscard]] Status accepts(const Geometry& from, const Geometry& to) const
      requires(transforms == 1) {
    return std::get<which>(parts_).accepts(from, to);
  }
  [[nodiscard]] Result<Payload> transform(const Fragment& fragment, std::size_t payload,
                                          const Geometry& to) const requires(transforms == 1) {
    return std::get<which>(parts_).transform(fragment, payload, to);
  }
  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
                                        std::int64_t first_position) const {
    return std::get<sizeof...(Parts) - 1>(parts_).align(ordered, first_position);
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Chain");
    hasher.value(static_cast<std::uint64_t>(sizeof...(Parts)));
    std::apply([&](const Parts&... parts) { (parts.digest(hasher), ...); }, parts_);
  }

 private:
  std::tuple<Parts...> parts_;
};

template <class... Parts>
Chain(Parts...) -> Chain<Parts...>;

namespace detail {

inline void write_blocks(extend::ByteWriter& w, const std::vector<MapBlock>& blocks) {
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
[[nodiscard]] inline std::vector<MapBlock> read_blocks(extend::ByteReader& r) {
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
inline void write_numbers(SafetensorsWriter& w, const std::string& name,
                          std::vector<std::uint64_t> shape, const std::vector<double>& numbers) {
  std::vector<float> narrow;
  for (const double x : numbers) {
    const auto f = static_cast<float>(x);
    if (static_cast<double>(f) != x) return w.floats<double>(name, std::move(shape), numbers);
    narrow.push_back(f);
  }
  w.floats<float>(name, std::move(shape), narrow);
}
/// A tensor of a given shape.
[[nodiscard]] inline Result<const StoredTensor*> find_shaped(const Safetensors& file,
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

[[nodiscard]] inline Result<LinearMap> read_matrix(const Safetensors& file,
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
[[nodiscard]] inline Result<std::shared_ptr<const ProjectionMap>> rounded_to_f32(
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
[[nodiscard]] inline Result<std::vector<std::byte>> to_safetensors(const ProjectionMap& map) {
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
  out.metadata("fit_tokens", extend::decimal(record.fit_tokens));
  out.metadata("held_out_tokens", extend::decimal(record.held_out_tokens));
  out.metadata("attention_cosine", extend::decimal(record.attention_cosine));
  out.metadata("downstream", extend::decimal(record.downstream));
  out.metadata("bar", extend::decimal(record.bar));
  extend::ByteWriter head;
  head.value(parts.kind);
  detail::visit_record(
      record, [&](const std::string& text) { head.text(text); },
      [&](const auto& value) { head.value(value); });
  extend::write_geometry(head, parts.source);
  extend::write_geometry(head, parts.target);
  head.varint(parts.matrices.size());
  head.varint(parts.layers.size());
  for (const LayerMap& layer : parts.layers) {
    detail::write_blocks(head, layer.key);
    detail::write_blocks(head, layer.value);
  }
  out.tensor("kvmeld.head", StoredType::u8, {head.size()}, head.written());
  for (std::size_t i = 0; i < parts.matrices.size(); ++i) {
    const LinearMap& m = parts.matrices[i];
    const std::string prefix = "matrix." + extend::decimal(i) + ".";
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
[[nodiscard]] inline Result<std::shared_ptr<const ProjectionMap>> projection_from_safetensors(
    std::span<const std::byte> bytes) {
  using extend::error;
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
  extend::ByteReader in((*head)->bytes);
  ProjectionParts parts;
  parts.kind = extend::read_enum(in, MapKind::permutation);
  detail::visit_record(
      parts.record, [&](std::string& text) { text = in.text(); },
      [&](auto& value) { value = in.value<std::remove_reference_t<decltype(value)>>(); });
  parts.source = extend::read_geometry(in);
  parts.target = extend::read_geometry(in);
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
    auto matrix = detail::read_matrix(*file, "matrix." + extend::decimal(i) + ".");
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

namespace detail {

/// The channel of a source head that a target channel is, for keys whose pairing changes.
[[nodiscard]] inline std::int32_t permuted_channel(const RopeSpec& from, const RopeSpec& to,
                                                   std::int32_t channel) noexcept {
  const std::int32_t c = channel - to.first_channel;
  if (from.kind == RopeKind::none || from.pairing == to.pairing || c < 0 || c >= to.rotary_channels)
    return channel;
  const std::int32_t half = to.rotary_channels / 2;
  if (to.pairing == RopePairing::half_split)
    return from.first_channel + (c < half ? 2 * c : 2 * (c - half) + 1);
  return from.first_channel + (c % 2 == 0 ? c / 2 : half + c / 2);
}

/// A permutation as matrices of zeros and ones, a block for each head.
[[nodiscard]] inline ProjectionParts as_matrices(const ProjectionParts& permutation) {
  ProjectionParts out{
      .source = permutation.source, .target = permutation.target, .record = permutation.record};
  for (std::size_t l = 0; l < out.target.layers.size(); ++l) {
    LayerMap& layer = out.layers.emplace_back();
    for (const PlaneShape& shape : out.target.layers[l].planes) {
      if (shape.channels == 0) continue;
      LinearMap matrix{.outputs = shape.channels, .inputs = shape.channels};
      matrix.weight.resize(static_cast<std::size_t>(shape.channels) *
                           static_cast<std::size_t>(shape.channels));
      for (std::int32_t c = 0; c < shape.channels; ++c) {
        const bool moves = shape.plane == Plane::key && shape.rotary;
        const std::int32_t in =
            moves ? permuted_channel(out.source.layers[l].rope, out.target.layers[l].rope, c) : c;
        matrix.weight[static_cast<std::size_t>(c) * static_cast<std::size_t>(shape.channels) +
                      static_cast<std::size_t>(in)] = 1;
      }
      const auto same = std::find(out.matrices.begin(), out.matrices.end(), matrix);
      const auto index = static_cast<std::uint32_t>(same - out.matrices.begin());
      if (same == out.matrices.end()) out.matrices.push_back(std::move(matrix));
      for (std::int32_t h = 0; h < shape.heads; ++h) {
        (shape.plane == Plane::key ? layer.key : layer.value)
            .push_back({h, index, {{static_cast<std::int32_t>(l), h}}});
      }
    }
  }
  return out;
}

/// A·B of a low rank as one matrix, row by row.
[[nodiscard]] inline std::vector<double> dense(const LinearMap& map) {
  std::vector<double> out(
      static_cast<std::size_t>(map.outputs) * static_cast<std::size_t>(map.inputs), 0.0);
  const auto columns = static_cast<std::size_t>(map.inputs);
  for (std::size_t o = 0; o < static_cast<std::size_t>(map.outputs); ++o) {
    for (std::size_t r = 0; r < static_cast<std::size_t>(map.rank); ++r) {
      const double a = map.weight[o * static_cast<std::size_t>(map.rank) + r];
      for (std::size_t i = 0; i < columns; ++i)
        out[o * columns + i] = fma(a, map.inner[r * columns + i], out[o * columns + i]);
    }
  }
  return out;
}

/// One block of `b` behind the blocks of `a` that make its inputs; matrices of `a` are dense.
[[nodiscard]] inline MapBlock compose_block(const ProjectionParts& a, const LinearMap& outer,
                                            const MapBlock& block, Plane plane,
                                            ProjectionParts& out) {
  MapBlock made{.first_head = block.first_head,
                .matrix = static_cast<std::uint32_t>(out.matrices.size())};
  // Where each hub head comes from, and which source heads that needs, each once.
  const auto origin = [&](const HeadRef& hub) {
    const LayerMap& layer = a.layers[static_cast<std::size_t>(hub.layer)];
    const std::vector<MapBlock>& blocks = plane == Plane::key ? layer.key : layer.value;
    std::size_t i = blocks.size() - 1;
    while (blocks[i].first_head > hub.head) --i;
    return &blocks[i];
  };
  std::int64_t columns = 0;
  std::vector<std::int64_t> first_column;
  for (const HeadRef& hub : block.inputs) {
    for (const HeadRef& in : origin(hub)->inputs) {
      if (std::find(made.inputs.begin(), made.inputs.end(), in) != made.inputs.end()) continue;
      made.inputs.push_back(in);
      first_column.push_back(columns);
      columns += find_plane(a.source.layers[static_cast<std::size_t>(in.layer)], plane)->channels;
    }
  }
  // The rows of what follows: all of W, or B of a low rank, whose A stays as it is.
  const std::vector<double>& left = outer.rank == 0 ? outer.weight : outer.inner;
  const auto rows = static_cast<std::size_t>(outer.rank == 0 ? outer.outputs : outer.rank);
  std::vector<double> product(rows * static_cast<std::size_t>(columns), 0.0);
  std::vector<double> bias = outer.bias.empty()
                                 ? std::vector<double>(static_cast<std::size_t>(outer.outputs), 0.0)
                                 : outer.bias;
  std::vector<double> shift(rows, 0.0);  // what the biases of `a` become
  std::size_t hub_column = 0;
  for (const HeadRef& hub : block.inputs) {
    const MapBlock& from = *origin(hub);
    const LinearMap& inner = a.matrices[from.matrix];
    const auto channels = static_cast<std::size_t>(
        find_plane(a.target.layers[static_cast<std::size_t>(hub.layer)], plane)->channels);
    const std::size_t first_row = static_cast<std::size_t>(hub.head - from.first_head) * channels;
    for (std::size_t c = 0; c < channels; ++c) {
      const double* const row =
          inner.weight.data() + (first_row + c) * static_cast<std::size_t>(inner.inputs);
      for (std::size_t r = 0; r < rows; ++r) {
        const double w = left[r * static_cast<std::size_t>(outer.inputs) + hub_column + c];
        if (!inner.bias.empty()) shift[r] = fma(w, inner.bias[first_row + c], shift[r]);
        std::size_t i = 0;
        for (const HeadRef& in : from.inputs) {
          const auto at = static_cast<std::size_t>(
              std::find(made.inputs.begin(), made.inputs.end(), in) - made.inputs.begin());
          double* const to = product.data() + r * static_cast<std::size_t>(columns) +
                             static_cast<std::size_t>(first_column[at]);
          const auto n = static_cast<std::size_t>(
              find_plane(a.source.layers[static_cast<std::size_t>(in.layer)], plane)->channels);
          for (std::size_t k = 0; k < n; ++k) to[k] = fma(w, row[i + k], to[k]);
          i += n;
        }
      }
    }
    hub_column += channels;
  }
  if (outer.rank == 0) {
    for (std::size_t r = 0; r < rows; ++r) bias[r] += shift[r];
  } else {
    for (std::size_t o = 0; o < bias.size(); ++o) {
      for (std::size_t r = 0; r < rows; ++r)
        bias[o] = fma(outer.weight[o * rows + r], shift[r], bias[o]);
    }
  }
  const bool biased = std::any_of(bias.begin(), bias.end(), [](double x) { return x != 0; });
  LinearMap matrix{
      .outputs = outer.outputs, .inputs = static_cast<std::int32_t>(columns), .rank = outer.rank};
  matrix.weight = outer.rank == 0 ? std::move(product) : outer.weight;
  if (outer.rank != 0) matrix.inner = std::move(product);
  if (biased) matrix.bias = std::move(bias);
  out.matrices.push_back(std::move(matrix));
  return made;
}

}  // namespace detail

/// One map for two, source → hub → target, as products in f64: with a hub, n models need n maps to
/// it and n from it, not n².
///
/// A low rank of the second map stays; the first map's becomes dense. The record says nothing of
/// the pair's score: measure it, and `with_record`. Two permutations give their product as
/// matrices. O(numbers of b · inputs of a). Errors: `geometry_mismatch` where the first map does
/// not end where the second begins; those of `make`.
[[nodiscard]] inline Result<std::shared_ptr<const ProjectionMap>> compose(const ProjectionMap& a,
                                                                          const ProjectionMap& b) {
  KVMELD_TRY(extend::check_side(a.target(), b.source(), "source"));
  ProjectionParts first =
      a.kind() == MapKind::permutation ? detail::as_matrices(a.parts()) : a.parts();
  ProjectionParts second =
      b.kind() == MapKind::permutation ? detail::as_matrices(b.parts()) : b.parts();
  ProjectionParts out{.source = std::move(first.source), .target = second.target};
  first.source = out.source;
  for (LinearMap& matrix : first.matrices) {
    if (matrix.rank == 0) continue;
    matrix.weight = detail::dense(matrix);
    matrix.inner.clear();
    matrix.rank = 0;
  }
  for (const LayerMap& layer : second.layers) {
    LayerMap& made = out.layers.emplace_back();
    for (const MapBlock& block : layer.key) {
      made.key.push_back(
          detail::compose_block(first, second.matrices[block.matrix], block, Plane::key, out));
    }
    for (const MapBlock& block : layer.value) {
      made.value.push_back(
          detail::compose_block(first, second.matrices[block.matrix], block, Plane::value, out));
    }
  }
  out.record.method = "composed of " + a.digest().hex() + " and " + b.digest().hex();
  return ProjectionMap::make(std::move(out));
}

namespace gradients {

/// Gradients of a loss through `apply`, in f64: from dL/dy to dL/dx and dL/d(W, A, B, b).
///
/// Of the un-rotated rows that a map works on: a rotation's transpose rotates by the opposite
/// angle. O(tokens · outputs · inputs).
/// @param x  (tokens, inputs)
/// @param dy (tokens, outputs)
/// @param dx (tokens, inputs), written
/// @param dmap gradients of the map's numbers, in a map of equal shape; they are added to what it
/// holds Errors: those of `validate`; `invalid_argument` where `dmap` has another shape.
[[nodiscard]] inline Status vjp(const LinearMap& map, std::int64_t tokens, const double* x,
                                const double* dy, double* dx, LinearMap& dmap) {
  KVMELD_TRY(validate(map));
  if (dmap.outputs != map.outputs || dmap.inputs != map.inputs || dmap.rank != map.rank ||
      dmap.weight.size() != map.weight.size() || dmap.inner.size() != map.inner.size() ||
      dmap.bias.size() != map.bias.size()) {
    return extend::error(ErrorCode::invalid_argument, "the gradient of a matrix of ", map.outputs,
                         " x ", map.inputs, ", rank ", map.rank, " was given as ", dmap.outputs,
                         " x ", dmap.inputs, ", rank ", dmap.rank);
  }
  // d_in = Wᵀ·d_out; dW += d_out · inᵀ
  const auto back = [](const std::vector<double>& w, std::vector<double>& dw, std::int32_t rows,
                       std::int32_t columns, const double* in, const double* d_out, double* d_in) {
    for (std::int32_t c = 0; c < columns; ++c) d_in[c] = 0;
    for (std::int32_t r = 0; r < rows; ++r) {
      const auto at = static_cast<std::size_t>(r) * static_cast<std::size_t>(columns);
      for (std::int32_t c = 0; c < columns; ++c) {
        const std::size_t i = at + static_cast<std::size_t>(c);
        d_in[c] = fma(w[i], d_out[r], d_in[c]);
        dw[i] = fma(d_out[r], in[c], dw[i]);
      }
    }
  };
  const LinearMap inner{.outputs = map.rank, .inputs = map.inputs, .weight = map.inner};
  std::vector<double> middle(static_cast<std::size_t>(map.rank));
  std::vector<double> d_middle(middle.size());
  for (std::int64_t t = 0; t < tokens; ++t, x += map.inputs, dx += map.inputs, dy += map.outputs) {
    for (std::size_t o = 0; o < map.bias.size(); ++o) dmap.bias[o] += dy[o];
    if (map.rank == 0) {
      back(map.weight, dmap.weight, map.outputs, map.inputs, x, dy, dx);
      continue;
    }
    apply(inner, x, middle.data());
    back(map.weight, dmap.weight, map.outputs, map.rank, middle.data(), dy, d_middle.data());
    back(map.inner, dmap.inner, map.rank, map.inputs, x, d_middle.data(), dx);
  }
  return {};
}

}  // namespace gradients

KVMELD_NAMESPACE_END
