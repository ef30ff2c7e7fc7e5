#pragma once
// A coordinator of one test's own, in this process or in one that can be killed.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <kvmeld/coordinator/grpc_client.hpp>
#include <kvmeld/coordinator/grpc_server.hpp>
#include <kvmeld/stores/file.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/random_cache.hpp"
#include "support/temp_folder.hpp"

namespace test {

/// Refused handshakes are part of the tests, and gRPC would print each.
inline const int quiet = ::setenv("GRPC_VERBOSITY", "NONE", 0);

inline kvmeld::Digest128 test_namespace() {
  return kvmeld::replica::frame_namespace("tenant", "test model", "test tokenizer");
}
inline constexpr kvmeld::Digest128 test_merger{7, 9};

inline kvmeld::Fragment fragment(std::uint64_t seed, std::int64_t tokens = 20) {
  return sealed(geometry({.layers = 2, .heads = 2, .channels = 32}), tokens, seed,
                {.tokens = token_ids(tokens)})
      .fragment;
}

inline kvmeld::coordinator::CoordinatorOptions server_options() {
  kvmeld::coordinator::CoordinatorOptions options{
      .replica = {.epoch = 1, .merger = kvmeld::replica::does_not_render}};
  options.replica.self = 1000;
  options.replica.epoch = 1;
  options.replica.frame.scope = test_namespace();
  options.replica.format.chunk_bytes = 1000;
  options.soft_ms = 200;
  return options;
}
inline kvmeld::coordinator::CoordinatorClientOptions client_options(
    kvmeld::replica::MemberId self) {
  kvmeld::coordinator::CoordinatorClientOptions options;
  options.self = self;
  options.frame.scope = test_namespace();
  options.format.chunk_bytes = 1000;
  options.timeout_ms = 20'000;
  options.retry_ms = 20;
  options.max_retry_ms = 200;
  options.seed = self;
  return options;
}

/// A server on any loopback port.
template <class Store = kvmeld::stores::MemoryStore>
struct Server {
  explicit Server(kvmeld::coordinator::CoordinatorOptions options, Store s = Store(),
                  const kvmeld::coordinator::TlsOptions& tls = {})
      : store(std::move(s)),
        server(store, std::move(options)),
        started(server.start("127.0.0.1:0", tls)) {}
  [[nodiscard]] std::string address() const { return "127.0.0.1:" + std::to_string(server.port()); }

  Store store;
  kvmeld::coordinator::CoordinatorServer server;
  kvmeld::Status started;
};

/// This very program again, running one of its hidden test cases, with arguments in the
/// environment.
class OtherProcess {
 public:
  OtherProcess(std::vector<std::string> command,
               const std::vector<std::pair<std::string, std::string>>& environment) {
    std::vector<char*> arguments;
    for (std::string& word : command) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    std::vector<std::string> words;
    for (char** at = environ; *at != nullptr; ++at) words.emplace_back(*at);
    for (const auto& [name, value] : environment) words.push_back(name + "=" + value);
    std::vector<char*> variables;
    for (std::string& word : words) variables.push_back(word.data());
    variables.push_back(nullptr);
    process_ = ::vfork();
    if (process_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::execvpe(arguments[0], arguments.data(), variables.data());
      ::_exit(127);
    }
  }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;
  ~OtherProcess() { end(); }
  /// As a crash does.
  void end() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    (void)::waitpid(process_, nullptr, 0);
    process_ = -1;
  }
  /// The exit status; −1 after a minute, or where it was killed.
  int wait() {
    for (int waited_ms = 0; process_ > 0 && waited_ms < 60'000; waited_ms += 10) {
      int status = 0;
      if (::waitpid(process_, &status, WNOHANG) == process_) {
        process_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return -1;
  }

 private:
  pid_t process_ = -1;
};

inline std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
inline bool write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path + ".part", std::ios::binary);
  file << text;
  file.close();
  return file.good() && std::rename((path + ".part").c_str(), path.c_str()) == 0;
}
/// A file's text once it is there.
inline std::string wait_for_text(const std::string& path) {
  for (int waited_ms = 0; waited_ms < 30'000; waited_ms += 5) {
    if (std::string text = text_of(path); !text.empty()) return text;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return {};
}

}  // namespace test
