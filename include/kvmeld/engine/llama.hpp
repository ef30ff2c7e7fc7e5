#pragma once

/// llama.cpp contexts as engines: export, import, probe, and sessions.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <llama.h>

#include <kvmeld/cache_view.hpp>
#include <kvmeld/check_view.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/engine/detail/llama_geometry.hpp>
#include <kvmeld/engine/detail/llama_state.hpp>
#include <kvmeld/refresh.hpp>
#include <kvmeld/render.hpp>
#include <kvmeld/replica/session_memory.hpp>

KVMELD_NAMESPACE_BEGIN

// llama.cpp as an engine: read a sequence as a cache view, write a rendered one, let the engine
// compute what a merge left open.
//
// Needs llama.h and the engine's library (CMake component kvmeld::llama). A context that is to be
// merged into is made with `kv_unified = true` (sequences share cells, so moving one costs no
// copy), `n_seq_max` of at least 2 (one sequence is spare), and best with flash attention on
// (otherwise V lies transposed, which is read and written, only slower). None of these calls may
// run while another thread uses the same context.

namespace llama {

/// One sequence of a context as it was when it was read: its own copy of the bytes and a view over
/// them. Move-only.
class SequenceState {
 public:
  SequenceState() = default;
  SequenceState(std::unique_ptr<const std::byte[]> storage, StateView<const std::byte> state)
      : storage_(std::move(storage)), state_(std::move(state)) {}

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return {storage_.get(), state_.layout.size_bytes};
  }
  [[nodiscard]] const KvCacheRef& view() const noexcept { return state_.cache; }
  [[nodiscard]] KvCacheRef kv_cache_ref() const { return state_.cache; }
  /// Position of every token of the view, ascending.
  [[nodiscard]] std::span<const std::int64_t> positions() const noexcept {
    return state_.positions;
  }
  [[nodiscard]] const StateLayout& layout() const noexcept { return state_.layout; }
  /// What `make_state` needs to lay out bytes for the same engine.
  [[nodiscard]] const StateForm& form() const noexcept { return state_.layout.form; }

 private:
  std::unique_ptr<const std::byte[]> storage_;
  StateView<const std::byte> state_;
};

namespace detail {

[[nodiscard]] inline Status check_sequence(const llama_context* context, llama_seq_id sequence) {
  const std::uint32_t count = llama_n_seq_max(context);
  if (sequence >= 0 && static_cast<std::uint32_t>(sequence) < count) return {};
  return extend::error(ErrorCode::invalid_argument, "llama: sequence ", sequence,
                       " of a context of ", count, " sequences");
}

[[nodiscard]] inline Status check_spare(llama_context* context, llama_seq_id sequence,
                                        llama_seq_id spare) {
  KVMELD_TRY(check_sequence(context, sequence));
  KVMELD_TRY(check_sequence(context, spare));
  if (sequence == spare)
    return extend::error(ErrorCode::invalid_argument, "llama: sequence ", spare,
                         " cannot be its own spare; set n_seq_max to 2 or more");
  if (const llama_pos last = llama_memory_seq_pos_max(llama_get_memory(context), spare); last >= 0)
    return extend::error(ErrorCode::invalid_argument, "llama: the spare sequence ", spare,
                         " holds tokens up to position ", last, "; clear it, or name an empty one");
  return {};
}

/// Empties a sequence on every way out.
class ClearGuard {
 public:
  ClearGuard(llama_context* context, llama_seq_id sequence) noexcept
      : memory_(llama_get_memory(context)), sequence_(sequence) {}
  ClearGuard(const ClearGuard&) = delete;
  ClearGuard& operator=(const ClearGuard&) = delete;
  ~ClearGuard() { clear(); }
  void clear() noexcept { (void)llama_memory_seq_rm(memory_, sequence_, -1, -1); }

 private:
  llama_memory_t memory_;
  llama_seq_id sequence_;
};

}  // namespace detail

/// Copies a sequence out of the engine and views it: one export by the engine, no further copy.
///
/// After `llama_memory_seq_add` the engine moves positions at once but keys only in its next
/// decode: decode before reading. Errors: `invalid_argument` (no such sequence), `engine_failure`
/// (the export came out short), those of `parse_state`.
[[nodiscard]] inline Result<SequenceState> read(llama_context* context, llama_seq_id sequence,
                                                std::shared_ptr<const Geometry> geometry) {
  using extend::error;
  if (Status status = detail::check_sequence(context, sequence); !status) return status;
  const std::size_t size = llama_state_seq_get_size(context, sequence);
  std::unique_ptr<std::byte[]> storage(new std::byte[size]);  // not cleared: the engine fills it
  const std::size_t written = llama_state_seq_get_data(
      context, reinterpret_cast<std::uint8_t*>(storage.get()), size, sequence);
  if (written == 0 || written != size)
    return extend::error(ErrorCode::engine_failure, "llama: the export of sequence ", sequence,
                         " wrote ", written, " of ", size, " bytes");
  Result<StateView<const std::byte>> view =
      view_state(std::span<const std::byte>(storage.get(), size), std::move(geometry));
  if (!view) return view.error();
  return SequenceState(std::move(storage), *std::move(view));
}

