// What a coordinator refuses: strangers, garbage, too much of anything, and clients that take their
// time.

#include <kvmeld/replica/openssl.hpp>

#include "grpc/coordinator_server.hpp"
#include "support/catch.hpp"

namespace {

namespace rpc = kvmeld::rpc::v1;
using kvmeld::Dot;
using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::FragmentSet;
using kvmeld::coordinator::CoordinatorClient;
using kvmeld::coordinator::detail::to_field;
using test::client_options;
using test::fragment;
using test::server_options;

FragmentSet set_of(std::uint64_t agent, const Fragment& f, std::uint64_t sequence = 0) {
  FragmentSet set;
  REQUIRE(set.insert(f, Dot{agent, sequence, 1}).ok());
  return set;
}

/// A client that sends what it likes.
struct Raw {
  explicit Raw(const std::string& address, int max_message = 64 << 20) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxSendMessageSize(max_message);
    // else its windows grow until what nobody reads fits into them
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    stub = rpc::Coordinator::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  }
  static void admit(grpc::ClientContext& context,
                    const std::string& scope =
                        kvmeld::coordinator::detail::namespace_bytes(test::test_namespace())) {
    context.AddMetadata("kvmeld-namespace-bin", scope);
    context.AddMetadata(
        "kvmeld-token-bin",
        *kvmeld::coordinator::detail::make_token(
            kvmeld::replica::FrameOptions{test::test_namespace()}, 1, std::time(nullptr) + 60));
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  }
  grpc::Status update(const std::vector<rpc::UpdateRequest>& items, bool end = true) {
    grpc::ClientContext context;
    admit(context);
    rpc::UpdateReply reply;
    const auto writer = stub->UpdateCache(&context, &reply);
    for (const rpc::UpdateRequest& item : items) {
      if (!writer->Write(item)) return writer->Finish();
    }
    if (end) {
      rpc::UpdateRequest last;
      last.set_items(items.size());
      (void)writer->Write(last);
    }
    (void)writer->WritesDone();
    return writer->Finish();
  }
  grpc::Status state(const rpc::StateRequest& request,
                     std::vector<rpc::StateReply>* replies = nullptr) {
    grpc::ClientContext context;
    admit(context);
    const auto reader = stub->GetGlobalState(&context, request);
    rpc::StateReply reply;
    while (reader->Read(&reply)) {
      if (replies != nullptr) replies->push_back(reply);
    }
    return reader->Finish();
  }
  std::unique_ptr<rpc::Coordinator::Stub> stub;
};

rpc::UpdateRequest set_item(const FragmentSet& set) {
  rpc::UpdateRequest item;
  item.set_set(to_field(std::span<const std::byte>(kvmeld::replica::encode_set(set))));
  return item;
}
/// Set, manifest and chunks of one fragment.
std::vector<rpc::UpdateRequest> items_of(const FragmentSet& set, const Fragment& f) {
  std::vector<rpc::UpdateRequest> out{set_item(set)};
  const auto manifest = kvmeld::replica::make_manifest(f, 1000);
  rpc::UpdateRequest item;
  item.mutable_manifest()->set_id(to_field(f.id()));
  item.mutable_manifest()->set_encoded(
      to_field(std::span<const std::byte>(kvmeld::replica::encode_manifest(*manifest))));
  out.push_back(item);
  for (std::size_t c = 0; c < manifest->chunks[0].size(); ++c) {
    item.mutable_chunk()->set_key(to_field(manifest->chunks[0][c]));
    item.mutable_chunk()->set_stored(to_field(std::span<const std::byte>(
        kvmeld::replica::encode_chunk(kvmeld::replica::raw_chunk(f.payloads()[0], c, 1000)))));
    out.push_back(item);
  }
  return out;
}

std::string run(const std::string& command) {
  std::string out;
  FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return "no shell";
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) out += buffer;
  return ::pclose(pipe) == 0 ? std::string() : out + "failed";
}

/// A key and a certificate of its own for loopback, made by openssl's command line.
bool make_certificate(const test::TempFolder& folder, const std::string& name) {
  const std::string said =
      run("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
          "/CN=" +
          name + " -addext subjectAltName=IP:127.0.0.1,DNS:" + name + " -keyout " +
          folder / (name + ".key") + " -out " + folder / (name + ".pem"));
  if (!said.empty()) std::printf("openssl: %s\n", said.c_str());
  return said.empty();
}

}  // namespace

