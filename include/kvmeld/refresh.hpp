#pragma once

/// Refresh: a fragment's tokens, read again behind what others hold, so that they have its context.
///
/// A fragment that was encoded right behind a prefix carries the marks of a beginning and knows
/// nothing of the others. In a round of refresh every agent reads its own tokens again behind the
/// merged caches of all others and keeps its own rows alone. Only caches travel, agents work at the
/// same time, and what comes out is a fragment like any other, which supersedes the older one. This
/// is message passing over a complete graph of segments (Graph-KV, arXiv 2506.07334), here at true
/// positions in the order of the merger, and as operations of a set that converges: whoever has
/// not heard of a round, or lacks its bytes, reads the round before.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/hash.hpp>
#include <kvmeld/render.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace refresh {

/// Names what a fragment was encoded behind, as its `Context::lead_in`: the fragments' ids in the
/// order in which they stood. Never zero. O(ids).
[[nodiscard]] inline Digest128 context_digest(std::span<const FragmentId> ids) {
  Hasher hasher;
  hasher.text("kvmeld.lead_in.fragments");
  hasher.value(static_cast<std::uint64_t>(ids.size()));
  for (const FragmentId& id : ids) hasher.bytes(std::as_bytes(std::span(id.bytes)));
  return hasher.digest();
}

/// The same of what a plan renders behind the prefix. O(fragments).
template <class M>
[[nodiscard]] Digest128 context_digest(const Plan<M>& plan) {
  std::vector<FragmentId> ids;
  for (const extend::PlanSource& source : plan.core().sources) {
    if (source.fragment.role() == Role::span) ids.push_back(source.fragment.id());
  }
  return context_digest(ids);
}

/// Seals what an engine made of a fragment's tokens when it read them again.
///
/// @param rows the K/V of the fragment's tokens; rows before the last `own.token_count()` are
/// context and left out. @param positions of `rows`, strictly ascending.
/// @param context `refresh::context_digest` of what stood before. @param hash that of the set.
///
/// The result has the same tokens, role and prefix. Where `own` has an encoding right behind the
/// prefix, it is kept as the second payload, which `render` reads for whichever span comes first:
/// what has nothing before it is best as it was. The caller inserts the result and has it supersede
/// `own` (`FragmentSet::supersede`). O(bytes). Errors: `tokens_required` for latent fragments,
/// whose tokens nobody can read again; `token_count_mismatch`; `payload_missing` where the plain
/// encoding is evicted; those of `seal`.
[[nodiscard]] inline Result<Fragment> seal(const Fragment& own, const KvCacheRef& rows,
                                           std::span<const std::int64_t> positions,
                                           const Digest128& context, const SetHash& hash = {}) {
  if (own.latent())
    return extend::error(ErrorCode::tokens_required, "fragment ", own.id().hex(),
                         " has no token ids to read again");
  const std::int64_t before = rows.tokens() - own.token_count();
  if (before < 0) {
    return extend::error(ErrorCode::token_count_mismatch, rows.tokens(), " rows for a fragment of ",
                         own.token_count(), " tokens");
  }
  std::vector<TokenId> tokens(static_cast<std::size_t>(before), TokenId{-1});
  tokens.insert(tokens.end(), own.tokens().begin(), own.tokens().end());
  auto sealed = kvmeld::seal(rows,
                             {.role = own.role(),
                              .tokens = tokens,
                              .positions = positions,
                              .drop_first = before,
                              .context = {.prefix = own.prefix(), .lead_in = context}},
                             hash);
  if (!sealed) return sealed.error();
  const std::span<const Payload> payloads = own.payloads();
  std::size_t plain = 0;
  while (plain < payloads.size() && payloads[plain].lead_in != Digest128{}) ++plain;
  if (plain == payloads.size()) return sealed;
  const FragmentView view(own, plain);
  if (!view.ref().valid())
    return extend::error(ErrorCode::payload_missing, "the encoding of fragment ", own.id().hex(),
                         " right behind the prefix is evicted");
  return with_variant(*sealed, view.ref(),
                      {.role = own.role(),
                       .tokens = own.tokens(),
                       .positions = payloads[plain].positions,
                       .context = {.prefix = own.prefix()}},
                      hash);
}

}  // namespace refresh

KVMELD_NAMESPACE_END