/// How much of an import is checked before it becomes the target.
enum class Verify : std::uint8_t {
  positions,  ///< first and last position and the size of an export: no byte is copied
  bytes,      ///< and every byte of K and V, through an export: about what the import itself costs
};

namespace detail {

/// Imports a state into an empty sequence and checks that it is there. The caller clears the
/// sequence on an error.
[[nodiscard]] inline Status import_state(llama_context* context, llama_seq_id sequence,
                                         const StateBlob& blob, Verify verify) {
  const StateLayout& layout = blob.layout();
  if (layout.form.streams != 1)
    return extend::error(ErrorCode::unsupported, "llama: the context keeps ", layout.form.streams,
                         " separate streams; create it with kv_unified = true");
  const llama_memory_t memory = llama_get_memory(context);
  const std::span<const std::byte> bytes = blob.bytes();
  const std::size_t used = llama_state_seq_set_data(
      context, reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size(), sequence);
  if (used != bytes.size())
    return extend::error(
        ErrorCode::engine_failure, "llama: the import of ", blob.positions().size(),
        " tokens used ", used, " of ", bytes.size(),
        " bytes; room for them beside the old ones, and equal K/V types, are needed");
  // A model with sliding windows answers for its windowed layers, whose first position is the later
  // one.
  if (const std::vector<std::int64_t>& positions = layout.sections.back().positions;
      !positions.empty()) {
    const llama_pos first = llama_memory_seq_pos_min(memory, sequence);
    const llama_pos last = llama_memory_seq_pos_max(memory, sequence);
    if (first != positions.front() || last != positions.back())
      return extend::error(ErrorCode::probe_failed, "llama: positions ", positions.front(), " to ",
                           positions.back(), " were written, ", first, " to ", last, " are there");
  }
  if (const std::size_t size = llama_state_seq_get_size(context, sequence); size != bytes.size())
    return extend::error(ErrorCode::probe_failed, "llama: ", bytes.size(), " bytes were written, ",
                         size, " would be exported");
  if (verify == Verify::positions) return {};
  const std::shared_ptr<const Geometry> geometry = blob.kv_cache_ref().shared_geometry();
  const Result<SequenceState> back = read(context, sequence, geometry);
  if (!back) return back.error();
  return same_state(bytes, layout, back->bytes(), back->layout(), *geometry);
}

}  // namespace detail

/// Replaces the target sequence by a rendered state.
///
/// The bytes are imported into the spare sequence, checked, and only then moved (the cells are
/// shared, so that costs no copy). On any error the target is as it was and the spare is empty.
/// Both sequences' cells exist for a moment: the context needs room for the old and the new tokens.
/// Errors: `invalid_argument` (sequences; a spare that is not empty), `unsupported` (a context
/// without `kv_unified`), `engine_failure` (the engine refused the bytes; its log says why),
/// `probe_failed` (it does not hold what was written).
[[nodiscard]] inline Status write(llama_context* context, llama_seq_id target, llama_seq_id spare,
                                  const StateBlob& blob, Verify verify = Verify::positions) {
  KVMELD_TRY(detail::check_spare(context, target, spare));
  const detail::ClearGuard guard(context, spare);
  KVMELD_TRY(detail::import_state(context, spare, blob, verify));
  const llama_memory_t memory = llama_get_memory(context);
  (void)llama_memory_seq_rm(memory, target, -1, -1);
  llama_memory_seq_cp(memory, spare, target, -1, -1);
  return {};
}

/// Adds a rendered state behind what the target holds: for spans rendered with
/// `Target::prefix_in_place`.
///
/// As `write`, but the target's tokens stay, and the state must go on where they end. Errors: those
/// of `write`; `position_gap` or `duplicate_position` where its first position is not the target's
/// last one plus 1.
[[nodiscard]] inline Status append(llama_context* context, llama_seq_id target, llama_seq_id spare,
                                   const StateBlob& blob, Verify verify = Verify::positions) {
  using extend::error;
  KVMELD_TRY(detail::check_spare(context, target, spare));
  if (blob.positions().empty()) return {};
  const llama_memory_t memory = llama_get_memory(context);
  const std::int64_t last = llama_memory_seq_pos_max(memory, target);
  if (const std::int64_t first = blob.positions().front(); first != last + 1)
    return extend::error(first <= last ? ErrorCode::duplicate_position : ErrorCode::position_gap,
                         "llama: a state from position ", first,
                         " on cannot follow a sequence that ends at ", last);
  const detail::ClearGuard guard(context, spare);
  KVMELD_TRY(detail::import_state(context, spare, blob, verify));
  llama_memory_seq_cp(memory, spare, target, -1, -1);
  return {};
}

