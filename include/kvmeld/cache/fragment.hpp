#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/cache/hash.hpp>
#include <kvmeld/tensor/span_of.hpp>

KVMELD_NAMESPACE_BEGIN

/// What a fragment is to a context: the text that several agents saw first, or something one of
/// them read.
enum class Role : std::uint8_t { prefix, span };

/// Last position that a token may have: far beyond any context, and far from overflow.
inline constexpr std::int64_t max_position = std::int64_t{1} << 48;

/// What stood before a fragment when it was encoded.
struct Context {
  FragmentId prefix{};  ///< the prefix fragment; empty: none
  Digest128 lead_in{};  ///< digest of the lead-in tokens that were dropped; zero: none

  bool operator==(const Context&) const = default;
};

/// The digest by which a lead-in is named in a fragment's context. Ids alone do not tell pictures
/// apart: where a lead-in holds placeholders, `contents` are digests of what they stand for, in
/// order.
KVMELD_LAZY [[nodiscard]] Digest128 lead_in_digest(std::span<const TokenId> tokens,
                                                   std::span<const Digest128> contents = {}) {
  if (tokens.empty()) return {};
  Hasher hasher;
  hasher.text("kvmeld.lead_in");
  hasher.values(tokens);
  for (const Digest128& content : contents) {
    hasher.value(content.low);
    hasher.value(content.high);
  }
  return hasher.digest();
}

/// Which of a fragment's tokens one layer holds, as ascending indices. Sliding-window layers hold
/// fewer than full ones.
struct TokenSet {
  bool all = true;
  std::vector<std::int32_t> present{};  ///< read only where `all` is false

  bool operator==(const TokenSet&) const = default;
};

namespace detail {

/// The largest magnitude in each plane of a payload, worked out once by whoever asks first: no part
/// of its content.
///
/// A copy starts without, because what is copied may be given other bytes. Any number of threads
/// may ask.
class PayloadPeaks {
 public:
  PayloadPeaks() = default;
  PayloadPeaks(const PayloadPeaks&) noexcept {}
  PayloadPeaks(PayloadPeaks&& other) noexcept : planes_(other.planes_.exchange(nullptr)) {}
  PayloadPeaks& operator=(PayloadPeaks other) noexcept {
    delete planes_.exchange(other.planes_.exchange(nullptr));
    return *this;
  }
  ~PayloadPeaks() { delete planes_.load(); }

  /// (planes); null: not known yet.
  [[nodiscard]] const std::vector<double>* get() const noexcept {
    return planes_.load(std::memory_order_acquire);
  }
  /// Notes what was measured, unless somebody was faster; returns what is known.
  const std::vector<double>& set(std::vector<double> planes) const {
    auto* const mine = new std::vector<double>(std::move(planes));
    const std::vector<double>* known = nullptr;
    if (planes_.compare_exchange_strong(known, mine)) return *mine;
    delete mine;
    return *known;
  }

 private:
  mutable std::atomic<const std::vector<double>*> planes_{nullptr};
};

}  // namespace detail

/// One encoding of a fragment's tokens: canonical bytes in the order (layer, plane, token, head,
/// channel).
///
/// Immutable once sealed. Scales of a scaled plane follow its elements, f32, in the order (token,
/// head, group).
struct Payload {
  /// What this encoding's context dropped; zero: encoded right behind the prefix.
  Digest128 lead_in{};
  std::vector<std::int64_t> positions{};     ///< source position of every token, strictly ascending
  std::vector<TokenSet> token_sets{};        ///< distinct sets; `layer_set` points into it
  std::vector<std::uint16_t> layer_set{};    ///< one entry a layer
  std::vector<std::size_t> plane_offsets{};  ///< byte offset of each (layer, plane), layer-major
  std::vector<std::size_t> scale_offsets{};  ///< byte offset of each plane's scales
  std::shared_ptr<const std::byte[]> bytes{};  ///< null: evicted
  std::size_t byte_count = 0;
  std::array<std::uint8_t, 31> digest{};  ///< of positions, token sets and bytes
  detail::PayloadPeaks peaks{};           ///< of the bytes, for plans: neither hashed nor sent

