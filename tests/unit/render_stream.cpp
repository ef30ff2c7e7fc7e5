// Streamed copies at every alignment of either side: outputs above the cache's size go through them.
#include <algorithm>
#include <cstddef>
#include <vector>

#include <kvmeld/cache/stream_copy.hpp>

#include "support/catch.hpp"

TEST_CASE("a streamed copy copies its bytes and no other, from and to any address") {
  constexpr std::byte kept{1};
  std::vector<std::byte> in(1200), out(1200);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(7 * i + 2);
  std::size_t wrong = 0;
  for (std::size_t to = 1; to < 66; ++to) {
    for (std::size_t from = 0; from < 66; from += 3) {
      for (const std::size_t size : {0U, 1U, 63U, 64U, 65U, 200U, 1000U}) {
        std::fill(out.begin(), out.end(), kept);
        kvmeld::detail::stream_copy(out.data() + to, in.data() + from, size);
        kvmeld::detail::stream_fence();
        for (std::size_t i = 0; i < size; ++i) wrong += out[to + i] != in[from + i] ? 1U : 0U;
        wrong += out[to - 1] != kept || out[to + size] != kept ? 1U : 0U;
      }
    }
  }
  CHECK(wrong == 0);
}
