#pragma once

/// One merge of all ranks' fragments over MPI.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/config.hpp>
#include <kvmeld/mpi/detail/communicator.hpp>
#include <kvmeld/replica/replica.hpp>
#include <kvmeld/replica/stores.hpp>

KVMELD_NAMESPACE_BEGIN

namespace mpi {

/// What all ranks of an all-merge give alike.
struct AllMergeOptions {
  Digest128 scope{};  ///< of `frame_namespace`: other tenants' and models' ranks are refused
  std::uint64_t max_payload_bytes = std::uint64_t{1} << 34;
  std::uint64_t max_set_bytes = std::uint64_t{1} << 30;  ///< of one rank's ids and metadata
  std::size_t message_bytes = std::size_t{1} << 26;      ///< larger payloads take several messages
};

/// Makes every rank's set the join of all ranks' sets, with every payload that any of them has.
/// Collective: all ranks call it.
///
/// Ids and metadata go to everybody; a payload goes from the lowest rank that has it to those that
/// lack it, once each, and is verified there. Where one rank fails, all ranks return its error and
/// keep the sets that they had: no rank waits for another for ever, unless that one dies, which is
/// MPI's to handle. Ranks that get no error hold equal sets, and render the same.
///
/// Errors, the same code on all ranks: `merger_mismatch` before anything is moved,
/// `unauthenticated` for another name space, `hash_mismatch`, `oversized`, those of `decode_set`
/// and `decode_manifest`, `id_mismatch`, `store_full` for want of memory, `unavailable` where MPI
/// fails.
/// @param comm   duplicated for the call; messages of the caller's own meet none of these.
/// @param merger `Merger::digest()` of what this rank renders with.
[[nodiscard]] inline Result<AllMergeReport> all_merge(MPI_Comm comm, FragmentSet& set,
                                                      const Digest128& merger,
                                                      const AllMergeOptions& options = {}) {
  using extend::error;
  detail::MpiComm ranks(comm, options.message_bytes);
  AllMergeReport report;
  KVMELD_TRY(ranks.status());
  const auto count = static_cast<std::size_t>(ranks.size());

  const std::vector<std::byte> mine = detail::encode_holdings(set);
  detail::MergeHello hello{mine.size(), merger, options.scope, options.message_bytes,
                           std::uint64_t{set.hash().tag} << 8U | set.hash().tag};
  const auto greetings = ranks.all_gather(detail::raw_of(hello));
  KVMELD_TRY(ranks.status());
  std::vector<std::uint64_t> sizes;
  Status status = ranks.set_aside();
  for (std::size_t r = 0; r < count; ++r) {
    detail::MergeHello theirs;
    std::memcpy(&theirs, greetings.data() + r * sizeof theirs, sizeof theirs);
    sizes.push_back(theirs.set_bytes);
    if (!status) continue;
    // Compared with rank 0's, so that all ranks find the same thing wrong.
    detail::MergeHello first;
    std::memcpy(&first, greetings.data(), sizeof first);
    if (theirs.scope != first.scope) {
      status = extend::error(ErrorCode::unauthenticated, "rank ", r, " is of name space ",
                             theirs.scope.hex(), ", rank 0 of ", first.scope.hex());
    } else if (theirs.merger != first.merger) {
      status = extend::error(ErrorCode::merger_mismatch, "rank ", r, " merges by ",
                             theirs.merger.hex(), ", rank 0 by ", first.merger.hex());
    } else if (theirs.hash != first.hash) {
      status = extend::error(ErrorCode::hash_mismatch, "rank ", r, " has a set of hash tag ",
                             theirs.hash & 0xFFU, ", rank 0 of ", first.hash & 0xFFU);
    } else if (theirs.message_bytes != first.message_bytes) {
      status = extend::error(ErrorCode::invalid_argument, "rank ", r, " sends messages of ",
                             theirs.message_bytes, " bytes, rank 0 of ", first.message_bytes);
    } else if (theirs.set_bytes > options.max_set_bytes) {
      status =
          extend::error(ErrorCode::oversized, "the set of rank ", r, " takes ", theirs.set_bytes,
                        " bytes; at most ", options.max_set_bytes, " are agreed");
    }
  }
  KVMELD_TRY(ranks.agree(status));

  detail::Gathered states;
  KVMELD_TRY(ranks.all_gather(mine, sizes, states));
  FragmentSet after = set;
  std::vector<std::vector<FragmentId>> complete;
  for (std::size_t r = 0; r < count && status; ++r) {
    report.state_bytes += states[r].size();
    auto theirs = detail::decode_holdings(states[r], set.hash());
    status = theirs.status();
    if (status) status = after.join(theirs->set);
    if (status) complete.push_back(std::move(theirs->complete));
  }
  KVMELD_TRY(ranks.agree(status));

  // All ranks hold the same joined set now, and walk over it in the same order.
  std::vector<FragmentId> ids;
  for (const FragmentSet::Entry& entry : after.entries()) ids.push_back(entry.id);
  for (const FragmentId& id : ids) {
    detail::Holders holders;
    for (int r = 0; r < ranks.size(); ++r) {
      const auto& theirs = complete[static_cast<std::size_t>(r)];
      if (!std::binary_search(theirs.begin(), theirs.end(), id)) {
        holders.lacking.push_back(r);
      } else if (holders.owner < 0) {
        holders.owner = r;
      }
    }
    if (holders.owner < 0) ++report.still_missing;
    const auto& own = complete[static_cast<std::size_t>(ranks.rank())];
    if (holders.owner != ranks.rank() && std::binary_search(own.begin(), own.end(), id))
      ++report.dedup_hits;
    if (holders.owner < 0 || holders.lacking.empty()) continue;
    detail::PieceRoute route(ranks, holders.owner, holders.lacking);
    if (route.sends()) {
      const Status given = detail::give_fragment(route, after.payload(id), holders.lacking.size(),
                                                 set.hash(), report);
      if (status) status = given;
    } else if (route.receives()) {
      const auto fragment =
          detail::take_fragment(route, id, options.max_payload_bytes, set.hash(), report);
      if (status) status = fragment ? after.restore(*fragment) : fragment.status();
    }
  }
  KVMELD_TRY(ranks.agree(status));
  set = std::move(after);
  return report;
}

/// As above, for a replica and the store that it stands on, whose options give name space, hash and
/// merger.
///
/// Errors also of the store and of `Replica::join`, on all ranks; what the others have taken up by
/// then stays, and a repeated call moves nothing twice.
[[nodiscard]] inline Result<AllMergeReport> all_merge(MPI_Comm comm, replica::Replica& replica,
                                                      replica::BlobStore& store,
                                                      AllMergeOptions options = {}) {
  options.scope = replica.options().frame.scope;
  options.max_payload_bytes = replica.options().format.max_payload_bytes;
  FragmentSet merged = replica.set();
  auto report = all_merge(comm, merged, replica.options().merger.digest(), options);
  if (!report) return report;
  Status status;
  for (const FragmentSet::Entry& entry : merged.entries()) {
    const FragmentSet::Entry* const here = replica.set().find(entry.id);
    if (!status || !entry.complete() || (here != nullptr && here->complete())) continue;
    status = store_fragment(store, entry.fragment, replica.options().format).status();
  }
  // Written down and joined by the replica; payloads that it lacks yet are in its store.
  if (status) status = replica.join(merged.delta_since(replica.set().context()), replica::everyone);
  detail::MpiComm ranks(comm, options.message_bytes);
  KVMELD_TRY(ranks.agree(status));
  return report;
}

}  // namespace mpi

KVMELD_NAMESPACE_END
