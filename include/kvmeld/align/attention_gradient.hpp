#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/math.hpp>

KVMELD_NAMESPACE_BEGIN

/// One head's pooling, as it was computed, and the cotangents of its results. Contiguous, the
/// caller's memory.
///
/// Keys stand in the queries' frame. Rotation is orthogonal: a caller whose keys are turned turns
/// gradients back.
template <std::floating_point T>
struct AttentionPullback {
  std::span<const T> queries{};  ///< (query, key channel)
  std::span<const T> keys{};     ///< (token, key channel)
  std::span<const T> values{};   ///< (token, value channel)
  std::size_t key_channels = 0;
  std::size_t value_channels = 0;
  T factor = 1;  ///< logit = q·k · factor
  /// Where each agent's tokens begin, ascending from 0: the mean over agents; empty: exact.
  std::span<const std::size_t> agents{};
  std::span<const T> pooled_values{};  ///< cotangent of Σ w·v (query, value channel)
  std::span<const T> pooled_keys{};    ///< cotangent of Σ w·k (query, key channel); empty: 0
  /// Cotangent of log Σ e^logit (query), exact form only; empty: 0.
  std::span<const T> lse_natural{};
};

/// What comes back: vector-Jacobian products, added to what the memory holds.
template <std::floating_point T>
struct AttentionGradients {
  std::span<T> queries{};  ///< (query, key channel)
  std::span<T> keys{};     ///< (token, key channel)
  std::span<T> values{};   ///< (token, value channel)
};

namespace detail {

template <class T>
[[nodiscard]] Status check_pullback(const AttentionPullback<T>& p, const AttentionGradients<T>& out,
                                    std::size_t& queries, std::size_t& tokens) {
  if (p.key_channels == 0 || p.value_channels == 0) {
    return error(ErrorCode::invalid_argument, "attention vjp: ", p.key_channels, " key and ",
                 p.value_channels, " value channels");
  }
  queries = p.queries.size() / p.key_channels;
  tokens = p.keys.size() / p.key_channels;
  const auto differs = [](const char* what, std::size_t size, std::size_t wanted) {
    return error(ErrorCode::invalid_argument, "attention vjp: ", what, " holds ", size,
                 " numbers, ", wanted, " fit");
  };
  if (p.queries.size() != queries * p.key_channels)
    return differs("queries", p.queries.size(), queries * p.key_channels);
  if (p.keys.size() != tokens * p.key_channels)
    return differs("keys", p.keys.size(), tokens * p.key_channels);
  if (p.values.size() != tokens * p.value_channels)
    return differs("values", p.values.size(), tokens * p.value_channels);
  if (p.pooled_values.size() != queries * p.value_channels)
    return differs("pooled_values", p.pooled_values.size(), queries * p.value_channels);
  if (!p.pooled_keys.empty() && p.pooled_keys.size() != p.queries.size())
    return differs("pooled_keys", p.pooled_keys.size(), p.queries.size());
  if (!p.lse_natural.empty() && p.lse_natural.size() != queries)
    return differs("lse_natural", p.lse_natural.size(), queries);
  if (out.queries.size() != p.queries.size())
    return differs("the gradient of queries", out.queries.size(), p.queries.size());
  if (out.keys.size() != p.keys.size())
    return differs("the gradient of keys", out.keys.size(), p.keys.size());
  if (out.values.size() != p.values.size())
    return differs("the gradient of values", out.values.size(), p.values.size());
  if (!p.agents.empty() && !p.lse_natural.empty()) {
    return error(ErrorCode::unsupported, "attention vjp: the mean over ", p.agents.size(),
                 " agents has no log-sum-exp");
  }
  for (std::size_t a = 0; a < p.agents.size(); ++a) {
    if ((a == 0 && p.agents[a] != 0) || (a > 0 && p.agents[a] < p.agents[a - 1]) ||
        p.agents[a] > tokens) {
      return error(ErrorCode::invalid_argument, "attention vjp: agent ", a, " begins at token ",
                   p.agents[a], " of ", tokens, "; begins ascend from 0");
    }
  }
  if (!std::isfinite(p.factor))
    return error(ErrorCode::non_finite, "attention vjp: the factor is ", p.factor);
  return {};
}

template <class T>
[[nodiscard]] T dot_in_order(const T* a, const T* b, std::size_t n) noexcept {
  T sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum = fma(a[i], b[i], sum);
  return sum;
}
template <class T>
void add_scaled(T* to, T scale, const T* from, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) to[i] = fma(scale, from[i], to[i]);
}

}  // namespace detail

