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

/// A peer that is heard and must not be believed: it serves other bytes than were asked for, acts in other members' names, and floods.
///
/// It stays within what replicas promise to bear. It does not tell one member that another did what it did not do, nor announces
/// fragments that nobody can serve: whoever may write to the session in a member's name can do both (docs/convergence.md).
class Liar {
 public:
  static constexpr MemberId id = 1'000'000;

  Liar(std::uint64_t seed, std::vector<Fragment> corpus, std::size_t chunk_bytes, std::uint64_t max_operations, FaultCounts& counts)
      : random_(seed), corpus_(std::move(corpus)), chunk_bytes_(chunk_bytes), max_operations_(max_operations), counts_(&counts) {}

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
    if (random_.chance(0.1)) return {lie(delivery.from, ReplicaMessage::lacking, piece(fetch->id, manifest_key(fetch->id), {}))};
    if (fetch->chunks.empty()) return {lie(delivery.from, ReplicaMessage::manifest, piece(fetch->id, manifest_key(fetch->id), false_manifest(fetch->id)))};
    std::vector<Lie> out;
    for (const BlobKey& key : fetch->chunks) out.push_back(lie(delivery.from, ReplicaMessage::chunk, piece(fetch->id, key, false_chunk())));
    return out;
  }

  /// A lie that nobody asked for.
  /// @param epoch the victim's own, which it may have learned from any message.
  [[nodiscard]] Lie act(MemberId victim, std::uint64_t epoch) {
    const Fragment& some = corpus_[random_.below(corpus_.size())];
    switch (random_.below(4)) {
      case 0: {
        CausalContext claimed = heard_;
        claimed.add({id, random_.below(5), 1});
        ++(*counts_)[Fault::lying_news];
        return lie(victim, ReplicaMessage::news, kvmeld::detail::encode(kvmeld::detail::News{claimed, {}}));
      }
      case 1: {
        FragmentSet forged;
        (void)forged.insert(some, {victim, 10'000 + random_.below(1000), epoch}, 4.0F);
        ++(*counts_)[Fault::forged_dot];
        Lie told = lie(victim, ReplicaMessage::delta, encode_set(forged));
        told.at_once = true;
        return told;
      }
      case 2: {
        FragmentSet flood;
        for (std::uint64_t n = 0; n < 20; ++n) {
          (void)flood.insert(corpus_[random_.below(corpus_.size())], {id, max_operations_ + random_.below(1U << 20U), 1});
        }
        ++(*counts_)[Fault::flood];
        return lie(victim, ReplicaMessage::delta, encode_set(flood));
      }
      default: return lie(victim, ReplicaMessage::manifest, piece(some.id(), manifest_key(some.id()), false_manifest(some.id())));
    }
  }

 private:
  [[nodiscard]] Lie lie(MemberId to, ReplicaMessage type, std::span<const std::byte> body) {
    auto frame = encode_replica_frame(type, Digest128{random_.next(), 1}, body);
    return {to, frame ? *std::move(frame) : std::vector<std::byte>(), false};
  }
  [[nodiscard]] static std::vector<std::byte> piece(const FragmentId& of, const BlobKey& key, std::span<const std::byte> bytes) {
    return kvmeld::detail::encode(kvmeld::detail::Piece{of, key, bytes});
  }
  [[nodiscard]] std::vector<std::byte> false_chunk() {
    ++(*counts_)[Fault::lying_chunk];
    const Payload& payload = corpus_[random_.below(corpus_.size())].payloads()[0];
    auto bytes = encode_chunk(raw_chunk(payload, 0, chunk_bytes_));  // another one, as well-formed as can be
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
  FaultCounts* counts_;
  CausalContext heard_;
};

}  // namespace testing
KVMELD_NAMESPACE_END
