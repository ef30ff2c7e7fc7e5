#pragma once

/// An agent's session: what it says is published, what others said is swapped in at safe points.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/replica/rounds.hpp>
#include <kvmeld/replica/session_memory.hpp>

KVMELD_NAMESPACE_BEGIN

namespace replica {

/// What a message is for.
enum class TrafficLayer : std::uint8_t {
  state,        ///< ids and metadata: news, requests, deltas
  payload,      ///< manifests, chunks, and requests for them
  rounds,       ///< barriers of synchronous rounds
  application,  ///< the host's own
};

/// The layer that a frame of this type belongs to (`ReplicaMessage`, `SessionMessage`).
[[nodiscard]] constexpr TrafficLayer traffic_layer(std::uint8_t type) noexcept {
  return type < 4    ? TrafficLayer::state
         : type < 32 ? TrafficLayer::payload
         : type < 40 ? TrafficLayer::rounds
                     : TrafficLayer::application;
}

/// Messages and their bytes, whole frames.
struct Traffic {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;

  bool operator==(const Traffic&) const = default;
  Traffic& operator+=(const Traffic& other) noexcept {
    messages += other.messages;
    bytes += other.bytes;
    return *this;
  }
  void add(std::size_t frame_bytes) noexcept {
    ++messages;
    bytes += frame_bytes;
  }
};

/// What taking part costs an agent, so far. Sums over types are what crossed the transport, each
/// way.
///
/// A message to everyone counts once, as the transport's `send` is called once.
struct Accounting {
  std::array<Traffic, 256> sent{};  ///< by frame type; what the transport refused is not in it
  /// By frame type; frames that were refused count under type 0.
  std::array<Traffic, 256> received{};
  /// Messages that the transport did not take; they are repeated by protocol.
  std::uint64_t send_failures = 0;
  StoredBytes stored{};  ///< what sealing wrote to the store, and what was there already
  std::uint64_t fragments_sealed = 0;
  /// Sealed, and in this agent's view only, since nobody takes them.
  std::uint64_t fragments_refused = 0;
  std::uint64_t application_dropped = 0;  ///< frames of the host's own that were not taken in time
  std::uint64_t fragments_fetched = 0;    ///< from peers
  std::uint64_t fragments_loaded = 0;     ///< from the store
  StoreDamage store_damage{};             ///< what the store found spoilt of its records
  ReplicaRefusals refused{};              ///< what this agent's replica did not take
  /// Raw K/V of sealed fragments, by layer of the model.
  std::vector<std::uint64_t> sealed_bytes{};
  std::uint64_t rounds_swapped = 0;
  std::uint64_t rounds_kept = 0;  ///< rounds that ended with the old cache
  double wait_ms = 0;             ///< between the begin and the end of rounds
  std::uint64_t renders = 0;
  double render_ms = 0;  ///< on the worker
  std::uint64_t swaps = 0;
  double swap_ms = 0;    ///< on the generating thread: pointer or import, and what was carried
  double import_ms = 0;  ///< part of `swap_ms` that an engine took to import
  /// Said since a snapshot, rotated to their new positions at the swap.
  std::uint64_t carried_tokens = 0;
  std::uint64_t refreshes = 0;            ///< rounds of refresh that ended, whatever came of them
  std::uint64_t refreshed_fragments = 0;  ///< read again, and other than they were
  std::uint64_t refreshed_tokens = 0;     ///< of all that were read again
  double refresh_ms = 0;                  ///< on the thread of the refresh

  [[nodiscard]] Traffic total_sent() const noexcept { return sum(sent, {}); }
  [[nodiscard]] Traffic total_received() const noexcept { return sum(received, {}); }
  [[nodiscard]] Traffic sent_of(TrafficLayer layer) const noexcept { return sum(sent, layer); }
  [[nodiscard]] Traffic received_of(TrafficLayer layer) const noexcept {
    return sum(received, layer);
  }

