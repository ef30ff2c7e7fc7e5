#pragma once

/// Frames that prove their sender, by OpenSSL (CMake component kvmeld::openssl).

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include <openssl/evp.h>

#include <kvmeld/codec/frame.hpp>

KVMELD_NAMESPACE_BEGIN

/// Models `Authenticator`: each member signs with a key of its own (Ed25519, RFC 8032, over the
/// SHA-256 of header and body), and all know the public halves. A member cannot speak in another's
/// name, as it can where all share one secret (`HmacSha256`).
///
/// A frame from a member whose public key is not named is refused, as is one that says no sender. A
/// replay is valid again, as everywhere.
class Ed25519 {
 public:
  static constexpr std::size_t tag_bytes = 64;
  using Key = std::array<std::byte, 32>;

  /// Signs nothing and verifies nothing.
  Ed25519() = default;
  /// @param own this member's private key: 32 bytes from a random source. @param members public
  /// keys, `public_key` of each one's own.
  Ed25519(const Key& own, std::map<MemberId, Key> members)
      : own_(KeyHandle(
            EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, bytes_of(own), own.size()),
            Free{})) {
    for (const auto& [member, key] : members) {
      members_.emplace(member, KeyHandle(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr,
                                                                     bytes_of(key), key.size()),
                                         Free{}));
    }
  }

  /// What others are told of a private key. Errors: `unsupported` where OpenSSL has no Ed25519.
  [[nodiscard]] static Result<Key> public_key(const Key& own) {
    const KeyHandle key(
        EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, bytes_of(own), own.size()), Free{});
    Key out{};
    std::size_t size = out.size();
    if (key == nullptr ||
        EVP_PKEY_get_raw_public_key(key.get(), reinterpret_cast<unsigned char*>(out.data()),
                                    &size) != 1 ||
        size != out.size()) {
      return detail::error(ErrorCode::unsupported, "OpenSSL makes no Ed25519 key of ", own.size(),
                           " bytes");
    }
    return out;
  }

  [[nodiscard]] bool sign(std::span<const std::byte> header, std::span<const std::byte> body,
                          std::span<std::byte> tag) const {
    unsigned char said[32];
    if (own_ == nullptr || tag.size() != tag_bytes || !digest(header, body, said)) return false;
    EVP_MD_CTX* const context = EVP_MD_CTX_new();
    std::size_t size = tag.size();
    const bool done = context != nullptr &&
                      EVP_DigestSignInit(context, nullptr, nullptr, nullptr, own_.get()) == 1 &&
                      EVP_DigestSign(context, reinterpret_cast<unsigned char*>(tag.data()), &size,
                                     said, sizeof said) == 1 &&
                      size == tag_bytes;
    EVP_MD_CTX_free(context);
    return done;
  }
  [[nodiscard]] bool verify(MemberId from, std::span<const std::byte> header,
                            std::span<const std::byte> body, std::span<const std::byte> tag) const {
    const auto at = members_.find(from);
    unsigned char said[32];
    if (at == members_.end() || at->second == nullptr || tag.size() != tag_bytes ||
        !digest(header, body, said))
      return false;
    EVP_MD_CTX* const context = EVP_MD_CTX_new();
    const bool done =
        context != nullptr &&
        EVP_DigestVerifyInit(context, nullptr, nullptr, nullptr, at->second.get()) == 1 &&
        EVP_DigestVerify(context, reinterpret_cast<const unsigned char*>(tag.data()), tag.size(),
                         said, sizeof said) == 1;
    EVP_MD_CTX_free(context);
    return done;
  }

 private:
  struct Free {
    void operator()(EVP_PKEY* key) const noexcept { EVP_PKEY_free(key); }
  };
  using KeyHandle = std::shared_ptr<EVP_PKEY>;

  [[nodiscard]] static const unsigned char* bytes_of(const Key& key) noexcept {
    return reinterpret_cast<const unsigned char*>(key.data());
  }
  /// The header names the body's length, so the border between the two is signed with it.
  [[nodiscard]] static bool digest(std::span<const std::byte> header,
                                   std::span<const std::byte> body, unsigned char (&out)[32]) {
    EVP_MD_CTX* const context = EVP_MD_CTX_new();
    const bool done = context != nullptr &&
                      EVP_DigestInit_ex(context, EVP_sha256(), nullptr) == 1 &&
                      EVP_DigestUpdate(context, header.data(), header.size()) == 1 &&
                      (body.empty() || EVP_DigestUpdate(context, body.data(), body.size()) == 1) &&
                      EVP_DigestFinal_ex(context, out, nullptr) == 1;
    EVP_MD_CTX_free(context);
    return done;
  }

  KeyHandle own_{};
  std::map<MemberId, KeyHandle> members_{};
};

KVMELD_NAMESPACE_END
