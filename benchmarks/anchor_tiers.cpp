// Payloads of anchors between tiers: back from a file, verified, against reading the same bytes;
// and takes while nothing moves.

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <kvmeld/anchors/tiers.hpp>
#include <kvmeld/stores/file.hpp>

#include "caches.hpp"
#include "paired.hpp"

namespace {

using Pool = kvmeld::anchors::AnchorPool<kvmeld::anchors::XxHash, kvmeld::anchors::LRU>;

kvmeld::anchors::Anchor anchor(const std::shared_ptr<const kvmeld::Geometry>& geometry,
                               std::int64_t tokens, std::uint32_t seed) {
  kvmeld::HostCache cache(geometry, tokens);
  bench::fill(cache.bytes(), seed);
  std::vector<kvmeld::TokenId> ids;
  for (std::int64_t t = 0; t < tokens; ++t) ids.push_back(static_cast<kvmeld::TokenId>(seed));
  auto made =
      kvmeld::anchors::make_anchor(*kvmeld::seal(cache.kv_cache_ref(), {.tokens = ids}), {1.0F});
  if (!made) std::abort();
  return *std::move(made);
}

/// Two payloads and room for one: each fetch drops the one that has its file already, and reads the
/// other.
void fetch(benchmark::State& state, std::int64_t mebibytes) {
  const auto geometry = bench::small_model(kvmeld::ElementType::f16);
  const std::int64_t tokens = mebibytes * bench::mebibyte / bench::token_bytes(*geometry);
  const std::string folder =
      std::filesystem::temp_directory_path() / ("kvmeld-tiers-" + std::to_string(::getpid()));
  auto store =
      kvmeld::stores::FileStore::open(folder, {.durability = kvmeld::stores::Durability::none});
  if (!store) std::abort();
  const std::vector<kvmeld::anchors::Anchor> both{anchor(geometry, tokens, 1),
                                                  anchor(geometry, tokens, 2)};
  const std::size_t bytes = both[0].base.payloads()[0].byte_count;
  {
    Pool pool(kvmeld::anchors::AnchorSpace::of(*geometry), {2, 4 * bytes});
    kvmeld::anchors::AnchorTiers tiers(*store, {.host_bytes = bytes, .file_bytes = 4 * bytes});
    for (const auto& a : both) {
      if (!tiers.commit(pool, a)) std::abort();
    }
    std::size_t next = 0;
    // both have their files
    if (!tiers.fetch(both[0].base) || !tiers.fetch(both[1].base)) std::abort();
    const auto ours = [&] {
      if (!tiers.fetch(both[next++ % 2].base)) std::abort();
    };
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder + "/payloads")) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    if (files.size() != 2) std::abort();
    std::size_t rotation = 0;
    const auto base = [&] {
      const std::unique_ptr<std::byte[]> to(new std::byte[bytes]);
      const int file = ::open(files[rotation++ % 2].c_str(), O_RDONLY);
      std::size_t done = 0;
      for (::ssize_t got = 1; got > 0 && done < bytes; done += static_cast<std::size_t>(got))
        got = ::read(file, to.get() + done, bytes - done);
      if (done != bytes) std::abort();
      ::close(file);
      benchmark::DoNotOptimize(to.get());
    };
    bench::paired(state, static_cast<std::int64_t>(bytes), ours, static_cast<std::int64_t>(bytes),
                  base);
  }
  std::filesystem::remove_all(folder);
}

/// A thousand takes of payloads in host memory; ratio: against a map under a mutex.
void take(benchmark::State& state, std::uint32_t anchors) {
  const auto geometry = bench::small_model(kvmeld::ElementType::f16);
  Pool pool(kvmeld::anchors::AnchorSpace::of(*geometry), {anchors, std::size_t{1} << 40});
  auto store = kvmeld::stores::FileStore::open(std::filesystem::temp_directory_path() /
                                               ("kvmeld-takes-" + std::to_string(::getpid())));
  if (!store) std::abort();
  kvmeld::anchors::AnchorTiers tiers(*store, {.host_bytes = std::size_t{1} << 40});
  std::vector<kvmeld::Fragment> shells;
  for (std::uint32_t a = 0; a < anchors; ++a) {
    const auto made = anchor(geometry, 1, a);
    if (!tiers.commit(pool, made)) std::abort();
    shells.push_back(made.base);
  }
  constexpr std::int64_t each = 1000;
  kvmeld::Fragment out;
  const auto ours = [&] {
    for (std::size_t i = 0; i < each; ++i) {
      if (tiers.take(shells[i * 7 % anchors], out) != kvmeld::anchors::TierAnswer::here)
        std::abort();
    }
  };
  std::map<kvmeld::FragmentId, kvmeld::Fragment> map;
  for (const auto& shell : shells) map.emplace(shell.id(), shell);
  std::mutex mutex;
  const auto base = [&] {
    for (std::size_t i = 0; i < each; ++i) {
      const std::lock_guard lock(mutex);
      out = map.find(shells[i * 7 % anchors].id())->second;
    }
  };
  bench::paired_with_setup(
      state, each, [] {}, ours, base);
  state.counters["best_ns_each"] = state.counters["best_us"].value * 1e3 / each;
  std::filesystem::remove_all(std::filesystem::temp_directory_path() /
                              ("kvmeld-takes-" + std::to_string(::getpid())));
}

const bool registered = [] {
  for (const std::int64_t size : {1, 16, 64})
    bench::add(bench::name({"anchor/tiers/fetch", bench::mib(size)}), fetch, size);
  for (const std::uint32_t anchors : {100U, 10000U})
    bench::add("anchor/tiers/take/anchors:" + std::to_string(anchors), take, anchors);
  return true;
}();

}  // namespace