/// What `recompute` did.
struct RecomputeReport {
  std::int64_t tokens = 0;  ///< tokens that the engine decoded
  std::int64_t runs = 0;    ///< stretches of consecutive holes
};

namespace detail {

/// Decodes tokens at consecutive positions of one sequence, without logits.
[[nodiscard]] inline Status decode(llama_context* context, llama_seq_id sequence,
                                   std::span<const llama_token> tokens, llama_pos first) {
  const std::size_t most = llama_n_batch(context);
  // llama_batch points to mutable tokens
  std::vector<llama_token> ids(tokens.begin(), tokens.end());
  std::vector<llama_pos> positions(tokens.size());
  std::vector<std::int32_t> counts(tokens.size(), 1);
  std::vector<llama_seq_id*> sequences(tokens.size(), &sequence);
  std::vector<std::int8_t> outputs(tokens.size(), 0);
  for (std::size_t i = 0; i < tokens.size(); ++i) positions[i] = first + static_cast<llama_pos>(i);
  for (std::size_t begin = 0; begin < tokens.size(); begin += most) {
    const std::size_t count = tokens.size() - begin < most ? tokens.size() - begin : most;
    llama_batch batch{};
    batch.n_tokens = static_cast<std::int32_t>(count);
    batch.token = ids.data() + begin;
    batch.pos = positions.data() + begin;
    batch.n_seq_id = counts.data() + begin;
    batch.seq_id = sequences.data() + begin;
    batch.logits = outputs.data() + begin;
    if (const std::int32_t code = llama_decode(context, batch); code != 0)
      return extend::error(ErrorCode::engine_failure, "llama: decoding ", count,
                           " tokens at position ", positions[begin], " returned ", code,
                           code == 1 ? " (no free cells)" : "");
  }
  llama_synchronize(context);
  return {};
}

}  // namespace detail

/// Lets the engine compute the tokens that a render left open, in place.
///
/// A hole in the middle cannot be decoded in its own sequence, because the engine wants positions
/// to go on from the last one. So each stretch of consecutive holes is decoded in the spare
/// sequence behind a copy of what precedes it (shared cells, no bytes moved), and its cells replace
/// those in `sequence`; what follows stays as it is. Stretches are done in ascending order, so
/// later ones see earlier ones recomputed. `Hole` has an integral `position` and a `token`;
/// positions ascend. On an error the stretches done so far stay, the others are as they were, and
/// the spare is empty. Errors: `invalid_argument` (sequences, order, a token outside the
/// vocabulary), `position_gap` (the tokens before a hole are not all there), `unsupported` (a
/// sliding window shorter than the sequence: the engine no longer holds what the holes would see),
/// `engine_failure`. Decoding dominates; moving is O(context cells) a stretch.
template <class Hole>
[[nodiscard]] Result<RecomputeReport> recompute(llama_context* context, llama_seq_id sequence,
                                                llama_seq_id spare, std::span<const Hole> holes) {
  using extend::error;
  if (Status status = detail::check_spare(context, sequence, spare); !status) return status;
  RecomputeReport report;
  if (holes.empty()) return report;
  const llama_memory_t memory = llama_get_memory(context);
  const llama_model* const model = llama_get_model(context);
  const std::int32_t vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (std::size_t i = 0; i < holes.size(); ++i) {
    if (holes[i].position < 0 || holes[i].position > 0x7ffffffe ||
        (i > 0 && holes[i].position <= holes[i - 1].position))
      return extend::error(ErrorCode::invalid_argument, "llama: position ", holes[i].position,
                           " of hole ", i, " is out of order or range");
    if (holes[i].token < 0 || holes[i].token >= vocabulary)
      return extend::error(ErrorCode::invalid_argument, "llama: token ", holes[i].token,
                           " of hole ", i, " is not among ", vocabulary);
  }
  const std::int64_t last = llama_memory_seq_pos_max(memory, sequence);
  if (const std::int32_t window = llama_model_n_swa(model); window > 0 && last >= window)
    return extend::error(
        ErrorCode::unsupported, "llama: a sequence up to position ", last,
        " exceeds the sliding window of ", window,
        " tokens; holes in its middle cannot be recomputed, prefill from the first one on");
  const llama_pos first_kept = llama_memory_seq_pos_min(memory, sequence);

  std::vector<llama_token> tokens;
  for (std::size_t begin = 0; begin < holes.size();) {
    std::size_t end = begin + 1;
    while (end < holes.size() && holes[end].position == holes[end - 1].position + 1) ++end;
    tokens.clear();
    for (std::size_t i = begin; i < end; ++i)
      tokens.push_back(static_cast<llama_token>(holes[i].token));
    const auto from = static_cast<llama_pos>(holes[begin].position);
    const auto to = static_cast<llama_pos>(holes[end - 1].position + 1);

    const detail::ClearGuard guard(context, spare);
    llama_memory_seq_cp(memory, sequence, spare, 0, from);
    const llama_pos before = llama_memory_seq_pos_max(memory, spare);
    if (before != from - 1 && !(before < 0 && (first_kept < 0 || from <= first_kept)))
      return extend::error(ErrorCode::position_gap, "llama: the hole at position ", from,
                           " follows position ", before, "; the tokens between them are missing");
    if (Status status = detail::decode(context, spare, tokens, from); !status) return status;
    (void)llama_memory_seq_rm(memory, sequence, from, to);
    llama_memory_seq_cp(memory, spare, sequence, from, to);
    report.tokens += static_cast<std::int64_t>(tokens.size());
    ++report.runs;
    begin = end;
  }
  return report;
}

}  // namespace llama