 private:
  [[nodiscard]] static Traffic sum(const std::array<Traffic, 256>& all,
                                   std::optional<TrafficLayer> layer) noexcept {
    Traffic total;
    for (std::size_t type = 0; type < all.size(); ++type) {
      if (!layer || traffic_layer(static_cast<std::uint8_t>(type)) == *layer) total += all[type];
    }
    return total;
  }
};

/// Adds a fragment's raw bytes, all payloads, to a count by layer of the model.
inline void add_layer_bytes(std::vector<std::uint64_t>& by_layer, const Fragment& fragment) {
  const Geometry& geometry = fragment.geometry();
  if (by_layer.size() < geometry.layers.size()) by_layer.resize(geometry.layers.size());
  for (const Payload& payload : fragment.payloads()) {
    for (std::size_t l = 0; l < geometry.layers.size(); ++l) {
      for (const PlaneShape& shape : geometry.layers[l].planes) {
        const auto rows = static_cast<std::uint64_t>(payload.layer_tokens(l) * shape.heads);
        by_layer[l] +=
            rows * (static_cast<std::uint64_t>(extend::row_bytes(shape)) +
                    sizeof(float) * static_cast<std::uint64_t>(extend::row_scales(shape)));
      }
    }
  }
}

/// Types of the frames that sessions exchange beside those of replicas; those from `application` on
/// are the host's own.
enum class SessionMessage : std::uint8_t { round_ready = 32, round_cut = 33, application = 64 };

/// Who an agent is in a session, how it cuts its words into fragments, and when it takes over what
/// the others said.
struct AgentSessionOptions {
  ReplicaOptions replica;  ///< the session's own merger takes the place of `merger`
  SpanOptions spans{};
  SpanStart start{};      ///< of the first span: prefix, lead-in, position
  RoundOptions rounds{};  ///< without members: no synchronous rounds
  Target target{};        ///< what is rendered into; without layers: the agent's own geometry
  std::optional<float> confidence{};  ///< of everything that this agent says
  bool background = true;       ///< renders whenever the set has changed; false: only in rounds
  bool content_digest = false;  ///< of each render, as members compare it
  /// Of words that nobody takes (`quota_exceeded`, say), kept in this agent's view; oldest go
  /// first.
  std::int64_t max_refused_tokens = 256;
  /// Of frames that wait for `take_application`; oldest go first.
  std::size_t max_application_bytes = std::size_t{64} << 20U;
};

/// Reads a fragment of a set again behind the others of it (kvmeld/refresh.hpp):
/// `llama::Refresher`, or what another engine does. Called from a thread of the session's.
using RefreshFunction = std::function<Result<Fragment>(const FragmentSet&, const FragmentId&)>;

/// What a round of refresh may cost.
struct RefreshOptions {
  /// Of this agent's, read again at most; fragments are taken in the order of their places, whole.
  /// 0: all.
  std::int64_t max_tokens = 0;
};

/// A swap at a safe point.
struct SwapReport {
  RenderReport render{};
  InstallReport install{};
  double render_ms = 0;     ///< on the worker, some time ago
  double swap_ms = 0;       ///< what the generating thread spent
  std::uint64_t round = 0;  ///< the synchronous round whose cut this is; 0: asynchronous
  /// Fragments that are known and were left out, since their bytes had not arrived.
  std::size_t missing = 0;
};

/// How a synchronous round ended.
struct RoundReport {
  std::uint64_t round = 0;
  bool swapped = false;
  Status status{};  ///< why not
  /// Why words before the barrier are not in it: an error of the store, or of `Replica::insert`.
  Status said{};
  std::optional<SwapReport> swap{};
};

/// One agent in a session: says what its engine computes, hears what others said, and generates
/// from a cache of all of it.
///
/// Two threads at most, which may be one. The *generating* thread calls `append`, `append_variant`,
/// `end_span`, `try_swap` and `next_position`: none of them does I/O or waits for a render. The
/// *network* thread calls everything else; `poll` does the I/O. `current` and `accounting` may be
/// called by any. What is sealed is queued for `poll`, which writes it to the store and tells the
/// others. A swap ends the span at hand, since what follows is encoded in another context; what
/// this agent said since the snapshot is rotated to its new place behind what is swapped in, so no
/// word is lost from its view.
///
/// @tparam Memory where the cache lies (`SwapMemory`).
template <SwapMemory Memory = HostMemory>
class AgentSession {
 public:
  using Options = AgentSessionOptions;
  using Buffer = typename Memory::Backing::Buffer;

  /// @param merger a `Merger`, what caches are rendered by; @param exec the executor of the worker
  /// that renders them. Store and transport outlive the session.
  template <class M, ExecutionPolicy E = exec::Sequential>
  AgentSession(M merger, ArbiterStore& store, Transport& transport,
               const std::shared_ptr<const Geometry>& geometry, AgentSessionOptions options,
               Memory memory = Memory(), E exec = E{})
      : options_(complete(std::move(options), merger.digest(), *geometry)),
        store_(&store),
        transport_(&transport),
        memory_(std::move(memory)),
        span_(geometry, options_.spans, options_.start, options_.replica.format.hash),
        replica_(store, options_.replica),
        clock_((std::max)(options_.rounds.timeout_ms, options_.replica.max_retry_ms)),
        worker_(std::make_unique<RenderWorker<M, typename Memory::Backing, E>>(
            std::move(merger), memory_.backing(), std::move(exec),
            typename RenderWorker<M, typename Memory::Backing, E>::Options{
                options_.content_digest})) {
    if (!options_.rounds.members.empty()) round_.emplace(options_.replica.self, options_.rounds);
  }
  AgentSession(const AgentSession&) = delete;
  AgentSession& operator=(const AgentSession&) = delete;
  /// Waits for the fragment that a refresh has in hand.
  ~AgentSession() {
    stop_refresh_.store(true, std::memory_order_relaxed);
    if (refresher_.joinable()) refresher_.join();
  }

  // --- the generating thread

