#pragma once

/// SHA-256 by OpenSSL (CMake component kvmeld::openssl), for stores and peers that are not trusted.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <utility>

#include <openssl/evp.h>

#include <kvmeld/cache/hash.hpp>

KVMELD_NAMESPACE_BEGIN

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

KVMELD_NAMESPACE_END