// llama.cpp under an `AgentSession`: the worker makes the bytes of a sequence, the generating
// thread imports them at a safe point.

namespace llama {

/// Makes sequence states for a worker to render into. Models `CacheBacking`.
struct StateBacking {
  using Buffer = StateBlob;
  StateForm form{};

  [[nodiscard]] Result<std::unique_ptr<StateBlob>> make(
      const std::shared_ptr<const Geometry>& geometry, std::span<const std::int64_t> positions,
      std::span<const TokenId> tokens, std::unique_ptr<StateBlob> recycled) const {
    auto state = make_state(geometry, form, positions, tokens,
                            recycled != nullptr ? std::move(*recycled) : StateBlob());
    if (!state) return state.error();
    return std::make_unique<StateBlob>(*std::move(state));
  }
};

/// The sequences of a context that a session uses, and how an import is bounded and checked.
struct MemoryOptions {
  llama_seq_id live = 0;     ///< what the agent generates in
  llama_seq_id staging = 1;  ///< empty; takes an import until all of it is there
  llama_seq_id scratch = 2;  ///< empty between calls
  /// Of the live sequence, from 0 on: the prefix, where `Target::prefix_in_place` renders spans
  /// alone.
  std::int64_t kept_positions = 0;
  Verify verify = Verify::positions;
  std::int64_t max_import_bytes = 0;  ///< larger states are refused at the safe point; 0: any
  bool recompute_holes = true;        ///< decode what a render left open before going on
};

/// The rows of a sequence from a position on, for `AgentSession::append`: only those cells are
/// exported.
///
/// `scratch` is empty, and is empty again afterwards. Errors: those of `read`, `invalid_argument`.
[[nodiscard]] inline Result<SequenceState> read_since(llama_context* context, llama_seq_id sequence,
                                                      llama_seq_id scratch, std::int64_t position,
                                                      std::shared_ptr<const Geometry> geometry) {
  if (Status status = detail::check_spare(context, sequence, scratch); !status) return status;
  if (position < 0 || position > 0x7fffffff)
    return extend::error(ErrorCode::invalid_argument, "llama: position ", position,
                         " does not fit the engine");
  const detail::ClearGuard guard(context, scratch);
  llama_memory_seq_cp(llama_get_memory(context), sequence, scratch,
                      static_cast<llama_pos>(position), -1);
  return read(context, scratch, std::move(geometry));
}

/// An agent's cache in a llama.cpp context. Models `SwapMemory`; belongs to the thread that
/// decodes.
///
/// The context was made with `kv_unified`, has three sequences at least, and room for the old and
/// the new tokens together. An import is staged: only when its bytes are there, its holes computed
/// and the agent's own words behind it, it becomes the live sequence, by moving cells. On an error
/// the live sequence is as it was. `form` comes from an export of this context that held a token.
class EngineMemory {
 public:
  using Backing = StateBacking;

  EngineMemory(llama_context* context, StateForm form, MemoryOptions options = {})
      : context_(context), form_(std::move(form)), options_(options) {}

  [[nodiscard]] StateBacking backing() const { return {form_}; }
  [[nodiscard]] Status check_room(std::int64_t) const { return {}; }
  // the engine wrote them
  Status append(const KvCacheRef&, std::span<const TokenId>) { return {}; }

