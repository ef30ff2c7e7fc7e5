#pragma once

#include <cstddef>
#include <span>

#include <kvmeld/codec/sha256.hpp>
#include <kvmeld/state/set_digest.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

[[nodiscard]] inline Digest256 sha256_digest256(std::span<const std::byte> bytes) { return {sha256_words(bytes)}; }

}  // namespace detail

/// The hash of sets whose writers do not trust each other: fragments are named by SHA-256, and so is what the digest sums.
///
/// `FragmentSet set(sha256_set)` takes what `seal<Sha256>` made, and a `Replica<Store, Auth, Sha256>` has it in its options. Needs
/// OpenSSL (component `kvmeld::openssl`).
inline constexpr SetHash sha256_set{Sha256::tag, &detail::sha256_digest256};

KVMELD_NAMESPACE_END
