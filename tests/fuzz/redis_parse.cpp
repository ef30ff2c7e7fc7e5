// A hostile server in the place of Redis: whatever it answers, and to however many questions, a
// store's calls end in an error or in records that came. Needs hiredis.

#ifdef KVMELD_TEST_REDIS

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include <kvmeld/stores/redis.hpp>

#include "support/fuzz.hpp"
#include "support/temp_folder.hpp"

namespace {

using namespace kvmeld;
using test::Bytes;
using test::need;
using test::need_reason;

/// How long a call waits for bytes that do not come, which most mutated answers make it do.
std::int64_t patience_ms = 5;

/// Greets each connection, then answers question by question with the next of some blocks of bytes,
/// and with the last one for ever.
class Stranger {
 public:
  Stranger() : path_(folder_ / "socket"), listener_(::socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    need(path_.size() < sizeof address.sun_path);
    std::copy(path_.begin(), path_.end(), address.sun_path);
    need(::bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
         ::listen(listener_, 64) == 0);
    thread_ = std::thread([this] { serve(); });
  }
  ~Stranger() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }
  [[nodiscard]] stores::RedisStoreOptions options(std::vector<Bytes> blocks) {
    const std::lock_guard lock(mutex_);
    blocks_ = std::move(blocks);
    stores::RedisStoreOptions out;
    out.server.unix_socket = path_;
    out.server.command_timeout_ms = patience_ms;
    out.server.backoff_ms = out.server.backoff_limit_ms = 1;
    out.server.backoff_seed = 1;
    return out;
  }

 private:
  void serve() {
    for (int client; (client = ::accept(listener_, nullptr, nullptr)) >= 0; ::close(client)) {
      std::vector<Bytes> blocks;
      {
        const std::lock_guard lock(mutex_);
        blocks = blocks_;
      }
      blocks.insert(blocks.begin(), test::bytes_of("+PONG\r\n"));
      char asked[4096];
      for (std::size_t n = 0; ::recv(client, asked, sizeof asked, 0) > 0; ++n) {
        need(n < 20000);  // a call asks without end
        const Bytes& answer = blocks[(std::min)(n, blocks.size() - 1)];
        (void)::send(client, answer.data(), answer.size(), MSG_NOSIGNAL);
      }
    }
  }

  test::TempFolder folder_;
  std::string path_;
  int listener_;
  std::mutex mutex_;
  std::vector<Bytes> blocks_;
  std::thread thread_;
};

std::string bulk(std::string_view text) {
  return "$" + std::to_string(text.size()) + "\r\n" + std::string(text) + "\r\n";
}
/// Answers to who the server is, and what it holds.
std::string identity() {
  return bulk("# Server\r\nrun_id:abc\r\n") +
         bulk("maxmemory:0\r\nmaxmemory_policy:noeviction\r\n") + bulk("content");
}
/// Answers to one reading of records: of so many numbers from `base` on.
std::string page(std::string_view base, std::string_view length,
                 const std::vector<std::string>& records) {
  std::string out =
      bulk(base) + ":" + std::string(length) + "\r\n*" + std::to_string(records.size()) + "\r\n";
  for (const std::string& record : records) out += bulk(record);
  return out + bulk("content") + bulk(base);
}

}  // namespace

const std::vector<Bytes>& test::fuzz_seeds() {
  static const std::vector<Bytes> all = [] {
    const std::string huge = "18446744073709551615";
    const std::vector<std::vector<std::string>> talks{
        {identity(), page("0", "2", {"first", "second"}), ":3\r\n" + bulk("content"),
         "+OK\r\n" + bulk("content") + bulk("0") + ":3\r\n",
         "+OK\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n*3\r\n:4\r\n+OK\r\n+OK\r\n"},
        {identity(), page("7", "1", {"a"}), page("7", "300", {"a", "b"}), page("7", "0", {})},
        {identity(), page(huge, "1", {"a"}), page(huge, "1", {"a"})},
        {identity(), page("17592186044416", "1", {"a"}), page("17592186044415", huge, {"a"})},
        {identity(), page("0", "-1", {}), page("x", "y", {})},
        {identity(), "*1000000000\r\n", "*-5\r\n", "$99999999999\r\n"},
        {identity(), "$300000\r\nabc", "-READONLY no\r\n", "-OOM no\r\n"},
    };
    std::vector<Bytes> out;
    for (const auto& talk : talks) {
      for (const std::uint64_t cursor : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}}) {
        Bytes one;
        put_number(one, cursor, 8);
        for (const std::string& block : talk) put_block(one, bytes_of(block));
        out.push_back(one);
      }
    }
    return out;
  }();
  return all;
}

namespace {
/// How far inputs came: a harness that is refused at the door tests nothing behind it.
std::size_t opened = 0, records_read = 0, replaced_records = 0;
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Stranger server;
  test::Input in(std::as_bytes(std::span(data, size)));
  const std::uint64_t cursor = in.number(8);
  std::vector<Bytes> blocks;
  while (!in.empty() && blocks.size() < 16) blocks.push_back(in.block());
  const test::MemoryMeter meter;
  auto store = stores::RedisStore::open(server.options(blocks));
  if (!store) {
    need_reason(store);
    return 0;
  }
  ++opened;
  const auto got = store->records(cursor);
  records_read += got ? got->records.size() : 0;
  need_reason(got);
  if (got) {
    need((got->cursor >> 44U) == (store->generation() >> 44U) || got->records.empty());
    for (const Bytes& record : got->records) need(record.size() <= size);
  }
  const Bytes more(3, std::byte{7});
  const Status added = store->add_record(more);
  if (!added) need(!added.message().empty());
  const Status replaced = store->replace_records(got ? got->cursor : cursor, more);
  if (!replaced) need(!replaced.message().empty());
  replaced_records += replaced.ok();
  // The buffers of a connection, the largest arrays that are taken, some of them in each other, and
  // what came in as many pages as a call may read; never what lengths announce.
  need(meter.most() <= (std::size_t{16} << 20U) + 2000 * size);
  return 0;
}

#ifndef KVMELD_LIBFUZZER
#include "support/catch.hpp"

TEST_CASE("a hostile Redis server ends no call in anything but an error or what it sent") {
  patience_ms =
      200;  // on a machine that is busy with other tests the answers of the seeds are in time, too
  test::fuzz_rounds(0, 3);
  patience_ms = 5;
  CHECK(opened > 0);
  CHECK(records_read > 0);
  CHECK(replaced_records > 0);
  test::fuzz_rounds(1000, 3);
}
#endif

#elif !defined(KVMELD_LIBFUZZER)

#include <cstdio>

int main() {
  std::puts("skipped: no hiredis (Debian: libhiredis-dev)");
  return 77;
}

#endif