  /// Takes the K/V of new tokens, as `SpanBuffer::append`; seals full spans. Errors: those, and
  /// `output_too_small` where kvmeld's own buffer is full; nothing was taken then.
  Status append(const KvCacheRef& rows, std::span<const TokenId> tokens = {},
                std::span<const std::int64_t> positions = {}) {
    if (rows.valid()) KVMELD_TRY(memory_.check_room(rows.tokens()));
    KVMELD_TRY(span_.append(rows, tokens, positions));
    KVMELD_TRY(memory_.append(rows, tokens));
    return seal_full();
  }
  /// As `SpanBuffer::append_variant`; seals full spans.
  Status append_variant(const KvCacheRef& rows, std::span<const std::int64_t> positions = {}) {
    KVMELD_TRY(span_.append_variant(rows, positions));
    return seal_full();
  }
  /// Seals what is pending, at a rotation's end or by hand. None where nothing is. Errors: those of
  /// `SpanBuffer::seal`.
  Result<std::optional<FragmentId>> end_span() {
    if (span_.pending() == 0) return std::optional<FragmentId>();
    auto fragment = span_.seal();
    if (!fragment) return fragment.error();
    hand_over(*fragment);
    return std::optional(fragment->id());
  }
  /// Begins a span in another context, as `SpanBuffer::begin`; pending tokens are sealed first.
  Status begin_span(const SpanStart& start) {
    KVMELD_TRY(end_span().status());
    span_.begin(start);
    return {};
  }
  /// A safe point: takes the newest rendered cache over, if there is one. The position that follows
  /// is `next_position()`.
  ///
  /// Errors: the render's, or the memory's; the old cache stays. Never waits for a render or for
  /// the network.
  Result<std::optional<SwapReport>> try_swap();
  /// Where the next token goes.
  [[nodiscard]] std::int64_t next_position() const noexcept { return span_.next_position(); }
  /// What is live in kvmeld's own memory; any thread.
  [[nodiscard]] auto current() const requires requires(const Memory& m) { m.current(); }
  { return memory_.current(); }
  [[nodiscard]] Memory& memory() noexcept { return memory_; }

  // --- the network thread

  /// Reads what the store has of an earlier life. Errors: the store's; call again.
  Status open() { return replica_.open(); }
  /// Puts a fragment that was sealed elsewhere, the prefix say, into the set. Errors: those of
  /// `Replica::insert`.
  Result<Dot> insert(const Fragment& fragment) {
    return replica_.insert(fragment, options_.confidence);
  }
  /// Does everything that waits: stores and tells what was sealed, hears the others, asks for what
  /// is missing, moves rounds on, and asks the worker for a cache of what is new. Waits at most
  /// `wait_ms` for a first message.
  ///
  /// Errors: the first of the store's and the transport's; the rest is done regardless, and nothing
  /// that was acknowledged is lost. Words that the store cannot take now are tried again. Words
  /// that nobody would take are told to nobody; the error says so once, and they stay in this
  /// agent's own view as long as there is room (`AgentSessionOptions::max_refused_tokens`).
  ///
  /// @param now_ms of any clock: one that is set back or ahead moves no deadline.
  Status poll(std::int64_t now_ms, std::int64_t wait_ms = 0);
  /// Comes to the barrier of the next synchronous round; `poll` and `try_swap` then bring it to its
  /// end. Errors: those of `Round::begin`; `unsupported` without members; those of storing what was
  /// said before, and the round goes on without it then.
  Status begin_round(std::int64_t now_ms);
  /// Whether a round is going on.
  [[nodiscard]] bool in_round() const noexcept {
    return round_ && (round_->state() == RoundState::waiting || round_->state() == RoundState::cut);
  }
  /// Null without members.
  [[nodiscard]] const Round* round() const noexcept { return round_ ? &*round_ : nullptr; }
  /// A whole round for agents of one thread: waits at the barrier until it ends, by a cut that was
  /// swapped in or by its timeout.
  ///
  /// @param now_ms gives milliseconds. Errors: those of `begin_round` where no round began; how it
  /// ended is in the report.
  template <class Clock>
  Result<RoundReport> synchronize(const Clock& now_ms) {
    const std::uint64_t before = round_ ? round_->number() : 0;
    RoundReport report;
    report.said = begin_round(now_ms());
    if (!round_ || round_->number() == before) return report.said;
    report.round = round_->number();
    while (in_round()) {
      (void)poll(now_ms(), 1);  // a store or transport that is away costs the round at most
      auto swap = try_swap();
      if (swap && *swap && (*swap)->round == report.round) report.swap = *std::move(swap);
    }
    report.swapped = round_->state() == RoundState::swapped;
    report.status = round_->status();
    return report;
  }

  /// Begins a round of refresh: this agent's fragments, as far as the options let them, are read
  /// again behind what is here now, on a thread of its own. `poll` then stores what came of it,
  /// and has it take the place of what was read; an error of `read` comes out of `poll` once, and
  /// the fragments that it concerns stay as they are.
  ///
  /// Does not wait. Errors: `unavailable` while the last round goes on.
  Status refresh(RefreshFunction read, RefreshOptions options = {});
  /// Whether a round of refresh goes on, or `poll` has not stored yet what came of it. Of the
  /// network thread.
  [[nodiscard]] bool refreshing() const {
    const std::lock_guard lock(mutex_);
    return refreshing_ || !refreshed_.empty();
  }

