#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <kvmeld/codec/frame.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// A message that has arrived, and who says it sent it.
struct Envelope {
  MemberId from = 0;
  std::vector<std::byte> bytes{};
};

/// Carries messages between members, and may lose, repeat, reorder and delay them: what is above
/// converges regardless.
///
/// Semantic requirements (tests/support/transport_laws.hpp checks them):
///  - `send` to a member or to `everyone`; without error the message was handed on, not necessarily
///    delivered; it never blocks for longer than the transport's own stated bound. Messages up to
///    `max_message_bytes()` are taken whole;
///  - a message arrives whole or not at all; the sender does not get its own;
///  - `receive(timeout_ms)` waits at most so long, and gives none when nothing came; 0 only looks;
///  - errors: `unavailable` (lost connection; later calls try to connect again, with backoff),
///    `oversized`.
template <class T>
concept Transport = requires(T& transport, const T& const_transport, MemberId to,
                             std::span<const std::byte> bytes, std::int64_t timeout_ms) {
  { const_transport.self() } -> std::same_as<MemberId>;
  { const_transport.max_message_bytes() } -> std::convertible_to<std::size_t>;
  { transport.send(to, bytes) } -> std::same_as<Status>;
  { transport.receive(timeout_ms) } -> std::same_as<Result<std::optional<Envelope>>>;
};

KVMELD_NAMESPACE_END
