#pragma once

/// The anchor pool: a concurrent index of anchors by signature, with eviction.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvmeld/anchors/decision.hpp>
#include <kvmeld/anchors/detail/table.hpp>
#include <kvmeld/anchors/signature.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/exec.hpp>

KVMELD_NAMESPACE_BEGIN

namespace anchors {

/// How much a pool may hold; both hold after every call.
struct AnchorCapacity {
  std::size_t anchors = 1000;
  std::size_t bytes = std::size_t{1} << 30;
};

/// What a commit did.
enum class CommitResult : std::uint8_t {
  inserted,   ///< a new anchor
  merged,     ///< an anchor that was there gained offsets
  unchanged,  ///< everything was there
};

/// A segment that may be like anchors seen before.
struct AnchorQuery {
  /// Of the engine that asks; null is a space without names, and matches no other.
  const AnchorSpace* space = nullptr;
  SignatureInput signature{};
  std::span<const float> vector{};  ///< compared with `Anchor::vector`, L2
  Digest128 context{};              ///< where the segment will stand
  ReuseRequest request{};           ///< `tokens` is the segment's length
};

/// A decision with the anchors that it names; they stay valid whatever the pool does meanwhile.
struct AnchorLookup {
  ReuseDecision decision{};  ///< `chosen` are indices into `anchors`: 0, 1, …
  std::vector<std::shared_ptr<const Anchor>> anchors{};  ///< chosen, ascending by id
  std::uint64_t version = 0;                             ///< of the pool
};

/// Segments seen before, shared by the agents of one process: looked up by signature, decided by
/// exact distance, evicted by policy.
///
/// Readers take the current version and never wait, for writers or each other; writers publish
/// whole versions one after the other, so that commits from several threads all survive. What a
/// reader holds stays valid after an eviction.
/// @tparam Signature models `SignaturePolicy`: which anchors are looked at.
/// @tparam Eviction  models `EvictionPolicy`: which anchor leaves a full pool.
template <class Signature = SimHash, class Eviction = LRU>
class AnchorPool {
 public:
  static_assert(SignaturePolicy<Signature>,
                "kvmeld: this type is no SignaturePolicy: it needs 'Result<std::uint64_t> "
                "sign(const SignatureInput&) const' and "
                "'void digest(Hasher&) const'");
  static_assert(EvictionPolicy<Eviction>,
                "kvmeld: this type is no EvictionPolicy: it needs 'std::size_t "
                "victim(std::span<const AnchorUse>) const' and "
                "'void digest(Hasher&) const'");

  /// One version of a pool.
  struct Snapshot {
    AnchorTable table;
    std::uint64_t version = 0;
  };

  AnchorPool(AnchorSpace space, AnchorCapacity capacity, Signature signature = {},
             Eviction eviction = {})
      : space_(std::move(space)),
        capacity_(capacity),
        signature_(std::move(signature)),
        eviction_(std::move(eviction)),
        published_(std::make_shared<const Snapshot>()) {}
  /// An agent's own pool: shares with the other's current version all pages that neither changes.
  /// O(n log n), no anchor copied.
  ///
  /// Commits and evictions of one are not the other's; a use counts for both where both have the
  /// anchor, on one clock. Reasons count from 0.
  AnchorPool(const AnchorPool& other)
      : space_(other.space_),
        capacity_(other.capacity_),
        signature_(other.signature_),
        eviction_(other.eviction_),
        published_(other.snapshot()),
        clock_(other.clock_) {
    const auto first = published_.get();
    for (std::size_t i = 0; i < first->table.size(); ++i) numbers_[first->table.anchor(i)->id] = i;
  }
  AnchorPool& operator=(const AnchorPool&) = delete;

