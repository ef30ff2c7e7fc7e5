#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvmeld/cache/check_view.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/normalise.hpp>
#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/exec/row_work.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/float_environment.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Blends rows: row r is one token of one (layer, plane), all heads. Models `RowWork`; one lane
/// does a row's work.
struct SoftUpdateWork {
  using State = NoState;
  struct Task {
    PlaneRef fused, local;
    MutablePlaneRef out;
  };

  const Task* tasks = nullptr;
  std::int64_t tokens = 0;
  float beta = 0;

  [[nodiscard]] NoState partial(std::int64_t, int) const noexcept { return {}; }
  [[nodiscard]] static NoState join(NoState, NoState) noexcept { return {}; }
  void finish(std::int64_t row, int lane, NoState) const noexcept {
    if (lane != 0) return;
    const Task& task = tasks[row / tokens];
    const std::int64_t t = row % tokens;
    const std::int64_t a = task.fused.slots.slot(t), b = task.local.slots.slot(t),
                       o = task.out.slots.slot(t);
    if (o < 0 || a < 0 || b < 0) return;
    for (std::int64_t head = 0; head < task.out.shape.heads; ++head) blend(task, a, b, o, head);
  }

 private:
  void blend(const Task& task, std::int64_t a, std::int64_t b, std::int64_t o,
             std::int64_t head) const noexcept {
    alignas(64) std::byte fused[max_bytes], local[max_bytes];
    alignas(64) float x[max_channels], y[max_channels];
    const PlaneShape& shape = task.out.shape;
    gather_row(task.fused, a, head, fused);
    gather_row(task.local, b, head, local);
    if (beta == 0.0F || beta == 1.0F)
      return scatter_row(task.out, o, head, beta == 0.0F ? local : fused);
    load_row<Isa::baseline>(shape.type, fused, shape.channels, x);
    load_row<Isa::baseline>(shape.type, local, shape.channels, y);
    for (std::int32_t c = 0; c < shape.channels; ++c) {
      // Numbers may lie farther apart than f32 reaches: then their halves, which are exact.
      const float apart = x[c] - y[c];
      const float half = fma(beta, fma(0.5F, x[c], -0.5F * y[c]), 0.5F * y[c]);
      y[c] = apart - apart == 0.0F ? fma(beta, apart, y[c]) : half + half;
    }
    store_row<Isa::baseline>(shape.type, y, shape.channels, fused);
    scatter_row(task.out, o, head, fused);
  }

 public:
  static constexpr std::int32_t max_channels = 1024;
  static constexpr std::size_t max_bytes = std::size_t{max_channels} * 4;
};

/// Refuses rows of which no blend is a number: those of a side that is read (`fused` unless β is 0,
/// `local` unless it is 1), for tokens that are written.
KVMELD_LAZY Status check_blended(const SoftUpdateWork::Task& task, std::int64_t tokens, float beta,
                                 std::size_t index) {
  const PlaneShape& shape = task.out.shape;
  std::vector<std::byte> heads(static_cast<std::size_t>(row_bytes(shape) * shape.heads));
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (task.out.slots.slot(t) < 0 || task.fused.slots.slot(t) < 0 || task.local.slots.slot(t) < 0)
      continue;
    for (const bool is_fused : {true, false}) {
      if (beta == (is_fused ? 0.0F : 1.0F)) continue;
      const PlaneRef& side = is_fused ? task.fused : task.local;
      gather_heads(side, side.slots.slot(t), heads.data());
      const double peak = peak_of(shape.type, heads.data(), heads.size());
      if (peak <= largest_stored(shape.type)) continue;
      return error(ErrorCode::non_finite, "soft_update: plane ", index, " of the ",
                   is_fused ? "fused" : "local", " cache reaches ", peak, " at token ", t,
                   ", beyond the numbers of ", to_string(shape.type));
    }
  }
  return {};
}

/// Whether two views name the same elements by the same tokens, so that a row is read before it is
/// written.
[[nodiscard]] inline bool same_rows(const KvCacheRef& a, const KvCacheRef& b) {
  if (a.planes().size() != b.planes().size()) return false;
  for (std::size_t p = 0; p < a.planes().size(); ++p) {
    const PlaneRef& x = a.planes()[p];
    const PlaneRef& y = b.planes()[p];
    if (!same_lattice(x, y) || x.slots.kind != y.slots.kind || x.slots.table != y.slots.table ||
        x.slots.first != y.slots.first)
      return false;
  }
  return true;
}

}  // namespace detail

