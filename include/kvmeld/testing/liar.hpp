#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvmeld/codec/chunk.hpp>
#include <kvmeld/codec/frame.hpp>
#include <kvmeld/codec/manifest.hpp>
#include <kvmeld/session/replica_messages.hpp>
#include <kvmeld/testing/faults.hpp>
#include <kvmeld/testing/random.hpp>
#include <kvmeld/testing/simulated_network.hpp>

KVMELD_NAMESPACE_BEGIN
namespace testing {

/// A peer that is heard and must not be believed: it serves other bytes than were asked for, acts
/// in other members' names, says that what they did is gone and that they did what they did not,
/// and floods.
///
/// It stays within what replicas promise to bear (docs/convergence.md). A stranger may say
/// anything. A member does not make up operations of another, whole, before that one was heard; nor
/// what an agent did in an earlier life, to that agent; and neither announces fragments under its
/// own dots that nobody can serve.
class Liar {
 public:
  static constexpr MemberId id = 1'000'000;

  Liar(std::uint64_t seed, std::vector<Fragment> corpus, std::size_t chunk_bytes,
       std::uint64_t max_operations, bool member, FaultCounts& counts)
      : random_(seed),
        corpus_(std::move(corpus)),
        chunk_bytes_(chunk_bytes),
        max_operations_(max_operations),
        member_(member),
        counts_(&counts) {}

  /// A life of a member that goes on.
  struct Life {
    MemberId member;
    std::uint64_t epoch;
  };

  struct Lie {
    MemberId to;
    std::vector<std::byte> frame;
    bool at_once = false;  ///< reaches the victim while it is in the life that the lie is about
  };

  /// Reads a message, and answers a request with something wrong, or not at all.
  [[nodiscard]] std::vector<Lie> hear(const Delivery& delivery) {
    const auto frame = decode_frame(delivery.bytes);
    if (!frame) return {};
    const auto body = kvmeld::detail::decode_body(frame->body);
    if (!body) return {};
    if (frame->type == static_cast<std::uint8_t>(ReplicaMessage::news)) {
      if (const auto news = kvmeld::detail::decode_news(body->rest)) heard_.join(news->context);
    }
    if (frame->type != static_cast<std::uint8_t>(ReplicaMessage::fetch)) return {};
    const auto fetch = kvmeld::detail::decode_fetch(body->rest);
    if (!fetch || random_.chance(0.2)) return {};
    if (random_.chance(0.1))
      return {lie(delivery.from, ReplicaMessage::lacking,
                  piece(fetch->id, manifest_key(fetch->id), {}))};
    if (fetch->chunks.empty())
      return {lie(delivery.from, ReplicaMessage::manifest,
                  piece(fetch->id, manifest_key(fetch->id), false_manifest(fetch->id)))};
    std::vector<Lie> out;
    for (const BlobKey& key : fetch->chunks)
      out.push_back(
          lie(delivery.from, ReplicaMessage::chunk, piece(fetch->id, key, false_chunk())));
    return out;
  }