/// Vector-Jacobian products of attention pooling with respect to queries, keys and values, of one
/// head.
///
/// With w = softmax over the tokens (or over each agent's, divided by the number of agents that
/// have tokens), g = v·V̄ + k·K̄ and s a softmax: d logit = w (g − Σ s g) + w·lse̅; q̄ = factor Σ
/// d·k; k̄ = factor Σ d·q + Σ w·K̄; v̄ = Σ w·V̄. Sums in order, exponentials in f64, nothing stored
/// but one query's weights: O(queries · tokens · channels). T is f32 or f64; f64 is what trainers
/// should take. Errors, with the gradients untouched: `invalid_argument` (sizes), `unsupported`
/// (log-sum-exp of a mean), `non_finite` (factor).
template <std::floating_point T>
[[nodiscard]] Status attention_vjp(const AttentionPullback<T>& p,
                                   const AttentionGradients<T>& out) {
  std::size_t queries = 0, tokens = 0;
  KVMELD_TRY(detail::check_pullback(p, out, queries, tokens));
  const std::size_t d = p.key_channels, e = p.value_channels;
  const std::size_t whole[] = {0};
  const std::span<const std::size_t> begins =
      p.agents.empty() ? std::span<const std::size_t>(whole) : p.agents;
  const auto end_of = [&](std::size_t a) { return a + 1 < begins.size() ? begins[a + 1] : tokens; };
  std::size_t speakers = 0;
  for (std::size_t a = 0; a < begins.size(); ++a)
    speakers += end_of(a) > begins[a] ? std::size_t{1} : std::size_t{0};
  std::vector<double> mass(tokens);
  std::vector<T> pull(tokens);
  for (std::size_t q = 0; q < queries; ++q) {
    const T* const query = p.queries.data() + q * d;
    const T* const to_values = p.pooled_values.data() + q * e;
    const T* const to_keys = p.pooled_keys.empty() ? nullptr : p.pooled_keys.data() + q * d;
    for (std::size_t a = 0; a < begins.size(); ++a) {
      const std::size_t first = begins[a], last = end_of(a);
      double top = -static_cast<double>(INFINITY), total = 0;
      for (std::size_t t = first; t < last; ++t) {
        mass[t] = static_cast<double>(detail::dot_in_order(query, p.keys.data() + t * d, d)) *
                  static_cast<double>(p.factor);
        top = mass[t] > top ? mass[t] : top;
      }
      for (std::size_t t = first; t < last; ++t) {
        mass[t] = math::exp(mass[t] - top);
        total += mass[t];
      }
      double mean = 0;
      for (std::size_t t = first; t < last; ++t) {
        mass[t] = mass[t] / total;
        pull[t] = detail::dot_in_order(to_values, p.values.data() + t * e, e);
        if (to_keys != nullptr) pull[t] += detail::dot_in_order(to_keys, p.keys.data() + t * d, d);
        mean = fma(mass[t], static_cast<double>(pull[t]), mean);
      }
      for (std::size_t t = first; t < last; ++t) {
        const double w = mass[t] / static_cast<double>(speakers);
        double logit = w * (static_cast<double>(pull[t]) - mean);
        if (!p.lse_natural.empty()) logit = fma(w, static_cast<double>(p.lse_natural[q]), logit);
        const T step = static_cast<T>(logit * static_cast<double>(p.factor));
        detail::add_scaled(out.queries.data() + q * d, step, p.keys.data() + t * d, d);
        detail::add_scaled(out.keys.data() + t * d, step, query, d);
        if (to_keys != nullptr)
          detail::add_scaled(out.keys.data() + t * d, static_cast<T>(w), to_keys, d);
        detail::add_scaled(out.values.data() + t * e, static_cast<T>(w), to_values, e);
      }
    }
  }
  return {};
}

KVMELD_NAMESPACE_END
