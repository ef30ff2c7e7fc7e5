#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/seal.hpp>
#include <kvmeld/session/row_buffer.hpp>

KVMELD_NAMESPACE_BEGIN

/// When spans end, and whether they come in two encodings.
struct SpanOptions {
  /// Tokens of content that make a span full; 0: spans end by hand or at a turn's end only.
  std::int64_t seal_every = 0;
  /// Each span is also encoded without lead-in, and is full only when both encodings are.
  bool variants = false;
};

/// Where a span begins, and what stands before it in the engine's context.
struct SpanStart {
  Context context{};  ///< the prefix, and the digest of the lead-in (`lead_in_digest`)
  std::int64_t first_position = 0;  ///< of the first token that will be appended, lead-in included
  /// Tokens of lead-in that will be appended before the content, and are dropped.
  std::int64_t drop_first = 0;
  /// Of the first token of the encoding without lead-in: where the prefix ends.
  std::int64_t variant_position = 0;
};

/// The lead-in of what an agent goes on to say behind its own sealed span: its earlier context
/// serves as one.
[[nodiscard]] inline Digest128 continued_lead_in(const Digest128& lead_in,
                                                 const FragmentId& before) {
  Hasher hasher;
  hasher.text("kvmeld.lead_in.continued");
  hasher.value(lead_in.low);
  hasher.value(lead_in.high);
  hasher.bytes(std::as_bytes(std::span(before.bytes)));
  return hasher.digest();
}

/// Collects the K/V of new tokens as an engine computes them, and seals them into fragments.
///
/// Rows are copied, so the engine may overwrite its own. Positions are counted here and only
/// compared with what the engine says. Errors leave the buffer as it was. Not for several threads
/// at once.
/// @tparam Hash names the fragments.
template <ContentHash Hash = Xxh3_128>
class SpanBuffer {
 public:
  explicit SpanBuffer(const std::shared_ptr<const Geometry>& geometry, SpanOptions options = {},
                      const SpanStart& start = {})
      : options_(options), rows_(geometry), variant_rows_(geometry) {
    begin(start);
  }

  /// Begins a span; what was appended and not sealed is forgotten. `first_position` ≥ 0.
  void begin(const SpanStart& start) {
    rows_.drop_front(rows_.tokens());
    variant_rows_.drop_front(variant_rows_.tokens());
    tokens_.clear();
    positions_.clear();
    start_ = start;
    to_drop_ = start.drop_first;
    next_ = start.first_position;
    variant_next_ = start.variant_position;
  }

  /// Copies the rows of new tokens, the next ones in the engine's context. `tokens` and `positions`
  /// are one a row, or empty: latent tokens, and the positions that follow. O(bytes).
  ///
  /// Errors: `position_gap` and `duplicate_position` where positions do not go on from
  /// `next_position()`; `token_count_mismatch`; `geometry_mismatch`; `non_finite`;
  /// `invalid_argument`.
  Status append(const KvCacheRef& rows, std::span<const TokenId> tokens = {},
                std::span<const std::int64_t> positions = {}) {
    KVMELD_TRY(check(rows, positions, next_));
    if (!tokens.empty() && static_cast<std::int64_t>(tokens.size()) != rows.tokens()) {
      return detail::error(ErrorCode::token_count_mismatch, tokens.size(), " token ids for ",
                           rows.tokens(), " rows of K/V");
    }
    const std::int64_t dropped = (std::min)(to_drop_, rows.tokens());
    const std::int64_t kept = rows.tokens() - dropped;
    if (kept > 0 && pending() > 0 && tokens.empty() != tokens_.empty()) {
      return detail::error(ErrorCode::token_count_mismatch, "a span of ", pending(), " tokens is ",
                           tokens_.empty() ? "latent" : "not latent", ", and the next ", kept,
                           " are otherwise; seal between them");
    }
    KVMELD_TRY(rows_.append(rows, dropped));
    for (std::int64_t t = dropped; t < rows.tokens(); ++t) {
      positions_.push_back(next_ + t);
      if (!tokens.empty()) tokens_.push_back(tokens[static_cast<std::size_t>(t)]);
    }
    to_drop_ -= dropped;
    next_ += rows.tokens();
    return {};
  }
  /// Copies rows of the same tokens, encoded right behind the prefix. Errors: as `append`;
  /// `invalid_argument` where the options ask for no variants.
  Status append_variant(const KvCacheRef& rows, std::span<const std::int64_t> positions = {}) {
    if (!options_.variants)
      return detail::error(ErrorCode::invalid_argument, rows.tokens(),
                           " rows of a variant that SpanOptions does not ask for");
    KVMELD_TRY(check(rows, positions, variant_next_));
    if (options_.seal_every > 0 && variant_rows_.tokens() + rows.tokens() > options_.seal_every) {
      return detail::error(
          ErrorCode::invalid_argument, variant_rows_.tokens() + rows.tokens(),
          " rows of a variant for one span of ", options_.seal_every,
          "; the next span's variant begins behind the prefix again, once this one is sealed");
    }
    KVMELD_TRY(variant_rows_.append(rows, 0));
    variant_next_ += rows.tokens();
    return {};
  }

