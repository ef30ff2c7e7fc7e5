#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvmeld/anchor/published.hpp>
#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/session/fragment_io.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Where payloads lie, fastest first.
enum class Tier : std::uint8_t { device, host, file };
inline constexpr std::size_t tier_count = 3;

[[nodiscard]] constexpr std::string_view to_string(Tier tier) noexcept {
  constexpr std::array<std::string_view, tier_count> names = {"device", "host", "file"};
  const auto i = static_cast<std::size_t>(tier);
  return i < names.size() ? names[i] : "unknown";
}

/// Memory of an accelerator, as its owner gives it: the library copies through these two calls and
/// knows no runtime of its own.
///
/// Semantic requirements:
///  - a `handle` shares what it names: copies are cheap, and the memory goes with the last of them
///    (a shared_ptr with a deleter does);
///  - `upload` returns when the bytes are there and may be read on any stream; `host` may go then.
///    Errors: `store_full`, `engine_failure`;
///  - `download` fills all of `out`, which is as long as what was uploaded, and returns when it is
///    filled;
///  - both are called by whichever threads are in `AnchorTiers::step`, `commit` or `fetch`.
template <class D>
concept DeviceMemory = requires(D& device, std::span<const std::byte> host,
                                const typename D::handle& handle, std::span<std::byte> out) {
  requires std::copyable<typename D::handle>;
  { device.upload(host) } -> std::same_as<Result<typename D::handle>>;
  { device.download(handle, out) } -> std::same_as<Status>;
};

/// No accelerator: the device tier takes nothing.
struct NoDevice {
  using handle = std::shared_ptr<const void>;
  Result<handle> upload(std::span<const std::byte>) const {
    return detail::error(ErrorCode::unsupported, "these tiers have no device");
  }
  Status download(const handle&, std::span<std::byte>) const {
    return detail::error(ErrorCode::unsupported, "these tiers have no device");
  }
};

namespace detail {

/// Copies of one payload, as a reader sees them: one version.
template <class Handle>
struct TierPlace {
  Fragment host;  // with its bytes; not valid() where they are not in host memory
  std::optional<Handle> device;
  bool file = false;
};

/// What a payload's readers ask for, beyond what they got: bits.
enum TierWant : std::uint8_t { want_nothing = 0, want_host = 1, want_device = 2 };

template <class Handle>
struct TierCell {
  using Place = TierPlace<Handle>;
  TierCell(Fragment without_bytes, BlobKey name)
      : shell(std::move(without_bytes)), key(name), place(std::make_shared<const Place>()) {}

  const Fragment shell;  // all but the bytes
  const BlobKey key;     // of the bytes, from their digest
  std::atomic<std::uint64_t> last_used{0};
  std::atomic<std::uint64_t> uses{0};
  std::atomic<std::uint32_t> hits{0};  // since it came to where it is
  std::atomic<std::uint8_t> want{want_nothing};
  Published<Place> place;
  // The writers', under their mutex.
  std::array<bool, tier_count> held{};
  std::array<bool, tier_count> leaving{};  // of those: chosen to go for something that comes
  bool moving = false;   // somebody copies it without the mutex, or waits for whether it has to go
  bool spilled = false;  // by the commit under way, from host memory to the file
  bool dead = false;     // forgotten, perhaps while it moved
  bool pinned = false;   // of the commit under way: may go to the file, but not be lost

