// Ranks of an MPI job merge their sets: same set, same bytes, each payload sent once where it
// lacks, and no rank left waiting.
//
// Every rank runs all of it, so a check that fails is counted, never thrown: the others would wait
// for its messages.
#include <cstdio>
#include <string>

#include <kvmeld/fragment.hpp>
#include <kvmeld/kvmeld.hpp>
#include <kvmeld/mpi/all_merge.hpp>
#include <kvmeld/replica/rounds.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/random_cache.hpp"

namespace {

using kvmeld::Digest128;
using kvmeld::Dot;
using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::FragmentSet;
using kvmeld::mpi::AllMergeReport;

int rank_number = 0;
int ranks = 0;
int failures = 0;

void check(bool holds, const char* text, int line, const std::string& more = {}) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "tests/mpi/all_merge.cpp:%d, rank %d: %s does not hold. %s\n", line,
               rank_number, text, more.c_str());
}
#define CHECK(...) check((__VA_ARGS__), #__VA_ARGS__, __LINE__)
#define CHECK_OK(...)                                               \
  do {                                                              \
    const kvmeld::Status checked = (__VA_ARGS__);                   \
    check(checked.ok(), #__VA_ARGS__, __LINE__, checked.message()); \
  } while (false)

Fragment fragment(std::uint64_t seed, std::int64_t tokens = 9) {
  return test::sealed(test::geometry({.layers = 2, .heads = 2, .channels = 32}), tokens, seed,
                      {.tokens = test::token_ids(tokens)})
      .fragment;
}
Dot dot(std::uint64_t sequence) {
  return {static_cast<std::uint64_t>(rank_number) + 1, sequence, 1};
}

/// Sum over all ranks.
std::uint64_t total(std::uint64_t mine) {
  (void)MPI_Allreduce(MPI_IN_PLACE, &mine, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
  return mine;
}
/// Whether all ranks have these bytes.
template <class T>
bool equal_on_all(const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(ranks));
  (void)MPI_Allgather(&mine, static_cast<int>(sizeof mine), MPI_BYTE, all.data(),
                      static_cast<int>(sizeof mine), MPI_BYTE, MPI_COMM_WORLD);
  return std::all_of(all.begin(), all.end(), [&](const T& other) { return other == mine; });
}

Digest128 content_digest(const FragmentSet& set) {
  const auto geometry = test::geometry({.layers = 2, .heads = 2, .channels = 32});
  const auto plan = kvmeld::plan(set, kvmeld::merger(), {.geometry = *geometry});
  CHECK_OK(plan.status());
  if (!plan) return {};
  test::TestCache out(geometry, plan->tokens());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto report =
      kvmeld::run(kvmeld::exec::seq, *plan, workspace, out.out(), {.content_digest = true});
  CHECK_OK(report.status());
  return report ? *report->content_digest : Digest128{};
}

void merges_everything(std::size_t message_bytes) {
  // Each rank has one of its own; all but the last have a common one; ranks 1 and 2 share one more;
  // the last has nothing.
  const bool last = rank_number + 1 == ranks;
  FragmentSet set;
  const auto own = static_cast<std::uint64_t>(rank_number);
  if (!last) {
    CHECK_OK(set.insert(fragment(10 + own, 5 + rank_number), dot(0), 0.5F));
    CHECK_OK(set.insert(fragment(1), dot(1)));
    if (rank_number > 0) CHECK_OK(set.insert(fragment(2), dot(2)));
    if (rank_number == 0) CHECK_OK(set.insert(fragment(3, 0), dot(3)));  // no tokens, no bytes
  }
  kvmeld::mpi::AllMergeOptions options;
  options.message_bytes = message_bytes;
  const auto report = kvmeld::mpi::all_merge(MPI_COMM_WORLD, set, {4, 2}, options);
  CHECK_OK(report.status());
  if (!report) return;
  CHECK(set.size() == static_cast<std::size_t>(ranks - 1) + 3);
  CHECK(std::all_of(set.entries().begin(), set.entries().end(), [](const auto& e) {
    return e.complete() && kvmeld::verify_fragment(e.fragment).ok();
  }));
  CHECK(equal_on_all(set.digest()));
  const auto cut = kvmeld::replica::make_cut(set, {4, 2}, 1, 1, 0);
  CHECK(cut.ok() && equal_on_all(cut->set.digest()));
  CHECK(equal_on_all(content_digest(set)));

  // Every payload crossed once for each rank that lacked it, and no other byte did.
  const std::uint64_t token_bytes = 2 * 2 * 2 * 32 * 4;
  std::uint64_t expected = 0;
  for (int r = 0; r + 1 < ranks; ++r)
    expected +=
        static_cast<std::uint64_t>(5 + r) * token_bytes * static_cast<std::uint64_t>(ranks - 1);
  expected += 9 * token_bytes;      // the common one: only the last rank lacked it
  expected += 2 * 9 * token_bytes;  // the one that ranks 0 and the last lacked
  CHECK(total(report->payload_bytes) == expected);
  CHECK(total(report->sent_bytes) == total(report->received_bytes));
  CHECK(total(report->fragments_sent) == total(report->fragments_received));
  CHECK(report->still_missing == 0);
  if (rank_number == 2) CHECK(report->dedup_hits == 2);
  if (rank_number == 0) CHECK(report->dedup_hits == 0);

  // What all have, nobody sends again.
  const auto again = kvmeld::mpi::all_merge(MPI_COMM_WORLD, set, {4, 2}, options);
  CHECK(again.ok() && again->sent_bytes + again->received_bytes == 0);
  CHECK(equal_on_all(set.digest()));
}

void removals_and_evictions() {
  FragmentSet set;
  CHECK_OK(set.insert(fragment(1), Dot{99, 0, 1}));
  CHECK_OK(set.insert(fragment(2), Dot{99, 1, 1}));
  if (rank_number == 1) CHECK_OK(set.remove(fragment(1).id(), dot(0)));
  CHECK_OK(set.evict(fragment(2).id()));
  const auto report = kvmeld::mpi::all_merge(MPI_COMM_WORLD, set, {});
  CHECK_OK(report.status());
  CHECK(report && report->still_missing == 1);  // no rank has it: an id without bytes, as before
  CHECK(set.size() == 1);
  CHECK(equal_on_all(set.digest()));
}

/// Calls that fail on one rank fail on all, with one code, and change no set.
template <class Prepare>
void fails_everywhere(ErrorCode code, const Prepare& prepare, const char* what) {
  FragmentSet set;
  CHECK_OK(set.insert(fragment(10 + static_cast<std::uint64_t>(rank_number)), dot(0)));
  Digest128 merger{4, 2};
  kvmeld::mpi::AllMergeOptions options;
  prepare(set, merger, options);
  const kvmeld::Digest256 before = set.digest();
  const auto report = kvmeld::mpi::all_merge(MPI_COMM_WORLD, set, merger, options);
  check(report.status().code() == code, what, __LINE__, report.status().message());
  CHECK(report.status().message().find("rank ") == 0);
  CHECK(set.digest() == before);
}

void errors() {
  const bool odd = rank_number == 2;
  fails_everywhere(
      ErrorCode::merger_mismatch,
      [&](auto&, Digest128& merger, auto&) {
        if (odd) merger = {5, 5};
      },
      "another merger");
  fails_everywhere(
      ErrorCode::unauthenticated,
      [&](auto&, auto&, auto& options) {
        if (odd) options.scope = {1, 0};
      },
      "another name space");
  fails_everywhere(
      ErrorCode::unauthenticated,
      [&](auto&, auto&, auto& options) {
        if (odd) options.scope = {0, 1};
      },
      "the other half of one");
  fails_everywhere(
      ErrorCode::invalid_argument,
      [&](auto&, auto&, auto& options) {
        if (odd) options.message_bytes = 7;
      },
      "other messages");
  fails_everywhere(
      ErrorCode::oversized,
      [&](auto&, auto&, auto& options) {
        if (odd) options.max_set_bytes = 3;
      },
      "too large a set");
  fails_everywhere(
      ErrorCode::oversized,
      [&](auto&, auto&, auto& options) {
        if (odd) options.max_payload_bytes = 100;
        options.message_bytes = 64;
      },
      "too large a payload");
  fails_everywhere(
      ErrorCode::id_mismatch,
      [&](FragmentSet& set, auto&, auto&) {
        if (!odd) return;
        // Memory that rotted after sealing: whoever receives it finds out.
        auto body = std::make_shared<Fragment::Body>(*set.payload(fragment(12).id()).body());
        const std::shared_ptr<std::byte[]> bytes(new std::byte[body->payloads[0].byte_count]);
        std::copy_n(body->payloads[0].bytes.get(), body->payloads[0].byte_count, bytes.get());
        bytes[17] ^= std::byte{1};
        body->payloads[0].bytes = bytes;
        set = FragmentSet();
        CHECK_OK(set.insert(Fragment(std::move(body)), dot(0)));
      },
      "rotten bytes");
  fails_everywhere(
      ErrorCode::hash_mismatch,
      [&](FragmentSet& set, auto&, auto&) {
        if (odd) set = FragmentSet(kvmeld::SetHash{2, nullptr});
      },
      "another hash");
}

/// Rank 0 announces what cannot be: the others refuse it and are still in step, where an exception
/// would leave the rest waiting.
void absurd_sizes() {
  namespace detail = kvmeld::detail;
  kvmeld::mpi::detail::MpiComm comm(MPI_COMM_WORLD, 1 << 16);
  CHECK_OK(comm.set_aside());
  constexpr std::uint64_t much = std::uint64_t{1} << 63;
  const kvmeld::mpi::detail::PieceHead heads[] = {
      {much, {}},
      {~std::uint64_t{0}, {1, 0}},
      {10, {much, much}},
      {10, {0, kvmeld::mpi::detail::max_piece_bytes + 1}}};
  for (const bool broadcast : {true, false}) {
    std::vector<int> lacking;
    for (int r = broadcast ? 1 : 2; r < ranks; ++r) lacking.push_back(r);
    for (kvmeld::mpi::detail::PieceHead head : heads) {
      kvmeld::mpi::detail::PieceRoute route(comm, 0, lacking);
      kvmeld::Status status;
      kvmeld::mpi::AllMergeReport report;
      if (route.sends()) route.move(kvmeld::mpi::detail::raw_of(head));
      if (route.receives())
        status = kvmeld::mpi::detail::take_fragment(route, fragment(1).id(), 1 << 20, {}, report)
                     .status();
      CHECK(route.receives() == (status.code() == ErrorCode::oversized));
      CHECK(comm.agree(status).code() == ErrorCode::oversized);
    }
  }
  // More than any rank has memory for, or the numbers have bits.
  for (const std::uint64_t size : {std::uint64_t{1} << 56, much}) {
    kvmeld::mpi::detail::Gathered out;
    CHECK(
        comm.all_gather({}, std::vector<std::uint64_t>(static_cast<std::size_t>(ranks), size), out)
            .code() == ErrorCode::store_full);
  }
}

void replicas() {
  kvmeld::stores::MemoryStore store(rank_number == 1 ? 40'000 : ~std::size_t{0});
  kvmeld::replica::ReplicaOptions options{.epoch = 1, .merger = kvmeld::Digest128{1, 1}};
  options.self = static_cast<std::uint64_t>(rank_number) + 1;
  options.epoch = 1;
  kvmeld::replica::Replica replica(store, options);
  CHECK_OK(replica.insert(fragment(20 + static_cast<std::uint64_t>(rank_number), 10)).status());
  const auto report = kvmeld::mpi::all_merge(MPI_COMM_WORLD, replica, store);
  // 10 KiB each: rank 1's store is full with the fourth.
  CHECK(report.status().code() == ErrorCode::store_full);
  kvmeld::stores::MemoryStore larger;
  kvmeld::replica::Replica second(larger, options);
  CHECK_OK(second.insert(fragment(20 + static_cast<std::uint64_t>(rank_number), 10)).status());
  CHECK_OK(kvmeld::mpi::all_merge(MPI_COMM_WORLD, second, larger).status());
  CHECK_OK(second.tick(1));
  CHECK(second.wanted() == 0);
  CHECK(second.set().size() == static_cast<std::size_t>(ranks));
  CHECK(equal_on_all(second.set().digest()));
}

}  // namespace

int main(int argc, char** argv) {
  (void)MPI_Init(&argc, &argv);
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank_number);
  (void)MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks >= 4) {
    merges_everything(1 << 20);
    merges_everything(1000);  // a payload takes many messages
    removals_and_evictions();
    errors();
    absurd_sizes();
    replicas();
  }
  const auto failed = total(static_cast<std::uint64_t>(failures));
  if (rank_number == 0)
    std::printf("%d ranks (4 or more are needed), %llu failures\n", ranks,
                static_cast<unsigned long long>(failed));
  (void)MPI_Finalize();
  return ranks < 4 ? 77 : failed == 0 ? 0 : 1;
}
