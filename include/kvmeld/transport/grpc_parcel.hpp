#pragma once

/// Fragments in a file, for whoever publishes them without this library (CMake component
/// kvmeld::grpc).

#include <string>
#include <utility>

#include <kvmeld/codec/manifest.hpp>
#include <kvmeld/transport/grpc_convert.hpp>

KVMELD_NAMESPACE_BEGIN

/// The bytes of a `Parcel` (coordinator.proto): operations with the payloads that are here.
/// O(bytes).
///
/// Errors: those of `make_manifest`; `oversized` for a set of more than 2^31 bytes with its
/// payloads, protobuf's bound.
template <ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
[[nodiscard]] Result<std::string> make_parcel(const FragmentSet& set,
                                              const FragmentFormat<Hash, C>& format = {}) {
  detail::rpc::Parcel out;
  out.set_set(detail::to_field(std::span<const std::byte>(encode_set(set))));
  for (const FragmentSet::Entry& entry : set.entries()) {
    if (!entry.complete()) continue;
    const auto manifest = make_manifest<Hash>(entry.fragment, format.chunk_bytes);
    if (!manifest) return manifest.error();
    auto& sent = *out.add_manifests();
    sent.set_id(detail::to_field(entry.id));
    sent.set_encoded(detail::to_field(std::span<const std::byte>(encode_manifest(*manifest))));
    for (std::size_t p = 0; p < manifest->chunks.size(); ++p) {
      const Payload& payload = entry.fragment.payloads()[p];
      for (std::size_t c = 0; c < manifest->chunks[p].size(); ++c) {
        auto& chunk = *out.add_chunks();
        chunk.set_key(detail::to_field(manifest->chunks[p][c]));
        chunk.set_stored(detail::to_field(std::span<const std::byte>(
            encode_chunk(raw_chunk(payload, c, format.chunk_bytes), format.compressor,
                         chunk_form(entry.fragment.geometry(), payload, c, format.chunk_bytes)))));
      }
    }
  }
  std::string bytes;
  if (out.ByteSizeLong() >= (std::size_t{1} << 31U) || !out.SerializeToString(&bytes)) {
    return detail::error(ErrorCode::oversized, "a parcel of ", out.ByteSizeLong(),
                         " bytes; protobuf takes less than 2^31");
  }
  return bytes;
}

KVMELD_NAMESPACE_END
