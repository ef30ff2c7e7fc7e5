#pragma once

/// Names of differing elements on the wire: ids of 32 bytes, or hashes of 8 where both sides hold
/// the id.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/state/detail/reconcile_stage.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Names of elements of a cell, in order of their hashes.
KVMELD_LAZY void write_names(ByteWriter& out, const ReconcileStage& stage,
                             std::span<const ReconcileItem> items, const ReconcileCell& cell) {
  const auto elements = stage.cell(cell.index);
  for (const std::uint32_t i : cell.mine) {
    if (stage.tags) {
      out.value(elements[i].hash);
    } else {
      out.bytes(std::as_bytes(std::span(items[elements[i].item].id.bytes)));
    }
  }
}

/// Reads them; false where this side holds one of them, so that somebody's short hashes have met.
KVMELD_LAZY [[nodiscard]] bool read_names(ByteReader& in, const ReconcileStage& stage,
                                          std::span<const ReconcileItem> items, ReconcileCell& cell,
                                          std::size_t count) {
  const auto elements = stage.cell(cell.index);
  bool strange = true;
  const auto bytes = in.bytes(count * stage.name_bytes());
  cell.theirs.resize(bytes.size() / stage.name_bytes());
  for (std::size_t i = 0; i < cell.theirs.size(); ++i) {
    TheirElement& their = cell.theirs[i];
    const std::byte* const name = bytes.data() + i * stage.name_bytes();
    if (stage.tags) {
      std::memcpy(&their.hash, name, sizeof(their.hash));
    } else {
      std::memcpy(their.id.bytes.data(), name, sizeof(FragmentId));
      their.hash = id_hash(their.id, stage.salt);
    }
    if (stage.cell_of(their.hash) != cell.index ||
        (i != 0 && their.hash <= cell.theirs[i - 1].hash))
      in.fail(ErrorCode::corrupt);
    const auto held =
        std::lower_bound(elements.begin(), elements.end(), their.hash,
                         [](const ReconcileElement& e, std::uint64_t h) { return e.hash < h; });
    if (held != elements.end() && held->hash == their.hash &&
        (stage.tags || items[held->item].id == their.id))
      strange = false;
  }
  return strange;
}

}  // namespace detail

KVMELD_NAMESPACE_END