  /// Errors: `oversized` above `max_import_bytes`; those of `write`, `recompute`, `append`,
  /// `make_state` and `plan`.
  [[nodiscard]] Result<replica::InstallReport> install(
      std::shared_ptr<replica::Rendered<StateBlob>> next, std::span<const Fragment> carried,
      std::int64_t first_position) {
    const auto bytes = static_cast<std::int64_t>(next->buffer->bytes().size());
    if (options_.max_import_bytes > 0 && bytes > options_.max_import_bytes) {
      return extend::error(ErrorCode::oversized, "llama: an import of ", bytes, " bytes, at most ",
                           options_.max_import_bytes, " are taken at a safe point");
    }
    if (Status status = detail::check_spare(context_, options_.live, options_.staging); !status)
      return status;
    const detail::ClearGuard guard(context_, options_.staging);
    replica::InstallReport report;
    report.import_bytes = bytes;
    const double begin = replica::steady_ms();
    const llama_memory_t memory = llama_get_memory(context_);
    if (options_.kept_positions > 0) {
      llama_memory_seq_cp(memory, options_.live, options_.staging, 0,
                          static_cast<llama_pos>(options_.kept_positions));
      if (Status status = llama::append(context_, options_.staging, options_.scratch, *next->buffer,
                                        options_.verify);
          !status)
        return status;
    } else if (carried.empty() &&
               (next->holes.empty() ||
                !options_.recompute_holes)) {  // nothing to come behind it: one move less
      if (Status status =
              write(context_, options_.live, options_.staging, *next->buffer, options_.verify);
          !status)
        return status;
      report.next_position = next->next_position(first_position);
      report.import_ms = replica::steady_ms() - begin;
      return report;
    } else if (!next->positions.empty()) {
      if (Status status =
              write(context_, options_.staging, options_.scratch, *next->buffer, options_.verify);
          !status)
        return status;
    }
    const double imported = replica::steady_ms();
    if (options_.recompute_holes && !next->holes.empty()) {
      const auto done = recompute(context_, options_.staging, options_.scratch,
                                  std::span<const Hole>(next->holes));
      if (!done) return done.error();
      report.recomputed_tokens = done->tokens;
      report.recompute_ms = replica::steady_ms() - imported;
    }
    report.next_position = next->next_position((std::max)(first_position, options_.kept_positions));
    for (const Fragment& fragment : carried) {
      if (Status status = carry(fragment, report); !status) return status;
    }
    (void)llama_memory_seq_rm(memory, options_.live, -1, -1);
    llama_memory_seq_cp(memory, options_.staging, options_.live, -1, -1);
    report.import_ms = replica::steady_ms() - begin - report.recompute_ms;
    return report;
  }

 private:
  /// Puts a span behind what is staged, rotated to its new positions.
  [[nodiscard]] Status carry(const Fragment& fragment, replica::InstallReport& report) {
    const auto made = kvmeld::replica::plan_behind(fragment, report.next_position);
    if (!made) return made.error();
    if (made->tokens() == 0) return {};
    auto blob = make_state(made->shared_geometry(), form_, made->positions(), made->token_ids(),
                           std::exchange(recycled_, {}));
    if (!blob) return blob.error();
    std::vector<std::byte> workspace(made->workspace_bytes());
    if (const auto done = run(exec::seq, *made, workspace, blob->mutable_ref()); !done)
      return done.error();
    Status status =
        report.next_position == 0
            ? write(context_, options_.staging, options_.scratch, *blob, options_.verify)
            : llama::append(context_, options_.staging, options_.scratch, *blob, options_.verify);
    report.carried_tokens += made->tokens();
    report.next_position += made->tokens();
    report.import_bytes += static_cast<std::int64_t>(blob->bytes().size());
    recycled_ = *std::move(blob);
    return status;
  }

  llama_context* context_;
  StateForm form_;
  MemoryOptions options_;
  StateBlob recycled_;
};

}  // namespace llama

// A fragment read again behind the merged caches of the others.

namespace llama {

/// The sequences of a context that a refresh uses: both empty before and after.
struct RefreshSequences {
  llama_seq_id working = 0;
  llama_seq_id scratch = 1;
};

/// Reads fragments again behind a merge of the others, in a context of its own, so that another
/// thread may go on generating (`AgentSession::refresh` calls it from its own thread).
///
/// The context was made with `kv_unified` and has room for the whole merge. `form` comes from an
/// export of this context that held a token. One refresh renders and imports the others' caches and
/// decodes the fragment's own tokens, and nothing else but the merger's holes.
/// @tparam M a `Merger`, the one that the agents render with.
template <class M>
class Refresher {
 public:
  /// @param target what is rendered into: a model's geometry and the first position.
  Refresher(llama_context* context, StateForm form, M merger, Target target,
            RefreshSequences sequences = {})
      : context_(context),
        form_(std::move(form)),
        merger_(std::move(merger)),
        target_(std::move(target)),
        sequences_(sequences) {}

