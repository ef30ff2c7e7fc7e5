#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/state/plan_core.hpp>

/// From contributions to rows: which bytes are read for an output, and how far each is turned.

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Numbers distinct turns. Positions repeat over layers, so this is called once a contribution and
/// group, not a row.
class ShiftIndex {
 public:
  explicit ShiftIndex(std::vector<std::int64_t>& shifts) : shifts_(shifts) {}

  KVMELD_LAZY [[nodiscard]] std::uint32_t operator()(std::int64_t shift) {
    if (shift == 0) return 0;
    if (shift == last_shift_) return last_;
    const auto at = std::lower_bound(sorted_.begin(), sorted_.end(),
                                     std::pair<std::int64_t, std::uint32_t>{shift, 0});
    if (at != sorted_.end() && at->first == shift) {
      last_ = at->second;
    } else {
      last_ = static_cast<std::uint32_t>(shifts_.size());
      sorted_.insert(at, {shift, last_});
      shifts_.push_back(shift);
    }
    last_shift_ = shift;
    return last_;
  }

 private:
  std::vector<std::int64_t>& shifts_;
  std::vector<std::pair<std::int64_t, std::uint32_t>> sorted_;
  std::int64_t last_shift_ = 0;
  std::uint32_t last_ = 0;
};

/// What the frame of a row depends on.
struct FuserTraits {
  bool equivariant = false;
  bool keeps_single = false;
};

/// Compiles the rows of one layer (and of all that hold the same tokens): token indices become
/// payload rows, positions become turns.
///
/// The frame: one contribution is turned straight to its output position; equally turned
/// contributions of a rotation-equivariant fuser are fused as they lie and turned once; anything
/// else is fused un-rotated.
KVMELD_LAZY void compile_rows(const PlanCore& core, const AlignmentGroup& alignment,
                              std::size_t layer, FuserTraits fuser,
                              std::span<const std::uint8_t> recompute, ShiftIndex& shift_of,
                              GroupArrays& out) {
  const bool pre_rope = core.geometry->layers[layer].key_form == KeyForm::pre_rope;
  const bool by_head = !alignment.head_weights.empty();
  for (std::size_t o = 0; o < core.positions.size(); ++o) {
    const std::size_t first = out.inputs.size();
    std::uint32_t out_shift = 0;
    if (recompute[o] == 0) {
      bool equal = true, any = false;
      std::int64_t common = 0;
      for (const Contribution& c : alignment.row(o)) {
        const Payload& payload = core.sources[c.source].payload();
        const std::int64_t row = payload_row(payload, layer, c.token);
        if (row < 0) continue;
        if (by_head)
          out.origin.push_back(static_cast<std::uint32_t>(&c - alignment.contributions.data()));
        const std::int64_t shift = pre_rope ? 0 : core.positions[o] - payload.positions[c.token];
        if (!by_head || c.source != core.local_source) {  // the local cache has its heads to itself
          equal = equal && (!any || shift == common);
          common = shift;
          any = true;
        }
        out.inputs.push_back({c.source, static_cast<std::uint32_t>(row),
                              rounded_product(c.weight, core.sources[c.source].weight),
                              shift_of(shift)});
      }
      if (by_head && !any) {  // nothing but the local cache: the heads of the set lack their row
        out.inputs.resize(first);
        out.origin.resize(first);
      }
      const std::size_t count = out.inputs.size() - first;
      for (std::size_t i = first; by_head && i < out.inputs.size(); ++i)
        out.direct.push_back(out.inputs[i].shift);
      if (!pre_rope && (count > 1 || (count == 1 && !fuser.keeps_single))) {
        if (equal && fuser.equivariant) {
          out_shift = shift_of(common);
          for (std::size_t i = first; i < out.inputs.size(); ++i) out.inputs[i].shift = 0;
        } else {
          out_shift = shift_of(core.positions[o]);
          std::size_t i = first;
          for (const Contribution& c : alignment.row(o)) {
            const Payload& payload = core.sources[c.source].payload();
            if (payload_row(payload, layer, c.token) >= 0)
              out.inputs[i++].shift = shift_of(-payload.positions[c.token]);
          }
        }
      }
    }
    out.out_shift.push_back(out_shift);
    out.row_begin.push_back(static_cast<std::uint32_t>(out.inputs.size()));
  }
  const std::size_t n = core.positions.size();
  out.run.assign(n, 1);
  const auto single = [&](std::size_t o) { return out.row_begin[o + 1] - out.row_begin[o] == 1; };
  for (std::size_t o = n; o-- > 1;) {
    if (!single(o) || !single(o - 1)) continue;
    const RowInput& a = out.inputs[out.row_begin[o - 1]];
    const RowInput& b = out.inputs[out.row_begin[o]];
    if (a.source == b.source && a.row + 1 == b.row && a.shift == b.shift)
      out.run[o - 1] = out.run[o] + 1;
  }
}

}  // namespace detail
KVMELD_NAMESPACE_END
