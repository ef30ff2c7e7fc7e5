#pragma once

/// Messages and statuses of gRPC to and from the library's.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/status.h>

#include <kvmeld/coordinator/coordinator.pb.h>
#include <kvmeld/config.hpp>
#include <kvmeld/coordinator/coordinator.hpp>
#include <kvmeld/extend/bytes.hpp>
#include <kvmeld/replica/stores.hpp>
#include <kvmeld/replica/wire.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace coordinator {

// Who may call a coordinator: TLS for the connection, a token for the call (CMake component
// kvmeld::grpc).

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

[[nodiscard]] inline std::string namespace_bytes(const Digest128& scope) {
  std::string out(16, '\0');
  std::memcpy(out.data(), &scope.low, 8);
  std::memcpy(out.data() + 8, &scope.high, 8);
  return out;
}
[[nodiscard]] inline std::span<const std::byte> as_bytes(std::string_view text) noexcept {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// Says that a caller has a member's key, until a time: the session's secret, or the member's own
/// where the authenticator knows each one's. It does not cover what is sent: TLS does.
[[nodiscard]] inline Result<std::string> make_token(const replica::FrameOptions& frame,
                                                    replica::MemberId member,
                                                    std::int64_t expires_s) {
  std::string body(16, '\0');
  std::memcpy(body.data(), &member, 8);
  std::memcpy(body.data() + 8, &expires_s, 8);
  std::string tag(frame.tag_bytes(), '\0');
  if (frame.auth != nullptr &&
      !frame.auth->sign(as_bytes(token_text), as_bytes(namespace_bytes(frame.scope) + body),
                        std::as_writable_bytes(std::span(tag.data(), tag.size())))) {
    return extend::error(ErrorCode::unsupported,
                         "the authenticator could not sign a token for member ", member);
  }
  return body + tag;
}

/// The member that a token names.
///
/// Errors: `unauthenticated`, for another namespace, a token that has expired or would live too
/// long, and a tag of another key.
[[nodiscard]] inline Result<replica::MemberId> check_token(
    const replica::FrameOptions& frame, std::string_view scope, std::string_view token,
    std::int64_t now_s, std::int64_t lifetime_s, std::int64_t difference_s) {
  if (scope != namespace_bytes(frame.scope)) {
    return extend::error(ErrorCode::unauthenticated, "a namespace of ", scope.size(),
                         " bytes that is not ", frame.scope.hex(),
                         ": tenant, model or tokenizer differ");
  }
  if (token.size() != 16 + frame.tag_bytes()) {
    return extend::error(ErrorCode::unauthenticated, "a token of ", token.size(),
                         " bytes where this coordinator expects ", 16 + frame.tag_bytes());
  }
  replica::MemberId member = 0;
  std::int64_t expires = 0;
  std::memcpy(&member, token.data(), 8);
  std::memcpy(&expires, token.data() + 8, 8);
  if (member == replica::everyone) {
    return extend::error(ErrorCode::unauthenticated, "a token of member ", member,
                         ", which nobody is");
  }
  if (expires < now_s - difference_s || expires > now_s + lifetime_s + difference_s) {
    return extend::error(ErrorCode::unauthenticated, "a token that expires at second ", expires,
                         "; it is ", now_s, " here");
  }
  if (frame.auth != nullptr &&
      !frame.auth->verify(member, as_bytes(token_text),
                          as_bytes(std::string(scope) + std::string(token.substr(0, 16))),
                          as_bytes(token.substr(16)))) {
    return extend::error(ErrorCode::unauthenticated, "the token of member ", member,
                         " is not of this coordinator's key");
  }
  return member;
}

}  // namespace detail

// Between protobuf's fields and kvmeld's values (CMake component kvmeld::grpc).

