#pragma once

#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <string_view>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/transport/redis_connection.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// What a server says about itself, and what it holds: who asks again later sees whether it is
/// still the same.
struct RedisIdentity {
  std::string run_id;   // another one for each process of the server
  std::string content;  // written once by whoever came first; gone when the data are
  std::string policy;   // what happens at `maxmemory`
  std::uint64_t max_memory = 0;

  [[nodiscard]] bool evicts() const noexcept {
    return max_memory != 0 && policy.substr(0, 8) == "allkeys-";
  }
  /// Never 0.
  [[nodiscard]] std::uint64_t generation() const {
    Hasher h;
    h.text(run_id);
    h.text(content);
    return h.digest().low | 1U;
  }
};

/// The value of `name:` in the lines of an INFO answer.
[[nodiscard]] inline std::string redis_info(std::string_view lines, std::string_view name) {
  for (std::size_t at = lines.find(name); at != std::string_view::npos;
       at = lines.find(name, at + 1)) {
    const bool begins = at == 0 || lines[at - 1] == '\n';
    const std::size_t value = at + name.size() + 1;
    if (!begins || value > lines.size() || lines[value - 1] != ':') continue;
    return std::string(lines.substr(value, lines.find_first_of("\r\n", value) - value));
  }
  return {};
}

/// A name that no earlier content of a server has had.
[[nodiscard]] inline std::string fresh_redis_content(const void* salt) {
  timespec now{};
  (void)clock_gettime(CLOCK_REALTIME, &now);
  Hasher h;
  h.value(static_cast<std::int64_t>(now.tv_sec));
  h.value(static_cast<std::int64_t>(now.tv_nsec));
  h.value(static_cast<std::int64_t>(getpid()));
  h.value(reinterpret_cast<std::uintptr_t>(salt));
  return h.digest().hex();
}

/// Asks for it, and names the content where nobody has. A server that refuses INFO, or the write,
/// is known by less.
[[nodiscard]] inline Result<RedisIdentity> redis_identity(RedisConnection& connection,
                                                          const std::string& content_key) {
  connection.queue({"INFO", "server"});
  connection.queue({"INFO", "memory"});
  connection.queue({"GET", content_key});
  auto replies = connection.exchange();
  if (!replies) return replies.error();
  if ((*replies)[2].is_nil()) {
    connection.queue({"SET", content_key, fresh_redis_content(&connection), "NX"});
    connection.queue({"GET", content_key});
    auto written = connection.exchange();
    if (!written) return written.error();
    (*replies)[2] = (*written)[1];
  }
  KVMELD_TRY(connection.status_of((*replies)[2]));
  RedisIdentity identity;
  identity.run_id = redis_info((*replies)[0].text(), "run_id");
  identity.policy = redis_info((*replies)[1].text(), "maxmemory_policy");
  const std::string most = redis_info((*replies)[1].text(), "maxmemory");
  if (!most.empty()) {
    const auto number = redis_digits(most);
    if (!number)
      return error(ErrorCode::corrupt, connection.address(), ": maxmemory is '", most.substr(0, 40),
                   "', and no number");
    identity.max_memory = *number;
  }
  identity.content = (*replies)[2].text();
  return identity;
}

}  // namespace detail

KVMELD_NAMESPACE_END
