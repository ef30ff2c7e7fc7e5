#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

// The elements of a vector, or of a pointer and a count, as a span. The standard's constructors
// have the compiler check the concepts of contiguous ranges wherever they are written, also in
// functions that nobody calls: 2 to 3 MB of its memory for each element type. A call of these
// checks nothing before the function that holds it is instantiated.
template <class T>
[[nodiscard]] inline std::span<const T> span_of(const std::vector<T>& elements) noexcept {
  return {elements.data(), elements.size()};
}
template <class T>
[[nodiscard]] inline std::span<T> span_of(std::vector<T>& elements) noexcept {
  return {elements.data(), elements.size()};
}
template <class T>
[[nodiscard]] inline std::span<T> span_of(T* elements, std::size_t count) noexcept {
  return {elements, count};
}

}  // namespace detail
KVMELD_NAMESPACE_END
