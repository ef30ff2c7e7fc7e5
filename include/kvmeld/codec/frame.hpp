#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// A member of a session: one agent, whatever process or connection it uses just now.
using MemberId = std::uint64_t;

/// Everybody else in the session, as the receiver of a message; as a sender: nobody in particular.
inline constexpr MemberId everyone = ~MemberId{0};

/// What a reader refuses when it is greater than its own.
inline constexpr std::uint8_t wire_major = 2;
/// What a reader ignores: new message types, never new fields of old ones.
inline constexpr std::uint8_t wire_minor = 0;

/// Says that a frame comes from somebody who knows a secret.
///
/// Semantic requirements: `sign` fills `tag_bytes` bytes that depend on every byte of both spans
/// and on their border, and returns false where it cannot; `verify` compares in a time that does
/// not depend on where the tags differ, and is told who is said to have sent the frame (`everyone`:
/// nobody says). One whose members have keys of their own answers false where that member did not
/// sign: then a frame proves its sender. No tag says when a frame was sent: what is above must bear
/// a replay, as joins do.
template <class A>
concept Authenticator = requires(const A& auth, MemberId from, std::span<const std::byte> bytes,
                                 std::span<std::byte> tag) {
  { A::tag_bytes } -> std::convertible_to<std::size_t>;
  { auth.sign(bytes, bytes, tag) } -> std::same_as<bool>;
  { auth.verify(from, bytes, bytes, bytes) } -> std::same_as<bool>;
};

/// Trusts the transport; takes no frame that carries a tag, since it could not check it.
struct NoAuth {
  static constexpr std::size_t tag_bytes = 0;

  [[nodiscard]] bool sign(std::span<const std::byte>, std::span<const std::byte>,
                          std::span<std::byte>) const noexcept {
    return true;
  }
  [[nodiscard]] bool verify(MemberId, std::span<const std::byte>, std::span<const std::byte>,
                            std::span<const std::byte>) const noexcept {
    return true;
  }
};

/// The digest by which a frame says whose caches it is about: those of another tenant, model or
/// tokenizer never meet.
[[nodiscard]] inline Digest128 frame_namespace(std::string_view tenant, std::string_view model,
                                               std::string_view tokenizer) {
  Hasher hasher;
  hasher.text("kvmeld.namespace.v1");
  hasher.text(tenant);
  hasher.text(model);
  hasher.text(tokenizer);
  return hasher.digest();
}

/// What both ends of a connection agree on beforehand.
template <Authenticator Auth = NoAuth>
struct FrameOptions {
  Digest128 name_space{};  ///< of `frame_namespace`
  std::size_t max_body_bytes = std::size_t{1} << 26;
  Auth auth{};
};

/// A frame that was checked. `body` points into the bytes that were read.
struct FrameView {
  std::uint8_t type = 0;   ///< meaning is the caller's
  std::uint8_t minor = 0;  ///< of the sender
  std::span<const std::byte> body{};
};

namespace detail {

inline constexpr std::uint32_t frame_magic = 0x464D564BU;  // "KVMF"
inline constexpr std::uint8_t frame_authenticated = 1;
inline constexpr std::size_t frame_header_bytes = 40;
inline constexpr std::size_t frame_sum_offset = 32;

/// XXH3-64 of the header before the sum, and of the body.
[[nodiscard]] inline std::uint64_t frame_sum(std::span<const std::byte> header,
                                             std::span<const std::byte> body) noexcept {
  XXH3_state_t state;
  (void)XXH3_64bits_reset(&state);
  (void)XXH3_64bits_update(&state, header.data(), frame_sum_offset);
  if (!body.empty()) (void)XXH3_64bits_update(&state, body.data(), body.size());
  return XXH3_64bits_digest(&state);
}

}  // namespace detail

