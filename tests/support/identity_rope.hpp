#pragma once

// The rope's share of the identity program: bytes that must be the same for every compiler, level
// and instruction set.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <kvmeld/rope.hpp>

namespace identity_rope {

using Rotate = void (*)(kvmeld::RopePairing, std::int32_t, std::int32_t, const float*, float*);

inline void rotate_base(kvmeld::RopePairing pairing, std::int32_t first, std::int32_t rotary,
                        const float* table, float* row) {
  kvmeld::rotate_row(pairing, first, rotary, table, row);
}
KVMELD_TARGET_AVX2 inline void rotate_avx2(kvmeld::RopePairing pairing, std::int32_t first,
                                           std::int32_t rotary, const float* table, float* row) {
  kvmeld::rotate_row(pairing, first, rotary, table, row);
}
KVMELD_TARGET_AVX512 inline void rotate_avx512(kvmeld::RopePairing pairing, std::int32_t first,
                                               std::int32_t rotary, const float* table,
                                               float* row) {
  kvmeld::rotate_row(pairing, first, rotary, table, row);
}

/// Every row form that this processor runs, always three: where one is missing the baseline takes
/// its place.
inline std::vector<Rotate> row_forms() {
  std::vector<Rotate> forms(3, rotate_base);
#if KVMELD_X86_DISPATCH
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) forms[1] = rotate_avx2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    forms[2] = rotate_avx512;
#endif
  return forms;
}

/// Key values in [-4, 4) from a counter, the same everywhere. (channel)
inline std::vector<float> key(std::int32_t channels, std::uint32_t seed) {
  std::vector<float> row(static_cast<std::size_t>(channels));
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (float& x : row) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<std::int32_t>(state) >> 8) * (1.0f / 2097152.0f);
  }
  return row;
}

/// A spec of each scaling over `rotary` channels.
inline kvmeld::RopeSpec spec(kvmeld::RopeScaling scaling, std::int32_t rotary) {
  auto rope = kvmeld::RopeSpec::rotary(rotary, 500000.0, kvmeld::RopePairing::half_split);
  rope.scaling = scaling;
  rope.factor = 4.0;
  rope.original_context = 8192;
  for (std::int32_t i = 0; i < rotary / 2; ++i) {
    rope.short_factors.push_back(1.0f + 0.03125f * static_cast<float>(i));
    rope.long_factors.push_back(1.0f + 0.75f * static_cast<float>(i));
    rope.factors.push_back(8.0f - 0.0625f * static_cast<float>(i));
  }
  return rope;
}

}  // namespace identity_rope

/// Feeds tables of every scaling, and rows of every form, pairing and head size, to
/// `sink.bytes(const void*, std::size_t)`.
template <class Sink>
inline void rope_identity(Sink& sink) {
  using namespace identity_rope;
  const std::int64_t shifts[] = {0, 1, -1, 7, 37, 1000, -4096, 131072, kvmeld::max_rope_shift};
  for (int scaling = 0; scaling <= static_cast<int>(kvmeld::RopeScaling::explicit_factors);
       ++scaling)
    for (const std::int64_t length : {4096, 100000}) {
      const auto rope = spec(static_cast<kvmeld::RopeScaling>(scaling), 96);
      const auto frequencies = kvmeld::inverse_frequencies(rope, length);
      if (frequencies) sink.bytes(frequencies->data(), frequencies->size() * sizeof(double));
      const auto table = kvmeld::RopeTable::build(rope, shifts, length);
      if (table) sink.bytes(table->data(), table->size_bytes());
    }
  struct Head {
    std::int32_t channels, first, rotary;
  };
  for (const Head head : {Head{64, 0, 64}, Head{80, 0, 32}, Head{80, 0, 80}, Head{96, 0, 96},
                          Head{128, 0, 128}, Head{192, 128, 64}, Head{256, 3, 250}, Head{7, 1, 6}})
    for (const auto pairing : {kvmeld::RopePairing::interleaved, kvmeld::RopePairing::half_split}) {
      const auto table =
          kvmeld::RopeTable::build(spec(kvmeld::RopeScaling::llama3, head.rotary), shifts);
      if (!table) continue;
      for (std::size_t s = 0; s < table->rows(); ++s) {
        const std::vector<float> source = key(head.channels, static_cast<std::uint32_t>(s));
        for (const Rotate rotate : row_forms()) {
          std::vector<float> row = source;
          rotate(pairing, head.first, head.rotary, table->row(s), row.data());
          sink.bytes(row.data(), row.size() * sizeof(float));
        }
        std::vector<float> lanes(source.size());
        for (std::int32_t c = 0; c < head.channels; ++c)
          lanes[static_cast<std::size_t>(c)] = kvmeld::rotated_channel(
              pairing, head.first, head.rotary, table->row(s), source.data(), c);
        sink.bytes(lanes.data(), lanes.size() * sizeof(float));
      }
    }
}
