#pragma once

/// What a render reads and writes, as arrays that a device can copy as they lie.

#include <cstddef>
#include <cstdint>

#include <kvmeld/cache/plane_ref.hpp>
#include <kvmeld/cache/rope.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// One contribution as the row work reads it: where the row lies, its weight, and how far its key
/// is turned first.
struct RowInput {
  std::uint32_t source = 0;
  std::uint32_t row = 0;  ///< index among the tokens that the layer group holds of that source
  float weight = 1.0F;
  std::uint32_t shift = 0;  ///< row of the rope table; 0: as it is
};

/// The outputs of the layers that hold the same tokens, as arrays that a device can copy as they
/// lie.
struct RowGroup {
  const std::uint32_t* row_begin = nullptr;  ///< (outputs + 1)
  const RowInput* inputs = nullptr;
  const std::uint32_t* out_shift = nullptr;  ///< (outputs) turn after the fusion; 0: none
  /// (outputs) from here on copy consecutive rows of one source, equally turned.
  const std::uint32_t* run = nullptr;
  /// (inputs) turn straight to the output, for a head that keeps one; null without head weights.
  const std::uint32_t* direct = nullptr;
};

/// The contributions to one head of an output: all of the output's, or those that head weights
/// leave it.
struct HeadInputs {
  const RowInput* inputs = nullptr;
  const float* weights = nullptr;  ///< 0: not of this head; null: the inputs' own
  int count = 0;                   ///< of the output

  [[nodiscard]] KVMELD_HD bool used(int i) const noexcept {
    return weights == nullptr || weights[i] != 0.0F;
  }
  [[nodiscard]] KVMELD_HD float weight(int i) const noexcept {
    return weights == nullptr ? inputs[i].weight : weights[i];
  }
  [[nodiscard]] KVMELD_HD int used_count() const noexcept {
    if (weights == nullptr) return count;
    int used_inputs = 0;
    for (int i = 0; i < count; ++i) used_inputs += weights[i] != 0.0F ? 1 : 0;
    return used_inputs;
  }
  [[nodiscard]] KVMELD_HD int first_used() const noexcept {
    int i = 0;
    while (i + 1 < count && !used(i)) ++i;
    return i;
  }
};

/// One plane of one layer: where its rows come from and go to.
struct PlaneTask {
  MutablePlaneRef out;
  RowGroup group;
  const std::byte* const* sources = nullptr;  ///< base of this plane in each source
  const float* rope = nullptr;   ///< table rows, cosines then sines; null: rows are not turned
  std::int64_t rope_stride = 0;  ///< floats
  RopePairing pairing = RopePairing::half_split;
  std::int32_t first_channel = 0;
  std::int32_t rotary_channels = 0;
  /// (head, input) in place of the inputs' own, 0: not of this head; null: none.
  const float* head_weights = nullptr;
  std::int64_t input_count = 0;  ///< of the group
  /// The local cache: a head that is its alone takes it as it is.
  std::uint32_t local_source = 0xffffffff;
  std::int32_t layer = 0;
  bool packed = false;  ///< output tokens follow each other in memory in canonical order

  /// Whether a head takes its only contribution as it is; `keeps_single`: the fuser does so with
  /// any.
  [[nodiscard]] KVMELD_HD bool keeps(const HeadInputs& row, bool keeps_single) const noexcept {
    return row.used_count() == 1 &&
           (keeps_single ||
            (row.weights != nullptr && row.inputs[row.first_used()].source == local_source));
  }
  [[nodiscard]] KVMELD_HD HeadInputs head_inputs(std::int64_t output,
                                                 std::int64_t head) const noexcept {
    const std::uint32_t begin = group.row_begin[output];
    return {group.inputs + begin,
            head_weights == nullptr ? nullptr : head_weights + head * input_count + begin,
            static_cast<int>(group.row_begin[output + 1] - begin)};
  }
  [[nodiscard]] KVMELD_HD const float* table(std::uint32_t shift) const noexcept {
    return rope + shift * rope_stride;
  }
  [[nodiscard]] KVMELD_HD bool turns(std::uint32_t shift) const noexcept {
    return rope != nullptr && shift != 0;
  }
  [[nodiscard]] KVMELD_HD const std::byte* input(const RowInput& in,
                                                 std::int64_t head) const noexcept {
    return sources[in.source] +
           (static_cast<std::int64_t>(in.row) * out.shape.heads + head) * row_bytes(out.shape);
  }
};

inline constexpr std::int32_t max_channels = 1024;  ///< of a head; rows live on the stack
inline constexpr int chunk_inputs = 64;  ///< contributions that are absorbed one after the other
inline constexpr int max_levels = 12;    ///< of the tree that joins chunks: 64 << 11 contributions

}  // namespace detail
KVMELD_NAMESPACE_END
