#pragma once

#include <kvmeld/codec/sha256.hpp>
#include <kvmeld/state/set_digest.hpp>

KVMELD_NAMESPACE_BEGIN

/// The hash of sets whose writers do not trust each other: fragments are named by SHA-256, and so
/// is what the digest sums.
///
/// `FragmentSet set(sha256_set)` takes what `seal<Sha256>` made; a `Replica<Store, Auth, Sha256>`
/// has it by default. Needs OpenSSL (component `kvmeld::openssl`).
inline constexpr SetHash sha256_set = set_hash_of<Sha256>();

KVMELD_NAMESPACE_END
