#pragma once
// A real redis-server of one test's own: on a Unix socket and, where asked, a loopback port, in a
// folder that goes with it.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <kvmeld/stores/detail/redis_connection.hpp>

namespace test {

/// Whether a program of this name is on the PATH.
inline bool has_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::string rest = path != nullptr ? path : "/usr/bin:/bin";
  while (!rest.empty()) {
    const std::size_t end = rest.find(':');
    if (access((rest.substr(0, end) + "/" + name).c_str(), X_OK) == 0) return true;
    rest = end == std::string::npos ? "" : rest.substr(end + 1);
  }
  return false;
}

class RedisServer {
 public:
  /// Starts it. Options as on its command line: {"--appendonly", "yes"}.
  explicit RedisServer(std::vector<std::string> options = {}, bool loopback = false)
      : options_(std::move(options)), loopback_(loopback) {
    if (!has_program("redis-server")) {
      std::printf("skipped: no redis-server on the PATH (Debian: redis-server)\n");
      std::exit(77);
    }
    std::string pattern =
        (std::filesystem::temp_directory_path() / "kvmeld-redis-").string() + std::string(6, 'X');
    if (mkdtemp(pattern.data()) == nullptr) std::abort();
    folder_ = pattern;
    std::filesystem::create_directory(folder_ / "data");
    running_ = start();
  }
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;
  ~RedisServer() {
    kill();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  [[nodiscard]] bool running() const { return running_; }
  [[nodiscard]] std::filesystem::path data_folder() const { return folder_ / "data"; }
  [[nodiscard]] std::string socket() const { return (folder_ / "socket").string(); }
  [[nodiscard]] int port() const { return port_; }
  [[nodiscard]] std::string log() const { return (folder_ / "log").string(); }

  /// How a client reaches it; short waits, so that tests of failures are quick.
  [[nodiscard]] kvmeld::stores::RedisOptions client() const {
    kvmeld::stores::RedisOptions options;
    options.unix_socket = socket();
    options.password = password_;
    options.connect_timeout_ms = 2000;
    options.command_timeout_ms = 5000;
    options.backoff_ms = 5;
    options.backoff_limit_ms = 50;
    options.backoff_seed = 7;
    return options;
  }
  [[nodiscard]] kvmeld::stores::RedisOptions client_by_port() const {
    kvmeld::stores::RedisOptions options = client();
    options.unix_socket.clear();
    options.port = port_;
    return options;
  }

  /// As a crash: no last words, nothing written that was not written.
  void kill() { end(SIGKILL); }
  /// Stands still, connections open.
  void pause() const { ::kill(process_, SIGSTOP); }
  void go_on() const { ::kill(process_, SIGCONT); }
  /// Starts it again, on the same folder, and waits until it answers.
  bool restart() {
    kill();
    return running_ = start();
  }
  /// Starts it again with nothing left of what it held.
  bool restart_empty() {
    kill();
    std::filesystem::remove_all(data_folder());
    std::filesystem::create_directory(data_folder());
    return running_ = start();
  }
  void set_options(std::vector<std::string> options) { options_ = std::move(options); }
  /// Clients and the wait for the first answer use it; the server gets it by --requirepass.
  void set_password(std::string password) {
    password_ = std::move(password);
    options_.insert(options_.end(), {"--requirepass", password_});
  }

  /// A command from outside of what is tested; its answer as text.
  std::string tell(std::initializer_list<kvmeld::stores::RedisArgument> arguments) const {
    kvmeld::stores::RedisConnection connection(client());
    const auto reply = connection.command(arguments);
    if (!reply) return reply.error().message();
    return reply->is_integer() ? std::to_string(reply->number().value_or(0))
                               : std::string(reply->text());
  }

 private:
  static int free_port() {
    const int probe = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    const bool bound = bind(probe, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                       getsockname(probe, reinterpret_cast<sockaddr*>(&address), &size) == 0;
    close(probe);
    return bound ? ntohs(address.sin_port) : 0;
  }

  bool start() {
    // A cluster's node listens 10000 higher, too.
    for (int tries = 0; loopback_ && (port_ == 0 || port_ > 55'000) && tries < 1000; ++tries)
      port_ = free_port();
    std::vector<std::string> words{"redis-server", "--port",    std::to_string(port_),
                                   "--bind",       "127.0.0.1", "--unixsocket",
                                   socket(),       "--dir",     data_folder().string(),
                                   "--logfile",    log(),       "--daemonize",
                                   "no",           "--save",    ""};
    words.insert(words.end(), options_.begin(), options_.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    std::filesystem::remove(socket());
    process_ = fork();
    if (process_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that dies leaves no server behind
      (void)std::freopen("/dev/null", "w", stdout);
      execvp(arguments[0], arguments.data());
      _exit(127);
    }
    for (int waited_ms = 0; process_ > 0 && waited_ms < 10'000; waited_ms += 5) {
      kvmeld::stores::RedisConnection connection(client());
      if (connection.connect()) return true;
      if (waitpid(process_, nullptr, WNOHANG) == process_) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::fprintf(stderr, "redis-server did not start; its log is %s\n", log().c_str());
    return false;
  }
  void end(int signal) {
    if (process_ <= 0) return;
    ::kill(process_, signal);
    ::kill(process_, SIGCONT);
    (void)waitpid(process_, nullptr, 0);
    process_ = -1;
    running_ = false;
  }

  std::vector<std::string> options_;
  std::filesystem::path folder_;
  std::string password_;
  pid_t process_ = -1;
  int port_ = 0;
  bool loopback_ = false;
  bool running_ = false;
};

}  // namespace test