  [[nodiscard]] const AnchorSpace& space() const noexcept { return space_; }
  [[nodiscard]] const AnchorCapacity& capacity() const noexcept { return capacity_; }
  /// The current version: a value that does not change. Never waits.
  [[nodiscard]] std::shared_ptr<const Snapshot> snapshot() const noexcept {
    return published_.get();
  }
  [[nodiscard]] std::size_t size() const noexcept { return snapshot()->table.size(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return snapshot()->table.bytes(); }
  [[nodiscard]] const ReasonCounters& reasons() const noexcept { return reasons_; }
  [[nodiscard]] std::uint64_t evictions() const noexcept {
    return evictions_.load(std::memory_order_relaxed);
  }

  /// Adds an anchor, or to one of the same id the offsets that it lacks; what is there already
  /// stays. Evicts what capacity asks for, never the anchor itself, and nothing where it fits.
  /// O(pages), O(n) for each eviction.
  ///
  /// Errors, the pool unchanged: `geometry_mismatch` for another space; `store_full` for an anchor
  /// above the capacity by itself; `invalid_argument`; those of the signature policy.
  [[nodiscard]] Result<CommitResult> commit(const Anchor& anchor) {
    if (!anchor.base.valid() || anchor.id.empty() || anchor.base.token_count() == 0 ||
        !is_unrotated(anchor.base)) {
      return extend::error(ErrorCode::invalid_argument,
                           "an anchor needs an id and an un-rotated base of at least 1 token; "
                           "make_anchor makes one");
    }
    if (const ReuseReason differs = compare(space_, AnchorSpace::of(anchor.base));
        differs != ReuseReason::reuse) {
      return extend::error(ErrorCode::geometry_mismatch, "anchor ", anchor.id.hex(),
                           " is of another namespace than the pool: ", to_string(differs));
    }
    Anchor checked = anchor;
    checked.offsets.clear();
    for (const ContextOffset& offset : anchor.offsets) {
      const auto added = add_offset(checked, offset);
      if (!added) return added.error();
    }
    const auto signature = signature_.sign(
        {anchor.base.tokens(), anchor.embedding.empty() ? anchor.vector : anchor.embedding});
    if (!signature) return signature.error();
    const std::lock_guard lock(writer_);
    const auto found = numbers_.find(anchor.id);
    if (found != numbers_.end()) return merge(found->second, checked);
    KVMELD_TRY(fits(checked));
    AnchorTable table = published_.get()->table;
    make_room(table, 1, checked.bytes(), none);
    auto use = std::make_shared<detail::UseCell>();
    use->inserted = tick();
    use->last_used.store(use->inserted, std::memory_order_relaxed);
    numbers_[anchor.id] = table.size();
    table.push_back(*signature,
                    {std::make_shared<const Anchor>(std::move(checked)), std::move(use)});
    publish(std::move(table));
    return CommitResult::inserted;
  }
  /// Adds a context's Δ to an anchor. Errors: `not_found` (evicted meanwhile: commit the anchor),
  /// those of `add_offset` and `commit`.
  [[nodiscard]] Result<CommitResult> commit(const FragmentId& id, const ContextOffset& offset) {
    const std::lock_guard lock(writer_);
    const auto found = numbers_.find(id);
    if (found == numbers_.end())
      return extend::error(ErrorCode::not_found, "anchor ", id.hex(), " is not in the pool");
    Anchor more = *published_.get()->table.anchor(found->second);
    const auto added = add_offset(more, offset);
    if (!added) return added.error();
    return merge(found->second, more);
  }
  /// Removes an anchor; false where there is none. Who holds it keeps it.
  bool erase(const FragmentId& id) {
    const std::lock_guard lock(writer_);
    const auto found = numbers_.find(id);
    if (found == numbers_.end()) return false;
    AnchorTable table = published_.get()->table;
    remove(table, found->second);
    publish(std::move(table));
    return true;
  }

  /// Looks for anchors like a segment and decides. The answer always has a reason; it is counted.
  /// Never waits. O(n / 16) for the scan.
  [[nodiscard]] AnchorLookup look_up(const ReuseRule& rule, const AnchorQuery& query) const {
    AnchorLookup out;
    const auto now = snapshot();
    out.version = now->version;
    std::vector<std::uint32_t> rows;
    out.decision = decide_on(*now, rule, query, rows);
    reasons_.count(out.decision.reason);
    if (!out.decision.reuses()) return out;
    const std::uint64_t at = tick();
    for (std::uint32_t& c : out.decision.chosen) {
      const AnchorTable::Row& row = now->table.row(rows[c]);
      row.use->uses.fetch_add(1, std::memory_order_relaxed);
      row.use->touch(at);
      c = static_cast<std::uint32_t>(out.anchors.size());
      out.anchors.push_back(row.anchor);
    }
    return out;
  }

  /// The anchor of exactly this content that holds an offset for the context and was never
  /// approximate, or null. Never waits.
  ///
  /// Tokens are the content where all their ids tell it; where some are placeholders, or there are
  /// none, the embedding must be the anchor's own number by number.
  [[nodiscard]] std::shared_ptr<const Anchor> find_exact(const SignatureInput& input,
                                                         const Digest128& context) const {
    const auto signature = signature_.sign(input);
    if (!signature) return nullptr;
    const auto now = snapshot();
    std::vector<HammingHit> hits;
    now->table.scan(*signature, 0, hits);
    for (const HammingHit& hit : hits) {
      const std::shared_ptr<const Anchor>& anchor = now->table.anchor(hit.index);
      if (!anchor->approximate && anchor->find(context) != nullptr && is_exactly(*anchor, input))
        return anchor;
    }
    return nullptr;
  }

  /// The anchor of this id, likewise. O(n).
  [[nodiscard]] std::shared_ptr<const Anchor> find_exact(const FragmentId& id,
                                                         const Digest128& context) const {
    const auto now = snapshot();
    for (std::size_t i = 0; i < now->table.size(); ++i) {
      const std::shared_ptr<const Anchor>& anchor = now->table.anchor(i);
      if (anchor->id == id)
        return !anchor->approximate && anchor->find(context) != nullptr ? anchor : nullptr;
    }
    return nullptr;
  }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  [[nodiscard]] static bool is_exactly(const Anchor& anchor, const SignatureInput& input) {
    if (!std::ranges::equal(anchor.base.tokens(), input.tokens)) return false;
    if (anchor.base.told_by_ids()) return true;
    const std::vector<float>& own = anchor.embedding.empty() ? anchor.vector : anchor.embedding;
    return !own.empty() && std::ranges::equal(own, input.embedding);
  }

  [[nodiscard]] std::uint64_t tick() const noexcept {
    return clock_->fetch_add(1, std::memory_order_relaxed) + 1;
  }
  [[nodiscard]] Status fits(const Anchor& anchor) const {
    if (capacity_.anchors > 0 && anchor.bytes() <= capacity_.bytes) return {};
    return extend::error(ErrorCode::store_full, "anchor of ", anchor.bytes(),
                         " bytes in a pool of ", capacity_.anchors, " anchors and ",
                         capacity_.bytes, " bytes");
  }
  [[nodiscard]] Result<CommitResult> merge(std::size_t number, const Anchor& anchor) {
    AnchorTable table = published_.get()->table;
    Anchor merged = *table.anchor(number);
    bool gained = false;
    for (const ContextOffset& offset : anchor.offsets) {
      const auto added = add_offset(merged, offset);
      if (!added) return added.error();
      gained = gained || *added;
    }
    if (gained) KVMELD_TRY(fits(merged));
    const std::uint64_t at = tick();
    if (gained) {
      const FragmentId id = merged.id;
      make_room(table, 0, merged.bytes() - table.anchor(number)->bytes(), number);
      table.replace(numbers_[id], std::make_shared<const Anchor>(std::move(merged)));
      number = numbers_[id];
    }
    table.row(number).use->touch(at);
    if (gained) publish(std::move(table));
    return gained ? CommitResult::merged : CommitResult::unchanged;
  }
  /// Evicts until `anchors` more of `bytes` together fit. Anchor `kept` stays; its number may
  /// change.
  void make_room(AnchorTable& table, std::size_t anchors, std::size_t bytes, std::size_t kept) {
    while (table.size() + anchors > capacity_.anchors || table.bytes() + bytes > capacity_.bytes) {
      std::vector<AnchorUse> uses;
      std::vector<std::size_t> numbers;
      for (std::size_t i = 0; i < table.size(); ++i) {
        if (i == kept) continue;
        uses.push_back(table.row(i).use->read());
        numbers.push_back(i);
      }
      const std::size_t victim = numbers[(std::min)(eviction_.victim(uses), numbers.size() - 1)];
      if (kept == table.size() - 1) kept = victim;  // takes the gap
      remove(table, victim);
      evictions_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  void remove(AnchorTable& table, std::size_t number) {
    numbers_[table.anchor(table.size() - 1)->id] = number;
    numbers_.erase(table.anchor(number)->id);
    table.erase(number);
  }
  void publish(AnchorTable table) {
    const std::uint64_t version = published_.get()->version + 1;
    published_.set(std::make_shared<const Snapshot>(Snapshot{std::move(table), version}));
  }
  [[nodiscard]] ReuseDecision decide_on(const Snapshot& now, const ReuseRule& rule,
                                        const AnchorQuery& query,
                                        std::vector<std::uint32_t>& rows) const {
    ReuseDecision refused;
    refused.reason = query.space == nullptr ? compare(space_, {}) : compare(space_, *query.space);
    if (refused.reuses()) refused.reason = detail::refuse_early(rule, query.request);
    if (!refused.reuses()) return refused;
    refused.reason = ReuseReason::empty_pool;
    if (now.table.size() == 0) return refused;
    const auto signature = signature_.sign(query.signature);
    refused.reason = ReuseReason::unsigned_segment;
    if (!signature) return refused;
    std::vector<HammingHit> hits;
    now.table.scan(*signature,
                   detail::exact_signature<Signature>() ? 0 : max_distance(rule.similarity), hits);
    // Of equally near signatures those of the smaller id, so that the list does not depend on how
    // the pool came about.
    const auto nearer = [&](const HammingHit& a, const HammingHit& b) {
      return a.distance != b.distance
                 ? a.distance < b.distance
                 : now.table.anchor(a.index)->id < now.table.anchor(b.index)->id;
    };
    const std::size_t most = (std::min)(hits.size(), static_cast<std::size_t>(rule.short_list));
    std::partial_sort(hits.begin(), hits.begin() + static_cast<std::ptrdiff_t>(most), hits.end(),
                      nearer);
    hits.resize(most);
    std::vector<ReuseCandidate> candidates;
    for (const HammingHit& hit : hits) {
      const Anchor& anchor = *now.table.anchor(hit.index);
      const ContextOffset* const offset = anchor.find(query.context);
      rows.push_back(hit.index);
      candidates.push_back(
          {anchor.id, l2_distance(query.vector, anchor.vector), anchor.base.token_count(),
           offset != nullptr,
           offset == nullptr || complete(offset->segment, anchor.base, query.request.tokens)});
    }
    return decide(rule, query.request, candidates);
  }
  /// Whether an offset has the first `tokens` tokens in every layer that depends on context, as far
  /// as the base has them.
  [[nodiscard]] static bool complete(const Fragment& offset, const Fragment& base,
                                     std::int64_t tokens) {
    const Payload& a = offset.payloads()[0];
    const Payload& b = base.payloads()[0];
    bool leading = true;
    for (std::size_t l = 0; l < a.layer_set.size(); ++l) {
      const TokenSet& has = a.token_sets[a.layer_set[l]];
      leading = leading && !has.all && has.present.empty();
      if (has.all || leading) continue;  // leading layers without any token are context-free
      const TokenSet& wants = b.token_sets[b.layer_set[l]];
      for (std::int64_t t = 0; t < tokens; ++t) {
        const auto token = static_cast<std::int32_t>(t);
        if ((wants.all || std::binary_search(wants.present.begin(), wants.present.end(), token)) &&
            !std::binary_search(has.present.begin(), has.present.end(), token)) {
          return false;
        }
      }
    }
    return true;
  }

  AnchorSpace space_;
  AnchorCapacity capacity_;
  Signature signature_;
  Eviction eviction_;
  detail::Published<Snapshot> published_;
  std::mutex writer_;
  std::map<FragmentId, std::size_t> numbers_;  // the writer's
  // with all forks
  const std::shared_ptr<std::atomic<std::uint64_t>> clock_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
  mutable ReasonCounters reasons_;
  std::atomic<std::uint64_t> evictions_{0};
};

/// Numbers that go together for a load; always under a budget of bytes (docs/anchors.md has the
/// memory that they cost).
struct AnchorPreset {
  AnchorCapacity capacity{};
  ReuseRule rule{};
  WindowLFU eviction{};
  /// Longest gap of tokens without counterpart over which offsets are interpolated.
  std::int32_t interpolation_window = 3;
};

namespace presets {

/// Few agents, short documents: up to 1000 anchors, τ .75, the least used of the 100 oldest goes.
[[nodiscard]] inline AnchorPreset light(std::size_t budget_bytes) {
  return {{1000, budget_bytes}, {.similarity = 0.75}, {100}, 3};
}
/// Many agents or documents: up to 5000 anchors, τ .85, the least used of the 500 oldest goes.
[[nodiscard]] inline AnchorPreset heavy(std::size_t budget_bytes) {
  return {{5000, budget_bytes}, {.similarity = 0.85}, {500}, 5};
}

}  // namespace presets

/// Bytes of K/V that one token of a geometry holds, in layer `first_layer` and above.
[[nodiscard]] inline std::int64_t kv_bytes_per_token(const Geometry& geometry,
                                                     std::size_t first_layer = 0) noexcept {
  std::int64_t bytes = 0;
  for (std::size_t l = first_layer; l < geometry.layers.size(); ++l) {
    for (const PlaneShape& shape : geometry.layers[l].planes)
      bytes += extend::row_bytes(shape) * shape.heads;
  }
  return bytes;
}

/// Bytes of K/V that anchors of `tokens` tokens hold, each with a Δ for each of `contexts`
/// contexts: bases whole, offsets without the context-free layers. Text that follows segments comes
/// on top.
[[nodiscard]] inline std::int64_t anchor_memory(const Geometry& geometry, std::int64_t anchors,
                                                std::int64_t tokens, std::int64_t contexts,
                                                std::size_t context_free_layers = 1) noexcept {
  return anchors * tokens *
         (kv_bytes_per_token(geometry) +
          contexts * kv_bytes_per_token(geometry, context_free_layers));
}

// A `ReuseRule::temperature` in the unit of the distances that a pool really has.

/// L2 distances between the vectors of the first `most` anchors, each pair once: how far apart
/// segments lie that are not each other.
///
/// Pairs whose distance is not a number (vectors of different length) are left out. O(most² ·
/// channels).
[[nodiscard]] inline std::vector<double> anchor_distances(const AnchorTable& table,
                                                          std::size_t most = 64) {
  std::vector<double> out;
  const std::size_t count = (std::min)(table.size(), most);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const double distance = l2_distance(table.anchor(i)->vector, table.anchor(j)->vector);
      if (std::isfinite(distance)) out.push_back(distance);
    }
  }
  return out;
}

/// The temperature at which the entropy rule tells like from unlike: one anchor at `like` times the
/// median of `unlike`, among `anchors` in all whose others lie at the median, has H(w) = γ log |A|
/// exactly. What stands out more is reused, what stands out less is `uncertain`.
///
/// At temperature 1, distances that differ by tenths give nearly equal weights, and γ = .3 asks for
/// new anchors for ever; distances of hundreds give all weight to one. Between them stands the
/// spread of the distances themselves: measure it on a warm pool (`anchor_distances`), or on any
/// segments that differ as those of the load do. 1, the default of the rule, where nothing was
/// measured or all distances are 0; 0 (the nearest alone) at γ = 0; and as for γ .99 above it,
/// where the rule hardly asks.
/// @param like in [0, 1): how near, in medians, an anchor must be for its offset to be worth taking
/// alone.
[[nodiscard]] inline double spread_temperature(std::span<const double> unlike, double gamma = 0.3,
                                               std::size_t anchors = 5, double like = 0.5) {
  std::vector<double> sorted;
  for (const double d : unlike) {
    if (std::isfinite(d) && d > 0) sorted.push_back(d);
  }
  if (sorted.empty() || !(like >= 0) || !(like < 1) || !(gamma >= 0)) return 1.0;
  const auto middle = sorted.begin() + std::ssize(sorted) / 2;
  std::nth_element(sorted.begin(), middle, sorted.end());
  if (gamma == 0) return 0.0;
  const auto n = static_cast<double>((std::max)(anchors, std::size_t{2}));
  const double wanted = (std::min)(gamma, 0.99) * math::log(n);
  // H falls as the others fall behind: `behind` is how far, in temperatures.
  double least = 0, most = 700;
  for (int step = 0; step < 60; ++step) {
    const double behind = (least + most) / 2;
    const double all = fma(n - 1, math::exp(-behind), 1.0), others = all - 1;
    const double h = fma(others / all, behind, math::log(all));
    (h > wanted ? least : most) = behind;
  }
  return (1 - like) * *middle / most;
}

/// What reuse and prefill take on the machine that serves, learned while it does: fills
/// `ReuseRequest::cost`.
///
/// Time what is done anyway and tell it: everything between the look-up and the engine's having the
/// K/V as `blended`, every prefill as `prefilled`. Each is kept as seconds a token, newer ones
/// weighing more (an eighth of each new one), so that a machine that gets busy is noticed. Any
/// thread.
class ReuseMeter {
 public:
  void blended(std::int64_t tokens, double seconds) noexcept { blend_.add(tokens, seconds); }
  void prefilled(std::int64_t tokens, double seconds) noexcept { prefill_.add(tokens, seconds); }