  /// The set and its messages. Of the network thread.
  [[nodiscard]] Replica& replica() noexcept { return replica_; }
  [[nodiscard]] const FragmentSet& set() const noexcept { return replica_.set(); }
  /// Frames of types from `SessionMessage::application` on that came in, oldest first; each once.
  /// At most `AgentSessionOptions::max_application_bytes` wait; `Accounting::application_dropped`
  /// counts what was not taken in time.
  [[nodiscard]] std::vector<std::pair<MemberId, Outgoing>> take_application() {
    application_bytes_ = 0;
    auto taken = std::exchange(application_, {});
    return {std::make_move_iterator(taken.begin()), std::make_move_iterator(taken.end())};
  }
  /// Any thread.
  [[nodiscard]] Accounting accounting() const {
    const std::lock_guard lock(mutex_);
    return counted_;
  }

 private:
  /// A fragment of this agent's. Known for good: a cut that somebody else publishes may lack it at
  /// any time.
  struct Said {
    FragmentId id;
    Fragment fragment;  // not valid() while the live cache has it, and every one that was asked for
    bool stored = false;
    bool refused = false;  // by everybody, for good
  };

  [[nodiscard]] static Options complete(Options options, const Digest128& merger,
                                        const Geometry& geometry) {
    options.replica.merger = merger;
    options.rounds.set_hash = options.replica.format.hash;
    if (options.target.geometry.layers.empty()) options.target.geometry = geometry;
    return options;
  }
  Status seal_full() {
    while (span_.full()) {
      auto fragment = span_.seal_full();
      if (!fragment) return fragment.error();
      hand_over(*fragment);
    }
    return {};
  }
  void hand_over(const Fragment& fragment) {
    const std::lock_guard lock(mutex_);
    said_.push_back({fragment.id(), fragment});
    to_insert_.push_back(fragment);
  }
  Status insert_said();
  Status insert_refreshed();
  void run_refresh(const FragmentSet& set, const std::vector<FragmentId>& own,
                   const RefreshFunction& read);
  void refuse(const FragmentId& id);
  void keep_application(MemberId from, std::uint8_t type, std::span<const std::byte> body);
  [[nodiscard]] bool replaced(const FragmentId& id, const FragmentSet& part) const;
  Status hear(std::int64_t wait_ms, std::int64_t now_ms);
  Status step_round(std::int64_t now_ms);
  void end_round();
  Status publish(std::int64_t now_ms);
  Status pursue_cut(std::int64_t now_ms);
  void render_behind();
  std::uint64_t request(FragmentSet set, std::size_t missing, bool for_round);
  Status flush();
  /// Changes whenever bytes of a known fragment arrive.
  [[nodiscard]] std::uint64_t arrivals() const noexcept {
    return replica_.counters().fragments_fetched + replica_.counters().fragments_loaded;
  }

  Options options_;
  ArbiterStore* store_;
  Transport* transport_;

  // Of the generating thread.
  Memory memory_;
  SpanBuffer span_;
  std::optional<RenderOutcome<Buffer>> ready_;  // taken, and not installed yet

  // Of the network thread.
  Replica replica_;
  std::optional<Round> round_;
  Elapsed clock_;
  std::int64_t next_cut_want_ms_ = 0;  // by `clock_`
  bool cut_wanted_ = false;
  bool round_open_ = false;
  // set and arrivals that were rendered last
  std::optional<std::pair<Digest256, std::uint64_t>> asked_for_{};
  std::deque<std::pair<MemberId, Outgoing>> application_;
  std::size_t application_bytes_ = 0;

  // Handed between them.
  mutable std::mutex mutex_;
  std::vector<Said> said_;
  std::vector<Fragment> to_insert_;
  /// A fragment that was read again, and which it was.
  struct Refreshed {
    FragmentId before;
    Fragment fragment;
  };
  std::vector<Refreshed> refreshed_;
  Status refresh_status_;  // of the round that ended last, until `poll` has told it
  bool refreshing_ = false;
  struct Asked {
    std::uint64_t request = 0;
    std::uint64_t round = 0;
    std::size_t missing = 0;
    // of what this agent said; ascending. What was removed or replaced counts as had
    std::vector<FragmentId> has{};

    [[nodiscard]] bool had(const FragmentId& id) const noexcept {
      return std::binary_search(has.begin(), has.end(), id);
    }
  };
  std::vector<Asked> asked_;         // requests that no newer one was swapped in for
  std::uint64_t round_request_ = 0;  // of the round that goes on
  std::uint64_t installing_ = 0;
  // the last request that was installed, or could not be
  std::optional<std::pair<std::uint64_t, Status>> ended_;
  Accounting counted_;

  std::atomic<bool> stop_refresh_{false};
  std::thread refresher_;  // of the network thread

