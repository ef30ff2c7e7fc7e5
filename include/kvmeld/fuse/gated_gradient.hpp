#pragma once

/// Gradients of gates. Trainers are not byte-reproducible: sums are as the compiler makes them.

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <span>
#include <vector>

#include <kvmeld/fuse/gate_weights.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// A gated row as it was computed. Contiguous, the caller's memory, which a tape reads again in its
/// `vjp`.
template <std::floating_point T>
struct GateInputs {
  std::span<const T> parameters{};  ///< one network of `GateShape`
  std::span<const T> values{};      ///< (contribution, channel) keys un-rotated
  std::span<const T> weights{};     ///< (contribution) above 0
};

/// What comes back: vector-Jacobian products, added to what the memory holds.
template <std::floating_point T>
struct GateGradients {
  std::span<T> parameters{};
  std::span<T> values{};   ///< (contribution, channel); empty: not asked for
  std::span<T> weights{};  ///< (contribution); empty: not asked for
};

/// Runs one gate forwards and back, for trainers: `forward`, then `vjp` of the same inputs.
///
/// Memory grows with the first row and is kept. O(contributions · (2 · channels + outputs) ·
/// hidden) each way.
template <std::floating_point T>
class GateTape {
 public:
  GateTape(GateKind kind, std::size_t channels, std::size_t hidden)
      : kind_(kind),
        channels_(channels),
        hidden_(hidden),
        outputs_(kind == GateKind::token ? 1 : channels) {}

  /// Numbers of the network: first.weight, first.bias, second.weight, second.bias.
  [[nodiscard]] std::size_t parameter_count() const noexcept {
    return hidden_ * (2 * channels_ + 1) + outputs_ * (hidden_ + 1);
  }

