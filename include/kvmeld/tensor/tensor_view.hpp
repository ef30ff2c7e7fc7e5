#pragma once

/// The array view that callers hand in, as a concept, and the strided view that the library itself
/// uses.

#include <array>
#include <concepts>
#include <cstddef>
#include <type_traits>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN

/// A non-owning strided view of an N-dimensional array.
///
/// Any `mdspan`-shaped type models it, so callers keep their own tensor type.
///
/// Semantic requirements (checked by tests/compile, not by the compiler):
///  - strides count elements; zero broadcasts, negative runs backwards;
///  - copying the view copies no elements;
///  - every index in the extents is addressable from `data_handle()` in the view's memory space.
template <class View>
concept TensorView = std::is_trivially_copyable_v<View> &&
    requires(const View& view, std::size_t axis) {
  typename View::element_type;
  { view.extent(axis) } -> std::convertible_to<std::ptrdiff_t>;
  { view.stride(axis) } -> std::convertible_to<std::ptrdiff_t>;
  { view.data_handle() } -> std::convertible_to<const typename View::element_type*>;
  requires(View::rank() >= 1);
};

/// An array of `Rank` axes in memory: element (i0, i1, ...) lies at `data + i0 * stride0 + i1 *
/// stride1 + ...`.
///
/// Models `TensorView`. Strides are signed elements. Nothing is checked on access; copying costs a
/// few words.
template <class T, std::size_t Rank>
class StridedView {
  static_assert(Rank >= 1, "kvmeld::StridedView needs at least one axis");

 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  using index_type = std::ptrdiff_t;
  using Shape = std::array<std::ptrdiff_t, Rank>;

  constexpr StridedView() = default;

  /// A dense array in row-major order: the last axis is contiguous.
  constexpr StridedView(T* data, const Shape& extents) noexcept : data_(data) {
    std::ptrdiff_t stride = 1;
    for (std::size_t axis = Rank; axis-- > 0;) {
      extents_[axis] = extents[axis];
      strides_[axis] = stride;
      stride *= extents[axis];
    }
  }
  constexpr StridedView(T* data, const Shape& extents, const Shape& strides) noexcept
      : data_(data) {
    for (std::size_t axis = 0; axis < Rank; ++axis) {
      extents_[axis] = extents[axis];
      strides_[axis] = strides[axis];
    }
  }

  /// A read-only view of the same elements.
  template <class U>
  requires(std::is_const_v<T>&& std::same_as<const U, T> && !std::is_const_v<U>) KVMELD_HD
      constexpr StridedView(
          const StridedView<U, Rank>& other) noexcept  // NOLINT: implicit on purpose
      : data_(other.data_handle()) {
    for (std::size_t axis = 0; axis < Rank; ++axis) {
      extents_[axis] = other.extent(axis);
      strides_[axis] = other.stride(axis);
    }
  }

  [[nodiscard]] KVMELD_HD static constexpr std::size_t rank() noexcept { return Rank; }
  [[nodiscard]] KVMELD_HD constexpr T* data_handle() const noexcept { return data_; }
  [[nodiscard]] KVMELD_HD constexpr std::ptrdiff_t extent(std::size_t axis) const noexcept {
    return extents_[axis];
  }
  [[nodiscard]] KVMELD_HD constexpr std::ptrdiff_t stride(std::size_t axis) const noexcept {
    return strides_[axis];
  }

  /// Product of the extents; 0 if any axis is empty.
  [[nodiscard]] KVMELD_HD constexpr std::ptrdiff_t size() const noexcept {
    std::ptrdiff_t product = 1;
    for (std::size_t axis = 0; axis < Rank; ++axis) product *= extents_[axis];
    return product;
  }
  [[nodiscard]] KVMELD_HD constexpr bool empty() const noexcept { return size() == 0; }

  template <class... Indices>
  requires(sizeof...(Indices) == Rank && (std::convertible_to<Indices, std::ptrdiff_t> && ...))
      [[nodiscard]] KVMELD_HD constexpr T&
      operator()(Indices... indices) const noexcept {
    const std::ptrdiff_t index[Rank] = {static_cast<std::ptrdiff_t>(indices)...};
    std::ptrdiff_t offset = 0;
    for (std::size_t axis = 0; axis < Rank; ++axis) offset += index[axis] * strides_[axis];
    return data_[offset];
  }

 private:
  T* data_ = nullptr;
  // plain arrays: the members of std::array are no device functions
  std::ptrdiff_t extents_[Rank] = {};
  std::ptrdiff_t strides_[Rank] = {};
};

KVMELD_NAMESPACE_END
