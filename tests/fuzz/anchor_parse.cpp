// Hostile records, lists and messages of anchors, and hostile sets.

#include <kvmeld/anchors/detail/directory.hpp>
#include <kvmeld/replica/wire.hpp>

#include "support/anchor_peers.hpp"
#include "support/fuzz.hpp"

namespace {

using namespace kvmeld;
using test::Bytes;
using test::need;
using test::need_reason;
using test::within;

enum Kind : std::uint8_t { records, list, messages, record, set, kinds };

const std::vector<anchors::Anchor>& sample_anchors() {
  static const std::vector<anchors::Anchor> all = [] {
    std::vector<anchors::Anchor> out{test::anchor(1), test::anchor(2, {2}), test::anchor(3, {}),
                                     test::anchor(4, {1, 2}, 1)};
    out[1].approximate = true;
    out[1].embedding = {1, 2, 3};
    return out;
  }();
  return all;
}
const replica::FragmentFormat format{.chunk_bytes = 64, .max_payload_bytes = 1U << 20U};

test::Exchange::Options options(replica::MemberId self) {
  test::Exchange::Options out;
  out.self = self;
  out.members = {1, 2};
  out.format = format;
  out.round_ms = out.retry_ms = 20;
  return out;
}
void publish(test::Exchange& peer, std::size_t first) {
  for (std::size_t i = first; i < first + 2; ++i) {
    const anchors::Anchor& a = sample_anchors()[i];
    need(peer.publish(a, a.offsets.empty() ? Digest128{} : a.offsets[0].context, i).ok());
  }
}

std::vector<anchors::AnchorRecord> records_of(const test::Exchange& peer) {
  std::vector<anchors::AnchorRecord> out;
  for (const auto& [key, entry] : peer.directory().entries()) out.push_back(entry.record);
  return out;
}

void try_records(std::span<const std::byte> bytes) {
  Digest128 space{};
  if (bytes.size() >= 17)
    std::memcpy(&space, bytes.data() + 1, 16);  // so that mutations get behind the namespace
  const auto got =
      within(bytes.size(), 16, 4096, [&] { return kvmeld::anchors::decode_records(bytes, space); });
  if (!got) return need_reason(got);
  for (const anchors::AnchorRecord& one : *got) need(check_record(one).ok());
  need(std::ranges::equal(kvmeld::anchors::encode_records(space, *got),
                          bytes));  // one form for each content
}

void try_list(std::span<const std::byte> bytes) {
  constexpr std::uint64_t most = std::uint64_t{1} << 30U;
  const auto got = within(bytes.size(), 64, 16384, [&] {
    return kvmeld::anchors::decode_anchor_list(bytes, {.max_payload_bytes = most});
  });
  if (!got) return need_reason(got);
  need(got->chunks.size() == got->parts().size());
  for (const Fragment& part : got->parts())
    need(part.token_count() >= 0 && part.payloads()[0].byte_count <= most);
  const Bytes again = kvmeld::anchors::encode_anchor_list(*got);
  const auto second = kvmeld::anchors::decode_anchor_list(again, {.max_payload_bytes = most});
  need(second.ok() && encode_anchor_list(*second) == again);
}

/// Messages one after the other, each a type and a body, to a peer that reconciles and pulls; what
/// it refuses changes nothing.
void try_messages(test::Input in) {
  stores::MemoryStore store;
  test::Exchange peer(store, options(1));
  publish(peer, 0);
  std::int64_t now = 0;
  for (int left = 40; left > 0 && !in.empty(); --left) {
    const std::uint8_t type = in.byte();
    const Bytes body = in.block();
    const anchors::AnchorDirectory before = peer.directory();
    const auto frame = encode_frame(type, body, options(1).frame);
    need(frame.ok());
    const Status status =
        within(body.size(), 256, 1U << 20U, [&] { return peer.receive(2, *frame); });
    if (!status) need(!status.message().empty() && peer.directory() == before);
    for (const auto& [key, entry] : peer.directory().entries()) (void)peer.pull(key);
    for (int ticks = 0; ticks < 3; ++ticks) {
      if (const Status ticked = peer.tick(now += 10); !ticked) need(!ticked.message().empty());
    }
    (void)peer.take_outbox();
  }
  for (const anchors::AnchorRecord& mine : records_of(peer)) need(check_record(mine).ok());
}

/// What is taken for a set is one: joins with it are laws, and it survives its own bytes.
void try_set(const Result<FragmentSet>& got) {
  if (!got) return need_reason(got);
  const FragmentSet& one = *got;
  const auto again = replica::decode_set(replica::encode_set(one), one.hash());
  need(again.ok() && again->digest() == one.digest() && again->context() == one.context());
  FragmentSet both;
  need(both.join(one).ok() && both.digest() == one.digest() && both.join(one).ok() &&
       both.digest() == one.digest());
  need(leq(one, both) && leq(both, one));
  FragmentSet third;
  need(third.join(one.delta_since(CausalContext())).ok() && third.digest() == one.digest());
}

}  // namespace

