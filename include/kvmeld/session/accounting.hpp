#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/session/replica_options.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a message is for.
enum class TrafficLayer : std::uint8_t {
  state,        ///< ids and metadata: news, requests, deltas
  payload,      ///< manifests, chunks, and requests for them
  rounds,       ///< barriers of synchronous rounds
  application,  ///< the host's own
};

/// The layer that a frame of this type belongs to (`ReplicaMessage`, `SessionMessage`).
[[nodiscard]] constexpr TrafficLayer traffic_layer(std::uint8_t type) noexcept {
  return type < 4    ? TrafficLayer::state
         : type < 32 ? TrafficLayer::payload
         : type < 40 ? TrafficLayer::rounds
                     : TrafficLayer::application;
}

/// Messages and their bytes, whole frames.
struct Traffic {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;

  bool operator==(const Traffic&) const = default;
  Traffic& operator+=(const Traffic& other) noexcept {
    messages += other.messages;
    bytes += other.bytes;
    return *this;
  }
  void add(std::size_t frame_bytes) noexcept {
    ++messages;
    bytes += frame_bytes;
  }
};

/// What taking part costs an agent, so far. Sums over types are what crossed the transport, each
/// way.
///
/// A message to everyone counts once, as the transport's `send` is called once.
struct Accounting {
  std::array<Traffic, 256> sent{};  ///< by frame type; what the transport refused is not in it
  /// By frame type; frames that were refused count under type 0.
  std::array<Traffic, 256> received{};
  /// Messages that the transport did not take; they are repeated by protocol.
  std::uint64_t send_failures = 0;
  StoredBytes stored{};  ///< what sealing wrote to the store, and what was there already
  std::uint64_t fragments_sealed = 0;
  /// Sealed, and in this agent's view only, since nobody takes them.
  std::uint64_t fragments_refused = 0;
  std::uint64_t application_dropped = 0;  ///< frames of the host's own that were not taken in time
  std::uint64_t fragments_fetched = 0;    ///< from peers
  std::uint64_t fragments_loaded = 0;     ///< from the store
  StoreDamage store_damage{};             ///< what the store found spoilt of its records
  ReplicaRefusals refused{};              ///< what this agent's replica did not take
  /// Raw K/V of sealed fragments, by layer of the model.
  std::vector<std::uint64_t> sealed_bytes{};
  std::uint64_t rounds_swapped = 0;
  std::uint64_t rounds_kept = 0;  ///< rounds that ended with the old cache
  double wait_ms = 0;             ///< between the begin and the end of rounds
  std::uint64_t renders = 0;
  double render_ms = 0;  ///< on the worker
  std::uint64_t swaps = 0;
  double swap_ms = 0;    ///< on the generating thread: pointer or import, and what was carried
  double import_ms = 0;  ///< part of `swap_ms` that an engine took to import
  /// Said since a snapshot, turned to their new positions at the swap.
  std::uint64_t carried_tokens = 0;

  [[nodiscard]] Traffic total_sent() const noexcept { return sum(sent, {}); }
  [[nodiscard]] Traffic total_received() const noexcept { return sum(received, {}); }
  [[nodiscard]] Traffic sent_of(TrafficLayer layer) const noexcept { return sum(sent, layer); }
  [[nodiscard]] Traffic received_of(TrafficLayer layer) const noexcept {
    return sum(received, layer);
  }

 private:
  [[nodiscard]] static Traffic sum(const std::array<Traffic, 256>& all,
                                   std::optional<TrafficLayer> layer) noexcept {
    Traffic total;
    for (std::size_t type = 0; type < all.size(); ++type) {
      if (!layer || traffic_layer(static_cast<std::uint8_t>(type)) == *layer) total += all[type];
    }
    return total;
  }
};

/// Adds a fragment's raw bytes, all payloads, to a count by layer of the model.
inline void add_layer_bytes(std::vector<std::uint64_t>& by_layer, const Fragment& fragment) {
  const Geometry& geometry = fragment.geometry();
  if (by_layer.size() < geometry.layers.size()) by_layer.resize(geometry.layers.size());
  for (const Payload& payload : fragment.payloads()) {
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      for (const PlaneShape& shape : geometry.layers[l].planes) {
        const auto rows = static_cast<std::uint64_t>(payload.layer_tokens(l) * shape.heads);
        by_layer[l] +=
            rows * (static_cast<std::uint64_t>(detail::row_bytes(shape)) +
                    sizeof(float) * static_cast<std::uint64_t>(detail::row_scales(shape)));
      }
    }
  }
}

KVMELD_NAMESPACE_END
