#pragma once

/// Who may call a coordinator: TLS for the connection, a token for the call (CMake component
/// kvmeld::grpc).

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/codec/frame.hpp>
#include <kvmeld/session/transport.hpp>

KVMELD_NAMESPACE_BEGIN

/// Certificates and keys as PEM text. All empty: no TLS, for loopback, Unix sockets and networks
/// that are trusted otherwise.
struct TlsOptions {
  std::string root_certificates{};  ///< that the other end's certificate must lead back to
  std::string certificate{};        ///< this end's chain; a client may have none
  std::string private_key{};
  bool require_client_certificate = false;
  /// That a client expects in the certificate, where it is not the address.
  std::string server_name{};

  [[nodiscard]] bool any() const noexcept {
    return !root_certificates.empty() || !certificate.empty() || !private_key.empty();
  }
};

namespace detail {

inline constexpr const char* namespace_entry = "kvmeld-namespace-bin";
inline constexpr const char* token_entry = "kvmeld-token-bin";
inline constexpr std::string_view token_text = "kvmeld.rpc.v1";

[[nodiscard]] inline std::shared_ptr<grpc::ServerCredentials> server_credentials(
    const TlsOptions& tls) {
  if (!tls.any()) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options(
      tls.require_client_certificate ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                     : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  options.pem_root_certs = tls.root_certificates;
  options.pem_key_cert_pairs.push_back({tls.private_key, tls.certificate});
  return grpc::SslServerCredentials(options);
}
[[nodiscard]] inline std::shared_ptr<grpc::ChannelCredentials> channel_credentials(
    const TlsOptions& tls) {
  if (!tls.any()) return grpc::InsecureChannelCredentials();
  return grpc::SslCredentials({tls.root_certificates, tls.private_key, tls.certificate});
}

[[nodiscard]] inline std::string namespace_bytes(const Digest128& name_space) {
  std::string out(16, '\0');
  std::memcpy(out.data(), &name_space.low, 8);
  std::memcpy(out.data() + 8, &name_space.high, 8);
  return out;
}
[[nodiscard]] inline std::span<const std::byte> as_bytes(std::string_view text) noexcept {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// Says that a caller has a member's key, until a time: the session's secret, or the member's own
/// where the authenticator knows each one's. It does not cover what is sent: TLS does.
template <Authenticator Auth>
[[nodiscard]] Result<std::string> make_token(const FrameOptions<Auth>& frame, MemberId member,
                                             std::int64_t expires_s) {
  std::string body(16, '\0');
  std::memcpy(body.data(), &member, 8);
  std::memcpy(body.data() + 8, &expires_s, 8);
  std::string tag(Auth::tag_bytes, '\0');
  if (!frame.auth.sign(as_bytes(token_text), as_bytes(namespace_bytes(frame.name_space) + body),
                       std::as_writable_bytes(std::span(tag.data(), tag.size())))) {
    return error(ErrorCode::unsupported, "the authenticator could not sign a token for member ",
                 member);
  }
  return body + tag;
}

/// The member that a token names.
///
/// Errors: `unauthenticated`, for another namespace, a token that has expired or would live too
/// long, and a tag of another key.
template <Authenticator Auth>
[[nodiscard]] Result<MemberId> check_token(const FrameOptions<Auth>& frame,
                                           std::string_view name_space, std::string_view token,
                                           std::int64_t now_s, std::int64_t lifetime_s,
                                           std::int64_t difference_s) {
  if (name_space != namespace_bytes(frame.name_space)) {
    return error(ErrorCode::unauthenticated, "a namespace of ", name_space.size(),
                 " bytes that is not ", frame.name_space.hex(),
                 ": tenant, model or tokenizer differ");
  }
  if (token.size() != 16 + std::size_t{Auth::tag_bytes}) {
    return error(ErrorCode::unauthenticated, "a token of ", token.size(),
                 " bytes where this coordinator expects ", 16 + std::size_t{Auth::tag_bytes});
  }
  MemberId member = 0;
  std::int64_t expires = 0;
  std::memcpy(&member, token.data(), 8);
  std::memcpy(&expires, token.data() + 8, 8);
  if (member == everyone) {
    return error(ErrorCode::unauthenticated, "a token of member ", member, ", which nobody is");
  }
  if (expires < now_s - difference_s || expires > now_s + lifetime_s + difference_s) {
    return error(ErrorCode::unauthenticated, "a token that expires at second ", expires, "; it is ",
                 now_s, " here");
  }
  if (!frame.auth.verify(member, as_bytes(token_text),
                         as_bytes(std::string(name_space) + std::string(token.substr(0, 16))),
                         as_bytes(token.substr(16)))) {
    return error(ErrorCode::unauthenticated, "the token of member ", member,
                 " is not of this coordinator's key");
  }
  return member;
}

}  // namespace detail

KVMELD_NAMESPACE_END