/// Blends a fused cache into an agent's own: new = β · fused + (1 − β) · local, for its own view
/// only.
///
/// The result is never sealed into a replicated set: averages are not associative, so replicas that
/// blended would not converge. Token i of both lies at the same position, which the caller says by
/// `positions`; keys then share their rotation and may be averaged as they are. Computed as fma(β,
/// fused − local, local) in f32: equal rows stay as they are, β = 0 and β = 1 copy the bytes of one
/// side, and what lies between two numbers of the element type is one too. `out` may be `local`
/// itself. A row that either side does not hold is left alone. O(bytes). Errors, with the output
/// untouched: `non_finite` (a NaN or an infinity in a row of either side, by plane and token),
/// `invalid_argument` (β outside [0, 1] or not finite), `geometry_mismatch`,
/// `token_count_mismatch`, `duplicate_position` or `position_gap` (positions differ),
/// `output_too_small`, `aliasing`, `unsupported` (scales, f64, or more than 1,024 channels a head),
/// `memory_space`, `float_environment`.
template <ExecutionPolicy E>
requires(!E::on_device) [[nodiscard]] Status
    soft_update(const E& exec, const KvCacheRef& fused,
                std::span<const std::int64_t> fused_positions, const KvCacheRef& local,
                std::span<const std::int64_t> local_positions, float beta,
                const MutableKvCacheRef& out) {
  using detail::error;
  KVMELD_TRY(check_float_environment());
  if (!(beta >= 0.0F && beta <= 1.0F))
    return error(ErrorCode::invalid_argument, "soft_update: beta ", beta, " is not in [0, 1]");
  if (!fused.valid() || !local.valid() || !out.valid())
    return error(ErrorCode::invalid_argument, "soft_update: a view has no geometry");
  KVMELD_TRY(validate(local.geometry()));
  KVMELD_TRY(check_same(local.geometry(), fused.geometry()));
  KVMELD_TRY(check_same(local.geometry(), out.geometry()));
  KVMELD_TRY(detail::check_on_host(fused, "soft_update"));
  KVMELD_TRY(detail::check_on_host(local, "soft_update"));
  KVMELD_TRY(detail::check_on_host(out, "soft_update"));
  const std::int64_t tokens = local.tokens();
  if (fused.tokens() != tokens || std::ssize(fused_positions) != tokens ||
      std::ssize(local_positions) != tokens) {
    return error(ErrorCode::token_count_mismatch, "soft_update: ", fused.tokens(),
                 " fused tokens at ", fused_positions.size(), " positions, ", tokens,
                 " local ones at ", local_positions.size());
  }
  for (std::size_t t = 0; t < fused_positions.size(); ++t) {
    if (fused_positions[t] == local_positions[t]) continue;
    return error(fused_positions[t] > local_positions[t] ? ErrorCode::position_gap
                                                         : ErrorCode::duplicate_position,
                 "soft_update: token ", t, " lies at position ", fused_positions[t],
                 " in one cache, at ", local_positions[t], " in the other");
  }
  if (out.tokens() < tokens)
    return error(ErrorCode::output_too_small, "soft_update: ", tokens, " tokens, the output holds ",
                 out.tokens());
  const MutableKvCacheRef written = out.first(tokens);
  const KvCacheRef target(written);
  if (overlaps(fused, target) || (overlaps(local, target) && !detail::same_rows(local, target))) {
    return error(
        ErrorCode::aliasing,
        "soft_update: the output shares memory with an input and is not the local cache itself");
  }
  std::vector<detail::SoftUpdateWork::Task> tasks;
  for (std::size_t p = 0; p < written.planes().size(); ++p) {
    const PlaneShape& shape = written.planes()[p].shape;
    if (shape.scales != ScaleScheme::none || shape.type == ElementType::f64 ||
        shape.channels > detail::SoftUpdateWork::max_channels) {
      return error(ErrorCode::unsupported, "soft_update: plane ", p, " of ", shape.channels,
                   " channels of ", to_string(shape.type),
                   " cannot be blended: no scales apart, no f64, at most ",
                   detail::SoftUpdateWork::max_channels, " channels");
    }
    KVMELD_TRY(check_writable(written.planes()[p]));
    tasks.push_back({fused.planes()[p], local.planes()[p], written.planes()[p]});
  }
  for (std::size_t p = 0; p < tasks.size(); ++p)
    KVMELD_TRY(detail::check_blended(tasks[p], tokens, beta, p));
  const auto rows = static_cast<std::int64_t>(tasks.size()) * tokens;
  if (rows == 0) return {};
  return exec.bulk(rows, detail::SoftUpdateWork{tasks.data(), tokens, beta});
}

KVMELD_NAMESPACE_END
