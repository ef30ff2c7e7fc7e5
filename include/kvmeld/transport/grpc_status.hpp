#pragma once

/// kvmeld's errors as gRPC's, and back (CMake component kvmeld::grpc).

#include <string>

#include <grpcpp/support/status.h>

#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

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
  return detail::error(code, "the coordinator's call ended with gRPC code ",
                       static_cast<int>(status.error_code()), ": ", status.error_message());
}

KVMELD_NAMESPACE_END