  /// Tokens that a layer holds.
  KVMELD_LAZY [[nodiscard]] std::int64_t layer_tokens(std::size_t layer) const noexcept {
    const TokenSet& set = token_sets[layer_set[layer]];
    return static_cast<std::int64_t>(set.all ? positions.size() : set.present.size());
  }
};

/// Immutable, content-named K/V of some tokens: what replicas exchange and `render` reads. A copy
/// shares the bytes.
///
/// One or two payloads: the first is the one encoded behind the lead-in and decides order; the
/// second, if there, was encoded without it and is what `render` reads for whichever span comes
/// first.
class Fragment {
 public:
  struct Body {
    std::shared_ptr<const Geometry> geometry;
    Role role = Role::span;
    FragmentId prefix;            ///< context: the prefix that stood before
    std::vector<TokenId> tokens;  ///< empty for latent fragments
    std::int64_t token_count = 0;
    std::vector<Payload> payloads;  ///< one or two
    FragmentId id;
  };

  Fragment() = default;
  explicit Fragment(std::shared_ptr<const Body> body) : body_(std::move(body)) {}

  [[nodiscard]] bool valid() const noexcept { return body_ != nullptr; }
  [[nodiscard]] const FragmentId& id() const noexcept { return body_->id; }
  [[nodiscard]] Role role() const noexcept { return body_->role; }
  [[nodiscard]] const FragmentId& prefix() const noexcept { return body_->prefix; }
  [[nodiscard]] const Geometry& geometry() const noexcept { return *body_->geometry; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return body_->geometry;
  }
  [[nodiscard]] std::int64_t token_count() const noexcept { return body_->token_count; }
  KVMELD_LAZY [[nodiscard]] std::span<const TokenId> tokens() const noexcept {
    return detail::span_of(body_->tokens);
  }
  /// Whether equal ids are equal content: it has ids, and none is a placeholder. O(tokens · log
  /// placeholders).
  KVMELD_LAZY [[nodiscard]] bool told_by_ids() const noexcept {
    return !latent() && std::none_of(body_->tokens.begin(), body_->tokens.end(), [&](TokenId id) {
      return id < 0 || geometry().is_placeholder(id);
    });
  }
  /// What token i is, where its id says so; −1 in a latent fragment and for placeholders.
  KVMELD_LAZY [[nodiscard]] TokenId token_id(std::int64_t i) const noexcept {
    if (body_->tokens.empty()) return -1;
    const TokenId id = body_->tokens[static_cast<std::size_t>(i)];
    return geometry().is_placeholder(id) ? -1 : id;
  }
  KVMELD_LAZY [[nodiscard]] bool latent() const noexcept {
    return body_->tokens.empty() && body_->token_count > 0;
  }
  KVMELD_LAZY [[nodiscard]] std::span<const Payload> payloads() const noexcept {
    return detail::span_of(body_->payloads);
  }
  [[nodiscard]] const std::shared_ptr<const Body>& body() const noexcept { return body_; }

 private:
  std::shared_ptr<const Body> body_;
};

/// Of two handles of one id, the payload bytes that either has: what was evicted here may be there.
/// O(payloads).
KVMELD_LAZY [[nodiscard]] Fragment with_all_bytes(const Fragment& a, const Fragment& b) {
  std::shared_ptr<Fragment::Body> both;
  for (std::size_t p = 0; p < a.payloads().size(); ++p) {
    if (a.payloads()[p].bytes != nullptr || b.payloads()[p].bytes == nullptr) continue;
    if (both == nullptr) both = std::make_shared<Fragment::Body>(*a.body());
    both->payloads[p] = b.payloads()[p];
  }
  return both == nullptr ? a : Fragment(std::move(both));
}

KVMELD_NAMESPACE_END
