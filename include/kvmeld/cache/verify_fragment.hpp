#pragma once

#include <cstddef>

#include <kvmeld/cache/seal.hpp>

KVMELD_NAMESPACE_BEGIN

/// Checks that a fragment's bytes and fields are those that its id names: for fragments that
/// crossed a trust boundary.
///
/// Payloads whose bytes are not there are checked by their stored digest alone. O(bytes). Errors:
/// `hash_mismatch` for an id of another content hash, `id_mismatch` with the payload or the two
/// ids.
/// @tparam Hash the content hash that named the fragment.
template <ContentHash Hash = Xxh3_128>
[[nodiscard]] Status verify_fragment(const Fragment& fragment) {
  if (!fragment.valid())
    return detail::error(ErrorCode::invalid_argument, "an empty Fragment has no id to verify");
  if (fragment.id().tag() != Hash::tag) {
    return detail::error(ErrorCode::hash_mismatch, "fragment named by hash ", fragment.id().tag(),
                         ", verified by ", Hash::tag);
  }
  for (std::size_t p = 0; p < fragment.payloads().size(); ++p) {
    const Payload& payload = fragment.payloads()[p];
    if (payload.bytes != nullptr && detail::payload_digest<Hash>(payload) != payload.digest) {
      return detail::error(ErrorCode::id_mismatch, "payload ", p, " of fragment ",
                           fragment.id().hex(), ": its ", payload.byte_count,
                           " bytes do not hash to its digest");
    }
  }
  const FragmentId id = detail::fragment_id<Hash>(*fragment.body());
  if (id == fragment.id()) return {};
  return detail::error(ErrorCode::id_mismatch, "the fragment claims id ", fragment.id().hex(),
                       ", its content has ", id.hex());
}

KVMELD_NAMESPACE_END
