#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvmeld/align/linear_map.hpp>

KVMELD_NAMESPACE_BEGIN

/// Gradients of a loss through `apply`, in f64: from dL/dy to dL/dx and dL/d(W, A, B, b).
///
/// Of the un-rotated rows that a map works on: a rotation's transpose turns by the opposite angle.
/// O(tokens · outputs · inputs).
/// @param x  (tokens, inputs)
/// @param dy (tokens, outputs)
/// @param dx (tokens, inputs), written
/// @param dmap gradients of the map's numbers, in a map of equal shape; they are added to what it
/// holds Errors: those of `validate`; `invalid_argument` where `dmap` has another shape.
KVMELD_LAZY [[nodiscard]] Status vjp(const LinearMap& map, std::int64_t tokens, const double* x,
                                     const double* dy, double* dx, LinearMap& dmap) {
  KVMELD_TRY(validate(map));
  if (dmap.outputs != map.outputs || dmap.inputs != map.inputs || dmap.rank != map.rank ||
      dmap.weight.size() != map.weight.size() || dmap.inner.size() != map.inner.size() ||
      dmap.bias.size() != map.bias.size()) {
    return detail::error(ErrorCode::invalid_argument, "the gradient of a matrix of ", map.outputs,
                         " x ", map.inputs, ", rank ", map.rank, " was given as ", dmap.outputs,
                         " x ", dmap.inputs, ", rank ", dmap.rank);
  }
  // d_in = Wᵀ·d_out; dW += d_out · inᵀ
  const auto back = [](const std::vector<double>& w, std::vector<double>& dw, std::int32_t rows,
                       std::int32_t columns, const double* in, const double* d_out, double* d_in) {
    for (std::int32_t c = 0; c < columns; ++c) d_in[c] = 0;
    for (std::int32_t r = 0; r < rows; ++r) {
      const auto at = static_cast<std::size_t>(r) * static_cast<std::size_t>(columns);
      for (std::int32_t c = 0; c < columns; ++c) {
        const std::size_t i = at + static_cast<std::size_t>(c);
        d_in[c] = fma(w[i], d_out[r], d_in[c]);
        dw[i] = fma(d_out[r], in[c], dw[i]);
      }
    }
  };
  const LinearMap inner{.outputs = map.rank, .inputs = map.inputs, .weight = map.inner};
  std::vector<double> middle(static_cast<std::size_t>(map.rank));
  std::vector<double> d_middle(middle.size());
  for (std::int64_t t = 0; t < tokens; ++t, x += map.inputs, dx += map.inputs, dy += map.outputs) {
    for (std::size_t o = 0; o < map.bias.size(); ++o) dmap.bias[o] += dy[o];
    if (map.rank == 0) {
      back(map.weight, dmap.weight, map.outputs, map.inputs, x, dy, dx);
      continue;
    }
    apply(inner, x, middle.data());
    back(map.weight, dmap.weight, map.outputs, map.rank, middle.data(), dy, d_middle.data());
    back(map.inner, dmap.inner, map.rank, map.inputs, x, d_middle.data(), dx);
  }
  return {};
}

KVMELD_NAMESPACE_END