  // last: it stops before anything that it uses goes
  std::unique_ptr<detail::CacheWorker<Buffer>> worker_;
};

// What an agent's session does on the network: store, tell, hear, rounds, and what the worker is
// asked for.

namespace detail {

/// Where a publisher writes a cut down before it tells anybody.
[[nodiscard]] inline BlobKey cut_key(std::uint64_t session, std::uint64_t round) {
  return extend::named_key(0x3F, "kvmeld.round.cut", session, round);
}
/// Whether trying again later may succeed.
[[nodiscard]] inline bool passing(ErrorCode code) noexcept {
  return code == ErrorCode::unavailable || code == ErrorCode::timed_out ||
         code == ErrorCode::store_full;
}

}  // namespace detail

template <SwapMemory Memory>
Status AgentSession<Memory>::poll(std::int64_t now_ms, std::int64_t wait_ms) {
  Status first;
  const auto note = [&](Status status) {
    if (first && !status) first = std::move(status);
  };
  now_ms = clock_.advance(now_ms);  // from here on time only goes forward
  note(insert_said());
  note(insert_refreshed());
  note(flush());  // before waiting: others may wait for it
  note(hear(wait_ms, now_ms));
  note(replica_.tick(now_ms));
  if (round_) note(step_round(now_ms));
  if (options_.background && !in_round()) render_behind();
  note(flush());
  const std::lock_guard lock(mutex_);
  counted_.stored = replica_.counters().stored;
  counted_.fragments_fetched = replica_.counters().fragments_fetched;
  counted_.fragments_loaded = replica_.counters().fragments_loaded;
  counted_.store_damage = replica_.counters().store_damage;
  counted_.refused = replica_.counters();
  return first;
}

/// Stores what was sealed, in order. What the store cannot take now waits, with all behind it; what
/// nobody would take is refused for good.
template <SwapMemory Memory>
Status AgentSession<Memory>::insert_said() {
  std::vector<Fragment> fragments;
  {
    const std::lock_guard lock(mutex_);
    fragments.swap(to_insert_);
  }
  Status first;
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    const auto dot = replica_.insert(fragments[i], options_.confidence);
    const std::lock_guard lock(mutex_);
    if (!dot) {
      if (first) first = dot.error();
      if (!detail::passing(dot.error().code())) {
        refuse(fragments[i].id());
        continue;
      }
      to_insert_.insert(to_insert_.begin(), fragments.begin() + static_cast<std::ptrdiff_t>(i),
                        fragments.end());
      break;
    }
    for (Said& said : said_) said.stored = said.stored || said.id == fragments[i].id();
    ++counted_.fragments_sealed;
    add_layer_bytes(counted_.sealed_bytes, fragments[i]);
  }
  return first;
}

template <SwapMemory Memory>
Status AgentSession<Memory>::refresh(RefreshFunction read, RefreshOptions options) {
  if (refreshing())
    return extend::error(ErrorCode::unavailable, "agent ", options_.replica.self,
                         ": the last refresh is not over yet");
  if (refresher_.joinable()) refresher_.join();
  std::vector<InForce> own;
  for (const InForce& entry : in_force(set(), Presence::complete)) {
    const Fragment& fragment = entry.entry->fragment;
    if (entry.place.agent != options_.replica.self || entry.entry->metadata.marks.empty() ||
        fragment.role() != Role::span || fragment.latent() || fragment.token_count() == 0)
      continue;
    own.push_back(entry);
  }
  std::sort(own.begin(), own.end(),
            [](const InForce& a, const InForce& b) { return a.place < b.place; });
  std::vector<FragmentId> ids;
  std::int64_t tokens = 0;
  for (const InForce& entry : own) {
    tokens += entry.entry->fragment.token_count();
    if (options.max_tokens > 0 && tokens > options.max_tokens) break;
    ids.push_back(entry.entry->id);
  }
  {
    const std::lock_guard lock(mutex_);
    refreshing_ = true;
  }
  auto work = [this, snapshot = set(), ids = std::move(ids), read = std::move(read)] {
    run_refresh(snapshot, ids, read);
  };
#if defined(__cpp_exceptions)
  try {
    refresher_ = std::thread(work);
  } catch (const std::system_error&) {
    work();  // in this thread, then
  }
#else
  refresher_ = std::thread(std::move(work));
#endif
  return {};
}

/// On the thread of the refresh.
template <SwapMemory Memory>
void AgentSession<Memory>::run_refresh(const FragmentSet& set, const std::vector<FragmentId>& own,
                                       const RefreshFunction& read) {
  const double begin = steady_ms();
  Status first;
  for (const FragmentId& id : own) {
    if (stop_refresh_.load(std::memory_order_relaxed)) break;
    auto made = read(set, id);
    const std::lock_guard lock(mutex_);
    if (!made) {
      if (first) first = made.error();
      continue;
    }
    counted_.refreshed_tokens += static_cast<std::uint64_t>(made->token_count());
    if (made->id() != id) refreshed_.push_back({id, *std::move(made)});
  }
  const std::lock_guard lock(mutex_);
  ++counted_.refreshes;
  counted_.refresh_ms += steady_ms() - begin;
  refresh_status_ = std::move(first);
  refreshing_ = false;
}

