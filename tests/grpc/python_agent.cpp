// A Python agent, without this library, in a round with a C++ one: both hold the same bytes in the
// end.

#include <openssl/evp.h>

#include <kvmeld/coordinator/grpc_client.hpp>
#include <kvmeld/replica/openssl.hpp>

#include "grpc/coordinator_server.hpp"
#include "support/catch.hpp"

namespace {

using Auth = kvmeld::replica::HmacSha256;

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    char two[3];
    (void)std::snprintf(two, sizeof two, "%02x",
                        static_cast<unsigned>(static_cast<unsigned char>(c)));
    out += two;
  }
  return out;
}

std::string sha256(std::span<const std::byte> bytes) {
  unsigned char digest[32];
  unsigned size = sizeof digest;
  (void)EVP_Digest(bytes.data(), bytes.size(), digest, &size, EVP_sha256(), nullptr);
  return hex({reinterpret_cast<const char*>(digest), sizeof digest});
}

/// A Python that has gRPC, or an empty text.
std::string python() {
  for (const char* name : {"python3", "/usr/bin/python3"}) {
    if (std::system(
            (std::string(name) +
             " -c 'import grpc, google.protobuf' 2>/dev/null && protoc --version >/dev/null 2>&1")
                .c_str()) == 0)
      return name;
  }
  return {};
}

}  // namespace

TEST_CASE(
    "a Python agent publishes, waits for the merge, and has the fragments' bytes as C++ has them") {
  const std::string python3 = python();
  if (python3.empty()) {
    return test::skip(
        "no python3 with grpc and protobuf, or no protoc (Debian: python3-grpcio, "
        "python3-protobuf, protobuf-compiler)");
  }
  kvmeld::coordinator::CoordinatorOptions options{
      .replica = {.epoch = 1, .merger = kvmeld::replica::does_not_render}};
  options.replica.self = 1000;
  options.replica.frame = {test::test_namespace(), 1 << 26,
                           std::make_shared<Auth>("the session's secret")};
  options.replica.format.chunk_bytes = 1000;
  options.members = {1, 2};
  options.soft_ms = 60'000;
  test::Server<> server(options);
  REQUIRE(server.started.ok());

  const test::TempFolder folder;
  kvmeld::FragmentSet theirs;
  REQUIRE(theirs.insert(test::fragment(2, 33), kvmeld::Dot{2, 0, 1}, 0.25F, 1234).ok());
  REQUIRE(theirs.insert(test::fragment(4, 0), kvmeld::Dot{2, 1, 1}).ok());
  const auto parcel = kvmeld::coordinator::make_parcel(theirs, {.chunk_bytes = 700});
  REQUIRE(parcel.ok());
  REQUIRE(test::write_text(folder / "parcel", *parcel));
  const auto agent = [&](const std::string& key) {
    return test::OtherProcess(
        {python3,       "examples/studies/06_agent.py",
         "--address",   server.address(),
         "--namespace", hex(kvmeld::coordinator::detail::namespace_bytes(test::test_namespace())),
         "--member",    "2",
         "--publish",   folder / "parcel",
         "--session",   "3",
         "--round",     "1",
         "--merger",    hex(kvmeld::coordinator::detail::namespace_bytes(test::test_merger)),
         "--timeout",   "20",
         "--output",    folder / "report"},
        {{"KVMELD_KEY", key}});
  };
  CHECK(agent("a wrong secret").wait() == 1);
  CHECK(server.server.core().set().empty());

  auto other = agent("the session's secret");
  kvmeld::coordinator::CoordinatorClientOptions mine;
  mine.self = 1;
  mine.frame = options.replica.frame;
  kvmeld::coordinator::CoordinatorClient client(server.address(), mine);
  kvmeld::FragmentSet set;
  REQUIRE(set.insert(test::fragment(1, 50), kvmeld::Dot{1, 0, 1}).ok());
  REQUIRE(client.publish(set).ok());
  const auto cut = client.wait_for_merge(3, 1, test::test_merger, set.context(), 20'000);
  REQUIRE(cut.ok());
  CHECK(cut->set.size() == 3);
  REQUIRE(client.sync(set).ok());
  CHECK(set.digest() == cut->version.set);
  REQUIRE(other.wait() == 0);

  const std::string report = test::text_of(folder / "report");
  CHECK(report.find("\"set_digest\": \"" + set.digest().hex() + "\"") != std::string::npos);
  for (const auto& entry : set.entries()) {
    CHECK(report.find(entry.id.hex()) != std::string::npos);
    for (const auto& payload : entry.fragment.payloads())
      CHECK(report.find(sha256({payload.bytes.get(), payload.byte_count})) != std::string::npos);
  }
  CHECK(set.payload(test::fragment(2, 33).id()).valid());
}
