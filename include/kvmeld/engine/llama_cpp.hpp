#pragma once

/// llama.cpp as an engine: read a sequence as a cache view, write a rendered one, let the engine
/// compute what a merge left open.
///
/// Needs llama.h and the engine's library (CMake component kvmeld::llama). A context that is to be
/// merged into is made with `kv_unified = true` (sequences share cells, so moving one costs no
/// copy), `n_seq_max` of at least 2 (one sequence is spare), and best with flash attention on
/// (otherwise V lies transposed, which is read and written, only slower). None of these calls may
/// run while another thread uses the same context.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <llama.h>

#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/engine/llama_compare.hpp>
#include <kvmeld/engine/llama_geometry.hpp>
#include <kvmeld/engine/llama_state.hpp>

KVMELD_NAMESPACE_BEGIN
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
  return error(ErrorCode::invalid_argument, "llama: sequence ", sequence, " of a context of ",
               count, " sequences");
}

[[nodiscard]] inline Status check_spare(llama_context* context, llama_seq_id sequence,
                                        llama_seq_id spare) {
  KVMELD_TRY(check_sequence(context, sequence));
  KVMELD_TRY(check_sequence(context, spare));
  if (sequence == spare)
    return error(ErrorCode::invalid_argument, "llama: sequence ", spare,
                 " cannot be its own spare; set n_seq_max to 2 or more");
  if (const llama_pos last = llama_memory_seq_pos_max(llama_get_memory(context), spare); last >= 0)
    return error(ErrorCode::invalid_argument, "llama: the spare sequence ", spare,
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
  using detail::error;
  if (Status status = detail::check_sequence(context, sequence); !status) return status;
  const std::size_t size = llama_state_seq_get_size(context, sequence);
  std::unique_ptr<std::byte[]> storage(new std::byte[size]);  // not cleared: the engine fills it
  const std::size_t written = llama_state_seq_get_data(
      context, reinterpret_cast<std::uint8_t*>(storage.get()), size, sequence);
  if (written == 0 || written != size)
    return error(ErrorCode::engine_failure, "llama: the export of sequence ", sequence, " wrote ",
                 written, " of ", size, " bytes");
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
    return error(ErrorCode::unsupported, "llama: the context keeps ", layout.form.streams,
                 " separate streams; create it with kv_unified = true");
  const llama_memory_t memory = llama_get_memory(context);
  const std::span<const std::byte> bytes = blob.bytes();
  const std::size_t used = llama_state_seq_set_data(
      context, reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size(), sequence);
  if (used != bytes.size())
    return error(ErrorCode::engine_failure, "llama: the import of ", blob.positions().size(),
                 " tokens used ", used, " of ", bytes.size(),
                 " bytes; room for them beside the old ones, and equal K/V types, are needed");
  // A model with sliding windows answers for its windowed layers, whose first position is the later
  // one.
  if (const std::vector<std::int64_t>& positions = layout.sections.back().positions;
      !positions.empty()) {
    const llama_pos first = llama_memory_seq_pos_min(memory, sequence);
    const llama_pos last = llama_memory_seq_pos_max(memory, sequence);
    if (first != positions.front() || last != positions.back())
      return error(ErrorCode::probe_failed, "llama: positions ", positions.front(), " to ",
                   positions.back(), " were written, ", first, " to ", last, " are there");
  }
  if (const std::size_t size = llama_state_seq_get_size(context, sequence); size != bytes.size())
    return error(ErrorCode::probe_failed, "llama: ", bytes.size(), " bytes were written, ", size,
                 " would be exported");
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
  using detail::error;
  KVMELD_TRY(detail::check_spare(context, target, spare));
  if (blob.positions().empty()) return {};
  const llama_memory_t memory = llama_get_memory(context);
  const std::int64_t last = llama_memory_seq_pos_max(memory, target);
  if (const std::int64_t first = blob.positions().front(); first != last + 1)
    return error(first <= last ? ErrorCode::duplicate_position : ErrorCode::position_gap,
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
      return error(ErrorCode::engine_failure, "llama: decoding ", count, " tokens at position ",
                   positions[begin], " returned ", code, code == 1 ? " (no free cells)" : "");
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
  using detail::error;
  if (Status status = detail::check_spare(context, sequence, spare); !status) return status;
  RecomputeReport report;
  if (holes.empty()) return report;
  const llama_memory_t memory = llama_get_memory(context);
  const llama_model* const model = llama_get_model(context);
  const std::int32_t vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (std::size_t i = 0; i < holes.size(); ++i) {
    if (holes[i].position < 0 || holes[i].position > 0x7ffffffe ||
        (i > 0 && holes[i].position <= holes[i - 1].position))
      return error(ErrorCode::invalid_argument, "llama: position ", holes[i].position, " of hole ",
                   i, " is out of order or range");
    if (holes[i].token < 0 || holes[i].token >= vocabulary)
      return error(ErrorCode::invalid_argument, "llama: token ", holes[i].token, " of hole ", i,
                   " is not among ", vocabulary);
  }
  const std::int64_t last = llama_memory_seq_pos_max(memory, sequence);
  if (const std::int32_t window = llama_model_n_swa(model); window > 0 && last >= window)
    return error(
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
      return error(ErrorCode::position_gap, "llama: the hole at position ", from,
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
KVMELD_NAMESPACE_END
