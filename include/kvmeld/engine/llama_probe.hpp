#pragma once

/// Whether a live llama.cpp context keeps what is written into it, and turns its keys as the
/// declared geometry says.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <llama.h>

#include <kvmeld/cache/row_copy.hpp>
#include <kvmeld/cache/verify_rope.hpp>
#include <kvmeld/engine/llama_cpp.hpp>
#include <kvmeld/engine/llama_keys.hpp>

KVMELD_NAMESPACE_BEGIN
namespace llama {

struct ProbeOptions {
  /// What to encode; empty: 48 tokens spread over the vocabulary.
  std::span<const TokenId> tokens{};
  std::int64_t shift = 96;  ///< positions by which keys are moved; at least 64
  /// Relative L2 error of turned keys; 0: by storage, .001 f32, .002 f16, .01 bf16, .02 q8_0.
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
      /// Keys of layer 0, turned by us, against the engine's own for the same tokens further on.
      0.0;
  /// The same for the layer above that is furthest off (another rope, or noise).
  double deep_error = 0.0;
  bool engine_can_shift =
      /// Whether the engine has a shift for such keys (none for bf16); if not, the next two are 0
      /// and 1.
      false;
  double engine_shift_error =
      /// Keys turned by us against the engine's own shift, worst layer, at the best common scale.
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
        ::kvmeld::detail::gather_row(in, source, head, row.data());
        ::kvmeld::detail::scatter_row(out, target, head, row.data());
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
      ::kvmeld::detail::gather_heads(p, slot, x.data());
      ::kvmeld::detail::gather_heads(q, other, y.data());
      if (x != y)
        return error(ErrorCode::probe_failed, "llama: values of layer ", l, " changed at token ", t,
                     " in the engine's shift");
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
/// 2. the keys that the engine makes for the same tokens further on are ours turned by the declared
///    rope: layer 0, where keys depend on nothing but token and position, within `tolerance`; other
///    layers, whose inputs carry the noise of the engine's arithmetic (large where K is quantised),
///    are reported, and bounded by `deep_tolerance` only where 3. cannot tell about them;
/// 3. the engine's own shift of imported keys is ours within `tolerance`, up to one common scale
///    (YaRN), and leaves values alone. Both sequences are empty afterwards. Decodes twice as many
///    tokens as are probed, and one. Errors: `invalid_argument` (sequences, a shift below 64),
///    `rope_mismatch` with the figures, `probe_failed`, those of `read` and `write`.
[[nodiscard]] inline Result<ProbeReport> probe(llama_context* context,
                                               const std::shared_ptr<const Geometry>& geometry,
                                               llama_seq_id first, llama_seq_id second,
                                               const ProbeOptions& options = {}) {
  using detail::error;
  if (Status status = detail::check_spare(context, first, second); !status) return status;
  if (Status status = detail::check_spare(context, second, first); !status) return status;
  if (options.shift < verify_rope_min_distance || options.shift > (1 << 24))
    return error(ErrorCode::invalid_argument, "llama: a probe by ", options.shift,
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
      return error(ErrorCode::probe_failed, "llama: the engine's shift of ",
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
        return error(ErrorCode::rope_mismatch, "llama: layer ", l, " shifted by ", shift,
                     " positions differs from the engine's shift by ", fit->error, " (tolerance ",
                     tolerance(l), "); the declared rope is not the engine's");
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
      if (!check) return error(check.error().code(), "llama: layer 0: ", check.error().message());
      report.first_layer_error = check->relative_error;
      continue;
    }
    const Result<detail::ShiftFit> fit =
        detail::fit_shift(layer, first_keys, shifted_keys, shift, length);
    if (!fit) return fit.error();
    if (!report.engine_can_shift && fit->plain_error > options.deep_tolerance)
      return error(ErrorCode::rope_mismatch, "llama: layer ", l, " for the same tokens ", shift,
                   " positions on differs by ", fit->plain_error, " (tolerance ",
                   options.deep_tolerance, "); the declared rope is not the engine's");
    if (fit->plain_error > report.deep_error) report.deep_error = fit->plain_error;
  }
  return report;
}

}  // namespace llama
KVMELD_NAMESPACE_END
