// Hostile tensor files and maps. With -DKVMELD_LIBFUZZER and clang's -fsanitize=fuzzer this is a
// fuzzer; otherwise a test that mutates a fixed corpus for a fixed number of rounds, the same ones
// every time.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include <kvmeld/anchors/gain.hpp>
#include <kvmeld/policies/gate_weights.hpp>
#include <kvmeld/policies/learned.hpp>
#include <kvmeld/policies/projection.hpp>

#include "support/fuzz.hpp"

namespace {

using namespace kvmeld;
using test::Bytes;
using test::need;

const std::shared_ptr<const Geometry>& gain_geometry() {
  static const std::shared_ptr<const Geometry> shape =
      test::geometry({.layers = 2, .heads = 1, .channels = 4});
  return shape;
}
/// As many numbers as a file of weights needs: 0.25, 0.5, …
std::vector<float> numbers(std::size_t count) {
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = 0.25F * static_cast<float>(i + 1);
  return out;
}
void add_weights(std::vector<Bytes>& out) {
  for (const anchors::GainKind kind :
       {anchors::GainKind::identity, anchors::GainKind::ridge, anchors::GainKind::lstm}) {
    const std::int32_t hidden = kind == anchors::GainKind::lstm ? 2 : 0;
    const std::vector<anchors::GainScore> scores(2, {2.0, 1.0});
    const auto parameters = numbers(2 * anchors::GainPredictor::size(kind, hidden));
    const auto gain =
        anchors::GainPredictor::make(kind, hidden, 2, parameters, scores, gain_geometry()->model);
    out.push_back(*to_safetensors(**gain));
  }
  GateShape shapes[3];
  shapes[1].planes_apart = true;
  shapes[2].layers = 2;
  shapes[2].kind = GateKind::channel;
  for (GateShape& shape : shapes) {
    shape.hidden = 2;
    shape.key_channels = shape.value_channels = 3;
    out.push_back(*to_safetensors(
        **GateWeights::make(shape, numbers(static_cast<std::size_t>(shape.size())))));
  }
  const auto weights = numbers(static_cast<std::size_t>(WeightPredictor::size(3, 2)));
  out.push_back(*to_safetensors(**WeightPredictor::make(3, 2, weights)));
}

/// A file of one linear map of head size 2, one of a permutation, one of odd tensors; then of
/// gains, gates and weights.
const std::vector<Bytes>& corpus() {
  static const std::vector<Bytes> all = [] {
    std::vector<Bytes> out;
    const auto from = test::geometry({.layers = 1, .heads = 1, .channels = 2});
    const auto to = test::geometry(
        {.layers = 2, .heads = 2, .channels = 2, .pairing = RopePairing::interleaved});
    ProjectionParts parts{.source = *from, .target = *to};
    parts.matrices = {
        {.outputs = 4, .inputs = 2, .weight = {1, 2, 3, 4, 5, 6, 7, 0.1}, .bias = {1, 2, 3, 4}},
        {.outputs = 2, .inputs = 2, .rank = 1, .weight = {0.5, 1}, .inner = {1, 2}}};
    parts.layers.resize(2);
    for (LayerMap& layer : parts.layers) {
      layer.key = {{0, 0, {{0, 0}}}};
      layer.value = {{0, 1, {{0, 0}}}, {1, 1, {{0, 0}}}};
    }
    out.push_back(*to_safetensors(**ProjectionMap::make(parts)));
    auto other = *from;
    other.layers[0].rope.pairing = RopePairing::interleaved;
    out.push_back(*to_safetensors(
        **ProjectionMap::make({.source = *from, .target = other, .kind = MapKind::permutation})));
    SafetensorsWriter odd;
    odd.metadata("\"\\\n\x01", "\xF0\x9F\x98\x80");
    odd.tensor("a", StoredType::i64, {0, 3}, {});
    odd.tensor("b", StoredType::boolean, {}, Bytes(1));
    odd.tensor("c", StoredType::bf16, {2, 1, 2}, Bytes(8));
    out.push_back(*odd.finish());
    add_weights(out);
    return out;
  }();
  return all;
}

/// What was taken writes a file that gives the same weights, and that the same file.
template <class Read>
void try_weights_of(std::span<const std::byte> bytes, const Read& read) {
  const auto got = test::within(bytes.size(), 64, 16384, [&] { return read(bytes); });
  if (!got) return test::need_reason(got);
  const auto file = to_safetensors(**got);
  need(file.ok());
  const auto again = read(*file);
  need(again.ok() && *to_safetensors(**again) == *file);
}
void try_weights(std::span<const std::byte> bytes) {
  try_weights_of(bytes, [](auto file) {
    return kvmeld::anchors::gain_from_safetensors(file, *gain_geometry());
  });
  try_weights_of(bytes, [](auto file) { return gate_from_safetensors(file); });
  try_weights_of(bytes, [](auto file) { return predictor_from_safetensors(file); });
}

/// What is accepted is consistent: tensors lie in the file, and write the same file again.
void try_file(std::span<const std::byte> bytes) {
  const auto file = test::within(bytes.size(), 64, 16384, [&] { return parse_safetensors(bytes); });
  if (!file) return test::need_reason(file);
  SafetensorsWriter again;
  std::size_t total = 0;
  for (const StoredTensor& tensor : file->tensors) {
    need(tensor.bytes.empty() ||
         (tensor.bytes.data() >= bytes.data() &&
          tensor.bytes.data() + tensor.bytes.size() <= bytes.data() + bytes.size()));
    total += tensor.bytes.size();
    if (const auto numbers = to_floats<double>(tensor)) need(numbers->size() == tensor.elements());
    again.tensor(tensor.name, tensor.type, tensor.shape, tensor.bytes);
  }
  need(total <= bytes.size());
  for (const auto& [key, value] : file->metadata) again.metadata(key, value);
  const auto made = again.finish();
  if (made) {
    const auto second = parse_safetensors(*made);
    need(second.ok() && second->metadata == file->metadata &&
         second->tensors.size() == file->tensors.size());
  }
  const auto map =
      test::within(bytes.size(), 64, 16384, [&] { return projection_from_safetensors(bytes); });
  if (map)
    need((*projection_from_safetensors(*to_safetensors(**map)))->digest() == (*map)->digest());
  try_weights(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto* const first = reinterpret_cast<const std::byte*>(data);
  Bytes exact(first + 1, first + size);
  switch (data[0] % 3) {
    case 0:
      try_file(exact);
      break;
    case 1: {  // a header without its length, which a fuzzer would have to guess: the rest is data
      const std::size_t end = static_cast<std::size_t>(
          std::find(exact.begin(), exact.end(), std::byte{0}) - exact.begin());
      const std::uint64_t length = end;
      exact.insert(exact.begin(), 8, std::byte{0});
      std::memcpy(exact.data(), &length, 8);
      try_file(exact);
      break;
    }
    default: {  // edits of a good file: place (2 bytes) and new byte
      if (size < 2) return 0;
      Bytes good = corpus()[data[1] % corpus().size()];
      for (std::size_t i = 2; i + 2 < size; i += 3)
        good[(data[i] | static_cast<std::size_t>(data[i + 1]) << 8U) % good.size()] = first[i + 2];
      try_file(good);
    }
  }
  return 0;
}

/// By a header that is behind its length, and by edits of each good file.
const std::vector<Bytes>& test::fuzz_seeds() {
  static const std::vector<Bytes> all = [] {
    std::vector<Bytes> out;
    for (std::size_t i = 0; i < corpus().size(); ++i) {
      out.emplace_back(1, std::byte{0});
      put_bytes(out.back(), corpus()[i]);
      out.push_back({std::byte{2}, static_cast<std::byte>(i)});
    }
    return out;
  }();
  return all;
}

#ifndef KVMELD_LIBFUZZER
#include "support/catch.hpp"

TEST_CASE("mutated tensor files are refused or consistent") {
  test::Random random(1);
  for (int round = 0; round < 20000; ++round) {
    Bytes bytes = corpus()[random.below(corpus().size())];
    for (std::size_t edits = 1 + random.below(3); edits > 0; --edits) {
      const std::size_t at = random.below(4) == 0
                                 ? random.below(bytes.size())
                                 : random.below((std::min)(bytes.size(), std::size_t{900}));
      switch (random.below(4)) {
        case 0:
          bytes[at] ^= static_cast<std::byte>(1U << random.below(8));
          break;
        case 1:
          if (random.below(8) == 0) bytes.resize((std::max)(at, std::size_t{1}));
          break;
        case 2:
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), random.below(9),
                       static_cast<std::byte>("0123456789{}[],:\" \\u"[random.below(20)]));
          break;
        default:
          bytes[at] = static_cast<std::byte>(random.below(2) == 0 ? 0xFF : random.next());
      }
    }
    if (random.below(2) == 0 && bytes.size() >= 8) {  // a Byzantine peer keeps the length right
      const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      const std::size_t end = text.find("}}");
      if (end != std::string_view::npos && end > 8) {
        const std::uint64_t length = end + 2 - 8;
        std::memcpy(bytes.data(), &length, 8);
      }
    }
    bytes.insert(bytes.begin(), std::byte{0});
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  }
  SUCCEED("20000 rounds");
}
#endif
