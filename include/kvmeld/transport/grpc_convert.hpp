#pragma once

/// Between protobuf's fields and kvmeld's values (CMake component kvmeld::grpc).

#include <cstring>
#include <string>
#include <string_view>

#include <kvmeld/transport/coordinator.pb.h>
#include <kvmeld/session/set_codec.hpp>
#include <kvmeld/transport/coordinator.hpp>
#include <kvmeld/transport/grpc_access.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

namespace rpc = ::kvmeld::rpc::v1;

[[nodiscard]] inline std::string to_field(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
template <class Key>
requires requires(const Key& key) { key.bytes; }
[[nodiscard]] std::string to_field(const Key& key) {
  return to_field(std::as_bytes(std::span(key.bytes)));
}
[[nodiscard]] inline std::string to_field(const Digest256& digest) {
  return to_field(std::as_bytes(std::span(digest.words)));
}
[[nodiscard]] inline std::string to_field(const Digest128& digest) {
  return namespace_bytes(digest);
}
[[nodiscard]] inline std::string to_field(const CausalContext& context) {
  ByteWriter w;
  write_context(w, context);
  return to_field(w.written());
}

/// A field of fixed size. Errors: `truncated`, `oversized`.
template <class Value>
[[nodiscard]] Result<Value> fixed_field(std::string_view field, const char* what) {
  if (field.size() != sizeof(Value)) {
    return error(field.size() < sizeof(Value) ? ErrorCode::truncated : ErrorCode::oversized, what,
                 " of ", field.size(), " bytes, not ", sizeof(Value));
  }
  Value out;
  std::memcpy(static_cast<void*>(&out), field.data(), sizeof(Value));
  return out;
}
/// A context of at most so many ranges. Errors: `oversized`, those of `read_context`.
[[nodiscard]] inline Result<CausalContext> context_field(
    std::string_view field, std::size_t max_ranges = default_max_ranges) {
  ByteReader r(as_bytes(field));
  CausalContext out = read_context(r, max_ranges);
  KVMELD_TRY(r.finish("context"));
  return out;
}

inline void fill(rpc::StateVersion& to, const StateVersion& version) {
  to.set_context(to_field(version.context));
  to.set_set_digest(to_field(version.set));
  to.set_merger(to_field(version.merger));
}
[[nodiscard]] inline Result<StateVersion> read_version(const rpc::StateVersion& from) {
  auto context = context_field(from.context());
  if (!context) return context.error();
  const auto set = fixed_field<Digest256>(from.set_digest(), "a set digest");
  if (!set) return set.error();
  const auto merger = fixed_field<Digest128>(from.merger(), "a merger digest");
  if (!merger) return merger.error();
  return StateVersion{*std::move(context), *set, *merger};
}

}  // namespace detail

KVMELD_NAMESPACE_END