TEST_CASE(
    "TLS: the right certificate, a wrong one, none; client certificates where they are asked for") {
  const test::TempFolder folder;
  REQUIRE(make_certificate(folder, "coordinator"));
  REQUIRE(make_certificate(folder, "member"));
  const auto pem = [&](const std::string& name) { return test::text_of(folder / name); };
  kvmeld::coordinator::TlsOptions tls{.root_certificates = pem("member.pem"),
                                      .certificate = pem("coordinator.pem"),
                                      .private_key = pem("coordinator.key")};
  const bool both = GENERATE(false, true);
  tls.require_client_certificate = both;
  test::Server<> server(server_options(), kvmeld::stores::MemoryStore(), tls);
  REQUIRE(server.started.ok());
  auto options = client_options(1);
  options.timeout_ms = 1500;
  const auto asked = [&](const kvmeld::coordinator::TlsOptions& with) {
    options.tls = with;
    CoordinatorClient client(server.address(), options);
    return client.publish(set_of(1, fragment(1))).status();
  };
  CHECK(asked({.root_certificates = pem("coordinator.pem"),
               .certificate = pem("member.pem"),
               .private_key = pem("member.key")})
            .ok());
  CHECK(asked({.root_certificates = pem("coordinator.pem")}).ok() == !both);
  CHECK_FALSE(asked({.root_certificates = pem("member.pem")}).ok());
  CHECK_FALSE(
      asked({.root_certificates = pem("coordinator.pem"), .server_name = "somebody.else"}).ok());
  CHECK_FALSE(asked({}).ok());
}

TEST_CASE(
    "another namespace, another key, no token, an old token: unauthenticated, and nothing is told "
    "or changed") {
  using Auth = kvmeld::replica::HmacSha256;
  kvmeld::coordinator::CoordinatorOptions options{
      .replica = {.epoch = 1, .merger = kvmeld::replica::does_not_render}};
  options.replica.self = 1000;
  options.replica.frame = {test::test_namespace(), 1 << 26,
                           std::make_shared<Auth>("a secret of the session")};
  test::Server<> server(options);
  REQUIRE(server.started.ok());
  const auto publish = [&](const kvmeld::Digest128& scope, const char* key) {
    kvmeld::coordinator::CoordinatorClientOptions mine;
    mine.self = 1;
    mine.timeout_ms = 10'000;
    mine.frame = {scope, 1 << 26, std::make_shared<Auth>(std::string_view(key))};
    CoordinatorClient client(server.address(), mine);
    return client.publish(set_of(1, fragment(1))).status();
  };
  CHECK(publish(kvmeld::replica::frame_namespace("other tenant", "test model", "test tokenizer"),
                "a secret of the session")
            .code() == ErrorCode::unauthenticated);
  CHECK(publish(test::test_namespace(), "another secret").code() == ErrorCode::unauthenticated);
  CHECK(publish(test::test_namespace(), "").code() == ErrorCode::unsupported);
  Raw raw(server.address());
  CHECK(raw.update({}).error_code() == grpc::StatusCode::UNAUTHENTICATED);  // its token has no tag
  CHECK(raw.state({}).error_code() == grpc::StatusCode::UNAUTHENTICATED);
  {
    grpc::ClientContext bare;
    rpc::MergeReply reply;
    CHECK(raw.stub->WaitForMerge(&bare, {}, &reply).error_code() ==
          grpc::StatusCode::UNAUTHENTICATED);
  }
  for (const std::int64_t age_s : {-400, 4000}) {
    grpc::ClientContext old;
    old.AddMetadata("kvmeld-namespace-bin",
                    kvmeld::coordinator::detail::namespace_bytes(test::test_namespace()));
    old.AddMetadata("kvmeld-token-bin", *kvmeld::coordinator::detail::make_token(
                                            options.replica.frame, 1, std::time(nullptr) + age_s));
    rpc::MergeReply reply;
    CHECK(raw.stub->WaitForMerge(&old, {}, &reply).error_code() ==
          grpc::StatusCode::UNAUTHENTICATED);
  }
  CHECK(server.server.core().set().empty());
  CHECK(publish(test::test_namespace(), "a secret of the session").ok());
  CHECK(server.server.core().set().size() == 1);
  // A token is one member's: it brings no operation of another.
  kvmeld::coordinator::CoordinatorClientOptions mine;
  mine.self = 1;
  mine.frame = options.replica.frame;
  CoordinatorClient client(server.address(), mine);
  CHECK(client.publish(set_of(2, fragment(2))).status().code() == ErrorCode::unauthenticated);
  CHECK(server.server.core().refusals().unauthenticated == 1);
  CHECK(server.server.core().set().size() == 1);
  mine.self = 2;
  CHECK(CoordinatorClient(server.address(), mine).publish(set_of(2, fragment(2))).ok());
}