namespace detail {

namespace rpc = ::kvmeld::rpc::v1;

[[nodiscard]] inline std::string to_field(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
template <class Key>
requires requires(const Key& key) { key.bytes; }
[[nodiscard]] std::string to_field(const Key& key) {
  return to_field(std::as_bytes(std::span(key.bytes)));
}
[[nodiscard]] inline std::string to_field(const Digest256& digest) {
  return to_field(std::as_bytes(std::span(digest.words)));
}
[[nodiscard]] inline std::string to_field(const Digest128& digest) {
  return namespace_bytes(digest);
}
[[nodiscard]] inline std::string to_field(const CausalContext& context) {
  extend::ByteWriter w;
  replica::write_context(w, context);
  return to_field(w.written());
}

/// A field of fixed size. Errors: `truncated`, `oversized`.
template <class Value>
[[nodiscard]] Result<Value> fixed_field(std::string_view field, const char* what) {
  if (field.size() != sizeof(Value)) {
    return extend::error(field.size() < sizeof(Value) ? ErrorCode::truncated : ErrorCode::oversized,
                         what, " of ", field.size(), " bytes, not ", sizeof(Value));
  }
  Value out;
  std::memcpy(static_cast<void*>(&out), field.data(), sizeof(Value));
  return out;
}
/// A context of at most so many ranges. Errors: `oversized`, those of `read_context`.
[[nodiscard]] inline Result<CausalContext> context_field(
    std::string_view field, std::size_t max_ranges = replica::default_max_ranges) {
  extend::ByteReader r(as_bytes(field));
  CausalContext out = replica::read_context(r, max_ranges);
  KVMELD_TRY(r.finish("context"));
  return out;
}

inline void fill(rpc::StateVersion& to, const StateVersion& version) {
  to.set_context(to_field(version.context));
  to.set_set_digest(to_field(version.set));
  to.set_merger(to_field(version.merger));
}
[[nodiscard]] inline Result<StateVersion> read_version(const rpc::StateVersion& from) {
  auto context = context_field(from.context());
  if (!context) return context.error();
  const auto set = fixed_field<Digest256>(from.set_digest(), "a set digest");
  if (!set) return set.error();
  const auto merger = fixed_field<Digest128>(from.merger(), "a merger digest");
  if (!merger) return merger.error();
  return StateVersion{*std::move(context), *set, *merger};
}

}  // namespace detail

// kvmeld's errors as gRPC's, and back (CMake component kvmeld::grpc).

/// The code that a client of any language sees; the details carry kvmeld's own by name.
[[nodiscard]] inline grpc::Status to_grpc(const Status& status) {
  const auto code = [](ErrorCode of) {
    switch (of) {
      case ErrorCode::ok:
        return grpc::StatusCode::OK;
      case ErrorCode::truncated:
      case ErrorCode::corrupt:
      case ErrorCode::id_mismatch:
        return grpc::StatusCode::DATA_LOSS;
      case ErrorCode::unauthenticated:
        return grpc::StatusCode::UNAUTHENTICATED;
      case ErrorCode::quota_exceeded:
      case ErrorCode::store_full:
        return grpc::StatusCode::RESOURCE_EXHAUSTED;
      case ErrorCode::timed_out:
        return grpc::StatusCode::DEADLINE_EXCEEDED;
      case ErrorCode::unavailable:
        return grpc::StatusCode::UNAVAILABLE;
      case ErrorCode::not_found:
      case ErrorCode::payload_missing:
        return grpc::StatusCode::NOT_FOUND;
      case ErrorCode::merger_mismatch:
      case ErrorCode::dot_reused:
        return grpc::StatusCode::FAILED_PRECONDITION;
      default:
        return grpc::StatusCode::INVALID_ARGUMENT;
    }
  };
  return status.ok() ? grpc::Status::OK
                     : grpc::Status(code(status.code()), status.message(),
                                    std::string(to_string(status.code())));
}

/// What a client was told, in kvmeld's terms.
[[nodiscard]] inline Status from_grpc(const grpc::Status& status) {
  if (status.ok()) return {};
  for (int code = 1; to_string(static_cast<ErrorCode>(code)) != "unknown"; ++code) {
    if (to_string(static_cast<ErrorCode>(code)) == status.error_details())
      return {static_cast<ErrorCode>(code), status.error_message()};
  }
  const auto code = [](grpc::StatusCode of) {
    switch (of) {
      case grpc::StatusCode::DEADLINE_EXCEEDED:
        return ErrorCode::timed_out;
      case grpc::StatusCode::UNAUTHENTICATED:
      case grpc::StatusCode::PERMISSION_DENIED:
        return ErrorCode::unauthenticated;
      // gRPC's own: a message above the limit
      case grpc::StatusCode::RESOURCE_EXHAUSTED:
        return ErrorCode::oversized;
      case grpc::StatusCode::INVALID_ARGUMENT:
        return ErrorCode::invalid_argument;
      case grpc::StatusCode::DATA_LOSS:
        return ErrorCode::corrupt;
      case grpc::StatusCode::NOT_FOUND:
        return ErrorCode::not_found;
      case grpc::StatusCode::UNIMPLEMENTED:
        return ErrorCode::unsupported;
      default:
        return ErrorCode::unavailable;
    }
  }(status.error_code());
  return extend::error(code, "the coordinator's call ended with gRPC code ",
                       static_cast<int>(status.error_code()), ": ", status.error_message());
}

}  // namespace coordinator

KVMELD_NAMESPACE_END
