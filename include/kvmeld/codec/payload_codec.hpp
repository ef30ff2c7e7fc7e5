#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/codec/blob_key.hpp>
#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/codec/geometry_codec.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Strictly ascending numbers from 0 on: the first, then each one's distance to its predecessor,
/// less one.
template <class T>
void write_ascending(ByteWriter& w, std::span<const T> numbers) {
  T next = 0;
  for (const T n : numbers) {
    w.varint(static_cast<std::uint64_t>(n - next));
    next = static_cast<T>(n + 1);
  }
}
template <class T>
void read_ascending(ByteReader& r, std::size_t count, std::uint64_t max, std::vector<T>& out) {
  std::uint64_t next = 0;
  for (; r.ok() && count > 0; --count) {
    const std::uint64_t gap = r.varint();
    if (gap > max || next + gap > max) r.fail(ErrorCode::corrupt);
    if (!r.ok()) return;
    out.push_back(static_cast<T>(next + gap));
    next += gap + 1;
  }
}

KVMELD_LAZY void write_payload(ByteWriter& w, const Payload& payload,
                               std::span<const BlobKey> chunks) {
  w.value(payload.lead_in.low);
  w.value(payload.lead_in.high);
  w.bytes(std::as_bytes(std::span(payload.digest)));
  write_ascending(w, std::span<const std::int64_t>(payload.positions));
  w.varint(payload.token_sets.size());
  for (const TokenSet& set : payload.token_sets) {
    w.value(static_cast<std::uint8_t>(set.all));
    if (set.all) continue;
    w.varint(set.present.size());
    write_ascending(w, std::span<const std::int32_t>(set.present));
  }
  for (const std::uint16_t set : payload.layer_set) w.varint(set);
  w.varint(payload.byte_count);
  for (const BlobKey& key : chunks) w.bytes(std::as_bytes(std::span(key.bytes)));
}

/// Reads up to the declared byte count, which the caller compares with the one that the geometry
/// implies.
KVMELD_LAZY [[nodiscard]] std::uint64_t read_payload(ByteReader& r, std::size_t tokens,
                                                     std::size_t layers, Payload& payload) {
  payload.lead_in.low = r.value<std::uint64_t>();
  payload.lead_in.high = r.value<std::uint64_t>();
  if (const auto digest = r.bytes(payload.digest.size()); !digest.empty())
    std::memcpy(payload.digest.data(), digest.data(), digest.size());
  if (tokens > r.remaining()) r.fail(ErrorCode::truncated);
  read_ascending(r, tokens, static_cast<std::uint64_t>(max_position), payload.positions);
  for (std::size_t sets = r.count(1); r.ok() && sets > 0; --sets) {
    TokenSet set;
    set.all = read_bool(r);
    if (!set.all) {
      const std::uint64_t last = tokens == 0 ? 0 : tokens - 1;
      const std::size_t present = r.count(1);
      if (present > tokens) r.fail(ErrorCode::corrupt);
      read_ascending(r, present,
                     (std::min)(last, std::uint64_t{(std::numeric_limits<std::int32_t>::max)()}),
                     set.present);
    }
    payload.token_sets.push_back(std::move(set));
  }
  for (std::size_t l = 0; r.ok() && l < layers; ++l) {
    const std::uint64_t set = r.varint();
    if (set >= payload.token_sets.size() || set > 0xFFFFU) r.fail(ErrorCode::corrupt);
    payload.layer_set.push_back(static_cast<std::uint16_t>(set));
  }
  return r.varint();
}

}  // namespace detail

KVMELD_NAMESPACE_END
