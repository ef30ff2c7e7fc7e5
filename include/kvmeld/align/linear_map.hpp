#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// y = W·x + b, or y = A·(B·x) + b where W = A·B has low rank.
///
/// Held in f64, as fits make it; what is applied to caches is rounded once to f32.
struct LinearMap {
  std::int32_t outputs = 0;
  std::int32_t inputs = 0;
  std::int32_t rank = 0;         ///< 0: dense
  std::vector<double> weight{};  ///< W (outputs, inputs), or A (outputs, rank), row by row
  std::vector<double> inner{};   ///< B (rank, inputs); empty where dense
  std::vector<double> bias{};    ///< (outputs); empty: none

  bool operator==(const LinearMap&) const = default;
};

/// Applies a map to one vector in f64, every output summed from the bias on in ascending order of
/// inputs, with fma.
///
/// The reference of what runs on caches, and the form for fits and their scores. O(outputs ·
/// inputs).
/// @param x (inputs) @param y (outputs), does not overlap `x`
inline void apply(const LinearMap& map, const double* x, double* y) {
  const auto product = [](const std::vector<double>& w, std::int32_t rows, std::int32_t columns,
                          const double* in, double* out) {
    for (std::int32_t r = 0; r < rows; ++r) {
      const double* const row = w.data() + static_cast<std::int64_t>(r) * columns;
      double sum = out[r];
      for (std::int32_t c = 0; c < columns; ++c) sum = fma(row[c], in[c], sum);
      out[r] = sum;
    }
  };
  for (std::int32_t r = 0; r < map.outputs; ++r)
    y[r] = map.bias.empty() ? 0.0 : map.bias[static_cast<std::size_t>(r)];
  if (map.rank == 0) return product(map.weight, map.outputs, map.inputs, x, y);
  std::vector<double> middle(static_cast<std::size_t>(map.rank), 0.0);
  product(map.inner, map.rank, map.inputs, x, middle.data());
  product(map.weight, map.outputs, map.rank, middle.data(), y);
}

/// Refuses sizes that contradict each other, sizes beyond 2^16, and numbers that are not finite in
/// f32.
[[nodiscard]] inline Status validate(const LinearMap& map) {
  constexpr std::int32_t most = 1 << 16;
  if (map.outputs <= 0 || map.inputs <= 0 || map.rank < 0 || map.outputs > most ||
      map.inputs > most || map.rank > most) {
    return detail::error(ErrorCode::invalid_argument, "a matrix of ", map.outputs, " x ",
                         map.inputs, ", rank ", map.rank, "; sizes lie in 1 to ", most);
  }
  const auto size = [](std::int32_t a, std::int32_t b) {
    return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
  };
  const std::size_t outer = size(map.outputs, map.rank == 0 ? map.inputs : map.rank);
  const std::size_t inner = size(map.rank, map.inputs);
  if (map.weight.size() != outer || map.inner.size() != inner) {
    return detail::error(ErrorCode::invalid_argument, "a matrix of ", map.outputs, " x ",
                         map.inputs, ", rank ", map.rank, " holds ", map.weight.size(), " and ",
                         map.inner.size(), " numbers, not ", outer, " and ", inner);
  }
  if (!map.bias.empty() && map.bias.size() != static_cast<std::size_t>(map.outputs)) {
    return detail::error(ErrorCode::invalid_argument, "a bias of ", map.bias.size(),
                         " numbers for ", map.outputs, " outputs");
  }
  for (const std::vector<double>* numbers : {&map.weight, &map.inner, &map.bias}) {
    for (const double x : *numbers) {
      if (!(x >= -3.4028234663852886e38 && x <= 3.4028234663852886e38)) {
        return detail::error(ErrorCode::non_finite, "a matrix of ", map.outputs, " x ", map.inputs,
                             " holds ", x, ", which is not finite in f32");
      }
    }
  }
  return {};
}

KVMELD_NAMESPACE_END