  /// Of a segment of so many tokens. Both 0, so that cost is not asked, until both were measured.
  [[nodiscard]] ReuseCost cost(std::int64_t tokens) const noexcept {
    const double blend = blend_.of(), prefill = prefill_.of();
    if (!(blend > 0) || !(prefill > 0)) return {};
    return {blend * static_cast<double>(tokens), prefill * static_cast<double>(tokens)};
  }
  /// 0: not measured.
  [[nodiscard]] double blend_seconds_per_token() const noexcept { return blend_.of(); }
  /// 0: not measured.
  [[nodiscard]] double prefill_seconds_per_token() const noexcept { return prefill_.of(); }

 private:
  class Rate {
   public:
    // What cannot be a measurement is left aside.
    void add(std::int64_t tokens, double seconds) noexcept {
      if (tokens <= 0 || !std::isfinite(seconds) || !(seconds > 0)) return;
      const double sample = seconds / static_cast<double>(tokens);
      double seen = value_.load(std::memory_order_relaxed);
      while (!value_.compare_exchange_weak(seen, seen == 0 ? sample : seen + (sample - seen) / 8,
                                           std::memory_order_relaxed)) {
      }
    }
    [[nodiscard]] double of() const noexcept { return value_.load(std::memory_order_relaxed); }