/// A message: 40 bytes of header, the body, and the authenticator's tag. O(body).
///
/// Errors: `oversized` for a body above the options' bound, `unsupported` where the authenticator
/// cannot sign.
template <Authenticator Auth = NoAuth>
[[nodiscard]] Result<std::vector<std::byte>> encode_frame(std::uint8_t type,
                                                          std::span<const std::byte> body,
                                                          const FrameOptions<Auth>& options = {}) {
  if (body.size() > options.max_body_bytes) {
    return detail::error(ErrorCode::oversized, "a frame's body of ", body.size(),
                         " bytes where at most ", options.max_body_bytes, " are agreed");
  }
  ByteWriter w;
  w.reserve(detail::frame_header_bytes + body.size() + Auth::tag_bytes);
  w.value(detail::frame_magic);
  w.value(wire_major);
  w.value(wire_minor);
  w.value(type);
  w.value(Auth::tag_bytes > 0 ? detail::frame_authenticated : std::uint8_t{0});
  w.value(options.name_space.low);
  w.value(options.name_space.high);
  w.value(static_cast<std::uint64_t>(body.size()));
  w.value(detail::frame_sum(w.written(), body));
  w.bytes(body);
  std::vector<std::byte> out = w.take();
  if constexpr (Auth::tag_bytes > 0) {
    out.resize(out.size() + Auth::tag_bytes);
    const auto all = std::span(out);
    if (!options.auth.sign(all.first(detail::frame_header_bytes),
                           all.subspan(detail::frame_header_bytes, body.size()),
                           all.last(Auth::tag_bytes))) {
      return detail::error(ErrorCode::unsupported, "the authenticator could not sign a frame of ",
                           out.size(), " bytes");
    }
  }
  return out;
}

/// Checks one whole frame from bytes that nobody vouches for; allocates nothing.
///
/// @param from who is said to have sent it: an authenticator with a key for each member checks
/// that. Errors: `truncated`, `oversized`, `corrupt` (no frame, or an accident), `version_mismatch`
/// for a newer major version, `unknown_field` for a flag, `unauthenticated` for another namespace
/// or a bad, missing or uncheckable tag. O(body).
template <Authenticator Auth = NoAuth>
[[nodiscard]] Result<FrameView> decode_frame(std::span<const std::byte> bytes,
                                             const FrameOptions<Auth>& options = {},
                                             MemberId from = everyone) {
  using detail::error;
  ByteReader r(bytes);
  const auto magic = r.value<std::uint32_t>();
  const auto major = r.value<std::uint8_t>();
  FrameView view;
  view.minor = r.value<std::uint8_t>();
  view.type = r.value<std::uint8_t>();
  const auto flags = r.value<std::uint8_t>();
  KVMELD_TRY(r.status("frame"));
  if (magic != detail::frame_magic)
    return error(ErrorCode::corrupt, "frame: starts with ", magic, ", not with KVMF");
  if (major != wire_major) {
    return error(ErrorCode::version_mismatch, "frame of wire version ", major, ".", view.minor,
                 "; this build reads version ", wire_major,
                 ": update the older of the two members");
  }
  if ((flags & ~detail::frame_authenticated) != 0)
    return error(ErrorCode::unknown_field, "frame: flags ", flags, " are unknown to this build");
  Digest128 name_space;
  name_space.low = r.value<std::uint64_t>();
  name_space.high = r.value<std::uint64_t>();
  const auto body_bytes = r.value<std::uint64_t>();
  const auto sum = r.value<std::uint64_t>();
  KVMELD_TRY(r.status("frame"));
  const std::size_t tag_bytes = flags == detail::frame_authenticated
                                    ? (Auth::tag_bytes > 0 ? Auth::tag_bytes : std::size_t{32})
                                    : 0;
  if (body_bytes > options.max_body_bytes) {
    return error(ErrorCode::oversized, "frame: a body of ", body_bytes, " bytes where at most ",
                 options.max_body_bytes, " are agreed");
  }
  if (const std::size_t left = r.remaining(); left < tag_bytes || left - tag_bytes != body_bytes) {
    return error(left < tag_bytes || left - tag_bytes < body_bytes ? ErrorCode::truncated
                                                                   : ErrorCode::oversized,
                 "frame: ", left, " bytes follow the header, a body of ", body_bytes,
                 " and a tag of ", tag_bytes, " are declared");
  }
  view.body = r.bytes(static_cast<std::size_t>(body_bytes));
  if (sum != detail::frame_sum(bytes, view.body))
    return error(ErrorCode::corrupt, "frame: checksum of its ", bytes.size(), " bytes differs");
  if (name_space != options.name_space) {
    return error(ErrorCode::unauthenticated, "frame of namespace ", name_space.hex(),
                 ", this member is in ", options.name_space.hex(),
                 ": tenant, model or tokenizer differ");
  }
  if ((tag_bytes > 0) != (Auth::tag_bytes > 0)) {
    return error(ErrorCode::unauthenticated,
                 tag_bytes > 0
                     ? "frame: carries a tag, and this member has no key to check it"
                     : "frame: carries no tag, and this member takes only frames that do");
  }
  if (!options.auth.verify(from, bytes.first(detail::frame_header_bytes), view.body,
                           bytes.last(tag_bytes))) {
    return error(ErrorCode::unauthenticated, "frame: the tag of its ", bytes.size(),
                 " bytes is not of this member's key");
  }
  return view;
}

KVMELD_NAMESPACE_END
