#pragma once

/// The metrics page over HTTP.

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <httplib.h>

#include <kvmeld/config.hpp>
#include <kvmeld/metrics/metrics.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace metrics {

/// Where metrics are to be fetched.
struct MetricsEndpointOptions {
  std::string host = "127.0.0.1";  ///< an address of this machine; metrics are not for everyone
  int port = 0;                    ///< 0: any that is free
  std::string path = "/metrics";
};

/// Serves a page to Prometheus over HTTP from threads of its own, until it is destroyed.
class MetricsEndpoint {
 public:
  /// @param fill `Status(MetricsPage&)`: called for each scrape, by several threads at once; what
  ///             it reads outlives the endpoint. Its error answers 500 with the message.
  ///
  /// Errors: `unavailable` where the address cannot be had.
  template <class Fill>
  [[nodiscard]] static Result<MetricsEndpoint> serve(Fill fill,
                                                     const MetricsEndpointOptions& options = {}) {
    auto running = std::make_unique<Running>();
    httplib::Server& server = running->server;
    server.new_task_queue = [] { return new httplib::ThreadPool(4); };
    server.set_payload_max_length(4096);  // requests have no body
    // the library's own would let two servers share a port
    server.set_socket_options([](socket_t socket) {
      const int yes = 1;
      (void)::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    server.Get(options.path, [fill = std::move(fill)](const httplib::Request&,
                                                      httplib::Response& response) {
      MetricsPage page;
      const Status filled = fill(page);
      if (filled.ok())
        return response.set_content(prometheus_text(page), std::string(prometheus_content_type));
      response.status = 500;
      response.set_content(filled.message(), "text/plain; charset=utf-8");
    });
    const int port = options.port == 0 ? server.bind_to_any_port(options.host)
                     : server.bind_to_port(options.host, options.port) ? options.port
                                                                       : -1;
    if (port <= 0)
      return extend::error(ErrorCode::unavailable, "cannot listen on ", options.host, ", port ",
                           options.port);
    running->port = port;
    running->thread = std::thread([r = running.get()] {
      (void)r->server.listen_after_bind();
      r->ended.store(true);
    });
    // A stop before the server runs would be lost.
    while (!server.is_running() && !running->ended.load()) std::this_thread::yield();
    return MetricsEndpoint(std::move(running));
  }

  [[nodiscard]] int port() const noexcept { return running_->port; }

 private:
  struct Running {
    httplib::Server server;
    std::thread thread;
    std::atomic<bool> ended{false};
    int port = 0;

    Running() = default;
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running() {
      server.stop();
      if (thread.joinable()) thread.join();
    }
  };

  explicit MetricsEndpoint(std::unique_ptr<Running> running) noexcept
      : running_(std::move(running)) {}

  std::unique_ptr<Running> running_;
};

}  // namespace metrics

KVMELD_NAMESPACE_END