TEST_CASE(
    "damaged, cut, incomplete and misplaced data is refused with a reason, and the state stays as "
    "it was") {
  test::Server server(server_options());
  Raw raw(server.address());
  const Fragment f = fragment(3, 6);
  const auto good = items_of(set_of(1, f), f);
  REQUIRE(good.size() > 3);
  test::Random random(9);
  const auto damaged = [&](std::size_t which, int how) {
    auto items = good;
    std::string* const bytes = which == 0   ? items[0].mutable_set()
                               : which == 1 ? items[1].mutable_manifest()->mutable_encoded()
                                            : items[which].mutable_chunk()->mutable_stored();
    if (how == 0) bytes->resize(random.below(bytes->size()));
    if (how == 1) (*bytes)[random.below(bytes->size())] ^= static_cast<char>(1U << random.below(8));
    if (how == 2) bytes->append("more");
    return raw.update(items);
  };
  std::size_t accepted = 0;
  for (int i = 0; i < 60; ++i) {
    for (std::size_t which = 0; which < 3; ++which) {
      const grpc::Status status = damaged(which, i % 3);
      if (status.ok()) {
        ++accepted;  // a set has no checksum: another dot or confidence is another operation
        CHECK(which == 0);
        continue;
      }
      CHECK((status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
             status.error_code() == grpc::StatusCode::DATA_LOSS ||
             status.error_code() == grpc::StatusCode::NOT_FOUND ||
             status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED ||
             status.error_code() == grpc::StatusCode::UNAUTHENTICATED));  // another agent's dot
      CHECK_FALSE(status.error_message().empty());
    }
    if (accepted == 0) CHECK(server.server.core().set().empty());
  }
  test::Server fresh(server_options());
  Raw to_fresh(fresh.address());
  const auto refused = [&](const std::vector<rpc::UpdateRequest>& items, grpc::StatusCode code,
                           bool end = true) {
    const grpc::Status status = to_fresh.update(items, end);
    CHECK(status.error_code() == code);
    CHECK(fresh.server.core().set().empty());
  };
  refused(good, grpc::StatusCode::DATA_LOSS, false);  // no end: the client broke off
  // a payload that no operation inserts
  refused({good[1], good[2]}, grpc::StatusCode::INVALID_ARGUMENT);
  refused({good[0], good[2]}, grpc::StatusCode::NOT_FOUND);  // a chunk before its manifest
  refused({good[0], rpc::UpdateRequest()}, grpc::StatusCode::INVALID_ARGUMENT);
  auto items = good;
  items[1].mutable_manifest()->set_id("short");
  refused(items, grpc::StatusCode::DATA_LOSS);
  items = good;
  items[2].mutable_chunk()->set_stored(good[3].chunk().stored());
  CHECK_FALSE(to_fresh.update(items).ok());
  items = good;
  items.pop_back();  // one chunk lacks: the operation is taken, the answer says what it lacks
  {
    CoordinatorClient client(fresh.address(), client_options(1));
    FragmentSet bare = set_of(1, f);
    REQUIRE(bare.evict(f.id()).ok());
    CHECK(client.publish(bare).status().code() == ErrorCode::payload_missing);
    FragmentSet mine;
    REQUIRE(client.sync(mine).ok());
    CHECK_FALSE(mine.find(f.id())->complete());
    REQUIRE(client.publish(set_of(1, f)).ok());
    REQUIRE(client.sync(mine).ok());
    CHECK(mine.find(f.id())->complete());
  }
  rpc::StateRequest bad;
  bad.set_context("\xff\xff\xff");
  CHECK_FALSE(to_fresh.state(bad).ok());
  bad.Clear();
  bad.add_wants()->set_id("?");
  CHECK_FALSE(to_fresh.state(bad).ok());
  bad.Clear();
  bad.add_wants()->set_id(to_field(fragment(99).id()));
  std::vector<rpc::StateReply> replies;
  CHECK(to_fresh.state(bad, &replies).ok());
  REQUIRE(replies.size() == 2);
  CHECK(replies[1].lacking() == to_field(fragment(99).id()));
}