/// Stores what was read again, and has it stand where the fragment stood. What the store cannot
/// take now waits.
template <SwapMemory Memory>
Status AgentSession<Memory>::insert_refreshed() {
  std::vector<Refreshed> all;
  Status first;
  {
    const std::lock_guard lock(mutex_);
    all.swap(refreshed_);
    first = std::exchange(refresh_status_, Status());
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto& [before, fragment] = all[i];
    if (set().find(before) == nullptr) continue;  // removed meanwhile
    Status status;
    if (const FragmentSet::Entry* const entry = set().find(fragment.id());
        entry == nullptr || !entry->complete())
      status = replica_.insert(fragment, options_.confidence).status();
    if (status) status = replica_.supersede(before, fragment.id()).status();
    const std::lock_guard lock(mutex_);
    if (!status) {
      if (first) first = status;
      if (!detail::passing(status.code())) continue;  // nobody would take it: the older one stays
      refreshed_.insert(refreshed_.begin(), all.begin() + static_cast<std::ptrdiff_t>(i),
                        all.end());
      break;
    }
    ++counted_.refreshed_fragments;
    add_layer_bytes(counted_.sealed_bytes, fragment);
  }
  return first;
}

/// Keeps words that nobody takes in this agent's view only, the newest of them. The lock is held.
template <SwapMemory Memory>
void AgentSession<Memory>::refuse(const FragmentId& id) {
  ++counted_.fragments_refused;
  std::int64_t tokens = 0;
  for (std::size_t i = said_.size(); i-- > 0;) {
    said_[i].refused = said_[i].refused || (said_[i].id == id && !said_[i].stored);
    if (!said_[i].refused || !said_[i].fragment.valid()) continue;
    tokens += said_[i].fragment.token_count();
    if (tokens > options_.max_refused_tokens)
      said_.erase(said_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

template <SwapMemory Memory>
void AgentSession<Memory>::keep_application(MemberId from, std::uint8_t type,
                                            std::span<const std::byte> body) {
  constexpr std::size_t each = 64;  // an empty frame takes room, too
  application_.emplace_back(from,
                            Outgoing{options_.replica.self, type, {body.begin(), body.end()}});
  application_bytes_ += body.size() + each;
  while (application_bytes_ > options_.max_application_bytes) {
    application_bytes_ -= application_.front().second.bytes.size() + each;
    application_.pop_front();
    const std::lock_guard lock(mutex_);
    ++counted_.application_dropped;
  }
}

template <SwapMemory Memory>
Status AgentSession<Memory>::hear(std::int64_t wait_ms, std::int64_t now_ms) {
  constexpr int most = 256;  // a poll ends, however much the others say
  for (int i = 0; i < most; ++i) {
    auto envelope = transport_->receive(i == 0 ? wait_ms : 0);
    if (!envelope) return envelope.error();
    if (!*envelope) return {};
    const auto& [from, bytes] = **envelope;
    // What does not hold is counted by the replica and otherwise ignored: a bad peer costs itself.
    const auto frame = replica_.receive(from, bytes);
    const std::uint8_t type =
        bytes.size() > 6 && frame ? static_cast<std::uint8_t>(bytes[6]) : std::uint8_t{0};
    {
      const std::lock_guard lock(mutex_);
      counted_.received[type].add(bytes.size());
    }
    if (!frame || !*frame) continue;
    if (type >= static_cast<std::uint8_t>(SessionMessage::application)) {
      keep_application(from, type, (*frame)->body);
    } else if (round_ && (type == static_cast<std::uint8_t>(SessionMessage::round_ready) ||
                          type == static_cast<std::uint8_t>(SessionMessage::round_cut))) {
      const auto kind = type == static_cast<std::uint8_t>(SessionMessage::round_cut)
                            ? RoundMessage::cut
                            : RoundMessage::ready;
      const bool was_in_round = in_round();
      (void)round_->receive(from, kind, (*frame)->body, now_ms);
      if (was_in_round && !in_round()) end_round();
    }
  }
  return {};
}

template <SwapMemory Memory>
Status AgentSession<Memory>::begin_round(std::int64_t now_ms) {
  if (!round_)
    return extend::error(ErrorCode::unsupported, "agent ", options_.replica.self,
                         " has no members to synchronize with: set RoundOptions::members");
  now_ms = clock_.advance(now_ms);
  Status stored = insert_said();  // what was said before the barrier belongs to the round
  KVMELD_TRY(round_->begin(now_ms, options_.replica.merger, set().context()));
  next_cut_want_ms_ = now_ms;
  cut_wanted_ = false;
  round_open_ = true;
  if (round_->publisher(round_->number()) == options_.replica.self) {
    for (const InForce& read : in_force(set())) {
      // evicted here, and others may hold it
      if (!read.entry->complete()) (void)replica_.fetch(read.entry->id);
    }
  }
  if (!in_round()) end_round();
  return stored;
}

template <SwapMemory Memory>
Status AgentSession<Memory>::step_round(std::int64_t now_ms) {
  if (in_round()) {
    const std::lock_guard lock(mutex_);
    if (round_request_ != 0 && ended_ && ended_->first == round_request_)
      round_->finish(ended_->second);
    // an import that has begun is not called back
    if (round_request_ == 0 || installing_ != round_request_) round_->tick(now_ms);
    // nor does one begin once the round has ended, and the lock is let go
    if (!in_round()) round_request_ = 0;
  }
  Status status;
  if (in_round()) status = publish(now_ms);
  if (in_round() && status) status = pursue_cut(now_ms);
  if (!in_round()) end_round();
  for (Round::Outgoing& out : round_->take_messages()) {
    const auto type =
        out.kind == RoundMessage::cut ? SessionMessage::round_cut : SessionMessage::round_ready;
    if (Status posted = replica_.post(out.to, static_cast<std::uint8_t>(type), out.body);
        !posted && status)
      status = posted;
  }
  return status;
}

template <SwapMemory Memory>
void AgentSession<Memory>::end_round() {
  if (!std::exchange(round_open_, false)) return;
  const bool swapped = round_->state() == RoundState::swapped;
  // The round's request may have taken the place of another; what it did not render is asked for
  // again.
  asked_for_.reset();
  if (swapped && round_->cut()->set.digest() == set().digest())
    asked_for_.emplace(set().digest(), arrivals());
  const std::lock_guard lock(mutex_);
  round_request_ = 0;
  (swapped ? counted_.rounds_swapped : counted_.rounds_kept) += 1;
  counted_.wait_ms += static_cast<double>(round_->age_ms());
}

/// Writes this member's cut down and tells it, when it is due. A cut that an earlier life wrote
/// down is the round's cut.
template <SwapMemory Memory>
Status AgentSession<Memory>::publish(std::int64_t now_ms) {
  if (!round_->wants_cut(now_ms, set().context(), replica_.wanted() == 0)) return {};
  const std::uint64_t number = round_->number();
  auto cut = make_cut(set(), options_.replica.merger.digest(), options_.rounds.session, number,
                      options_.replica.self);
  if (!cut) return cut.error();
  if (cut->set.empty()) return {};  // nothing to merge: members keep what they have
  const std::vector<std::byte> bytes = encode(*cut);
  if (bytes.size() + 1024 > transport_->max_message_bytes()) {
    return extend::error(ErrorCode::oversized, "a cut of ", cut->set.size(), " fragments takes ",
                         bytes.size(), " bytes, a message at most ",
                         transport_->max_message_bytes());
  }
  const BlobKey key = detail::cut_key(options_.rounds.session, number);
  const auto fresh = store_->put_if_absent(key, bytes);
  if (!fresh) return fresh.error();
  if (!*fresh) {
    const auto written = store_->get(key);
    if (!written) return written.error();
    cut = decode_cut(written->bytes(), options_.replica.format.hash);
    if (!cut) return cut.error();
  }
  if (const std::size_t n = options_.rounds.members.size(); number > n)
    (void)store_->erase(detail::cut_key(options_.rounds.session, number - n));
  return round_->publish(*cut);
}

/// Asks for what the cut names and is not here; then has exactly the cut rendered.
template <SwapMemory Memory>
Status AgentSession<Memory>::pursue_cut(std::int64_t now_ms) {
  if (round_->state() != RoundState::cut || round_request_ != 0) return {};
  const RoundCut& cut = *round_->cut();
  const auto missing = missing_of(cut, set());
  if (missing.empty()) {
    auto part = restrict_to(cut, set());
    if (part) {
      (void)request(*std::move(part), 0, true);
    } else {
      round_->finish(part.error());
    }
    return {};
  }
  if (now_ms < next_cut_want_ms_) return {};
  const bool first = !std::exchange(cut_wanted_, true);
  next_cut_want_ms_ = now_ms + options_.rounds.retry_ms;
  bool unknown = false;
  for (const FragmentId& id : missing) unknown = !replica_.fetch(id).ok() || unknown;
  if (!unknown) return {};
  return replica_.ask_for_delta(first ? cut.publisher : everyone);
}

/// Whether something in `part`, or something else that this agent said, stands where this fragment
/// of the set stood, after however many steps. The lock is held.
template <SwapMemory Memory>
bool AgentSession<Memory>::replaced(const FragmentId& id, const FragmentSet& part) const {
  std::vector<FragmentId> met{id};
  for (std::size_t i = 0; i < met.size(); ++i) {
    if (i > 0 && (part.find(met[i]) != nullptr ||
                  std::ranges::any_of(said_, [&](const Said& said) { return said.id == met[i]; })))
      return true;
    const FragmentSet::Entry* const entry = set().find(met[i]);
    if (entry == nullptr) continue;
    for (const Mark& mark : entry->metadata.marks) {
      if (!mark.superseded_by.empty() &&
          std::find(met.begin(), met.end(), mark.superseded_by) == met.end())
        met.push_back(mark.superseded_by);
    }
  }
  return false;
}

/// Asks the worker for a cache of everything that is here, where that has changed.
template <SwapMemory Memory>
void AgentSession<Memory>::render_behind() {
  const std::pair now(set().digest(), arrivals());
  // nothing was ever said: the agent keeps what it has
  if (asked_for_ == now || (!asked_for_ && set().empty())) return;
  asked_for_ = now;
  std::size_t missing = 0;
  for (const InForce& read : in_force(set())) missing += read.entry->complete() ? 0U : 1U;
  if (missing == 0) {
    (void)request(set(), 0, false);
  } else if (auto part = renderable(set())) {
    (void)request(*std::move(part), missing, false);
  }
}

template <SwapMemory Memory>
std::uint64_t AgentSession<Memory>::request(FragmentSet part, std::size_t missing, bool for_round) {
  const std::lock_guard lock(mutex_);  // the outcome waits until it is known what it has
  // removed by somebody
  std::erase_if(said_,
                [&](const Said& said) { return said.stored && set().find(said.id) == nullptr; });
  Asked asked{0, for_round ? round_->number() : 0, missing};
  for (Said& said : said_) {
    if (part.find(said.id) != nullptr || (said.stored && replaced(said.id, part))) {
      asked.has.push_back(said.id);
    } else if (const FragmentSet::Entry* const entry = set().find(said.id);
               !said.fragment.valid() && entry != nullptr && entry->complete()) {
      said.fragment = entry->fragment;  // to be carried, though it was swapped in before
    }
  }
  std::sort(asked.has.begin(), asked.has.end());
  const std::uint64_t number = worker_->request(std::move(part), options_.target);
  asked.request = number;
  asked_.push_back(std::move(asked));
  if (for_round) round_request_ = number;  // under the same lock: the outcome may be there already
  return number;
}

template <SwapMemory Memory>
Status AgentSession<Memory>::flush() {
  Status first;
  for (const Outgoing& out : replica_.take_outbox()) {
    Status status = transport_->send(out.to, out.bytes);
    const std::lock_guard lock(mutex_);
    if (status) {
      counted_.sent[out.type].add(out.bytes.size());
    } else {
      ++counted_.send_failures;
      if (first) first = std::move(status);
    }
  }
  return first;
}

// What an agent's session does at a safe point.

namespace detail {

/// The lead-in of what is said behind a merged cache: what was rendered, and what was carried
/// behind it.
[[nodiscard]] inline Digest128 swapped_lead_in(const Digest128& render_id,
                                               std::span<const Fragment> carried) {
  Hasher hasher;
  hasher.text("kvmeld.lead_in.swapped");
  hasher.value(render_id.low);
  hasher.value(render_id.high);
  for (const Fragment& fragment : carried)
    hasher.bytes(std::as_bytes(std::span(fragment.id().bytes)));
  return hasher.digest();
}

}  // namespace detail

template <SwapMemory Memory>
Result<std::optional<SwapReport>> AgentSession<Memory>::try_swap() {
  if (auto newer = worker_->take()) ready_ = std::move(newer);
  if (!ready_) return std::optional<SwapReport>();
  const double begin = steady_ms();
  const std::uint64_t request = ready_->request;
  const auto end = [&](Status status) {
    const std::lock_guard lock(mutex_);
    installing_ = 0;
    ended_.emplace(request, status);
    std::erase_if(asked_, [&](const Asked& a) { return a.request <= request; });
    ready_.reset();
    return status;
  };
  if (!ready_->status) return end(ready_->status);
  KVMELD_TRY(end_span().status());  // a variant that is not whole yet: the next safe point will do
  std::vector<Fragment> carried, kept;  // with and without what nobody takes
  Asked asked;
  {
    const std::lock_guard lock(mutex_);
    const auto at = std::find_if(asked_.begin(), asked_.end(),
                                 [&](const Asked& a) { return a.request == request; });
    // of a round that ended with the old cache
    if (at == asked_.end() || (at->round != 0 && request != round_request_)) {
      ready_.reset();
      return std::optional<SwapReport>();
    }
    asked = *at;
    installing_ = request;
    for (const Said& said : said_) {
      if (!said.fragment.valid() || asked.had(said.id)) continue;
      carried.push_back(said.fragment);
      if (!said.refused) kept.push_back(said.fragment);
    }
  }
  bool forget_refused = false;
  SwapReport report;
  report.render = ready_->rendered->report;
  report.render_ms = ready_->rendered->render_ms;
  report.round = asked.round;
  report.missing = asked.missing;
  const auto install = [&] {
    return memory_.install(std::shared_ptr(ready_->rendered), carried,
                           options_.target.first_position);
  };
  auto installed = install();
  // what nobody takes does not keep out what others said
  if (!installed && kept.size() < carried.size()) {
    carried = std::move(kept);
    installed = install();
    forget_refused = installed.ok();
  }
  if (!installed) return end(installed.error());
  report.install = *installed;
  SpanStart next;
  next.context.prefix = options_.start.context.prefix;
  next.context.lead_in = detail::swapped_lead_in(report.render.render_id, carried);
  next.first_position = installed->next_position;
  next.variant_position = options_.start.variant_position;
  span_.begin(next);
  report.swap_ms = steady_ms() - begin;
  (void)end({});
  const std::lock_guard lock(mutex_);
  std::erase_if(said_, [&](const Said& said) { return forget_refused && said.refused; });
  for (Said& said : said_) {  // the set has them; what is asked for and lacks them carries them yet
    const auto has = [&](const Asked& a) { return a.had(said.id); };
    if (has(asked) && std::all_of(asked_.begin(), asked_.end(), has)) said.fragment = {};
  }
  ++counted_.swaps;
  counted_.swap_ms += report.swap_ms;
  counted_.import_ms += report.install.import_ms;
  counted_.carried_tokens += static_cast<std::uint64_t>(report.install.carried_tokens);
  ++counted_.renders;
  counted_.render_ms += report.render_ms;
  return std::optional(std::move(report));
}

}  // namespace replica

KVMELD_NAMESPACE_END