const std::vector<Bytes>& test::fuzz_seeds() {
  static const std::vector<Bytes> all = [] {
    std::vector<Bytes> out;
    const auto add = [&out](Kind kind, std::span<const std::byte> bytes) {
      out.emplace_back(1, static_cast<std::byte>(kind));
      put_bytes(out.back(), bytes);
    };
    for (const anchors::Anchor& anchor : sample_anchors()) {
      add(list,
          encode_anchor_list(*anchors::detail::list_anchor(
              anchor, anchor.offsets.empty() ? Digest128{} : anchor.offsets[0].context, format)));
    }
    // Two peers that reconcile, tell each other what they have, and pull all of it.
    stores::MemoryStore stores[2];
    test::Exchange a(stores[0], options(1)), b(stores[1], options(2));
    publish(a, 0);
    publish(b, 2);
    Bytes talk;
    for (std::int64_t now = 0; now < 800; now += 10) {
      need(a.tick(now).ok() && b.tick(now).ok());
      if (now == 400) {
        for (const auto& [key, entry] : a.directory().entries()) need(a.pull(key).ok());
      }
      for (const replica::Outgoing& message : a.take_outbox()) (void)b.receive(1, message.bytes);
      for (const replica::Outgoing& message : b.take_outbox()) {
        const auto frame = replica::decode_frame(message.bytes, options(2).frame);
        Bytes one(1, static_cast<std::byte>(message.type));
        put_block(one, frame->body);
        if (talk.size() < 6000) put_bytes(talk, one);
        add(messages, one);
        (void)a.receive(2, message.bytes);
      }
    }
    add(messages, talk);
    add(records, encode_records({3, 4}, records_of(a)));
    FragmentSet some;
    need(some.insert(sample_anchors()[0].base, {1, 0, 1}).ok() &&
         some.insert(sample_anchors()[1].base, {2, 7, 1}, 0.5F).ok());
    need(some.insert(sample_anchors()[2].base, {1, 1, 1}).ok() &&
         some.remove(sample_anchors()[2].base.id(), {2, 8, 1}).ok());
    need(some.supersede(sample_anchors()[0].base.id(), sample_anchors()[1].base.id(), {1, 2, 1})
             .ok());
    add(set, replica::encode_set(some));
    add(record, kvmeld::replica::encode_record(replica::encode_set(some)));
    return out;
  }();
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto* const first = reinterpret_cast<const std::byte*>(data);
  const Bytes exact(first + 1, first + size);
  switch (data[0] % kinds) {
    case records:
      try_records(exact);
      break;
    case list:
      try_list(exact);
      break;
    case messages:
      try_messages(test::Input(exact));
      break;
    case record:
      try_set(replica::decode_record(exact));
      break;
    default:
      try_set(within(exact.size(), 160, 16384, [&] { return replica::decode_set(exact); }));
  }
  return 0;
}

#ifndef KVMELD_LIBFUZZER
#include "support/catch.hpp"

TEST_CASE(
    "mutated anchors and sets are refused with a reason, or sound, and cost memory by their "
    "bytes") {
  test::fuzz_rounds(5000, 1);
  SUCCEED("5000 rounds");
}
#endif