TEST_CASE("too much: one message, one update, one author's operations and bytes, calls at once") {
  auto options = server_options();
  options.replica.max_message_bytes = 1 << 16;
  options.replica.max_operations = 10;
  options.max_update_bytes = 50'000;
  options.max_author_bytes = 60'000;
  options.max_calls = 12;
  test::Server server(options);
  REQUIRE(server.started.ok());
  Raw raw(server.address());
  rpc::UpdateRequest huge;
  huge.set_set(std::string(1 << 17, 'x'));
  CHECK(raw.update({huge}).error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
  CoordinatorClient client(server.address(), client_options(1));
  // 60 tokens of 1 KiB
  CHECK(client.publish(set_of(1, fragment(1, 60))).status().code() == ErrorCode::quota_exceeded);
  CHECK(client.publish(set_of(1, fragment(1, 5), 10)).status().code() == ErrorCode::quota_exceeded);
  CHECK(server.server.core().set().empty());
  REQUIRE(client.publish(set_of(1, fragment(1, 40))).ok());
  CHECK(client.publish(set_of(1, fragment(2, 40), 1)).status().code() == ErrorCode::quota_exceeded);
  CHECK(server.server.core().set().size() == 1);
  CoordinatorClient second(server.address(), client_options(2));
  REQUIRE(second.publish(set_of(2, fragment(2, 40))).ok());  // another author
  {
    // More than one update may carry goes in several.
    FragmentSet many;
    for (std::uint64_t i = 0; i < 5; ++i)
      REQUIRE(many.insert(fragment(30 + i, 11), Dot{3, i, 1}).ok());
    auto mine = client_options(3);
    CHECK(CoordinatorClient(server.address(), mine).publish(many).status().code() ==
          ErrorCode::quota_exceeded);
    mine.max_update_bytes = 30'000;
    CoordinatorClient third(server.address(), mine);
    const auto published = third.publish(many);
    REQUIRE(published.ok());
    CHECK(third.traffic().fragments_sent == 5);
    CHECK(leq(many.context(), published->context));
    CHECK(third.sync(many).ok());
    CHECK(many.size() == 7);
  }

  std::vector<std::thread> waiting;
  for (int i = 0; i < 12; ++i) {
    waiting.emplace_back([&] {
      CoordinatorClient one(server.address(), client_options(5));
      (void)one.wait_for_change(server.server.core().version().set, {}, 2500);
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  CHECK(client.version().status().code() == ErrorCode::quota_exceeded);
  for (std::thread& one : waiting) one.join();
  // A call counts until the server has let go of it, a little after the client has its answer.
  bool free = false;
  for (int tries = 0; !free && tries < 200; ++tries) {
    free = client.version().ok();
    if (!free) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK(free);
}

TEST_CASE("a member that claims to have seen very much is refused before it is listened to") {
  auto options = server_options();
  options.max_ranges = 100;
  test::Server server(options);
  CoordinatorClient client(server.address(), client_options(1));
  kvmeld::CausalContext much;
  for (std::uint64_t i = 0; i < 101; ++i) much.add(Dot{9, 2 * i, 1});
  CHECK(client.wait_for_change({}, much, 1000).status().code() == ErrorCode::oversized);
  CHECK(client.wait_for_merge(1, 1, test::test_merger, much, 1000).status().code() ==
        ErrorCode::oversized);
  CHECK(client.publish(set_of(1, fragment(1))).ok());
  CHECK(client.wait_for_change({}, {}, 1000).ok());
}

TEST_CASE("clients that stop in the middle of a call hold up nobody, and are cut off") {
  auto options = server_options();
  options.max_call_ms = 3000;
  options.replica.format.chunk_bytes = 1 << 16;
  test::Server server(options);
  Raw raw(server.address());
  CoordinatorClient client(server.address(), client_options(1));
  const Fragment large = fragment(1, 1000);  // 1 MiB: more than HTTP/2's windows
  REQUIRE(client.publish(set_of(1, large)).ok());
  constexpr int count = 40;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<rpc::StateReply>>> readers;
  std::vector<std::unique_ptr<grpc::ClientWriter<rpc::UpdateRequest>>> writers;
  std::vector<rpc::UpdateReply> replies(count);
  rpc::StateRequest request;
  request.add_wants()->set_id(to_field(large.id()));
  request.mutable_wants(0)->set_whole(true);
  for (int i = 0; i < count; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    Raw::admit(*contexts.back());
    if (i % 2 == 0) {
      readers.push_back(raw.stub->GetGlobalState(contexts.back().get(), request));
    } else {
      writers.push_back(
          raw.stub->UpdateCache(contexts.back().get(), &replies[static_cast<std::size_t>(i)]));
      (void)writers.back()->Write(set_item(set_of(7, fragment(7))));
    }
  }
  const auto begun = std::chrono::steady_clock::now();
  CHECK(client.publish(set_of(1, fragment(2), 1)).ok());
  CHECK(std::chrono::steady_clock::now() - begun < std::chrono::milliseconds(2500));
  std::this_thread::sleep_for(std::chrono::milliseconds(4500));
  for (const auto& writer : writers) CHECK_FALSE(writer->Finish().ok());
  for (const auto& reader : readers) {
    rpc::StateReply reply;
    while (reader->Read(&reply)) {
    }
    CHECK_FALSE(reader->Finish().ok());
  }
  CHECK(server.server.core().set().size() == 2);
}