  [[nodiscard]] std::size_t bytes() const noexcept { return shell.payloads()[0].byte_count; }
  [[nodiscard]] bool stays(Tier tier) const noexcept {
    return held[static_cast<std::size_t>(tier)] && !leaving[static_cast<std::size_t>(tier)];
  }
  /// That stay.
  [[nodiscard]] int copies() const noexcept {
    return static_cast<int>(stays(Tier::device)) + static_cast<int>(stays(Tier::host)) +
           static_cast<int>(stays(Tier::file));
  }
  /// bytes · age / frequency.
  [[nodiscard]] double burden(std::uint64_t now) const noexcept {
    const std::uint64_t last = last_used.load(std::memory_order_relaxed);
    const auto age = static_cast<double>(now > last ? now - last : 0);
    return static_cast<double>(bytes()) * age /
           static_cast<double>(uses.load(std::memory_order_relaxed) + 1);
  }
  /// The greatest leaves a tier first: copies of what a faster tier has, then the greatest burden.
  [[nodiscard]] std::pair<bool, double> order(Tier tier, std::uint64_t now) const noexcept {
    return {
        (tier != Tier::device && stays(Tier::device)) || (tier == Tier::file && stays(Tier::host)),
        burden(now)};
  }
  /// Counts a use at a tick; hits since it came to where it is.
  std::uint32_t use(std::uint64_t tick) noexcept {
    uses.fetch_add(1, std::memory_order_relaxed);
    last_used.store(tick, std::memory_order_relaxed);
    return hits.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  template <class Change>
  void change(const Change& change_place) {
    Place next = *place.get();
    change_place(next);
    held = {next.device.has_value(), next.host.valid(), next.file};
    hits.store(0, std::memory_order_relaxed);
    place.set(std::make_shared<const Place>(std::move(next)));
  }
};

/// Cells by the id of their payload. A reader takes a version and never waits; one writer at a time
/// replaces one bucket of it.
template <class Cell>
class TierDirectory {
 public:
  TierDirectory() : root_(std::make_shared<const Root>()) {}

  [[nodiscard]] std::shared_ptr<Cell> find(const FragmentId& id) const noexcept {
    const auto root = root_.get();
    const auto& bucket = (*root)[place(id)];
    if (bucket == nullptr) return nullptr;
    for (const auto& [name, cell] : *bucket) {
      if (name == id) return cell;
    }
    return nullptr;
  }
  void add(std::shared_ptr<Cell> cell) {
    const FragmentId id = cell->shell.id();
    change(id, [&](Bucket& bucket) { bucket.emplace_back(id, std::move(cell)); });
  }
  void erase(const FragmentId& id) {
    change(id, [&](Bucket& bucket) {
      std::erase_if(bucket, [&](const auto& entry) { return entry.first == id; });
    });
  }

 private:
  using Bucket = std::vector<std::pair<FragmentId, std::shared_ptr<Cell>>>;
  using Root = std::array<std::shared_ptr<const Bucket>, 256>;
  // of a hash, any byte is as good
  [[nodiscard]] static std::size_t place(const FragmentId& id) noexcept { return id.bytes[8]; }
  template <class Change>
  void change(const FragmentId& id, const Change& change_bucket) {
    Root root = *root_.get();
    auto& at = root[place(id)];
    auto bucket = at == nullptr ? std::make_shared<Bucket>() : std::make_shared<Bucket>(*at);
    change_bucket(*bucket);
    at = std::move(bucket);
    root_.set(std::make_shared<const Root>(std::move(root)));
  }

  Published<Root> root_;
};

/// What happened to payloads, counted by writers.
struct TierTally {
  std::atomic<std::uint64_t> promoted{0}, demoted{0}, written{0}, lost{0}, damaged{0},
      moved_bytes{0};
};

/// Where a payload's bytes lie in a store: under their digest, as a sealed fragment's do.
template <ContentHash Hash>
[[nodiscard]] BlobKey tier_key(const Payload& payload) {
  Payload named = payload;
  named.digest = payload_digest<Hash>(payload);
  return payload_key<Hash>(named);
}

/// The fragment with other bytes, or with none.
[[nodiscard]] inline Fragment with_bytes(const Fragment& fragment,
                                         std::shared_ptr<const std::byte[]> bytes) {
  auto body = std::make_shared<Fragment::Body>(*fragment.body());
  body->payloads[0].bytes = std::move(bytes);
  return Fragment(std::move(body));
}

}  // namespace detail
KVMELD_NAMESPACE_END
