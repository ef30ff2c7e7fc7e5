#pragma once

#include <kvmeld/align/attention_kernels.hpp>
#include <kvmeld/align/attention_kernels_avx512.hpp>
#include <kvmeld/align/attention_kernels_x86.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/tensor/element.hpp>
#include <kvmeld/tensor/isa.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// The loops of one instruction set, raw ones for rows of `type`.
[[nodiscard]] inline AttentionSteps attention_steps(
    [[maybe_unused]] Isa isa, [[maybe_unused]] ElementType type = ElementType::f64) noexcept {
#if KVMELD_X86_DISPATCH
  if (isa == Isa::avx512) {
    AttentionSteps steps{dots_avx512<ElementType::f32>,
                         weigh_avx512,
                         largest_avx2,
                         add_avx512<ElementType::f32>,
                         carry_avx512,
                         finish_avx2,
                         nullptr,
                         nullptr,
                         nullptr};
    if (type == ElementType::f32) steps.raw_dots = steps.dots, steps.raw_add = steps.add;
    if (type == ElementType::f16)
      steps.raw_dots = dots_avx512<ElementType::f16>, steps.raw_add = add_avx512<ElementType::f16>,
      steps.widen = widen_parts_avx512<ElementType::f16>;
    if (type == ElementType::bf16)
      steps.raw_dots = dots_avx512<ElementType::bf16>,
      steps.raw_add = add_avx512<ElementType::bf16>,
      steps.widen = widen_parts_avx512<ElementType::bf16>;
    return steps;
  }
  if (isa == Isa::avx2) {
    AttentionSteps steps{dots_avx2<ElementType::f32>,
                         weigh_avx2,
                         largest_avx2,
                         add_avx2<ElementType::f32>,
                         carry_avx2,
                         finish_avx2,
                         nullptr,
                         nullptr,
                         nullptr};
    if (type == ElementType::f32) steps.raw_dots = steps.dots, steps.raw_add = steps.add;
    if (type == ElementType::f16)
      steps.raw_dots = dots_avx2<ElementType::f16>, steps.raw_add = add_avx2<ElementType::f16>,
      steps.widen = widen_parts_avx2<ElementType::f16>;
    if (type == ElementType::bf16)
      steps.raw_dots = dots_avx2<ElementType::bf16>, steps.raw_add = add_avx2<ElementType::bf16>,
      steps.widen = widen_parts_avx2<ElementType::bf16>;
    return steps;
  }
#endif
  return {dots_baseline,   weigh_baseline, largest_baseline, add_baseline, carry_baseline,
          finish_baseline, nullptr,        nullptr,          nullptr};
}

}  // namespace detail
KVMELD_NAMESPACE_END
