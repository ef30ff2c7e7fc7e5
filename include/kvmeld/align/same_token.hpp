#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/cache/row_copy.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Digest of a token's rows in every layer, scales included; none where the bytes are evicted.
/// O(bytes of a token).
KVMELD_LAZY [[nodiscard]] std::optional<Digest128> content_of(const Source& source,
                                                              std::int64_t token) {
  const Payload& payload = *source.payload;
  if (payload.bytes == nullptr) return std::nullopt;
  Hasher hasher;
  std::size_t plane = 0;
  const std::vector<LayerShape>& layers = source.fragment->geometry().layers;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const TokenSet& set = payload.token_sets[payload.layer_set[l]];
    std::int64_t row = token;
    bool held = true;
    if (!set.all) {
      const auto at = std::lower_bound(set.present.begin(), set.present.end(),
                                       static_cast<std::int32_t>(token));
      held = at != set.present.end() && *at == token;
      row = at - set.present.begin();
    }
    hasher.value(static_cast<std::uint8_t>(held));
    for (const PlaneShape& shape : layers[l].planes) {
      const auto elements = static_cast<std::size_t>(row_bytes(shape) * shape.heads);
      const auto scales = static_cast<std::size_t>(row_scales(shape)) * sizeof(float) *
                          static_cast<std::size_t>(shape.heads);
      const std::byte* const base = payload.bytes.get();
      const auto index = static_cast<std::size_t>(row);
      if (held) {
        hasher.bytes({base + payload.plane_offsets[plane] + index * elements, elements});
        hasher.bytes({base + payload.scale_offsets[plane] + index * scales, scales});
      }
      ++plane;
    }
  }
  return hasher.digest();
}

/// Whether two tokens are one: by their ids, or, where ids tell nothing, by their rows.
KVMELD_LAZY [[nodiscard]] bool same_token(const Source& a, std::int64_t i, const Source& b,
                                          std::int64_t j) {
  if (a.fragment == b.fragment && i == j) return true;
  const TokenId id = a.token_id(i);
  if (id != b.token_id(j)) return false;
  if (id >= 0) return true;
  const auto content = content_of(a, i);
  return content.has_value() && content == content_of(b, j);
}

/// Gives tokens of several fragments numbers that are equal where `same_token` says so: ids, and
/// below −1 a number for each content.
class TokenNamer {
 public:
  /// (tokens of the fragment)
  KVMELD_LAZY [[nodiscard]] std::vector<TokenId> names(const Source& source) {
    std::vector<TokenId> out(static_cast<std::size_t>(source.fragment->token_count()));
    for (std::size_t t = 0; t < out.size(); ++t) {
      const auto token = static_cast<std::int64_t>(t);
      out[t] = source.token_id(token);
      if (out[t] >= 0) continue;
      out[t] = next_;
      const auto content = content_of(source, token);
      if (content.has_value())
        out[t] = known_.emplace(std::pair(content->high, content->low), next_).first->second;
      if (out[t] == next_) --next_;
    }
    return out;
  }

 private:
  TokenId next_ = -2;
  std::map<std::pair<std::uint64_t, std::uint64_t>, TokenId> known_;
};

}  // namespace detail
KVMELD_NAMESPACE_END