   private:
    std::atomic<double> value_{0};
  };

  Rate blend_, prefill_;
};

// One version of a pool as kernels read it.

/// Signatures and lengths of anchors by number. Trivially copyable; owns nothing: its arrays lie
/// where the code that reads them can.
struct AnchorPoolRef {
  SignatureRef signatures{};
  const std::int32_t* tokens = nullptr;  ///< (count) of each anchor's base
  std::uint64_t version = 0;

  [[nodiscard]] KVMELD_HD std::uint32_t size() const noexcept { return signatures.count; }
};
static_assert(std::is_trivially_copyable_v<AnchorPoolRef>);

/// The arrays of an `AnchorPoolRef` in host memory, three copies away from a device's: taken once a
/// version.
struct AnchorPoolArrays {
  std::vector<std::uint32_t> low{};    ///< (count)
  std::vector<std::uint32_t> high{};   ///< (count)
  std::vector<std::int32_t> tokens{};  ///< (count)
  std::uint64_t version = 0;

  /// O(n). `version` is `AnchorPool::Snapshot::version`.
  [[nodiscard]] static AnchorPoolArrays of(const AnchorTable& table, std::uint64_t version) {
    AnchorPoolArrays out;
    out.version = version;
    for (std::size_t i = 0; i < table.size(); ++i) {
      const std::uint64_t signature = table.signature(i);
      out.low.push_back(static_cast<std::uint32_t>(signature));
      out.high.push_back(static_cast<std::uint32_t>(signature >> 32U));
      constexpr std::int64_t most = (std::numeric_limits<std::int32_t>::max)();
      const std::int64_t tokens =
          table.anchor(i)->base.valid() ? table.anchor(i)->base.token_count() : 0;
      out.tokens.push_back(static_cast<std::int32_t>(tokens < most ? tokens : most));
    }
    return out;
  }
  [[nodiscard]] AnchorPoolRef ref() const noexcept {
    return {
        {low.data(), high.data(), static_cast<std::uint32_t>(low.size())}, tokens.data(), version};
  }
};

/// What `FindNearestAnchor` answers. Numbers are those of one version: look them up in the snapshot
/// that it came from.
struct NearestAnchor {
  static constexpr std::uint32_t none = 0xffffffff;
  std::uint32_t index = none;
  std::uint32_t distance = 65;  ///< bits; 65 where there is none

