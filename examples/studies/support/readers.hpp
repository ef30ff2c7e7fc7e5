#pragma once
// Several agents that read the same document: alike, with a few words changed, or with one whose
// cache is wrong.

#include "dataset.hpp"
#include "lead_in.hpp"

#include <kvmeld/kvmeld.hpp>

#include <ggml.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace example {

/// Element i of a row of llama.cpp's cache, which holds f16 unless it is told otherwise.
inline double element(const std::byte* row, std::int64_t i) {
  return static_cast<double>(ggml_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t*>(row)[i]));
}
inline void set_element(std::byte* row, std::int64_t i, double value) {
  reinterpret_cast<ggml_fp16_t*>(row)[i] = ggml_fp32_to_fp16(static_cast<float>(value));
}

/// A reader's own lead-in: eight of the sixteen sentences, from another one on for each reader.
inline std::string lead_in_of(std::size_t reader) {
  std::string out;
  for (std::size_t i = 0; i < 8; ++i)
    out += lead_in_sentences[(3 * reader + i) % lead_in_sentences.size()];
  return out;
}

/// A reader's copy of a document with a few words changed, the facts left alone. Reader 0 has the
/// document as it is.
inline std::vector<std::string> edited_copy(std::vector<std::string> document, std::size_t reader) {
  if (reader == 0) return document;
  const auto replace = [](std::string& in, const std::string& what, const std::string& with) {
    if (const std::size_t at = in.find(what); at != std::string::npos)
      in.replace(at, what.size(), with);
  };
  replace(document[reader % document.size()], " keeps ", " still keeps ");
  replace(document[(reader + 3) % document.size()], " The ", " That ");
  return document;
}

/// A fragment of the same tokens whose keys and values are off: noise as large as the row it is
/// added to.
inline kvmeld::Result<kvmeld::Fragment> with_noise(const kvmeld::Fragment& fragment,
                                                   std::uint64_t seed) {
  kvmeld::HostCache cache(fragment.shared_geometry(), fragment.token_count());
  const kvmeld::FragmentView view(fragment);
  Draw draw(seed);
  // variance 1
  const auto noise = [&draw] {
    return std::sqrt(3.0) * (static_cast<double>(draw.next() >> 11) * 0x1p-52 - 1.0);
  };
  for (std::size_t p = 0; p < view.ref().planes().size(); ++p) {
    const kvmeld::PlaneRef& from = view.ref().planes()[p];
    const kvmeld::MutablePlaneRef& to = cache.mutable_ref().planes()[p];
    const std::int64_t channels = from.shape.channels;
    for (std::int64_t row = 0; row < fragment.token_count() * from.shape.heads; ++row) {
      double square = 0;
      const auto value = [&](std::int64_t c) { return element(from.data, row * channels + c); };
      for (std::int64_t c = 0; c < channels; ++c) square += value(c) * value(c);
      const double size = std::sqrt(square / static_cast<double>(channels));
      for (std::int64_t c = 0; c < channels; ++c)
        set_element(to.data, row * channels + c, value(c) + size * noise());
    }
  }
  const kvmeld::Payload& payload = fragment.payloads()[0];
  return kvmeld::seal(cache.kv_cache_ref(), {.tokens = fragment.tokens(),
                                             .positions = payload.positions,
                                             .context = {fragment.prefix(), payload.lead_in}});
}

}  // namespace example
