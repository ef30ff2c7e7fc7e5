#pragma once

#include <cstdint>
#include <string>

#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Where a Redis or Valkey server is, how to log in, and how long to wait for it.
///
/// There is no TLS here: across machines that do not trust the network, put a tunnel (stunnel,
/// WireGuard, a service mesh) in between and name its local end.
struct RedisOptions {
  std::string host = "127.0.0.1";
  int port = 6379;
  /// Path of the server's socket; when given, host and port are not used.
  std::string unix_socket{};
  std::string user{};      ///< empty: the server's default user
  std::string password{};  ///< empty: no AUTH is sent
  int database = 0;
  /// For the connection alone; a host name is resolved before, at the system's own pace.
  std::int64_t connect_timeout_ms = 1000;
  /// Longest wait in which no byte moves, or less than 64 KiB of a call that goes on; afterwards
  /// the connection counts as lost.
  std::int64_t command_timeout_ms = 5000;
  /// After the first failure; doubles with each, times a random factor in [0.5, 1).
  std::int64_t backoff_ms = 20;
  std::int64_t backoff_limit_ms = 2000;
  /// Of that factor; 0: another one for each process and connection.
  std::uint64_t backoff_seed = 0;
};

namespace detail {

[[nodiscard]] inline std::string redis_address(const RedisOptions& options) {
  if (!options.unix_socket.empty()) return "redis at " + options.unix_socket;
  return "redis at " + options.host + ":" + detail::decimal(options.port);
}

[[nodiscard]] inline Status check_redis(const RedisOptions& options) {
  // sockaddr_un; hiredis would cut it short without a word
  constexpr std::size_t longest_path = 107;
  if (options.unix_socket.size() > longest_path) {
    return error(ErrorCode::invalid_argument, "a socket path of ", options.unix_socket.size(),
                 " bytes; the system takes ", longest_path);
  }
  if (options.unix_socket.empty() &&
      (options.host.empty() || options.port < 1 || options.port > 65535)) {
    return error(ErrorCode::invalid_argument, "redis host '", options.host, "', port ",
                 options.port, " (1 to 65535)");
  }
  if (options.database < 0)
    return error(ErrorCode::invalid_argument, "redis database ", options.database);
  if (!options.user.empty() && options.password.empty()) {
    return error(ErrorCode::invalid_argument, "redis user '", options.user, "' without a password");
  }
  if (options.connect_timeout_ms < 1 || options.command_timeout_ms < 1) {
    return error(ErrorCode::invalid_argument, "timeouts of ", options.connect_timeout_ms, " and ",
                 options.command_timeout_ms, " ms; at least 1");
  }
  if (options.backoff_ms < 1 || options.backoff_limit_ms < options.backoff_ms) {
    return error(ErrorCode::invalid_argument, "backoff from ", options.backoff_ms, " to ",
                 options.backoff_limit_ms, " ms");
  }
  return {};
}

/// Namespaces become a cluster's hash tag, so that all keys of one lie in one slot.
[[nodiscard]] inline Status check_redis_namespace(const std::string& name) {
  if (!name.empty() && name.find_first_of("{}") == std::string::npos) return {};
  return error(ErrorCode::invalid_argument, "redis namespace '", name,
               "': at least one byte, and neither { nor }");
}

}  // namespace detail

KVMELD_NAMESPACE_END
