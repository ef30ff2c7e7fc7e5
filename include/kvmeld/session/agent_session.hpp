#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/session/accounting.hpp>
#include <kvmeld/session/replica.hpp>
#include <kvmeld/session/round.hpp>
#include <kvmeld/session/span_buffer.hpp>
#include <kvmeld/session/swap_memory.hpp>

KVMELD_NAMESPACE_BEGIN

/// Types of the frames that sessions exchange beside those of replicas; those from `application` on
/// are the host's own.
enum class SessionMessage : std::uint8_t { round_ready = 32, round_cut = 33, application = 64 };

/// Who an agent is in a session, how it cuts its words into fragments, and when it takes over what
/// the others said.
template <Authenticator Auth = NoAuth, ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
struct AgentSessionOptions {
  ReplicaOptions<Auth, Hash, C> replica;  ///< the session's own merger takes the place of `merger`
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
/// this agent said since the snapshot is turned to its new place behind what is swapped in, so no
/// word is lost from its view.
///
/// @tparam M a `Merger`; @tparam S an `ArbiterStore`; @tparam T a `Transport`;
/// @tparam Memory where the cache lies (`SwapMemory`);
/// @tparam E the executor of the rendering worker. Store and transport outlive the session.
template <class M, BlobStore S, Transport T, SwapMemory Memory = HostMemory,
          ExecutionPolicy E = exec::Sequential, Authenticator Auth = NoAuth,
          ContentHash Hash = Xxh3_128, Compressor C = NoCompression>
class AgentSession {
  static_assert(ArbiterStore<S>, "a round has one cut: the store needs put_if_absent");

 public:
  using Options = AgentSessionOptions<Auth, Hash, C>;
  using Buffer = typename Memory::Backing::Buffer;

  AgentSession(M merger, S& store, T& transport, const std::shared_ptr<const Geometry>& geometry,
               AgentSessionOptions<Auth, Hash, C> options, Memory memory = Memory(), E exec = E{})
      : options_(complete(std::move(options), merger, *geometry)),
        store_(&store),
        transport_(&transport),
        memory_(std::move(memory)),
        span_(geometry, options_.spans, options_.start),
        replica_(store, options_.replica),
        clock_((std::max)(options_.rounds.timeout_ms, options_.replica.max_retry_ms)),
        worker_(std::move(merger), memory_.backing(), std::move(exec),
                RunOptions{options_.content_digest}) {
    if (!options_.rounds.members.empty()) round_.emplace(options_.replica.self, options_.rounds);
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
  /// Seals what is pending, at a turn's end or by hand. None where nothing is. Errors: those of
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
  Result<Provenance> insert(const Fragment& fragment) {
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

  /// The set and its messages. Of the network thread.
  [[nodiscard]] Replica<S, Auth, Hash, C>& replica() noexcept { return replica_; }
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

  [[nodiscard]] static Options complete(Options options, const M& merger,
                                        const Geometry& geometry) {
    options.replica.merger = merger.digest();
    options.rounds.set_hash = options.replica.set_hash;
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
  S* store_;
  T* transport_;

  // Of the generating thread.
  Memory memory_;
  SpanBuffer<Hash> span_;
  std::optional<RenderOutcome<Buffer>> ready_;  // taken, and not installed yet

  // Of the network thread.
  Replica<S, Auth, Hash, C> replica_;
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

  // last: it stops before anything that it uses goes
  RenderWorker<M, typename Memory::Backing, E> worker_;
};

template <class M, class S, class T, class Auth, class Hash, class C>
AgentSession(M, S&, T&, const std::shared_ptr<const Geometry>&, AgentSessionOptions<Auth, Hash, C>)
    -> AgentSession<M, S, T, HostMemory, exec::Sequential, Auth, Hash, C>;
template <class M, class S, class T, class Auth, class Hash, class C, class Memory>
AgentSession(M, S&, T&, const std::shared_ptr<const Geometry>&, AgentSessionOptions<Auth, Hash, C>,
             Memory) -> AgentSession<M, S, T, Memory, exec::Sequential, Auth, Hash, C>;
template <class M, class S, class T, class Auth, class Hash, class C, class Memory, class E>
AgentSession(M, S&, T&, const std::shared_ptr<const Geometry>&, AgentSessionOptions<Auth, Hash, C>,
             Memory, E) -> AgentSession<M, S, T, Memory, E, Auth, Hash, C>;

KVMELD_NAMESPACE_END

#include <kvmeld/session/agent_session_poll.hpp>
#include <kvmeld/session/agent_session_swap.hpp>
