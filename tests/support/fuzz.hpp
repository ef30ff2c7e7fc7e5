#pragma once
// What harnesses of parsers share. A harness defines `test::fuzz_seeds` and LLVMFuzzerTestOneInput:
// with -DKVMELD_LIBFUZZER and clang's -fsanitize=fuzzer it is a fuzzer that starts from the seeds,
// otherwise a test that mutates them, the same way every time.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "random_cache.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define KVMELD_TEST_COUNTS_MEMORY 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVMELD_TEST_COUNTS_MEMORY 1
#endif
#endif
#ifdef KVMELD_TEST_COUNTS_MEMORY
// Of the sanitizers' runtime; g++ 12 brings no header for them.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*,
                                                                  std::size_t),
                                                         void (*)(const volatile void*));
extern "C" std::size_t __sanitizer_get_allocated_size(const volatile void*);
#endif

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace test {

using Bytes = std::vector<std::byte>;

/// Inputs as they should be, that mutations start from.
const std::vector<Bytes>& fuzz_seeds();

inline void need(bool holds) {
  if (!holds) std::abort();
}
/// A refusal that says nothing helps nobody.
template <class Answer>
void need_reason(const Answer& answer) {
  if (!answer) need(!answer.error().message().empty());
}

/// Bytes that the program has from malloc, of whichever library, and the most since `start`. 0
/// without the address sanitizer.
class MemoryMeter {
 public:
  MemoryMeter() {
#ifdef KVMELD_TEST_COUNTS_MEMORY
    static const bool once =
        __sanitizer_install_malloc_and_free_hooks(
            [](const volatile void*, std::size_t bytes) {
              count(static_cast<std::int64_t>(bytes));
            },
            [](const volatile void* p) {
              if (p != nullptr)
                count(-static_cast<std::int64_t>(__sanitizer_get_allocated_size(p)));
            }) > 0;
    need(once);
#endif
    begin_ = alive_;
    most_ = begin_;
  }
  [[nodiscard]] std::size_t most() const { return static_cast<std::size_t>(most_ - begin_); }

 private:
  static void count(std::int64_t bytes) {
    const std::int64_t now = alive_ += bytes;
    if (now > most_) most_ = now;
  }
  inline static std::atomic<std::int64_t> alive_ = 0;
  inline static std::atomic<std::int64_t> most_ = 0;
  std::int64_t begin_ = 0;
};

/// What `work` gives; its memory is at most `factor` times the bytes that came, and `room`.
template <class Work>
auto within(std::size_t bytes, std::size_t factor, std::size_t room, Work&& work) {
  const MemoryMeter meter;
  auto out = work();
  if (meter.most() > factor * bytes + room) {
    std::fprintf(stderr, "%zu bytes of memory for %zu that came\n", meter.most(), bytes);
    std::abort();
  }
  return out;
}

/// The rest of an input, read piece by piece; what is missing is 0 or empty.
class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : rest_(bytes) {}
  [[nodiscard]] bool empty() const { return rest_.empty(); }
  [[nodiscard]] std::span<const std::byte> rest() const { return rest_; }
  std::uint8_t byte() { return static_cast<std::uint8_t>(number(1)); }
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t out = 0;
    const auto from = take(bytes);
    for (std::size_t i = 0; i < from.size(); ++i)
      out |= std::to_integer<std::uint64_t>(from[i]) << (8 * i);
    return out;
  }
  /// Bytes behind their length of two bytes, in memory of their own, so that reading past their end
  /// shows.
  Bytes block() {
    const auto from = take(static_cast<std::size_t>(number(2)));
    return {from.begin(), from.end()};
  }

 private:
  std::span<const std::byte> take(std::size_t bytes) {
    const auto out = rest_.first((std::min)(bytes, rest_.size()));
    rest_ = rest_.subspan(out.size());
    return out;
  }
  std::span<const std::byte> rest_;
};
inline void put_number(Bytes& to, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) to.push_back(static_cast<std::byte>(value >> (8 * i)));
}
inline void put_bytes(Bytes& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}
inline void put_block(Bytes& to, std::span<const std::byte> bytes) {
  need(bytes.size() < 65536);
  put_number(to, bytes.size(), 2);
  put_bytes(to, bytes);
}
inline Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
  return {bytes.begin(), bytes.end()};
}

/// Flips, overwrites, cuts, inserts and repeats bytes.
inline Bytes mutated(Bytes bytes, Random& random) {
  for (std::uint64_t edits = 1 + random.below(3); edits > 0 && !bytes.empty(); --edits) {
    const auto at = static_cast<std::size_t>(random.below(bytes.size()));
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random.below(8)) {
      case 0:
        bytes[at] = std::byte{0xFF};
        break;
      case 1:
        bytes[at] = static_cast<std::byte>(random.next());
        break;
      case 2:
        bytes[at] = std::byte{0};
        break;
      case 3:
        bytes.resize(random.below(4) == 0 ? at : bytes.size());
        break;
      case 4:
        bytes.insert(place, 1 + random.below(9), static_cast<std::byte>(random.next()));
        break;
      case 5:
        bytes.erase(place);
        break;
      case 6: {  // a piece of it at its end
        const Bytes piece(
            place, bytes.begin() + static_cast<std::ptrdiff_t>((std::min)(bytes.size(), at + 200)));
        put_bytes(bytes, piece);
        break;
      }
      default:
        bytes[at] ^= static_cast<std::byte>(1U << random.below(8));
    }
  }
  return bytes;
}
inline void run_input(const Bytes& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
}
/// Every seed as it is, then mutations of them.
inline void fuzz_rounds(int rounds, std::uint64_t seed) {
  for (const Bytes& bytes : fuzz_seeds()) run_input(bytes);
  Random random(seed);
  for (int round = 0; round < rounds; ++round)
    run_input(mutated(fuzz_seeds()[random.below(fuzz_seeds().size())], random));
}

}  // namespace test

#ifdef KVMELD_LIBFUZZER
/// Writes the seeds into the corpus, which is the last argument, before it is read.
extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  const std::string last = (*arguments)[*count - 1];
  for (std::size_t i = 0; *count > 1 && last[0] != '-' && i < test::fuzz_seeds().size(); ++i) {
    std::FILE* const file = std::fopen((last + "/seed" + std::to_string(i)).c_str(), "wb");
    if (file == nullptr) break;
    const test::Bytes& bytes = test::fuzz_seeds()[i];
    (void)std::fwrite(bytes.data(), 1, bytes.size(), file);
    (void)std::fclose(file);
  }
  return 0;
}
#endif
