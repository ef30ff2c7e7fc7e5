#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <kvmeld/cache/hash.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// A normal form as text.
struct LatexText {
  using type = std::string;
  [[nodiscard]] static std::string leaf(std::string_view name) { return std::string(name); }
  [[nodiscard]] static std::string call(std::string_view name, std::span<const std::string> parts) {
    std::string out = "(";
    out += name;
    for (const std::string& p : parts) (out += ' ') += p;
    out += ')';
    return out;
  }
  /// Of parts in any order.
  [[nodiscard]] static std::string call_unordered(std::string_view name,
                                                  std::vector<std::string>& parts) {
    std::sort(parts.begin(), parts.end());
    return call(name, parts);
  }
};
/// The same as a hash, which is much sooner compared: equal where the text is.
struct LatexHash {
  using type = Digest128;
  [[nodiscard]] static Digest128 leaf(std::string_view name) {
    const XXH128_hash_t hash = XXH3_128bits(name.data(), name.size());
    return {hash.low64, hash.high64};
  }
  [[nodiscard]] static Digest128 call(std::string_view name, std::span<const Digest128> parts) {
    const XXH128_hash_t hash = XXH3_128bits_withSeed(parts.data(), parts.size_bytes(),
                                                     XXH3_64bits(name.data(), name.size()));
    return {hash.low64, hash.high64};
  }
  [[nodiscard]] static Digest128 call_unordered(std::string_view name,
                                                std::span<const Digest128> parts) {
    Digest128 sums[2] = {{0, parts.size()}, {}};
    for (const Digest128& p : parts) {
      sums[1].low += p.low;
      sums[1].high += p.high;
    }
    return call(name, sums);
  }
};

}  // namespace detail
KVMELD_NAMESPACE_END
