#pragma once

// The elements' share of the identity program: bytes that must be the same for every compiler,
// level and instruction set.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensor_forms.hpp"

/// Feeds rows of every element type, single elements, and the f64 routines to `sink.bytes(const
/// void*, std::size_t)`.
template <class Sink>
inline void tensor_identity(Sink& sink) {
  using kvmeld::ElementType;
  for (int t = 0; t <= static_cast<int>(ElementType::q8_0); ++t) {
    const auto type = static_cast<ElementType>(t);
    for (const std::ptrdiff_t n : {1, 7, 32, 63, 64, 80, 128, 257}) {
      const std::vector<float> source =
          tensor_forms::floats(static_cast<std::size_t>(n), static_cast<std::uint32_t>(n));
      const auto size = static_cast<std::size_t>(kvmeld::byte_size(type, n));
      for (const tensor_forms::Form& form : tensor_forms::forms()) {
        std::vector<std::byte> stored(size + 1);  // at an odd address
        std::vector<float> back(source.size());
        form.store(type, source.data(), n, stored.data() + 1);
        form.load(type, stored.data() + 1, n, back.data());
        sink.bytes(stored.data() + 1, size);
        sink.bytes(back.data(), back.size() * sizeof(float));
      }
      if (type == ElementType::q8_0) continue;
      std::vector<std::byte> stored(size);
      for (std::ptrdiff_t i = 0; i < n; ++i) {
        kvmeld::detail::store_element(type, stored.data(), i, source[static_cast<std::size_t>(i)]);
        const float back = kvmeld::detail::load_element(type, stored.data(), i);
        sink.bytes(&back, sizeof(back));
      }
      sink.bytes(stored.data(), size);
    }
  }
  std::vector<double> x;
  for (double scale = 0x1p-60; scale < 1e9; scale *= 1.37) {
    x.push_back(scale);
    x.push_back(-scale * 0.7);
  }
  for (int k = -2000; k < 2000; ++k) x.push_back(k * 0.78539816339744830962);
  std::vector<double> out(5 * x.size());
  for (const tensor_forms::Form& form : tensor_forms::forms()) {
    form.functions(x.data(), static_cast<std::ptrdiff_t>(x.size()), out.data());
    sink.bytes(out.data(), out.size() * sizeof(double));
  }
  for (const double base : {10000.0, 500000.0, 1e6, 1.5, 0x1p-1060}) {
    for (int i = 0; i <= 128; ++i) {
      const double power = kvmeld::math::pow(base, -i / 128.0);
      sink.bytes(&power, sizeof(power));
    }
  }
}
