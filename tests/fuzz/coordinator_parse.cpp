// Hostile updates, contexts, questions and stored numbers of a coordinator; holdings of ranks where
// there is MPI, tokens and fields of calls where there is gRPC.

#ifdef KVMELD_TEST_MPI
#include <kvmeld/mpi/detail/communicator.hpp>
#endif
#ifdef KVMELD_TEST_GRPC
#include <kvmeld/coordinator/detail/grpc_convert.hpp>
#endif
#ifdef KVMELD_TEST_OPENSSL
#include <kvmeld/replica/openssl.hpp>
#endif
#include <kvmeld/coordinator/coordinator.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/fuzz.hpp"

namespace {

using namespace kvmeld;
using test::Bytes;
using test::need;
using test::need_reason;
using test::within;
using Core = coordinator::Coordinator;

enum Kind : std::uint8_t { calls, context, holdings, token, kinds };
/// What is done to a coordinator, each with its bytes behind it.
enum Call : std::uint8_t {
  add_set,
  add_manifest,
  add_chunk,
  apply,
  ask,
  saw,
  store_cut,
  store_oldest,
  call_kinds
};

/// How far inputs came: a harness that is refused at the door tests nothing behind it.
std::size_t updates_taken = 0, rounds_cut = 0;

constexpr std::size_t chunk_bytes = 200;
constexpr std::uint64_t most_payload = 1U << 16U;

const std::vector<Fragment>& fragments() {
  static const std::vector<Fragment> all = [] {
    std::vector<Fragment> out;
    for (std::uint64_t i = 0; i < 3; ++i) {
      out.push_back(test::sealed(test::geometry({.layers = 1, .heads = 1, .channels = 32}), 2, i,
                                 {.tokens = test::token_ids(2)})
                        .fragment);
    }
    return out;
  }();
  return all;
}

coordinator::CoordinatorOptions core_options() {
  coordinator::CoordinatorOptions out{
      .replica = {.epoch = 1, .merger = kvmeld::replica::does_not_render}};
  out.replica.self = 1000;
  out.replica.members = {1, 2, 1000};
  out.replica.format.chunk_bytes = chunk_bytes;
  out.replica.format.max_payload_bytes = most_payload;
  out.replica.max_message_bytes = 1U << 16U;
  out.max_update_bytes = 1U << 18U;
  out.max_marks = out.max_ranges = 64;
  out.max_rounds = 4;
  out.quorum = 1;
  out.soft_ms = 0;
  return out;
}

/// What every client gets is the state, and an update that was refused is not in it.
void check_state(const Core& core) {
  const auto deltas = core.deltas({});
  need(deltas.ok());
  FragmentSet joined;
  for (const auto& bytes : *deltas) {
    const auto part = replica::decode_set(bytes);
    need(part.ok() && joined.join(*part).ok());
  }
  need(joined.digest() == core.version().set);
}

/// One question at the barrier of a round; a round that has a cut keeps it.
void try_ask(Core& core, std::span<const std::byte> bytes,
             std::map<std::pair<std::uint64_t, std::uint64_t>, Digest256>& cuts) {
  test::Input in(bytes);
  coordinator::MergeAsk one;
  one.session = in.byte();
  one.round = in.number(8);
  one.member = in.byte();
  extend::ByteReader r(in.rest());
  one.context = replica::read_context(r);
  if (!r.ok()) return need(!r.status("context").message().empty());
  const Status here = core.arrive(one, 0);
  if (!here) return need(!here.message().empty());
  const auto answer = core.poll(one, 0);
  core.leave(one);
  if (!answer) return;
  if (!*answer) return need_reason(*answer);
  if (one.round == 0) return;
  const auto [at, first] = cuts.try_emplace({one.session, one.round}, (*answer)->cut.set.digest());
  need(first || at->second == (*answer)->cut.set.digest());
  ++rounds_cut;
}

void try_calls(test::Input in) {
  stores::MemoryStore store;
  Core core(store, core_options());
  need(core.open().ok());
  std::map<std::pair<std::uint64_t, std::uint64_t>, Digest256> cuts;
  std::optional<Core::Update> update;
  for (int left = 60; left > 0 && !in.empty(); --left) {
    const auto call = in.byte() % call_kinds;
    const Bytes bytes = in.block();
    if (!update) update.emplace(core.options().replica.format, core.options().max_update_bytes);
    Status status;
    switch (call) {
      case add_set:
        status = within(bytes.size(), 256, 1U << 17U, [&] { return update->add_set(bytes); });
        break;
      case add_manifest: {
        const auto manifest = kvmeld::replica::decode_manifest(bytes, {most_payload});
        const FragmentId id = manifest ? manifest->fragment.id() : FragmentId{};
        status = within(bytes.size(), 64, 16384, [&] { return update->add_manifest(id, bytes); });
        break;
      }
      case add_chunk: {
        test::Input chunk(bytes);
        BlobKey key;
        for (auto& byte : key.bytes) byte = chunk.byte();
        status =
            within(bytes.size(), 64, 16384, [&] { return update->add_chunk(key, chunk.rest()); });
        break;
      }
      case apply: {
        const coordinator::StateVersion before = core.version();
        status = update->end(update->items());
        if (status) {
          const auto applied = core.apply(*update);
          need_reason(applied);
          if (!applied) need(core.version() == before);
          updates_taken += applied.ok();
        }
        update.reset();
        check_state(core);
        break;
      }
      case ask:
        try_ask(core, bytes, cuts);
        break;
      case saw: {
        extend::ByteReader r(bytes);
        const replica::MemberId member = r.value<std::uint8_t>();
        const CausalContext seen = replica::read_context(r);
        if (r.ok()) core.saw(member, seen);
        break;
      }
      case store_cut:
        (void)store.put(coordinator::detail::coordinator_cut_key(5, 1), bytes);
        break;
      default:
        (void)store.put(coordinator::detail::coordinator_oldest_key(5, 0), bytes);
    }
    if (!status) need(!status.message().empty());
  }
  update.reset();
  check_state(core);
}

void try_context(std::span<const std::byte> bytes) {
  extend::ByteReader r(bytes);
  const CausalContext got =
      within(bytes.size(), 64, 16384, [&] { return replica::read_context(r); });
  if (const Status end = r.finish("context"); !end) return need(!end.message().empty());
  extend::ByteWriter w;
  replica::write_context(w, got);
  extend::ByteReader again(w.written());
  need(replica::read_context(again) == got && again.finish("context").ok());
#ifdef KVMELD_TEST_GRPC
  const auto field = coordinator::detail::context_field(
      {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, 64);
  need(field ? *field == got : got.ranges().size() > 64);
#endif
}

void try_holdings([[maybe_unused]] std::span<const std::byte> bytes) {
#ifdef KVMELD_TEST_MPI
  const auto got = within(bytes.size(), 256, 16384,
                          [&] { return mpi::detail::decode_holdings(bytes, SetHash{}); });
  if (!got) return need_reason(got);
  need(got->complete.size() <= got->set.size() && std::ranges::is_sorted(got->complete));
  for (const FragmentId& id : got->complete) need(got->set.find(id) != nullptr);
  const auto again =
      mpi::detail::decode_holdings(mpi::detail::encode_holdings(got->set), SetHash{});
  need(again.ok() && again->set.digest() == got->set.digest() &&
       again->complete.empty());  // a set without payloads
#endif
}

#ifdef KVMELD_TEST_GRPC
constexpr std::int64_t today_s = 1'000'000;
void try_token(const replica::FrameOptions& frame, std::string_view text, bool mine) {
  const auto got = coordinator::detail::check_token(
      frame, coordinator::detail::namespace_bytes(frame.scope), text, today_s, 3600, 300);
  need_reason(got);
  if (!got) return;
  std::int64_t expires = 0;
  std::memcpy(&expires, text.data() + 8, 8);
  need(expires >= today_s - 300 && expires <= today_s + 3900);
  need(mine || *coordinator::detail::make_token(frame, *got, expires) == text);
}
#endif
void try_tokens([[maybe_unused]] std::span<const std::byte> bytes) {
#ifdef KVMELD_TEST_GRPC
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  try_token(replica::FrameOptions{}, text, true);
#ifdef KVMELD_TEST_OPENSSL
  try_token(replica::FrameOptions{.scope = {3, 4},
                                  .auth = std::make_shared<replica::HmacSha256>("a secret")},
            text, false);
#endif
  const auto key = coordinator::detail::fixed_field<BlobKey>(text, "a key");
  need_reason(key);
  need(key.ok() == (bytes.size() == sizeof(BlobKey)));
#endif
}

Bytes call_of(Call call, std::span<const std::byte> bytes) {
  Bytes out(1, static_cast<std::byte>(call));
  test::put_block(out, bytes);
  return out;
}
/// An update that inserts a fragment with its payload, and rounds before and behind it.
Bytes honest_calls() {
  Bytes out(1, static_cast<std::byte>(calls));
  const auto add = [&out](Call call, std::span<const std::byte> bytes) {
    test::put_bytes(out, call_of(call, bytes));
  };
  CausalContext seen;
  for (std::uint64_t i = 0; i < fragments().size(); ++i) {
    FragmentSet set;
    need(set.insert(fragments()[i], Dot{1, i, 1}, 0.5F).ok());
    if (i == 2)
      need(set.insert(fragments()[0], Dot{1, 0, 1}, 0.5F).ok() &&
           set.remove(fragments()[0].id(), {2, 0, 1}).ok());
    seen.join(set.context());
    add(add_set, replica::encode_set(set));
    add(add_manifest, *replica::encode_manifest(fragments()[i], chunk_bytes));
    const Payload& payload = fragments()[i].payloads()[0];
    for (std::size_t c = 0; c < replica::chunk_count(payload.byte_count, chunk_bytes); ++c) {
      const auto raw = replica::raw_chunk(payload, c, chunk_bytes);
      const BlobKey key = kvmeld::replica::chunk_key(raw);
      Bytes chunk =
          test::bytes_of({reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()});
      test::put_bytes(chunk, replica::encode_chunk(raw));
      add(add_chunk, chunk);
    }
    add(apply, {});
    Bytes question{std::byte{5}};
    test::put_number(question, i + 1, 8);
    test::put_number(question, 1, 1);
    extend::ByteWriter w;
    replica::write_context(w, seen);
    test::put_bytes(question, w.written());
    add(ask, question);
    Bytes news(1, std::byte{2});
    test::put_bytes(news, w.written());
    add(saw, news);
  }
  return out;
}

}  // namespace

const std::vector<Bytes>& test::fuzz_seeds() {
  static const std::vector<Bytes> all = [] {
    const Bytes honest = honest_calls();
    std::vector<Bytes> out{honest};
    const auto add = [&out](Kind kind, std::span<const std::byte> bytes) {
      out.emplace_back(1, static_cast<std::byte>(kind));
      put_bytes(out.back(), bytes);
    };
    FragmentSet set;
    for (std::uint64_t i = 0; i < fragments().size(); ++i)
      need(set.insert(fragments()[i], {1 + i % 2, i, 1 + i}).ok());
    const auto cut = kvmeld::replica::make_cut(set, {}, 5, 1, 1000);
    Bytes stored = call_of(store_cut, kvmeld::replica::encode(*cut));
    put_bytes(stored, call_of(store_oldest, Bytes(8, std::byte{0})));
    put_bytes(stored, std::span(honest).subspan(1));
    add(calls, stored);
    extend::ByteWriter w;
    replica::write_context(w, set.context());
    add(context, w.written());
    Bytes held = replica::encode_set(set);
    put_bytes(held, Bytes(set.size(), std::byte{1}));
    put_number(held, set.size(), 8);
    add(holdings, held);
    Bytes plain;
    put_number(plain, 7, 8);
    put_number(plain, 1'000'100, 8);
    add(token, plain);
#if defined(KVMELD_TEST_GRPC) && defined(KVMELD_TEST_OPENSSL)
    const replica::FrameOptions frame{.scope = {3, 4},
                                      .auth = std::make_shared<replica::HmacSha256>("a secret")};
    add(token, bytes_of(*coordinator::detail::make_token(frame, 7, today_s + 100)));
#endif
    return out;
  }();
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto* const first = reinterpret_cast<const std::byte*>(data);
  const Bytes exact(first + 1, first + size);
  switch (data[0] % kinds) {
    case calls:
      try_calls(test::Input(exact));
      break;
    case context:
      try_context(exact);
      break;
    case holdings:
      try_holdings(exact);
      break;
    default:
      try_tokens(exact);
  }
  return 0;
}

#ifndef KVMELD_LIBFUZZER
#include "support/catch.hpp"

TEST_CASE(
    "mutated calls leave a coordinator with a state that it can give out, and are refused with a "
    "reason") {
  test::fuzz_rounds(0, 2);
  CHECK(updates_taken >= 6);  // of two seeds with three each
  CHECK(rounds_cut >= 6);
  test::fuzz_rounds(3000, 2);
}
#endif
