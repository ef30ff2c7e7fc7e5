#pragma once
// The renderer once more, in plain loops and double, from the formulas and not from the library.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "random_cache.hpp"

namespace reference {

using test::Dense;
using test::Sealed;

/// One input token of an output token.
struct Input {
  std::size_t source = 0;
  std::int64_t token = 0;
  double weight = 1.0;
};
/// One output token; without inputs it is a hole.
struct Output {
  std::int64_t position = 0;
  std::vector<Input> inputs;
};
enum class Fuse { mean, sum, max };

/// Every token its own output.
inline std::vector<Output> concat(const std::vector<Sealed>& spans, std::int64_t position = 0) {
  std::vector<Output> out;
  for (std::size_t s = 0; s < spans.size(); ++s) {
    for (std::int64_t t = 0; t < std::ssize(spans[s].positions); ++t)
      out.push_back({position++, {{s, t}}});
  }
  return out;
}

/// The first `shared` tokens of all spans share outputs, the rest follow span by span. `shared` <
/// 0: by index, all along.
inline std::vector<Output> match(const std::vector<Sealed>& spans, std::int64_t shared,
                                 std::int64_t position = 0) {
  std::int64_t longest = 0;
  for (const Sealed& s : spans) longest = std::max(longest, std::ssize(s.positions));
  if (shared < 0) shared = longest;
  std::vector<Output> out;
  for (std::int64_t t = 0; t < shared; ++t) {
    Output output{position++, {}};
    for (std::size_t s = 0; s < spans.size(); ++s) {
      if (t < std::ssize(spans[s].positions)) output.inputs.push_back({s, t});
    }
    out.push_back(output);
  }
  for (std::size_t s = 0; s < spans.size(); ++s) {
    for (std::int64_t t = shared; t < std::ssize(spans[s].positions); ++t)
      out.push_back({position++, {{s, t}}});
  }
  return out;
}

/// How many leading tokens have the same ids in all spans.
inline std::int64_t common_prefix(const std::vector<Sealed>& spans) {
  for (std::int64_t t = 0;; ++t) {
    for (const Sealed& s : spans) {
      const auto ids = s.fragment.tokens();
      if (t == std::ssize(ids) || ids[static_cast<std::size_t>(t)] !=
                                      spans[0].fragment.tokens()[static_cast<std::size_t>(t)])
        return t;
    }
  }
}

/// Rotates one head's row by `shift` positions: unscaled frequencies base^(−2i / rotary), angles in
/// double.
inline void rotation(const kvmeld::RopeSpec& rope, double shift, std::vector<double>& row) {
  const int pairs = rope.rotary_channels / 2;
  for (int i = 0; i < pairs; ++i) {
    const double angle = shift * std::pow(rope.base, -2.0 * i / rope.rotary_channels);
    const bool adjacent = rope.pairing == kvmeld::RopePairing::interleaved;
    const auto a = static_cast<std::size_t>(rope.first_channel + (adjacent ? 2 * i : i));
    const auto b = adjacent ? a + 1 : a + static_cast<std::size_t>(pairs);
    const double x = row[a], y = row[b];
    row[a] = x * std::cos(angle) - y * std::sin(angle);
    row[b] = x * std::sin(angle) + y * std::cos(angle);
  }
}

/// One head's row of one output, and the size that its errors scale with.
struct Row {
  std::vector<double> values;
  double magnitude = 0.0;  // largest over the channels of sum(|w x|), divided as the values are
  bool exact = true;       // one input, not rotated: its very bytes
  std::size_t inputs = 0;  // that this layer holds; 0: the row is left as it was
};

inline Row row(const kvmeld::Geometry& g, std::size_t layer, std::size_t plane_in_layer,
               std::size_t plane, std::int64_t head, const std::vector<Sealed>& spans,
               const Output& output, Fuse fuse) {
  const kvmeld::LayerShape& shape = g.layers[layer];
  const kvmeld::PlaneShape& p = shape.planes[plane_in_layer];
  const bool rotates = p.rotary && shape.rope.kind == kvmeld::RopeKind::rotary &&
                       shape.key_form == kvmeld::KeyForm::post_rope;
  const auto channels = static_cast<std::size_t>(p.channels);
  Row out;
  double total = 0.0;
  std::vector<double> original;
  std::vector<double> size(channels, 0.0);
  out.values.assign(channels, fuse == Fuse::max ? -std::numeric_limits<double>::infinity() : 0.0);
  for (const Input& in : output.inputs) {
    const Sealed& span = spans[in.source];
    if (!span.hidden.empty() && in.token < span.hidden[layer]) continue;
    const std::size_t begin = static_cast<std::size_t>(in.token * p.heads + head) * channels;
    std::vector<double> x(
        span.values[plane].begin() + static_cast<std::ptrdiff_t>(begin),
        span.values[plane].begin() + static_cast<std::ptrdiff_t>(begin + channels));
    const std::int64_t from = span.positions[static_cast<std::size_t>(in.token)];
    original = x;
    out.exact = out.exact && !(rotates && from != output.position) &&
                (fuse != Fuse::sum || in.weight == 1.0);
    if (rotates) {
      // un-rotated: in exact arithmetic the frame does not matter
      rotation(shape.rope, -static_cast<double>(from), x);
    }
    ++out.inputs;
    total += in.weight;
    for (std::size_t c = 0; c < channels; ++c) {
      const double y = fuse == Fuse::max ? x[c] : in.weight * x[c];
      size[c] = fuse == Fuse::max ? std::max(size[c], std::abs(y)) : size[c] + std::abs(y);
      out.values[c] = fuse == Fuse::max ? std::max(out.values[c], y) : out.values[c] + y;
    }
  }
  if (out.inputs != 1) out.exact = false;
  if (out.inputs == 0) return out;
  for (std::size_t c = 0; c < channels; ++c) {
    if (fuse == Fuse::mean) out.values[c] /= total;
    out.magnitude =
        std::max(out.magnitude, fuse == Fuse::mean ? size[c] / std::abs(total) : size[c]);
  }
  if (rotates) rotation(shape.rope, static_cast<double>(output.position), out.values);
  if (out.exact) out.values = original;
  return out;
}

/// How far a rendered element may lie from the reference.
///
/// f32 arithmetic: at most two turns (2^-25 a table entry and 2^-24 for each of two roundings on
/// both members of a pair: below 4 · 2^-24 of the pair's size a rotation) and a fold of n
/// contributions in chunks of 64 (at most 64 + 12 + 2 roundings deep), each 2^-24 of the sum of
/// magnitudes. Storage: half a unit of the type, and half its smallest subnormal; q8_0: half a
/// step, a step is the block's largest magnitude / 127, and 127 steps of its f16 scale's error.
inline double tolerance(kvmeld::ElementType type, const Row& row, std::size_t channel) {
  if (row.exact) return 0.0;
  const double deep = static_cast<double>(std::min<std::size_t>(row.inputs, 64)) + 14.0;
  const double f32 = (8.0 * std::sqrt(2.0) + deep) * 0x1p-24 * row.magnitude;
  const double at = std::abs(row.values[channel]);
  switch (type) {
    case kvmeld::ElementType::f64:
    case kvmeld::ElementType::f32:
      return f32 + at * 0x1p-24 + 0x1p-149;
    case kvmeld::ElementType::f16:
      return 1.01 * f32 + at * 0x1p-11 + 0x1p-25;
    case kvmeld::ElementType::bf16:
      return 1.01 * f32 + at * 0x1p-8 + 0x1p-134;
    case kvmeld::ElementType::f8_e4m3:
      return 1.1 * f32 + at * 0x1p-4 + 0x1p-10;
    case kvmeld::ElementType::f8_e5m2:
      return 1.2 * f32 + at * 0x1p-3 + 0x1p-17;
    case kvmeld::ElementType::i8:
      return f32 + 0.5;
    case kvmeld::ElementType::q8_0:
      break;
  }
  double largest = 0.0;
  for (std::size_t c = channel / 32 * 32; c < channel / 32 * 32 + 32; ++c)
    largest = std::max(largest, std::abs(row.values[c]));
  return 2.0 * f32 + (largest + f32) * (0.5 / 127.0 + 0x1p-11) + 0x1p-25 * 127.0;
}

/// The largest ratio of error to tolerance over a whole cache: at most 1 where the render is right.
///
/// A row without inputs must still hold `untouched` bytes. Exact rows must be equal (0 / 0 counts
/// as right).
inline double worst(const test::TestCache& cache, const std::vector<Sealed>& spans,
                    const std::vector<Output>& outputs, Fuse fuse) {
  double worst_ratio = 0.0;
  const kvmeld::Geometry& g = cache.geometry();
  std::size_t plane = 0;
  for (std::size_t l = 0; l < g.layers.size(); ++l) {
    for (std::size_t k = 0; k < g.layers[l].planes.size(); ++k, ++plane) {
      const kvmeld::PlaneShape& shape = g.layers[l].planes[k];
      for (std::size_t o = 0; o < outputs.size(); ++o) {
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          const Row want = row(g, l, k, plane, h, spans, outputs[o], fuse);
          for (std::size_t c = 0; c < want.values.size(); ++c) {
            const auto token = static_cast<std::int64_t>(o), channel = static_cast<std::int64_t>(c);
            if (want.inputs == 0) {
              if (*cache.bytes(plane, token, h, channel) != test::TestCache::untouched)
                return std::numeric_limits<double>::infinity();
              continue;
            }
            const double off = std::abs(cache.get(plane, token, h, channel) - want.values[c]);
            if (off == 0.0) continue;
            const double ratio = off / tolerance(shape.type, want, c);
            if (!(ratio <= worst_ratio)) worst_ratio = ratio;
          }
        }
      }
    }
  }
  return worst_ratio;
}

}  // namespace reference