  /// The position of the next token in the engine's context: what to decode at.
  [[nodiscard]] std::int64_t next_position() const noexcept { return next_; }
  /// Tokens of content that are not sealed yet.
  [[nodiscard]] std::int64_t pending() const noexcept { return rows_.tokens(); }
  /// Whether `seal_every` tokens are there.
  [[nodiscard]] bool full() const noexcept {
    return options_.seal_every > 0 && pending() >= options_.seal_every &&
           (!options_.variants || variant_rows_.tokens() >= options_.seal_every);
  }
  [[nodiscard]] const Context& context() const noexcept { return start_.context; }

  /// Seals the next `seal_every` tokens; what comes after them stays. Errors: `invalid_argument`
  /// where there are fewer.
  [[nodiscard]] Result<Fragment> seal_full() {
    if (!full())
      return detail::error(ErrorCode::invalid_argument, pending(), " tokens are no full span of ",
                           options_.seal_every);
    return seal_first(options_.seal_every);
  }
  /// Seals everything that is pending: at a turn's end, or by hand. Zero tokens make a valid, empty
  /// fragment.
  ///
  /// Errors: `token_count_mismatch` where the variant does not encode as many tokens.
  [[nodiscard]] Result<Fragment> seal() { return seal_first(pending()); }

 private:
  [[nodiscard]] Status check(const KvCacheRef& rows, std::span<const std::int64_t> positions,
                             std::int64_t next) const {
    if (!rows.valid())
      return detail::error(ErrorCode::invalid_argument, "the view has no geometry");
    KVMELD_TRY(check_same(*rows_.shared_geometry(), rows.geometry()));
    if (!positions.empty() && static_cast<std::int64_t>(positions.size()) != rows.tokens()) {
      return detail::error(ErrorCode::token_count_mismatch, positions.size(), " positions for ",
                           rows.tokens(), " rows of K/V");
    }
    if (next < 0 || next + rows.tokens() > max_position) {
      return detail::error(ErrorCode::invalid_argument, rows.tokens(), " tokens from position ",
                           next, " on are not in [0, ", max_position, "]");
    }
    for (std::size_t i = 0; i < positions.size(); ++i) {
      const std::int64_t expected = next + static_cast<std::int64_t>(i);
      if (positions[i] == expected) continue;
      return detail::error(
          positions[i] > expected ? ErrorCode::position_gap : ErrorCode::duplicate_position,
          "token ", i, " comes at position ", positions[i], ", the next one is ", expected);
    }
    return {};
  }
  [[nodiscard]] Result<Fragment> seal_first(std::int64_t count) {
    const auto n = static_cast<std::size_t>(count);
    if (options_.variants && variant_rows_.tokens() < count) {
      return detail::error(ErrorCode::token_count_mismatch, "the variant encodes ",
                           variant_rows_.tokens(), " of ", count, " tokens");
    }
    SealOptions options;
    options.context = start_.context;
    options.positions = std::span<const std::int64_t>(positions_).first(n);
    if (!tokens_.empty()) options.tokens = std::span<const TokenId>(tokens_).first(n);
    const auto view = rows_.view(count);
    auto fragment = kvmeld::seal<Hash>(view.ref, options);
    if (fragment && options_.variants && start_.context.lead_in != Digest128{}) {
      std::vector<std::int64_t> positions;
      for (std::int64_t t = 0; t < count; ++t) positions.push_back(start_.variant_position + t);
      options.positions = positions;
      options.context.lead_in = {};
      const auto variant = variant_rows_.view(count);
      fragment = with_variant<Hash>(*fragment, variant.ref, options);
    }
    if (!fragment) return fragment;
    if (options_.variants) {
      variant_rows_.drop_front(count);
      variant_next_ = start_.variant_position + variant_rows_.tokens();
    }
    rows_.drop_front(count);
    positions_.erase(positions_.begin(), positions_.begin() + static_cast<std::ptrdiff_t>(count));
    if (!tokens_.empty())
      tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(count));
    if (count > 0)
      start_.context.lead_in = continued_lead_in(start_.context.lead_in, fragment->id());
    return fragment;
  }

  SpanOptions options_;
  SpanStart start_;
  detail::RowBuffer rows_;
  detail::RowBuffer variant_rows_;
  std::vector<TokenId> tokens_;
  std::vector<std::int64_t> positions_;
  std::int64_t to_drop_ = 0;
  std::int64_t next_ = 0;
  std::int64_t variant_next_ = 0;
};

KVMELD_NAMESPACE_END