  /// Writes the fused row; out: (channel). Errors: `invalid_argument` (sizes).
  [[nodiscard]] Status forward(const GateInputs<T>& inputs, std::span<T> out) {
    const std::size_t n = inputs.weights.size();
    if (n == 0 || inputs.parameters.size() != parameter_count() ||
        inputs.values.size() != n * channels_ || out.size() != channels_) {
      return detail::error(ErrorCode::invalid_argument, "gate: ", inputs.parameters.size(),
                           " parameters, ", inputs.values.size(), " values, ", n,
                           " weights and a result of ", out.size(), " for ", channels_,
                           " channels and ", hidden_, " hidden units");
    }
    in_ = inputs;
    mean_.assign(channels_, T(0));
    units_.resize(n * hidden_);
    gates_.resize(n * outputs_);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t c = 0; c < channels_; ++c) mean_[c] += inputs.values[i * channels_ + c];
    }
    for (T& m : mean_) m /= static_cast<T>(n);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < hidden_; ++j) {
        const T* const w = first(j);
        T sum = in_.parameters[first_bias() + j];
        for (std::size_t c = 0; c < channels_; ++c) sum += w[c] * inputs.values[i * channels_ + c];
        for (std::size_t c = 0; c < channels_; ++c) sum += w[channels_ + c] * mean_[c];
        units_[i * hidden_ + j] = std::tanh(sum);
      }
      for (std::size_t o = 0; o < outputs_; ++o) {
        T sum = in_.parameters[second_bias() + o];
        for (std::size_t j = 0; j < hidden_; ++j)
          sum += in_.parameters[second(o) + j] * units_[i * hidden_ + j];
        gates_[i * outputs_ + o] = sum;
      }
    }
    std::fill(out.begin(), out.end(), T(0));
    for (std::size_t o = 0; o < outputs_; ++o) {
      T most = gates_[o], total = 0;
      for (std::size_t i = 1; i < n; ++i) most = (std::max)(most, gates_[i * outputs_ + o]);
      for (std::size_t i = 0; i < n; ++i) {
        T& gate = gates_[i * outputs_ + o];
        gate = in_.weights[i] * std::exp(gate - most);
        total += gate;
      }
      for (std::size_t i = 0; i < n; ++i) gates_[i * outputs_ + o] /= total;
    }
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t c = 0; c < channels_; ++c)
        out[c] += gate(i, c) * inputs.values[i * channels_ + c];
    }
    return {};
  }

  /// Gates of the last row: (contribution, output), adding up to 1 over contributions.
  [[nodiscard]] std::span<const T> gates() const noexcept { return gates_; }

  /// Adds the gradients of the last row; cotangent: (channel). Errors: `invalid_argument` (sizes,
  /// or no row yet).
  [[nodiscard]] Status vjp(std::span<const T> cotangent, const GateGradients<T>& out) {
    const std::size_t n = in_.weights.size();
    if (n == 0 || cotangent.size() != channels_ || out.parameters.size() != parameter_count() ||
        (!out.values.empty() && out.values.size() != in_.values.size()) ||
        (!out.weights.empty() && out.weights.size() != n)) {
      return detail::error(ErrorCode::invalid_argument, "gate: gradients of ",
                           out.parameters.size(), " parameters, ", out.values.size(),
                           " values and ", out.weights.size(), " weights from ", cotangent.size(),
                           " channels; the last row has ", n, " contributions of ", channels_);
    }
    d_logits_.assign(n * outputs_, T(0));
    d_mean_.assign(channels_, T(0));
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t c = 0; c < channels_; ++c) {
        const std::size_t at = i * channels_ + c;
        if (!out.values.empty()) out.values[at] += gate(i, c) * cotangent[c];
        T& d = d_logits_[i * outputs_ + (outputs_ == 1 ? 0 : c)];
        d += cotangent[c] * in_.values[at];
      }
    }
    for (std::size_t o = 0; o < outputs_; ++o) {  // softmax
      T mixed = 0;
      for (std::size_t i = 0; i < n; ++i)
        mixed += gates_[i * outputs_ + o] * d_logits_[i * outputs_ + o];
      for (std::size_t i = 0; i < n; ++i)
        d_logits_[i * outputs_ + o] =
            gates_[i * outputs_ + o] * (d_logits_[i * outputs_ + o] - mixed);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const T* const x = in_.values.data() + i * channels_;
      for (std::size_t o = 0; o < outputs_; ++o) {
        const T d = d_logits_[i * outputs_ + o];
        if (!out.weights.empty()) out.weights[i] += d / in_.weights[i];
        out.parameters[second_bias() + o] += d;
        for (std::size_t j = 0; j < hidden_; ++j)
          out.parameters[second(o) + j] += d * units_[i * hidden_ + j];
      }
      for (std::size_t j = 0; j < hidden_; ++j) {
        T d = 0;
        for (std::size_t o = 0; o < outputs_; ++o)
          d += d_logits_[i * outputs_ + o] * in_.parameters[second(o) + j];
        d *= T(1) - units_[i * hidden_ + j] * units_[i * hidden_ + j];
        out.parameters[first_bias() + j] += d;
        const T* const w = first(j);
        T* const to = out.parameters.data() + j * 2 * channels_;
        for (std::size_t c = 0; c < channels_; ++c) {
          to[c] += d * x[c];
          to[channels_ + c] += d * mean_[c];
          if (!out.values.empty()) out.values[i * channels_ + c] += d * w[c];
          d_mean_[c] += d * w[channels_ + c];
        }
      }
    }
    for (std::size_t at = 0; at < out.values.size(); ++at)
      out.values[at] += d_mean_[at % channels_] / static_cast<T>(n);
    return {};
  }

 private:
  [[nodiscard]] const T* first(std::size_t unit) const noexcept {
    return in_.parameters.data() + unit * 2 * channels_;
  }
  [[nodiscard]] std::size_t first_bias() const noexcept { return hidden_ * 2 * channels_; }
  [[nodiscard]] std::size_t second(std::size_t output) const noexcept {
    return first_bias() + hidden_ + output * hidden_;
  }
  [[nodiscard]] std::size_t second_bias() const noexcept { return second(outputs_); }
  [[nodiscard]] T gate(std::size_t i, std::size_t c) const noexcept {
    return gates_[i * outputs_ + (outputs_ == 1 ? 0 : c)];
  }

  GateKind kind_;
  std::size_t channels_, hidden_, outputs_;
  GateInputs<T> in_{};
  std::vector<T> mean_;      // (channel)
  std::vector<T> units_;     // (contribution, hidden)
  std::vector<T> gates_;     // (contribution, output)
  std::vector<T> d_logits_;  // (contribution, output)
  std::vector<T> d_mean_;    // (channel)
};

KVMELD_NAMESPACE_END
