#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>

#include <kvmeld/anchor/decision.hpp>
#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// What reuse and prefill take on the machine that serves, learned while it does: fills
/// `ReuseRequest::cost`.
///
/// Time what is done anyway and tell it: everything between the look-up and the engine's having the
/// K/V as `blended`, every prefill as `prefilled`. Each is kept as seconds a token, newer ones
/// weighing more (an eighth of each new one), so that a machine that gets busy is noticed. Any
/// thread.
class ReuseMeter {
 public:
  void blended(std::int64_t tokens, double seconds) noexcept { blend_.add(tokens, seconds); }
  void prefilled(std::int64_t tokens, double seconds) noexcept { prefill_.add(tokens, seconds); }

  /// Of a segment of so many tokens. Both 0, so that cost is not asked, until both were measured.
  [[nodiscard]] ReuseCost cost(std::int64_t tokens) const noexcept {
    const double blend = blend_.of(), prefill = prefill_.of();
    if (!(blend > 0) || !(prefill > 0)) return {};
    return {blend * static_cast<double>(tokens), prefill * static_cast<double>(tokens)};
  }
  /// 0: not measured.
  [[nodiscard]] double blend_seconds_per_token() const noexcept { return blend_.of(); }
  /// 0: not measured.
  [[nodiscard]] double prefill_seconds_per_token() const noexcept { return prefill_.of(); }

 private:
  class Rate {
   public:
    // What cannot be a measurement is left aside.
    void add(std::int64_t tokens, double seconds) noexcept {
      if (tokens <= 0 || !std::isfinite(seconds) || !(seconds > 0)) return;
      const double sample = seconds / static_cast<double>(tokens);
      double seen = value_.load(std::memory_order_relaxed);
      while (!value_.compare_exchange_weak(seen, seen == 0 ? sample : seen + (sample - seen) / 8,
                                           std::memory_order_relaxed)) {
      }
    }
    [[nodiscard]] double of() const noexcept { return value_.load(std::memory_order_relaxed); }

   private:
    std::atomic<double> value_{0};
  };

  Rate blend_, prefill_;
};

KVMELD_NAMESPACE_END