  /// A lie that nobody asked for: to a member, about itself or about another, which may be the
  /// same.
  [[nodiscard]] Lie act(const Life& victim, const Life& other) {
    const Fragment& some = corpus_[random_.below(corpus_.size())];
    switch (random_.below(7)) {
      case 0: {
        CausalContext claimed = heard_;
        claimed.add({id, random_.below(5), 1});
        if (random_.chance(0.2))
          claimed.add({other.member, 10'000 + random_.below(1000), other.epoch});
        ++(*counts_)[Fault::lying_news];
        return lie(victim.member, ReplicaMessage::news,
                   kvmeld::detail::encode(kvmeld::detail::News{claimed, {}, 1}));
      }
      case 1:
        return forge(victim.member, some,
                     {victim.member, 10'000 + random_.below(1000), victim.epoch},
                     Fault::forged_dot);
      case 2: {
        FragmentSet flood;
        for (std::uint64_t n = 0; n < 20; ++n) {
          (void)flood.insert(corpus_[random_.below(corpus_.size())],
                             {id, max_operations_ + random_.below(1U << 20U), 1});
        }
        ++(*counts_)[Fault::flood];
        return lie(victim.member, ReplicaMessage::delta, encode_set(flood));
      }
      // in the name of a member that is a stranger to nobody, what it has done already included
      case 3: {
        if (member_) return end(victim, other);
        return forge(victim.member, some, {other.member, random_.below(20), other.epoch},
                     Fault::foreign_dot);
      }
      case 4:
        return end(victim, other);
      case 5: {
        CausalContext gone;
        gone.append({other.member, other.epoch, 0, max_operations_ - 1});
        auto claim = FragmentSet::from_parts({}, {}, {}, gone);
        ++(*counts_)[Fault::foreign_gone];
        return at_once(lie(victim.member, ReplicaMessage::delta,
                           claim ? encode_set(*claim) : std::vector<std::byte>()));
      }
      default:
        return lie(victim.member, ReplicaMessage::manifest,
                   piece(some.id(), manifest_key(some.id()), false_manifest(some.id())));
    }
  }

 private:
  [[nodiscard]] static Lie at_once(Lie lie) {
    lie.at_once = true;
    return lie;
  }
  [[nodiscard]] Lie forge(MemberId to, const Fragment& fragment, const Provenance& dot,
                          Fault fault) {
    FragmentSet forged;
    (void)forged.insert(fragment, dot, 4.0F);
    ++(*counts_)[fault];
    return at_once(lie(to, ReplicaMessage::delta, encode_set(forged)));
  }
  /// Ends what another has not done yet: by a removal of its own or, as a stranger, of that other.
  [[nodiscard]] Lie end(const Life& victim, const Life& other) {
    Removal removal{{id, random_.below(20), 1}, corpus_[random_.below(corpus_.size())].id(), {}};
    if (!member_ && random_.chance(0.5))
      removal.dot = {other.member, 5'000 + random_.below(20), other.epoch};
    const std::uint64_t from = 10'000 + random_.below(1000);
    for (std::uint64_t n = 0; n < 8; ++n)
      removal.removed.push_back({other.member, from + n, other.epoch});
    auto set = FragmentSet::from_parts({}, {}, {removal}, {});
    ++(*counts_)[Fault::foreign_removal];
    return at_once(lie(victim.member, ReplicaMessage::delta,
                       set ? encode_set(*set) : std::vector<std::byte>()));
  }
  [[nodiscard]] Lie lie(MemberId to, ReplicaMessage type, std::span<const std::byte> body) {
    auto frame = encode_replica_frame(type, Digest128{random_.next(), 1}, body);
    return {to, frame ? *std::move(frame) : std::vector<std::byte>(), false};
  }
  [[nodiscard]] static std::vector<std::byte> piece(const FragmentId& of, const BlobKey& key,
                                                    std::span<const std::byte> bytes) {
    return kvmeld::detail::encode(kvmeld::detail::Piece{of, key, bytes});
  }
  [[nodiscard]] std::vector<std::byte> false_chunk() {
    ++(*counts_)[Fault::lying_chunk];
    const Payload& payload = corpus_[random_.below(corpus_.size())].payloads()[0];
    // another one, as well-formed as can be
    auto bytes = encode_chunk(raw_chunk(payload, 0, chunk_bytes_));
    if (random_.chance(0.3)) bytes.resize(random_.below(bytes.size() + 1));
    if (random_.chance(0.3)) bytes.assign(random_.below(64), std::byte{0xA5});
    return bytes;
  }
  /// Another fragment's manifest, or the right one with chunks that nobody has.
  [[nodiscard]] std::vector<std::byte> false_manifest(const FragmentId& of) {
    ++(*counts_)[Fault::lying_manifest];
    const Fragment* told = &corpus_[random_.below(corpus_.size())];
    const bool right = random_.chance(0.7);
    for (const Fragment& fragment : corpus_) {
      if (right && fragment.id() == of) told = &fragment;
    }
    auto manifest = make_manifest(*told, random_.chance(0.3) ? chunk_bytes_ / 2 : chunk_bytes_);
    if (!manifest) return {};
    if (random_.chance(0.7)) {
      for (auto& keys : manifest->chunks) {
        if (!keys.empty()) keys[random_.below(keys.size())].bytes[9] ^= 0x55U;
      }
    }
    auto bytes = encode_manifest(*manifest);
    if (random_.chance(0.1)) bytes.resize(random_.below(bytes.size()));
    return bytes;
  }

  Random random_;
  std::vector<Fragment> corpus_;
  std::size_t chunk_bytes_;
  std::uint64_t max_operations_;
  bool member_;
  FaultCounts* counts_;
  CausalContext heard_;
};

}  // namespace testing
KVMELD_NAMESPACE_END