  /// The fragment `own` of a set, encoded behind all others of it (`refresh::set_behind`); `only`:
  /// behind these of them. Errors: those of `refresh::set_behind`, `plan`, `write`, `recompute`,
  /// `read` and `refresh::seal`; `engine_failure`.
  [[nodiscard]] Result<Fragment> operator()(const FragmentSet& set, const FragmentId& own,
                                            std::span<const FragmentId> only = {}) {
    if (Status status = detail::check_spare(context_, sequences_.working, sequences_.scratch);
        !status)
      return status;
    const auto behind = refresh::set_behind(set, own, only);
    if (!behind) return behind.error();
    const auto made = plan(*behind, merger_, target_);
    if (!made) return made.error();
    const Fragment& fragment = set.find(own)->fragment;
    if (fragment.latent())
      return extend::error(ErrorCode::tokens_required, "llama: fragment ", own.hex(),
                           " has no token ids to read again");
    const detail::ClearGuard guard(context_, sequences_.working);
    if (Status status = load(*made); !status) return status;
    const std::int64_t position =
        made->positions().empty() ? target_.first_position : made->positions().back() + 1;
    if (Status status = detail::decode(context_, sequences_.working, fragment.tokens(),
                                       static_cast<llama_pos>(position));
        !status)
      return status;
    decoded_ += fragment.token_count();
    const auto state = read_since(context_, sequences_.working, sequences_.scratch, position,
                                  fragment.shared_geometry());
    if (!state) return state.error();
    return refresh::seal(fragment, state->view(), state->positions(),
                         refresh::context_digest(*made), set.hash());
  }

  /// Tokens that were decoded so far, holes of the merger included.
  [[nodiscard]] std::int64_t decoded() const noexcept { return decoded_; }

 private:
  /// Puts what a plan renders into the working sequence.
  [[nodiscard]] Status load(const Plan<M>& made) {
    if (made.tokens() == 0) return {};
    auto blob = make_state(made.shared_geometry(), form_, made.positions(), made.token_ids(),
                           std::exchange(recycled_, {}));
    if (!blob) return blob.error();
    workspace_.resize((std::max)(workspace_.size(), made.workspace_bytes()));
    if (const auto done = run(exec::seq, made, workspace_, blob->mutable_ref()); !done)
      return done.error();
    Status status = write(context_, sequences_.working, sequences_.scratch, *blob);
    recycled_ = *std::move(blob);
    if (!status || made.holes().empty()) return status;
    const auto holes = recompute(context_, sequences_.working, sequences_.scratch, made.holes());
    if (!holes) return holes.error();
    decoded_ += holes->tokens;
    return {};
  }

  llama_context* context_;
  StateForm form_;
  M merger_;
  Target target_;
  RefreshSequences sequences_;
  StateBlob recycled_;
  std::vector<std::byte> workspace_;
  std::int64_t decoded_ = 0;
};

}  // namespace llama

// Whether a live llama.cpp context keeps what is written into it, and rotates its keys as the
// declared geometry says.

