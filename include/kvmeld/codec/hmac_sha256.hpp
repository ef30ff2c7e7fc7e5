#pragma once

/// Message authentication by OpenSSL (CMake component kvmeld::openssl).

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <kvmeld/codec/frame.hpp>

KVMELD_NAMESPACE_BEGIN

/// Models `Authenticator`: HMAC-SHA-256 (RFC 2104) of a frame's header and body under a secret that
/// all members share.
///
/// Says that a member wrote the frame, not which one (`Ed25519` does) nor when: a frame sent again
/// is valid again. Joins are idempotent, so a replay changes nothing; rounds carry numbers. An
/// empty key signs nothing and verifies nothing.
class HmacSha256 {
 public:
  static constexpr std::size_t tag_bytes = 32;

  HmacSha256() = default;
  /// @param key  32 bytes from a random source; shorter keys are weaker, longer ones are hashed
  /// first.
  explicit HmacSha256(std::span<const std::byte> key) : key_(key.begin(), key.end()) {}
  explicit HmacSha256(std::string_view key)
      : HmacSha256(std::as_bytes(std::span(key.data(), key.size()))) {}

  [[nodiscard]] bool sign(std::span<const std::byte> header, std::span<const std::byte> body,
                          std::span<std::byte> tag) const {
    if (key_.empty() || tag.size() != tag_bytes) return false;
    EVP_PKEY* const key = EVP_PKEY_new_raw_private_key(
        EVP_PKEY_HMAC, nullptr, reinterpret_cast<const unsigned char*>(key_.data()), key_.size());
    EVP_MD_CTX* const context = EVP_MD_CTX_new();
    std::size_t bytes = tag.size();
    // The header names the body's length, so the border between the two is signed with it.
    const bool done =
        key != nullptr && context != nullptr &&
        EVP_DigestSignInit(context, nullptr, EVP_sha256(), nullptr, key) == 1 &&
        EVP_DigestSignUpdate(context, header.data(), header.size()) == 1 &&
        (body.empty() || EVP_DigestSignUpdate(context, body.data(), body.size()) == 1) &&
        EVP_DigestSignFinal(context, reinterpret_cast<unsigned char*>(tag.data()), &bytes) == 1 &&
        bytes == tag_bytes;
    EVP_MD_CTX_free(context);
    EVP_PKEY_free(key);
    return done;
  }
  [[nodiscard]] bool verify(MemberId, std::span<const std::byte> header,
                            std::span<const std::byte> body, std::span<const std::byte> tag) const {
    std::byte own[tag_bytes];
    return tag.size() == tag_bytes && sign(header, body, own) &&
           CRYPTO_memcmp(own, tag.data(), tag_bytes) == 0;
  }

 private:
  std::vector<std::byte> key_;
};

KVMELD_NAMESPACE_END