  bool operator==(const NearestAnchor&) const = default;
};

namespace detail {

[[nodiscard]] KVMELD_HD inline std::uint32_t differing_bits(std::uint64_t a,
                                                            std::uint64_t b) noexcept {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint32_t>(__popcll(a ^ b));
#else
  return static_cast<std::uint32_t>(std::popcount(a ^ b));
#endif
}

}  // namespace detail

/// Row work, a row for each query: the nearest of the anchors that are at least as long as the
/// segment and differ in at most `max_distance` bits; of equally near ones that of the smaller
/// number. All pointers are of the memory where it runs. O(n / 32) steps a row.
struct FindNearestAnchor {
  using State = NearestAnchor;

  AnchorPoolRef pool{};
  const std::uint64_t* signatures = nullptr;  ///< (queries)
  const std::int32_t* tokens = nullptr;       ///< (queries) of the segments
  std::int32_t max_distance = 9;
  NearestAnchor* nearest = nullptr;  ///< (queries) written

  [[nodiscard]] KVMELD_HD State partial(std::int64_t row, int lane) const noexcept {
    State best;
    for (std::uint32_t i = static_cast<std::uint32_t>(lane); i < pool.size(); i += lanes_per_row) {
      if (pool.tokens[i] < tokens[row]) continue;
      const std::uint32_t distance =
          detail::differing_bits(pool.signatures.signature(i), signatures[row]);
      if (static_cast<std::int64_t>(distance) <= max_distance) best = join(best, {i, distance});
    }
    return best;
  }
  [[nodiscard]] KVMELD_HD static State join(State a, State b) noexcept {
    if (a.distance != b.distance) return a.distance < b.distance ? a : b;
    return a.index < b.index ? a : b;
  }
  KVMELD_HD void finish(std::int64_t row, int lane, State total) const noexcept {
    if (lane == 0) nearest[row] = total;
  }
};
static_assert(RowWork<FindNearestAnchor>);

}  // namespace anchors

KVMELD_NAMESPACE_END