namespace llama {

/// What a probe encodes, how far it moves it, and what it lets pass.
struct ProbeOptions {
  /// What to encode; empty: 48 tokens spread over the vocabulary.
  std::span<const TokenId> tokens{};
  std::int64_t shift = 96;  ///< positions by which keys are moved; at least 64
  /// Relative L2 error of rotated keys; 0: by storage, .001 f32, .002 f16, .01 bf16, .02 q8_0.
  double tolerance = 0.0;
  /// The same for layers above the first, whose inputs carry the engine's own noise; decides only
  /// where the engine cannot shift.
  double deep_tolerance = 0.2;
};

/// What a probe saw. Errors are L2 norms relative to the engine's keys.
struct ProbeReport {
  StateForm form{};  ///< how this engine lays out a sequence: what `make_state` needs
  std::int64_t tokens = 0;
  std::int64_t shift = 0;
  double first_layer_error =
      /// Keys of layer 0, rotated by us, against the engine's own for the same tokens further on.
      0.0;
  /// The same for the layer above that is furthest off (another rope, or noise).
  double deep_error = 0.0;
  bool engine_can_shift =
      /// Whether the engine has a shift for such keys (none for bf16); if not, the next two are 0
      /// and 1.
      false;
  double engine_shift_error =
      /// Keys rotated by us against the engine's own shift, worst layer, at the best common scale.
      0.0;
  double engine_shift_scale =
      /// That scale, of the layer furthest from 1: 1.139 for YaRN of factor 4, which ours never
      /// applies.
      1.0;
  /// Largest relative change of a key's norm by our shift, before it is stored.
  double norm_change = 0.0;
};

namespace detail {

/// Copies every row of one view into another of the same geometry and tokens.
inline void copy_rows(const KvCacheRef& from, const MutableKvCacheRef& to) {
  std::vector<std::byte> row;
  for (std::size_t p = 0; p < from.planes().size(); ++p) {
    const PlaneRef& in = from.planes()[p];
    const MutablePlaneRef& out = to.planes()[p];
    row.resize(static_cast<std::size_t>(byte_size(in.shape.type, in.shape.channels)));
    for (std::int64_t t = 0; t < in.tokens; ++t) {
      const std::int64_t source = in.slots.slot(t), target = out.slots.slot(t);
      if (source < 0 || target < 0) continue;
      for (std::int64_t head = 0; head < in.shape.heads; ++head) {
        ::kvmeld::extend::gather_row(in, source, head, row.data());
        ::kvmeld::extend::scatter_row(out, target, head, row.data());
      }
    }
  }
}

/// The engine's own shift: import, move, decode one token so that it happens, drop that token,
/// export.
[[nodiscard]] inline Result<SequenceState> engine_shift(
    llama_context* context, llama_seq_id sequence, const SequenceState& state, llama_token token,
    llama_pos shift, const std::shared_ptr<const Geometry>& geometry) {
  const llama_memory_t memory = llama_get_memory(context);
  const auto end = static_cast<llama_pos>(state.positions().back()) + 1 + shift;
  llama_memory_seq_add(memory, sequence, 0, -1, shift);
  if (Status status = decode(context, sequence, std::span(&token, 1), end); !status) return status;
  (void)llama_memory_seq_rm(memory, sequence, end, -1);
  return read(context, sequence, geometry);
}

/// Values must not move, in a single bit, when keys do.
[[nodiscard]] inline Status check_same_values(const KvCacheRef& a, const KvCacheRef& b) {
  std::vector<std::byte> x, y;
  for (std::size_t l = 0; l < a.geometry().layers.size(); ++l) {
    if (a.geometry().layers[l].planes.size() < 2) continue;
    const PlaneRef& p = a.plane(l, 1);
    const PlaneRef& q = b.plane(l, 1);
    x.resize(static_cast<std::size_t>(cell_bytes(p.shape)));
    y.resize(x.size());
    for (std::int64_t t = 0; t < a.tokens(); ++t) {
      const std::int64_t slot = p.slots.slot(t), other = q.slots.slot(t);
      if (slot < 0 || other < 0) continue;
      ::kvmeld::extend::gather_heads(p, slot, x.data());
      ::kvmeld::extend::gather_heads(q, other, y.data());
      if (x != y)
        return extend::error(ErrorCode::probe_failed, "llama: values of layer ", l,
                             " changed at token ", t, " in the engine's shift");
    }
  }
  return {};
}

[[nodiscard]] inline std::vector<llama_token> probe_tokens(const llama_context* context,
                                                           const ProbeOptions& options) {
  std::vector<llama_token> tokens(options.tokens.begin(), options.tokens.end());
  const llama_model* const model = llama_get_model(context);
  const std::int32_t vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  const std::int32_t window = llama_model_n_swa(model);
  // Half a window at most, so that the token that triggers the shift pushes none out.
  const std::int32_t count = window > 0 && window < 96 ? (window + 1) / 2 : 48;
  if (tokens.empty())
    for (std::int32_t i = 0; i < count; ++i)
      tokens.push_back(
          static_cast<llama_token>((static_cast<std::int64_t>(i) * 7919 + 101) % vocabulary));
  return tokens;
}

}  // namespace detail

/// Tries a context before anything is merged in it; call it once for each model and way of creating
/// contexts.
///
/// With two empty sequences it checks that
/// 1. export, import and export give the same bytes, cell by cell;
/// 2. the keys that the engine makes for the same tokens further on are ours rotated by the
///    declared rope: layer 0, where keys depend on nothing but token and position, within
///    `tolerance`; other layers, whose inputs carry the noise of the engine's arithmetic (large
///    where K is quantised), are reported, and bounded by `deep_tolerance` only where 3. cannot
///    tell about them;
/// 3. the engine's own shift of imported keys is ours within `tolerance`, up to one common scale
///    (YaRN), and leaves values alone. Both sequences are empty afterwards. Decodes twice as many
///    tokens as are probed, and one. Errors: `invalid_argument` (sequences, a shift below 64),
///    `rope_mismatch` with the figures, `probe_failed`, those of `read` and `write`.
[[nodiscard]] inline Result<ProbeReport> probe(llama_context* context,
                                               const std::shared_ptr<const Geometry>& geometry,
                                               llama_seq_id first, llama_seq_id second,
                                               const ProbeOptions& options = {}) {
  using extend::error;
  if (Status status = detail::check_spare(context, first, second); !status) return status;
  if (Status status = detail::check_spare(context, second, first); !status) return status;
  if (options.shift < verify_rope_min_distance || options.shift > (1 << 24))
    return extend::error(ErrorCode::invalid_argument, "llama: a probe by ", options.shift,
                         " positions; take at least ", verify_rope_min_distance);
  const std::vector<llama_token> tokens = detail::probe_tokens(context, options);
  const auto shift = static_cast<llama_pos>(options.shift);
  const auto length =
      // the engine picks length-dependent frequencies by it
      static_cast<std::int64_t>(llama_n_ctx(context));
  const detail::ClearGuard clear_first(context, first), clear_second(context, second);
  ProbeReport report;
  report.tokens = static_cast<std::int64_t>(tokens.size());
  report.shift = options.shift;

  if (Status status = detail::decode(context, first, tokens, 0); !status) return status;
  const Result<SequenceState> state = read(context, first, geometry);
  if (!state) return state.error();
  report.form = state->form();
  Result<StateBlob> blob =
      make_state(geometry, state->form(), state->positions(),
                 state->form().cell_ext_bytes == 12 ? std::span<const TokenId>(tokens)
                                                    : std::span<const TokenId>());
  if (!blob) return blob.error();
  detail::copy_rows(state->view(), blob->mutable_ref());
  if (Status status = detail::import_state(context, second, *blob, Verify::bytes); !status)
    return status;

  const std::size_t layers = geometry->layers.size();
  const auto tolerance = [&](std::size_t l) {
    return options.tolerance > 0.0 ? options.tolerance
                                   : detail::storage_tolerance(geometry->layers[l].planes[0].type);
  };
  report.engine_can_shift = llama_memory_can_shift(llama_get_memory(context));
  // The engine's CPU backend has no rotation of bf16 in place and ends the process when asked to
  // shift such keys.
  for (const LayerShape& layer : geometry->layers)
    if (layer.planes[0].type == ElementType::bf16) report.engine_can_shift = false;
  if (report.engine_can_shift) {
    const Result<SequenceState> moved =
        detail::engine_shift(context, second, *state, tokens[0], shift, geometry);
    if (!moved) return moved.error();
    if (moved->positions().size() != state->positions().size() ||
        moved->positions().front() != state->positions().front() + shift)
      return extend::error(ErrorCode::probe_failed, "llama: the engine's shift of ",
                           state->positions().size(), " tokens by ", shift, " left ",
                           moved->positions().size(), " tokens");
    if (Status status = detail::check_same_values(state->view(), moved->view()); !status)
      return status;
    for (std::size_t l = 0; l < layers; ++l) {
      const std::vector<float> engine = detail::layer_keys(moved->view(), state->view(), l);
      const Result<detail::ShiftFit> fit = detail::fit_shift(
          geometry->layers[l], detail::layer_keys(state->view(), moved->view(), l), engine, shift,
          length);
      if (!fit) return fit.error();
      if (fit->error > tolerance(l))
        return extend::error(ErrorCode::rope_mismatch, "llama: layer ", l, " shifted by ", shift,
                             " positions differs from the engine's shift by ", fit->error,
                             " (tolerance ", tolerance(l),
                             "); the declared rope is not the engine's");
      if (fit->error > report.engine_shift_error) report.engine_shift_error = fit->error;
      if (fit->norm_change > report.norm_change) report.norm_change = fit->norm_change;
      if (__builtin_fabs(fit->scale - 1.0) > __builtin_fabs(report.engine_shift_scale - 1.0))
        report.engine_shift_scale = fit->scale;
    }
  }

  (void)llama_memory_seq_rm(llama_get_memory(context), second, -1, -1);
  if (Status status = detail::decode(context, second, tokens, shift); !status) return status;
  const Result<SequenceState> fresh = read(context, second, geometry);
  if (!fresh) return fresh.error();
  for (std::size_t l = 0; l < layers; ++l) {
    const LayerShape& layer = geometry->layers[l];
    const std::vector<float> first_keys = detail::layer_keys(state->view(), fresh->view(), l);
    const std::vector<float> shifted_keys = detail::layer_keys(fresh->view(), state->view(), l);
    if (l == 0) {
      const Result<RopeCheck> check =
          verify_rope(layer.rope, layer.planes[0].heads, layer.planes[0].channels, first_keys,
                      shifted_keys, 0, shift, tolerance(0), length);
      if (!check)
        return extend::error(check.error().code(), "llama: layer 0: ", check.error().message());
      report.first_layer_error = check->relative_error;
      continue;
    }
    const Result<detail::ShiftFit> fit =
        detail::fit_shift(layer, first_keys, shifted_keys, shift, length);
    if (!fit) return fit.error();
    if (!report.engine_can_shift && fit->plain_error > options.deep_tolerance)
      return extend::error(ErrorCode::rope_mismatch, "llama: layer ", l, " for the same tokens ",
                           shift, " positions on differs by ", fit->plain_error, " (tolerance ",
                           options.deep_tolerance, "); the declared rope is not the engine's");
    if (fit->plain_error > report.deep_error) report.deep_error = fit->plain_error;
  }
  return report;
}

}  // namespace llama

KVMELD_NAMESPACE_END
