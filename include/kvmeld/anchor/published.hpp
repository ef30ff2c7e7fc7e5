#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include <kvmeld/config.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// A value that one writer at a time replaces and any number of readers take, without a lock: each
/// reader gets one whole version, and keeps it for as long as it likes.
///
/// The version stands in one of two places, and its number is published. A reader marks a place
/// before it looks whether that is still the current one; a writer changes the other place once
/// nobody marks it, and empties the one before likewise: so no reader ever copies from a place that
/// is being written, and what was replaced is gone with its last reader. A reader starts again only
/// when a writer has got further. (std::atomic of a shared_ptr takes a lock in every standard
/// library of today.)
template <class T>
class Published {
 public:
  explicit Published(std::shared_ptr<const T> first) { places_[0].value = std::move(first); }

  /// The current version. Any thread.
  [[nodiscard]] std::shared_ptr<const T> get() const noexcept {
    for (;;) {
      const std::uint32_t at = current_.load();
      const Place& place = places_[at];
      place.readers.fetch_add(1);
      const bool still = current_.load() == at;
      std::shared_ptr<const T> out;
      if (still) out = place.value;
      place.readers.fetch_sub(1);
      if (still) return out;
    }
  }
  /// Makes a version the current one. One writer at a time: the caller's mutex says which.
  void set(std::shared_ptr<const T> value) noexcept {
    const std::uint32_t now = current_.load();
    const std::uint32_t next = 1 - now;
    wait_unmarked(places_[next]);
    places_[next].value = std::move(value);
    current_.store(next);
    wait_unmarked(places_[now]);
    places_[now].value.reset();
  }

 private:
  struct alignas(64) Place {
    mutable std::atomic<std::uint32_t> readers{0};
    std::shared_ptr<const T> value;
  };
  // Marks last as long as a copy of a pointer.
  static void wait_unmarked(const Place& place) noexcept {
    while (place.readers.load() != 0) std::this_thread::yield();
  }

  std::array<Place, 2> places_;
  std::atomic<std::uint32_t> current_{0};
};

}  // namespace detail
KVMELD_NAMESPACE_END
