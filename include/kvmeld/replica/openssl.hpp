#pragma once

/// SHA-256, HMAC-SHA256 and Ed25519 by OpenSSL.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <kvmeld/config.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/replica/wire.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

// SHA-256 by OpenSSL (CMake component kvmeld::openssl), for stores and peers that are not trusted.

/// Models `ContentHash`: SHA-256 (FIPS 180-4) cut to its first 31 bytes, collision-resistant
/// against whoever writes to a shared store.
///
/// Streams 1.4 to 2 GB/s where the processor has SHA instructions. A process whose OpenSSL cannot
/// give SHA-256 at all is ended: no id could be trusted after that.
class Sha256 {
 public:
  static constexpr std::uint8_t tag = 2;

  Sha256() : context_(EVP_MD_CTX_new()) {
    if (context_ == nullptr || EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) != 1)
      std::abort();
  }
  Sha256(const Sha256& other) : context_(EVP_MD_CTX_new()) {
    if (context_ == nullptr || EVP_MD_CTX_copy_ex(context_, other.context_) != 1) std::abort();
  }
  Sha256(Sha256&& other) noexcept : context_(std::exchange(other.context_, nullptr)) {}
  Sha256& operator=(Sha256 other) noexcept {
    std::swap(context_, other.context_);
    return *this;
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }

  void update(std::span<const std::byte> bytes) noexcept {
    if (!bytes.empty() && EVP_DigestUpdate(context_, bytes.data(), bytes.size()) != 1) std::abort();
  }
  /// All 32 bytes. The hash can go on taking bytes.
  [[nodiscard]] std::array<std::uint8_t, 32> digest32() const {
    const Sha256 last(*this);
    std::array<std::uint8_t, 32> out{};
    if (EVP_DigestFinal_ex(last.context_, out.data(), nullptr) != 1) std::abort();
    return out;
  }
  [[nodiscard]] std::array<std::uint8_t, 31> finish() const {
    const auto whole = digest32();
    std::array<std::uint8_t, 31> out{};
    std::memcpy(out.data(), whole.data(), out.size());
    return out;
  }

 private:
  EVP_MD_CTX* context_;
};

// Message authentication by OpenSSL (CMake component kvmeld::openssl).

/// HMAC-SHA-256 (RFC 2104) of a frame's header and body under a secret that
/// all members share.
///
/// Says that a member wrote the frame, not which one (`Ed25519` does) nor when: a frame sent again
/// is valid again. Joins are idempotent, so a replay changes nothing; rounds carry numbers. An
/// empty key signs nothing and verifies nothing.
class HmacSha256 final : public Authenticator {
 public:
  HmacSha256() = default;
  /// @param key  32 bytes from a random source; shorter keys are weaker, longer ones are hashed
  /// first.
  explicit HmacSha256(std::span<const std::byte> key) : key_(key.begin(), key.end()) {}
  explicit HmacSha256(std::string_view key)
      : HmacSha256(std::as_bytes(std::span(key.data(), key.size()))) {}

  [[nodiscard]] std::size_t tag_bytes() const noexcept override { return tag_size; }
  [[nodiscard]] bool sign(std::span<const std::byte> header, std::span<const std::byte> body,
                          std::span<std::byte> tag) const override {
    if (key_.empty() || tag.size() != tag_size) return false;
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
        bytes == tag_size;
    EVP_MD_CTX_free(context);
    EVP_PKEY_free(key);
    return done;
  }
  [[nodiscard]] bool verify(MemberId, std::span<const std::byte> header,
                            std::span<const std::byte> body,
                            std::span<const std::byte> tag) const override {
    std::byte own[tag_size];
    return tag.size() == tag_size && sign(header, body, own) &&
           CRYPTO_memcmp(own, tag.data(), tag_size) == 0;
  }

 private:
  static constexpr std::size_t tag_size = 32;

  std::vector<std::byte> key_;
};

/// The hash of sets whose writers do not trust each other: fragments are named by SHA-256, and so
/// is what the digest sums.
///
/// `FragmentSet set(sha256_set)` takes what `seal<Sha256>` made, and a `Replica` whose
/// `FragmentFormat::hash` it is. Needs OpenSSL (component `kvmeld::openssl`).
inline constexpr SetHash sha256_set = set_hash_of<Sha256>();

// Frames that prove their sender, by OpenSSL (CMake component kvmeld::openssl).

/// Each member signs with a key of its own (Ed25519, RFC 8032, over the
/// SHA-256 of header and body), and all know the public halves. A member cannot speak in another's
/// name, as it can where all share one secret (`HmacSha256`).
///
/// A frame from a member whose public key is not named is refused, as is one that says no sender. A
/// replay is valid again, as everywhere.
class Ed25519 final : public Authenticator {
 public:
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
      return extend::error(ErrorCode::unsupported, "OpenSSL makes no Ed25519 key of ", own.size(),
                           " bytes");
    }
    return out;
  }

  [[nodiscard]] std::size_t tag_bytes() const noexcept override { return tag_size; }
  [[nodiscard]] bool sign(std::span<const std::byte> header, std::span<const std::byte> body,
                          std::span<std::byte> tag) const override {
    unsigned char said[32];
    if (own_ == nullptr || tag.size() != tag_size || !digest(header, body, said)) return false;
    EVP_MD_CTX* const context = EVP_MD_CTX_new();
    std::size_t size = tag.size();
    const bool done = context != nullptr &&
                      EVP_DigestSignInit(context, nullptr, nullptr, nullptr, own_.get()) == 1 &&
                      EVP_DigestSign(context, reinterpret_cast<unsigned char*>(tag.data()), &size,
                                     said, sizeof said) == 1 &&
                      size == tag_size;
    EVP_MD_CTX_free(context);
    return done;
  }
  [[nodiscard]] bool verify(MemberId from, std::span<const std::byte> header,
                            std::span<const std::byte> body,
                            std::span<const std::byte> tag) const override {
    const auto at = members_.find(from);
    unsigned char said[32];
    if (at == members_.end() || at->second == nullptr || tag.size() != tag_size ||
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
  static constexpr std::size_t tag_size = 64;

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

}  // namespace replica

KVMELD_NAMESPACE_END
