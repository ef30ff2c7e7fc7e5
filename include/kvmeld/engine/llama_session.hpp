#pragma once

/// llama.cpp under an `AgentSession`: the worker makes the bytes of a sequence, the generating
/// thread imports them at a safe point.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/engine/llama_cpp.hpp>
#include <kvmeld/session/swap_memory.hpp>

KVMELD_NAMESPACE_BEGIN
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
    return detail::error(ErrorCode::invalid_argument, "llama: position ", position,
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
  [[nodiscard]] Result<InstallReport> install(std::shared_ptr<Rendered<StateBlob>> next,
                                              std::span<const Fragment> carried,
                                              std::int64_t first_position) {
    const auto bytes = static_cast<std::int64_t>(next->buffer->bytes().size());
    if (options_.max_import_bytes > 0 && bytes > options_.max_import_bytes) {
      return detail::error(ErrorCode::oversized, "llama: an import of ", bytes, " bytes, at most ",
                           options_.max_import_bytes, " are taken at a safe point");
    }
    if (Status status = detail::check_spare(context_, options_.live, options_.staging); !status)
      return status;
    const detail::ClearGuard guard(context_, options_.staging);
    InstallReport report;
    report.import_bytes = bytes;
    const double begin = steady_ms();
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
      report.import_ms = steady_ms() - begin;
      return report;
    } else if (!next->positions.empty()) {
      if (Status status =
              write(context_, options_.staging, options_.scratch, *next->buffer, options_.verify);
          !status)
        return status;
    }
    const double imported = steady_ms();
    if (options_.recompute_holes && !next->holes.empty()) {
      const auto done = recompute(context_, options_.staging, options_.scratch,
                                  std::span<const Hole>(next->holes));
      if (!done) return done.error();
      report.recomputed_tokens = done->tokens;
      report.recompute_ms = steady_ms() - imported;
    }
    report.next_position = next->next_position((std::max)(first_position, options_.kept_positions));
    for (const Fragment& fragment : carried) {
      if (Status status = carry(fragment, report); !status) return status;
    }
    (void)llama_memory_seq_rm(memory, options_.live, -1, -1);
    llama_memory_seq_cp(memory, options_.staging, options_.live, -1, -1);
    report.import_ms = steady_ms() - begin - report.recompute_ms;
    return report;
  }

 private:
  /// Puts a span behind what is staged, turned to its new positions.
  [[nodiscard]] Status carry(const Fragment& fragment, InstallReport& report) {
    const auto made = kvmeld::detail::plan_behind(fragment, report.next_position);
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
KVMELD_NAMESPACE_END
