#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <kvmeld/align/alignment.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/status.hpp>

/// Fragments of other models in a plan: asked for, checked, and made fragments of the target's
/// model.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// What an aligner takes beside fragments in the target's geometry, of any type.
struct TransformCall {
  const void* policy = nullptr;
  Status (*accepts)(const void*, const Geometry&, const Geometry&) = nullptr;
  Result<Payload> (*transform)(const void*, const Fragment&, std::size_t,
                               const Geometry&) = nullptr;
};

template <class P>
[[nodiscard]] TransformCall transform_call([[maybe_unused]] const P& policy) {
  if constexpr (TransformForm<P>) {
    return {&policy,
            [](const void* p, const Geometry& from, const Geometry& to) {
              return static_cast<const P*>(p)->accepts(from, to);
            },
            [](const void* p, const Fragment& fragment, std::size_t payload, const Geometry& to) {
              return static_cast<const P*>(p)->transform(fragment, payload, to);
            }};
  } else {
    return {};
  }
}

/// Refuses what a transform (perhaps the user's) made wrong.
KVMELD_LAZY Status check_mapped(const Payload& payload, const Geometry& geometry,
                                std::int64_t tokens) {
  std::size_t plane = 0;
  const auto wrong = [&](const char* what) {
    return error(ErrorCode::invalid_argument, "a transform's payload of ", tokens,
                 " tokens has wrong ", what);
  };
  if (payload.bytes == nullptr || static_cast<std::int64_t>(payload.positions.size()) != tokens)
    return wrong("positions or no bytes");
  const bool unturned = std::all_of(payload.positions.begin(), payload.positions.end(),
                                    [](std::int64_t at) { return at == 0; });
  for (std::size_t t = 0; t < payload.positions.size() && !unturned; ++t) {
    if (payload.positions[t] < 0 || payload.positions[t] > max_position ||
        (t > 0 && payload.positions[t] <= payload.positions[t - 1])) {
      return wrong("positions: all are 0, or each is above the one before");
    }
  }
  if (payload.layer_set.size() != geometry.layers.size()) return wrong("layers");
  for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
    if (payload.layer_set[l] >= payload.token_sets.size()) return wrong("token sets");
    const TokenSet& set = payload.token_sets[payload.layer_set[l]];
    for (std::size_t i = 0; !set.all && i < set.present.size(); ++i) {
      if (set.present[i] < 0 || set.present[i] >= tokens ||
          (i > 0 && set.present[i] <= set.present[i - 1]))
        return wrong("token sets");
    }
    for (const PlaneShape& shape : geometry.layers[l].planes) {
      if (plane >= payload.plane_offsets.size()) return wrong("planes");
      const auto bytes =
          static_cast<std::size_t>(payload.layer_tokens(l) * shape.heads * row_bytes(shape));
      if (payload.plane_offsets[plane] > payload.byte_count ||
          bytes > payload.byte_count - payload.plane_offsets[plane])
        return wrong("planes");
      ++plane;
    }
  }
  return {};
}

/// The fragment as it is in the target's model: one payload, the same id, token ids where the
/// tokenizers are one.
KVMELD_LAZY Result<Fragment> mapped_fragment(const TransformCall& call, const Fragment& fragment,
                                             std::size_t payload,
                                             const std::shared_ptr<const Geometry>& to) {
  auto mapped = call.transform(call.policy, fragment, payload, *to);
  if (!mapped) return mapped.error();
  KVMELD_TRY(check_mapped(*mapped, *to, fragment.token_count()));
  auto body = std::make_shared<Fragment::Body>();
  body->geometry = to;
  body->role = fragment.role();
  body->token_count = fragment.token_count();
  if (!to->tokenizer.empty() && fragment.geometry().tokenizer == to->tokenizer) {
    body->tokens.assign(fragment.tokens().begin(), fragment.tokens().end());
    for (TokenId& id : body->tokens) {  // a placeholder of either model tells nothing
      if (fragment.geometry().is_placeholder(id) && !to->is_placeholder(id)) id = -1;
    }
  }
  body->payloads.push_back(*std::move(mapped));
  body->id = fragment.id();
  return Fragment(std::move(body));
}

}  // namespace detail
KVMELD_NAMESPACE_END
