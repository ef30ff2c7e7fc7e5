// Payloads of anchors over device, host and file: which move, what is refused, budgets after every
// call, and readers that never wait.

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>
#include <vector>

#include <kvmeld/anchors/tiers.hpp>
#include <kvmeld/stores/file.hpp>
#include <kvmeld/stores/memory.hpp>

#include "support/anchor_segments.hpp"
#include "support/catch.hpp"
#include "support/temp_folder.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::Fragment;
using kvmeld::anchors::Anchor;
using kvmeld::anchors::AnchorTiers;
using kvmeld::anchors::Tier;
using kvmeld::anchors::TierAnswer;

const std::shared_ptr<const kvmeld::Geometry> shape =
    test::geometry({.layers = 2, .heads = 1, .channels = 4});
const kvmeld::Digest128 context{1, 7};
using Pool = kvmeld::anchors::AnchorPool<kvmeld::anchors::XxHash, kvmeld::anchors::LRU>;
// 2 tokens; a Δ has one layer of two
constexpr std::size_t base_bytes = 2 * 2 * 2 * 4 * 4, delta_bytes = base_bytes / 2;

/// An anchor of so many tokens, with Δs of its own for so many contexts, the first `context`.
Anchor anchor(std::uint8_t n, std::int64_t tokens = 2, std::uint64_t contexts = 1) {
  const test::Segment alone(shape, tokens, n);
  test::TestCache cache(shape, tokens);
  alone.write(cache, 0);
  std::vector<kvmeld::TokenId> ids;
  std::vector<std::int64_t> positions;
  for (std::int64_t t = 0; t < tokens; ++t) {
    ids.push_back(static_cast<kvmeld::TokenId>(10 * n + t));
    positions.push_back(5 + t);
  }
  auto out = *kvmeld::anchors::make_anchor(*kvmeld::seal(cache.ref(), {.tokens = ids}),
                                           {static_cast<float>(n)});
  for (std::uint64_t c = 0; c < contexts; ++c) {
    test::TestCache there(shape, tokens);
    alone.in_context(100U + n + 1000 * c).write(there, 5);
    const auto met = *kvmeld::seal(there.ref(), {.tokens = ids, .positions = positions});
    out.offsets.push_back(
        {{context.low + c, context.high + c}, *kvmeld::anchors::measure_offset(met, out.base), {}});
  }
  return out;
}
std::vector<Anchor> anchors(std::uint8_t count) {
  std::vector<Anchor> out;
  for (std::uint8_t n = 0; n < count; ++n) out.push_back(anchor(n));
  return out;
}
Pool pool_for(std::size_t count) {
  return Pool(kvmeld::anchors::AnchorSpace::of(*shape), {count, std::size_t{1} << 30});
}
const Fragment& delta(const Anchor& a) { return a.offsets[0].segment; }
bool same_bytes(const Fragment& a, const Fragment& b) {
  const kvmeld::Payload &x = a.payloads()[0], &y = b.payloads()[0];
  return x.bytes != nullptr && x.byte_count == y.byte_count &&
         std::equal(x.bytes.get(), x.bytes.get() + x.byte_count, y.bytes.get());
}

/// A base with the bytes of another anchor's, under its own name.
Anchor same_base(std::uint8_t n, const Anchor& other) {
  Anchor out = anchor(n, other.base.token_count(), 0);
  out.base = kvmeld::anchors::detail::with_bytes(out.base, other.base.payloads()[0].bytes);
  return out;
}

/// Host memory in place of an accelerator's, which counts what it holds.
struct Device {
  using handle = std::shared_ptr<std::vector<std::byte>>;
  std::shared_ptr<std::atomic<std::size_t>> live = std::make_shared<std::atomic<std::size_t>>(0);
  kvmeld::Result<handle> upload(std::span<const std::byte> host) const {
    live->fetch_add(host.size());
    return handle(new std::vector<std::byte>(host.begin(), host.end()),
                  [live = live](const std::vector<std::byte>* gone) {
                    live->fetch_sub(gone->size());
                    delete gone;
                  });
  }
  kvmeld::Status download(const handle& from, std::span<std::byte> out) const {
    std::copy(from->begin(), from->end(), out.begin());
    return {};
  }
};

/// A store that fails, stands still, takes no more, or keeps everything, when it is told to.
struct Moody : kvmeld::replica::BlobStore {
  kvmeld::stores::MemoryStore inner{};
  // that it still takes
  std::shared_ptr<std::atomic<int>> puts = std::make_shared<std::atomic<int>>(1 << 30);
  std::shared_ptr<std::atomic<bool>> keeps = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<std::atomic<bool>> fails = std::make_shared<std::atomic<bool>>(false),
                                     waits = std::make_shared<std::atomic<bool>>(false),
                                     entered = std::make_shared<std::atomic<bool>>(false);
  kvmeld::Status mood() {
    entered->store(true);
    while (waits->load()) std::this_thread::yield();
    return fails->load() ? kvmeld::Status(ErrorCode::unavailable, "moody") : kvmeld::Status{};
  }
  kvmeld::Result<bool> put(const kvmeld::BlobKey& key, std::span<const std::byte> bytes) override {
    if (auto bad = mood(); !bad.ok()) return bad;
    if (puts->fetch_sub(1) <= 0) return kvmeld::Status(ErrorCode::store_full, "moody");
    return inner.put(key, bytes);
  }
  kvmeld::Result<kvmeld::Blob> get(const kvmeld::BlobKey& key) override {
    if (auto bad = mood(); !bad.ok()) return bad;
    return inner.get(key);
  }
  kvmeld::Result<bool> contains(const kvmeld::BlobKey& key) override { return inner.contains(key); }
  kvmeld::Status erase(const kvmeld::BlobKey& key) override {
    if (fails->load() || keeps->load()) return {ErrorCode::unavailable, "moody"};
    return inner.erase(key);
  }
  kvmeld::Status add_record(std::span<const std::byte> bytes) override {
    return inner.add_record(bytes);
  }
  kvmeld::Result<kvmeld::replica::RecordBatch> records(std::uint64_t cursor) override {
    return inner.records(cursor);
  }
  kvmeld::Status replace_records(std::uint64_t cursor, std::span<const std::byte> bytes) override {
    return inner.replace_records(cursor, bytes);
  }
};

/// A store beside which somebody does something each time before it takes a payload.
struct Meanwhile : Moody {
  std::shared_ptr<std::function<void()>> what = std::make_shared<std::function<void()>>();
  kvmeld::Result<bool> put(const kvmeld::BlobKey& key, std::span<const std::byte> bytes) override {
    if (*what) (*what)();
    return Moody::put(key, bytes);
  }
};

std::vector<std::filesystem::path> files(const test::TempFolder& folder) {
  std::vector<std::filesystem::path> out;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder.path() / "store/payloads")) {
    if (entry.is_regular_file()) out.push_back(entry.path());
  }
  return out;
}
std::size_t file_bytes(const test::TempFolder& folder) {
  std::size_t sum = 0;
  for (const auto& file : files(folder)) sum += std::filesystem::file_size(file);
  return sum;
}
template <class Tiers>
void settle(Tiers& tiers) {
  for (int i = 0; i < 1000; ++i) {
    const auto step = tiers.step();
    REQUIRE(step.ok());
    if (!step->moved) return;
  }
  FAIL("the tiers do not come to rest");
}

}  // namespace

TEST_CASE("payloads leave the pool, fall to the file and come back as they were") {
  const test::TempFolder folder;
  auto store = kvmeld::stores::FileStore::open(folder / "store",
                                               {.durability = kvmeld::stores::Durability::none});
  REQUIRE(store.ok());
  const auto all = anchors(6);
  Pool pool = pool_for(10);
  AnchorTiers tiers(*store, {.host_bytes = 2 * (base_bytes + delta_bytes), .file_bytes = 1 << 20});
  for (const Anchor& a : all) {
    REQUIRE(*tiers.commit(pool, a) == kvmeld::anchors::CommitResult::inserted);
    REQUIRE(tiers.bytes(Tier::host) <= 2 * (base_bytes + delta_bytes));
    REQUIRE(tiers.bytes(Tier::file) == file_bytes(folder));
  }
  REQUIRE(tiers.bytes(Tier::file) >= 4 * (base_bytes + delta_bytes));
  REQUIRE(pool.size() == 6);
  for (std::size_t i = 0; i < 6; ++i)
    REQUIRE(pool.snapshot()->table.anchor(i)->base.payloads()[0].bytes == nullptr);

  // A look-up's anchor is a miss with a reason, then here; a plan over it gives the bytes of one
  // over the offset that was never away.
  const auto space = kvmeld::anchors::AnchorSpace::of(*shape);
  const auto found = pool.look_up(
      {}, {&space, {.tokens = all[0].base.tokens()}, all[0].vector, context, {.tokens = 2}});
  REQUIRE(found.decision.reuses());
  auto got = tiers.take(found.anchors, context);
  REQUIRE(got.answer == TierAnswer::being_fetched);
  REQUIRE(to_string(got.answer) == "being_fetched");
  REQUIRE(got.offsets.empty());
  settle(tiers);
  got = tiers.take(found.anchors, context);
  REQUIRE(got.answer == TierAnswer::here);
  const auto blended = [&](const Fragment& d) {
    kvmeld::anchors::ReuseOffset offset;
    offset.anchor = all[0].id;
    offset.delta = d;
    const kvmeld::anchors::ReusePart part{.base = all[0].base, .position = 9, .offsets = {offset}};
    return test::rendered({&part, 1}, shape);
  };
  REQUIRE(!blended(delta(all[0])).empty());
  REQUIRE(blended(got.offsets[0].segment) == blended(delta(all[0])));

  // All of them, by waiting.
  for (const Anchor& a : all) {
    const auto whole = tiers.fetch(a.base);
    REQUIRE(whole.ok());
    REQUIRE(same_bytes(*whole, a.base));
    REQUIRE(tiers.bytes(Tier::host) <= 2 * (base_bytes + delta_bytes));
    REQUIRE(tiers.bytes(Tier::file) == file_bytes(folder));
  }
  // Files go with the anchors.
  for (const Anchor& a : all) pool.erase(a.id);
  tiers.retain(pool.snapshot()->table);
  REQUIRE(tiers.bytes(Tier::host) == 0);
  REQUIRE(tiers.bytes(Tier::file) == 0);
  REQUIRE(files(folder).empty());
}

TEST_CASE("hits promote, bytes by age over frequency demote") {
  const auto all = anchors(4);
  Pool pool = pool_for(10);
  const Device device;
  kvmeld::stores::MemoryStore tiers_store;
  AnchorTiers tiers(tiers_store,
                    {.device_bytes = delta_bytes,
                     .host_bytes = 2 * (base_bytes + delta_bytes),
                     .file_bytes = 1 << 20,
                     .device_hits = 3},
                    device);
  Fragment out;
  Device::handle handle;
  REQUIRE(tiers.commit(pool, all[0]).ok());
  REQUIRE(tiers.commit(pool, all[1]).ok());
  for (int i = 0; i < 2; ++i) REQUIRE(tiers.take(delta(all[0]), out) == TierAnswer::here);
  REQUIRE(tiers.take(all[1].base, out) == TierAnswer::here);
  settle(tiers);
  REQUIRE(tiers.bytes(Tier::device) == 0);
  REQUIRE(tiers.take(delta(all[0]), out) == TierAnswer::here);  // the third
  settle(tiers);
  REQUIRE(tiers.bytes(Tier::device) == delta_bytes);
  REQUIRE(*device.live == delta_bytes);
  REQUIRE(tiers.take_device(delta(all[0]), handle) == TierAnswer::here);
  REQUIRE(std::equal(handle->begin(), handle->end(), delta(all[0]).payloads()[0].bytes.get()));

  // The next anchor needs room: first the copy that the device has as well goes, then what was used
  // longest ago for its size.
  REQUIRE(tiers.commit(pool, all[2]).ok());
  REQUIRE(tiers.take(delta(all[0]), out) == TierAnswer::being_fetched);
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::being_fetched);
  REQUIRE(tiers.take(all[1].base, out) == TierAnswer::here);
  REQUIRE(tiers.take(all[2].base, out) == TierAnswer::here);
  settle(tiers);  // both come back, one of them from the device
  REQUIRE(tiers.take(delta(all[0]), out) == TierAnswer::here);
  REQUIRE(same_bytes(out, delta(all[0])));
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::here);
  REQUIRE(same_bytes(out, all[0].base));

  // A device of one Δ takes another one for it; what somebody holds there stays.
  REQUIRE(tiers.take_device(delta(all[2]), handle) == TierAnswer::being_fetched);
  REQUIRE(handle != nullptr);
  settle(tiers);
  REQUIRE(*device.live == 2 * delta_bytes);
  REQUIRE(tiers.take_device(delta(all[2]), handle) == TierAnswer::here);
  REQUIRE(*device.live == delta_bytes);
  REQUIRE(tiers.bytes(Tier::device) == delta_bytes);
  REQUIRE(tiers.take_device(all[2].base, handle) == TierAnswer::gone);  // larger than the device
  REQUIRE(*device.live == delta_bytes);
  // Asked for before anybody takes it.
  const auto held = pool.snapshot()->table.anchor(1);
  tiers.prefetch({&held, 1}, context, Tier::device);
  settle(tiers);
  REQUIRE(tiers.take_device(held->offsets[0].segment, handle) == TierAnswer::here);
}

TEST_CASE("bytes, age and frequency each decide who leaves") {
  const auto bare = [](std::uint8_t n, std::int64_t tokens) {
    test::TestCache cache(shape, tokens);
    cache.fill(n);
    const auto ids = test::token_ids(tokens, 10 * n);
    return *kvmeld::anchors::make_anchor(*kvmeld::seal(cache.ref(), {.tokens = ids}),
                                         {static_cast<float>(n)});
  };
  // One of two goes for a third; who, when the first was taken so often, then the second so often.
  const auto leaver = [&](std::int64_t first_tokens, int first_takes, int second_takes,
                          std::int64_t third_tokens) {
    const Anchor first = bare(1, first_tokens), second = bare(2, 2), third = bare(3, third_tokens);
    Pool pool = pool_for(4);
    kvmeld::stores::MemoryStore tiers_store;
    AnchorTiers tiers(tiers_store, {.host_bytes = first.base.payloads()[0].byte_count + base_bytes,
                                    .file_bytes = 1 << 20});
    Fragment out;
    bool good = tiers.commit(pool, first).ok() && tiers.commit(pool, second).ok();
    for (int i = 0; i < first_takes; ++i)
      good = good && tiers.take(first.base, out) == TierAnswer::here;
    for (int i = 0; i < second_takes; ++i)
      good = good && tiers.take(second.base, out) == TierAnswer::here;
    good = good && tiers.commit(pool, third).ok();
    const bool first_left = tiers.take(first.base, out) == TierAnswer::being_fetched,
               second_left = tiers.take(second.base, out) == TierAnswer::being_fetched;
    return !good || first_left == second_left ? 0 : first_left ? 1 : 2;
  };
  REQUIRE(leaver(2, 1, 1, 2) == 1);  // the one that was used longer ago
  REQUIRE(leaver(2, 0, 3, 2) == 1);
  // though used later, since it was used less: 1 / 3 against 2 / 11
  REQUIRE(leaver(2, 9, 1, 2) == 2);
  REQUIRE(leaver(6, 9, 1, 2) == 1);  // three times as large: 3 · 2 / 11
}

TEST_CASE("steps write what falls next, so that commits do not wait for the store") {
  const auto all = anchors(8);
  Pool pool = pool_for(10);
  Moody store;
  AnchorTiers tiers(store, {.host_bytes = 4 * (base_bytes + delta_bytes),
                            .file_bytes = 1 << 20,
                            .ahead_bytes = 2 * (base_bytes + delta_bytes)});
  for (std::size_t i = 0; i < 4; ++i) REQUIRE(tiers.commit(pool, all[i]).ok());
  REQUIRE(tiers.counts().written == 0);
  settle(tiers);
  // Two anchors' room, of whichever payloads fall next: those of equal use in the order of their
  // ids.
  REQUIRE(tiers.bytes(Tier::file) >= 2 * (base_bytes + delta_bytes));
  REQUIRE(tiers.counts().written <= 5);
  REQUIRE(tiers.bytes(Tier::host) == 4 * (base_bytes + delta_bytes));  // nothing left for it
  store.fails->store(true);
  REQUIRE(tiers.commit(pool, all[4]).ok());
  REQUIRE(tiers.commit(pool, all[5]).ok());
  const auto before = pool.size();
  // now the store is needed
  REQUIRE(tiers.commit(pool, all[6]).status().code() == ErrorCode::unavailable);
  REQUIRE(pool.size() == before);
  REQUIRE(tiers.step().status().code() == ErrorCode::unavailable);
  REQUIRE(tiers.bytes(Tier::host) <= 4 * (base_bytes + delta_bytes));
  store.fails->store(false);
  settle(tiers);
  REQUIRE(tiers.commit(pool, all[6]).ok());
  REQUIRE(tiers.counts().lost == 0);
  for (std::size_t i = 0; i < 7; ++i) {
    const auto whole = tiers.fetch(all[i].base);
    REQUIRE(whole.ok());
    REQUIRE(same_bytes(*whole, all[i].base));
  }
}

TEST_CASE("what is missing, damaged or too large is refused, and outputs stay") {
  const test::TempFolder folder;
  auto store = kvmeld::stores::FileStore::open(folder / "store",
                                               {.durability = kvmeld::stores::Durability::none});
  REQUIRE(store.ok());
  const auto all = anchors(4);
  Pool pool = pool_for(10);
  AnchorTiers tiers(*store, {.host_bytes = base_bytes + delta_bytes, .file_bytes = 1 << 20});
  Fragment out = all[3].base;
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::gone);
  REQUIRE(tiers.fetch(all[0].base).status().code() == ErrorCode::payload_missing);
  REQUIRE(tiers.fetch(Fragment{}).status().code() == ErrorCode::payload_missing);
  REQUIRE(tiers.commit(pool, all[0]).ok());
  REQUIRE(tiers.commit(pool, all[1]).ok());  // anchor 0 is in the file now
  REQUIRE(tiers.fetch(all[1].base).ok());    // as many bytes of equal age may go in either order
  REQUIRE(tiers.fetch(delta(all[1])).ok());
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::being_fetched);
  REQUIRE(tiers.take(delta(all[0]), out) == TierAnswer::being_fetched);
  const auto shell = pool.snapshot()->table.anchor(0);

  for (const auto& file : files(folder)) {  // one byte
    std::filesystem::permissions(file, std::filesystem::perms::owner_write,
                                 std::filesystem::perm_options::add);
    std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekp(3);
    damaged.put('x');
  }
  auto refused = tiers.step();
  // what is in its way goes to the file first
  while (refused.ok() && refused->moved) refused = tiers.step();
  REQUIRE(refused.status().code() == ErrorCode::id_mismatch);
  REQUIRE(refused.status().message().find(delta(all[0]).id().hex()) != std::string::npos);
  REQUIRE(tiers.take(delta(all[0]), out) == TierAnswer::gone);
  REQUIRE(tiers.fetch(all[0].base).status().code() == ErrorCode::id_mismatch);
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::gone);
  REQUIRE(tiers.counts().damaged == 2);
  REQUIRE(same_bytes(out, all[3].base));
  const auto gone = tiers.take({&shell, 1}, context);
  REQUIRE(gone.answer == TierAnswer::gone);
  REQUIRE(gone.gone_anchors == std::vector<kvmeld::FragmentId>{all[0].id});
  // Committed anew it is there again.
  REQUIRE(*tiers.commit(pool, all[0]) == kvmeld::anchors::CommitResult::unchanged);
  REQUIRE(tiers.take({&shell, 1}, context).answer == TierAnswer::here);

  // A file that somebody took away.
  REQUIRE(tiers.take(all[1].base, out) == TierAnswer::being_fetched);
  for (const auto& file : files(folder)) std::filesystem::remove(file);
  REQUIRE(tiers.fetch(all[1].base).status().code() == ErrorCode::not_found);
  REQUIRE(tiers.fetch(all[1].base).status().code() == ErrorCode::payload_missing);

  // Anchors without bytes, and beyond the budgets.
  const auto held = tiers.bytes(Tier::host) + tiers.bytes(Tier::file);
  Anchor bare = all[2];
  bare.base = kvmeld::anchors::detail::with_bytes(bare.base, nullptr);
  REQUIRE(tiers.commit(pool, bare).status().code() == ErrorCode::payload_missing);
  kvmeld::stores::MemoryStore small_store;
  AnchorTiers small(small_store, {.host_bytes = base_bytes + delta_bytes - 1});
  Pool other = pool_for(4);
  REQUIRE(small.commit(other, all[2]).status().code() == ErrorCode::store_full);
  REQUIRE(small.bytes(Tier::host) == 0);
  REQUIRE(other.size() == 0);
  // A refusal of the pool takes the payloads out again.
  Pool none(kvmeld::anchors::AnchorSpace::of(*shape), {0, 1 << 20});
  kvmeld::stores::MemoryStore large_store;
  AnchorTiers large(large_store, {});
  REQUIRE(large.commit(none, all[2]).status().code() == ErrorCode::store_full);
  REQUIRE(large.commit(none, all[2].id, all[2].offsets[0]).status().code() == ErrorCode::not_found);
  REQUIRE(large.bytes(Tier::host) == 0);
  REQUIRE(tiers.bytes(Tier::host) + tiers.bytes(Tier::file) == held);
  // Without a file, what falls is lost and said to be.
  kvmeld::stores::MemoryStore host_only_store;
  AnchorTiers host_only(host_only_store, {.host_bytes = base_bytes + delta_bytes});
  Pool lossy = pool_for(4);
  REQUIRE(host_only.commit(lossy, all[0]).ok());
  REQUIRE(host_only.commit(lossy, all[1]).ok());
  REQUIRE(host_only.take(all[0].base, out) == TierAnswer::gone);
  REQUIRE(host_only.counts().lost == 2);
}

TEST_CASE("a commit does not make room for itself by its own payloads") {
  const auto used = anchors(10);
  const Anchor large = anchor(20, 12);
  const std::size_t large_bytes =
      large.base.payloads()[0].byte_count + delta(large).payloads()[0].byte_count;
  REQUIRE(large_bytes == 6 * (base_bytes + delta_bytes));
  Fragment out;
  const auto use_all = [&](auto& tiers) {
    for (int i = 0; i < 1000; ++i) {
      for (const Anchor& a : used) {
        (void)tiers.take(a.base, out);
        (void)tiers.take(delta(a), out);
      }
    }
  };
  // Without a file: the base is fresh, and by bytes · age / frequency soon the first to go.
  Pool pool = pool_for(20);
  kvmeld::stores::MemoryStore host_only_store;
  AnchorTiers host_only(host_only_store, {.host_bytes = 8 * (base_bytes + delta_bytes)});
  for (std::size_t i = 0; i < 8; ++i) REQUIRE(host_only.commit(pool, used[i]).ok());
  use_all(host_only);
  REQUIRE(host_only.commit(pool, large).ok());
  REQUIRE(host_only.take(delta(large), out) == TierAnswer::here);
  REQUIRE(host_only.take(large.base, out) == TierAnswer::here);
  REQUIRE(same_bytes(out, large.base));

  // By way of a full file: host memory has room for the base or the Δ, and all in the file are
  // worth more.
  Pool filed = pool_for(20);
  kvmeld::stores::MemoryStore tiers_store;
  AnchorTiers tiers(tiers_store, {.host_bytes = large.base.payloads()[0].byte_count,
                                  .file_bytes = large_bytes,
                                  .host_hits = 1U << 30U});
  for (const Anchor& a : used) REQUIRE(tiers.commit(filed, a).ok());
  use_all(tiers);
  REQUIRE(tiers.commit(filed, large).ok());
  for (const Fragment* part : {&delta(large), &large.base})
    REQUIRE(tiers.take(*part, out) != TierAnswer::gone);
  for (const Fragment* part : {&delta(large), &large.base}) {
    const auto whole = tiers.fetch(*part);
    REQUIRE(whole.ok());
    REQUIRE(same_bytes(*whole, *part));
  }
}

TEST_CASE(
    "whether an anchor fits is decided with what is there of it, before anything is dropped") {
  Pool pool = pool_for(10);
  kvmeld::stores::MemoryStore tiers_store;
  AnchorTiers tiers(tiers_store, {.host_bytes = 2 * (base_bytes + delta_bytes)});
  const Anchor first = anchor(1), second = anchor(2), four = anchor(1, 2, 4),
               five = anchor(1, 2, 5);
  REQUIRE(base_bytes + 4 * delta_bytes == 2 * (base_bytes + delta_bytes));
  REQUIRE(tiers.commit(pool, first).ok());
  REQUIRE(tiers.commit(pool, second).ok());
  Fragment out;
  REQUIRE(tiers.commit(pool, five).status().code() == ErrorCode::store_full);
  REQUIRE(tiers.counts().lost == 0);
  for (const Anchor* a : {&first, &second}) {
    REQUIRE(tiers.take(a->base, out) == TierAnswer::here);
    REQUIRE(tiers.take(delta(*a), out) == TierAnswer::here);
  }
  REQUIRE(*tiers.commit(pool, four) == kvmeld::anchors::CommitResult::merged);
  REQUIRE(tiers.take(second.base, out) == TierAnswer::gone);
  REQUIRE(tiers.take(four.base, out) == TierAnswer::here);
  for (const auto& offset : four.offsets)
    REQUIRE(tiers.take(offset.segment, out) == TierAnswer::here);

  // One Δ in two contexts is one payload.
  Anchor twice = anchor(3);
  twice.offsets.push_back(twice.offsets[0]);
  twice.offsets[1].context.low += 1;
  Pool other = pool_for(4);
  kvmeld::stores::MemoryStore exact_store;
  AnchorTiers exact(exact_store, {.host_bytes = base_bytes + delta_bytes});
  REQUIRE(exact.commit(other, twice).ok());
  REQUIRE(exact.bytes(Tier::host) == base_bytes + delta_bytes);
}

TEST_CASE("a commit that the pool or the store refuses late displaces nothing") {
  const auto all = anchors(5);
  const Anchor large = anchor(20, 12);
  constexpr std::size_t one = base_bytes + delta_bytes;
  Fragment out;
  // By a pool that takes no anchor so large: tiers have to let go of three for it, which they would
  // have to write or lose.
  for (const std::size_t file_bytes : {std::size_t{0}, one, std::size_t{1} << 20}) {
    Pool pool(kvmeld::anchors::AnchorSpace::of(*shape), {10, 5 * all[0].bytes()});
    Moody store;
    AnchorTiers tiers(store, {.host_bytes = 7 * one, .file_bytes = file_bytes});
    for (std::size_t i = 0; i < 4; ++i) REQUIRE(tiers.commit(pool, all[i]).ok());
    REQUIRE(tiers.commit(pool, large).status().code() == ErrorCode::store_full);
    REQUIRE(pool.size() == 4);
    REQUIRE(tiers.counts().lost == 0);
    REQUIRE(tiers.counts().demoted == 0);
    for (std::size_t i = 0; i < 4; ++i) {
      for (const Fragment* part : {&all[i].base, &delta(all[i])}) {
        REQUIRE(tiers.take(*part, out) == TierAnswer::here);
        REQUIRE(same_bytes(out, *part));
      }
    }
    REQUIRE(tiers.take(large.base, out) == TierAnswer::gone);
    REQUIRE(tiers.bytes(Tier::host) == 4 * one);
    REQUIRE(tiers.bytes(Tier::file) <= file_bytes);
    REQUIRE(tiers.bytes(Tier::file) == store.inner.used_bytes());
    REQUIRE(tiers.commit(pool, all[4]).ok());  // and nothing is left over of it
    REQUIRE(tiers.bytes(Tier::host) == 5 * one);
  }
  // By a store that takes so many payloads and then none: both tiers are full of only copies, two
  // of which have to go down for one of twice their size.
  std::vector<Anchor> bare;
  for (std::uint8_t n = 0; n < 4; ++n) bare.push_back(anchor(n, 2, 0));
  const Anchor twice = anchor(9, 4, 0);
  for (const int puts : {0, 1}) {
    Pool pool = pool_for(10);
    Moody store;
    AnchorTiers tiers(
        store,
        {.host_bytes = 2 * base_bytes, .file_bytes = 2 * base_bytes, .host_hits = 1U << 30U});
    for (const Anchor& a : bare) REQUIRE(tiers.commit(pool, a).ok());
    REQUIRE(tiers.counts().lost == 0);
    std::vector<TierAnswer> before;
    for (const Anchor& a : bare) before.push_back(tiers.take(a.base, out));
    store.puts->store(puts);
    REQUIRE(tiers.commit(pool, twice).status().code() == ErrorCode::store_full);
    REQUIRE(pool.size() == 4);
    REQUIRE(tiers.counts().lost == 0);
    for (std::size_t i = 0; i < 4; ++i) REQUIRE(tiers.take(bare[i].base, out) == before[i]);
    REQUIRE(tiers.bytes(Tier::host) == 2 * base_bytes);
    REQUIRE(tiers.bytes(Tier::file) == 2 * base_bytes);
    REQUIRE(store.inner.used_bytes() == 2 * base_bytes);
    store.puts->store(1 << 30);
    REQUIRE(tiers.commit(pool, twice).ok());
    REQUIRE(tiers.counts().lost == 2);
    REQUIRE(tiers.bytes(Tier::file) == store.inner.used_bytes());
    REQUIRE(tiers.take(twice.base, out) == TierAnswer::here);
    REQUIRE(same_bytes(out, twice.base));
  }
}

TEST_CASE(
    "a file that leaves with the second of two payloads that have it is room for the rest of the "
    "commit") {
  // In the file two of equal bytes, and another; in host memory three that all have to go there.
  const Anchor x = anchor(1, 4, 0), y = same_base(2, x), z = anchor(3, 2, 0),
               passing = anchor(4, 6, 0), large = anchor(5, 6, 0);
  const std::vector<Anchor> falling{anchor(6, 2, 0), anchor(7, 2, 0), anchor(8, 2, 0)};
  Pool pool = pool_for(10);
  Meanwhile store;
  AnchorTiers tiers(
      store, {.host_bytes = 3 * base_bytes, .file_bytes = 3 * base_bytes, .host_hits = 1U << 30U});
  Fragment out;
  for (const Anchor* a : {&x, &y, &z, &passing}) REQUIRE(tiers.commit(pool, *a).ok());
  REQUIRE(tiers.bytes(Tier::file) == 3 * base_bytes);  // x and y share theirs
  pool.erase(passing.id);
  tiers.retain(pool.snapshot()->table);
  for (int i = 0; i < 9; ++i) REQUIRE(tiers.take(y.base, out) == TierAnswer::being_fetched);
  for (const Anchor& a : falling) REQUIRE(tiers.commit(pool, a).ok());
  for (int i = 0; i < 10; ++i) {
    for (const Anchor& a : falling) REQUIRE(tiers.take(a.base, out) == TierAnswer::here);
  }
  REQUIRE(tiers.counts().lost == 0);
  // The first goes in the room of x, which has none, and z; the second in that of y, which has more
  // than it takes. By then the first two are used so much that none of them would leave the file
  // again for the third.
  int puts = 0;
  *store.what = [&] {
    if (++puts != 2) return;
    for (int i = 0; i < 100; ++i) {
      for (std::size_t a = 0; a < 2; ++a) (void)tiers.take(falling[a].base, out);
    }
  };
  REQUIRE(tiers.commit(pool, large).ok());
  *store.what = nullptr;
  REQUIRE(puts == 3);
  REQUIRE(tiers.counts().lost == 3);
  for (const Anchor* a : {&x, &y, &z}) REQUIRE(tiers.take(a->base, out) == TierAnswer::gone);
  REQUIRE(tiers.bytes(Tier::host) == 3 * base_bytes);
  REQUIRE(tiers.bytes(Tier::file) == 3 * base_bytes);
  REQUIRE(store.inner.used_bytes() == 3 * base_bytes);
  for (const Anchor& a : falling) {
    REQUIRE(tiers.take(a.base, out) == TierAnswer::being_fetched);
    const auto whole = tiers.fetch(a.base);
    REQUIRE(whole.ok());
    REQUIRE(same_bytes(*whole, a.base));
  }
}

TEST_CASE(
    "a step that the store refuses loses nothing, and what it would not erase counts until it "
    "does") {
  const Anchor first = anchor(1, 2, 0), second = anchor(2, 2, 0), third = anchor(3, 2, 0);
  Pool pool = pool_for(9);
  Moody store;
  AnchorTiers tiers(store, {.host_bytes = base_bytes, .file_bytes = 2 * base_bytes}, Device{});
  for (const Anchor* a : {&first, &second, &third}) REQUIRE(tiers.commit(pool, *a).ok());
  Fragment out;
  // the others are in the file, which is full
  REQUIRE(tiers.take(third.base, out) == TierAnswer::here);
  REQUIRE(tiers.take(first.base, out) == TierAnswer::being_fetched);
  store.puts->store(0);
  for (int i = 0; i < 3; ++i) {
    REQUIRE(tiers.take(first.base, out) == TierAnswer::being_fetched);
    REQUIRE(tiers.step().status().code() == ErrorCode::store_full);
    for (const Anchor* a : {&first, &second, &third})
      REQUIRE(tiers.take(a->base, out) != TierAnswer::gone);
  }
  REQUIRE(tiers.counts().lost == 0);
  REQUIRE(tiers.bytes(Tier::file) == 2 * base_bytes);
  store.puts->store(1 << 30);
  store.keeps->store(true);
  const Anchor fourth = anchor(4, 2, 0);
  REQUIRE(tiers.commit(pool, fourth).ok());
  REQUIRE(tiers.counts().lost == 1);
  REQUIRE(tiers.bytes(Tier::file) == 3 * base_bytes);
  REQUIRE(store.inner.used_bytes() == 3 * base_bytes);
  REQUIRE(tiers.commit(pool, anchor(5, 2, 0)).status().code() == ErrorCode::unavailable);
  REQUIRE(tiers.counts().lost == 1);
  store.keeps->store(false);
  REQUIRE(tiers.commit(pool, anchor(5, 2, 0)).ok());
  REQUIRE(tiers.bytes(Tier::file) == 2 * base_bytes);
  REQUIRE(store.inner.used_bytes() == 2 * base_bytes);
}

TEST_CASE("what the pool lets go of for a newcomer is room for it") {
  const auto all = anchors(5);
  constexpr std::size_t one = base_bytes + delta_bytes;
  Pool pool = pool_for(4);
  kvmeld::stores::MemoryStore tiers_store;
  AnchorTiers tiers(tiers_store, {.host_bytes = 4 * one});
  for (std::size_t i = 0; i < 4; ++i) REQUIRE(tiers.commit(pool, all[i]).ok());
  Fragment out;
  // to the tiers the first is worth most, to the pool, in which nobody looked for it, least
  for (int i = 0; i < 9; ++i) {
    REQUIRE(tiers.take(all[0].base, out) == TierAnswer::here);
    REQUIRE(tiers.take(delta(all[0]), out) == TierAnswer::here);
  }
  REQUIRE(tiers.commit(pool, all[4]).ok());
  REQUIRE(pool.evictions() == 1);
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::gone);
  REQUIRE(tiers.counts().lost == 0);
  for (std::size_t i = 1; i < 5; ++i) {
    REQUIRE(tiers.take(all[i].base, out) == TierAnswer::here);
    REQUIRE(tiers.take(delta(all[i]), out) == TierAnswer::here);
  }
  REQUIRE(tiers.bytes(Tier::host) == 4 * one);
}

TEST_CASE("budgets hold after every one of many calls, and everything that is here is right") {
  const test::TempFolder folder;
  auto store = kvmeld::stores::FileStore::open(folder / "store",
                                               {.durability = kvmeld::stores::Durability::none});
  REQUIRE(store.ok());
  constexpr std::uint8_t names = 14;
  const auto all = anchors(names);
  const Device device;
  Pool pool = pool_for(10);
  const kvmeld::anchors::TierOptions options{.device_bytes = 3 * delta_bytes,
                                             .host_bytes = 4 * base_bytes,
                                             .file_bytes = 7 * base_bytes,
                                             .host_hits = 2,
                                             .device_hits = 2,
                                             .ahead_bytes = base_bytes};
  AnchorTiers tiers(*store, options, device);
  test::Random random(5);
  std::size_t here = 0;
  for (int op = 0; op < 3000; ++op) {
    const Anchor& a = all[random.below(names)];
    Fragment out;
    Device::handle handle;
    bool good = true;
    const Fragment& part = random.below(2) == 0 ? a.base : delta(a);
    switch (random.below(10)) {
      case 0:
        good = tiers.commit(pool, a).ok();
        break;
      case 1:
        pool.erase(a.id);
        tiers.retain(pool.snapshot()->table);
        break;
      case 2:
        good = tiers.take_device(delta(a), handle) != TierAnswer::here ||
               std::equal(handle->begin(), handle->end(), delta(a).payloads()[0].bytes.get());
        break;
      case 3: {
        const auto whole = tiers.fetch(part);
        good = whole.ok() ? same_bytes(*whole, part)
                          : whole.status().code() == ErrorCode::payload_missing;
        break;
      }
      case 4:
      case 5:
      case 6:
        good = tiers.step().ok();
        break;
      default:
        if (tiers.take(part, out) == TierAnswer::here) {
          good = same_bytes(out, part);
          ++here;
        }
    }
    handle.reset();
    good = good && tiers.bytes(Tier::device) <= options.device_bytes &&
           tiers.bytes(Tier::host) <= options.host_bytes &&
           tiers.bytes(Tier::file) <= options.file_bytes;
    good = good && tiers.bytes(Tier::device) == *device.live &&
           tiers.bytes(Tier::file) == file_bytes(folder);
    if (op % 50 == 0) {
      std::size_t sum = 0;
      for (const Anchor& b : all) {
        for (const Fragment* f : {&b.base, &delta(b)})
          sum += tiers.take(*f, out) == TierAnswer::here ? f->payloads()[0].byte_count : 0;
      }
      good = good && sum == tiers.bytes(Tier::host);
    }
    if (!good) FAIL("operation " << op);
  }
  const auto counts = tiers.counts();
  REQUIRE(here > 100);
  REQUIRE(counts.promoted > 50);
  REQUIRE(counts.written > 50);
  REQUIRE(counts.demoted > 50);
  REQUIRE(counts.damaged == 0);
}

TEST_CASE("readers do not wait for a store that stands still") {
  const auto all = anchors(5);
  Pool pool = pool_for(10);
  Moody store;
  AnchorTiers tiers(store, {.host_bytes = 3 * (base_bytes + delta_bytes),
                            .file_bytes = 1 << 20,
                            .ahead_bytes = base_bytes});
  for (std::size_t i = 0; i < 4; ++i) REQUIRE(tiers.commit(pool, all[i]).ok());
  settle(tiers);
  Fragment out;
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::being_fetched);
  store.entered->store(false);
  store.waits->store(true);
  std::thread stuck([&] { (void)tiers.step(); });
  while (!store.entered->load()) std::this_thread::yield();
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::being_fetched);
  REQUIRE(tiers.take(all[3].base, out) == TierAnswer::here);
  REQUIRE(tiers.bytes(Tier::host) <= 3 * (base_bytes + delta_bytes));
  pool.erase(all[0].id);
  tiers.retain(pool.snapshot()->table);  // forgotten on its way
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::gone);
  store.waits->store(false);
  stuck.join();
  REQUIRE(tiers.take(all[0].base, out) == TierAnswer::gone);
  for (const Anchor& a : all) pool.erase(a.id);
  tiers.retain(pool.snapshot()->table);
  REQUIRE(tiers.bytes(Tier::host) == 0);
  REQUIRE(tiers.bytes(Tier::file) == 0);
  REQUIRE(store.inner.used_bytes() == 0);
}

TEST_CASE(
    "what is asked for while it moves is found by a later step, though another looked meanwhile") {
  const auto all = anchors(2);
  Pool pool = pool_for(4);
  Moody store;
  AnchorTiers tiers(
      store,
      {.device_bytes = 1 << 20, .host_bytes = base_bytes + delta_bytes, .file_bytes = 1 << 20},
      Device{});
  REQUIRE(tiers.commit(pool, all[0]).ok());
  REQUIRE(tiers.commit(pool, all[1]).ok());
  pool.erase(all[1].id);
  // so that anchor 0 is in the file, and host memory has room
  tiers.retain(pool.snapshot()->table);
  const auto shell = pool.snapshot()->table.anchor(0);
  Device::handle handle;
  Fragment out;
  REQUIRE(tiers.take(delta(all[0]), out) == TierAnswer::being_fetched);
  REQUIRE(tiers.bytes(Tier::host) < base_bytes + delta_bytes);
  tiers.prefetch({&shell, 1}, context, Tier::device);
  store.entered->store(false);
  store.waits->store(true);
  std::thread first([&] { (void)tiers.step(); });
  while (!store.entered->load()) std::this_thread::yield();
  const auto second = tiers.step();
  store.waits->store(false);
  first.join();
  REQUIRE(second.ok());
  REQUIRE(!second->moved);
  settle(tiers);
  REQUIRE(tiers.take_device(delta(all[0]), handle) == TierAnswer::here);
}

TEST_CASE("an upload for which there is no room does not hold up what is behind it") {
  const Anchor there = anchor(1, 2, 0), wanted = anchor(2, 2, 0), behind = anchor(3, 2, 0);
  // The device is full of an only copy, and host memory of what is wanted there most.
  for (const std::size_t ahead_bytes : {std::size_t{0}, base_bytes}) {
    Pool pool = pool_for(4);
    kvmeld::stores::MemoryStore tiers_store;
    AnchorTiers tiers(tiers_store,
                      {.device_bytes = base_bytes,
                       .host_bytes = base_bytes,
                       .file_bytes = 1 << 20,
                       .ahead_bytes = ahead_bytes},
                      Device{});
    Device::handle handle;
    Fragment out;
    REQUIRE(tiers.commit(pool, there).ok());
    REQUIRE(tiers.take_device(there.base, handle) == TierAnswer::being_fetched);
    REQUIRE(tiers.step()->to == Tier::device);
    if (ahead_bytes == 0) REQUIRE(tiers.commit(pool, behind).ok());
    REQUIRE(tiers.commit(pool, wanted).ok());
    for (int i = 0; i < 9; ++i)
      REQUIRE(tiers.take_device(wanted.base, handle) == TierAnswer::being_fetched);
    if (ahead_bytes == 0) {
      REQUIRE(tiers.take(behind.base, out) == TierAnswer::being_fetched);
      REQUIRE(tiers.step()->to == Tier::file);  // room for it
      const auto step = tiers.step();
      REQUIRE(step.ok());
      REQUIRE(step->moved);
      REQUIRE(step->payload == behind.base.id());
      REQUIRE(tiers.take(behind.base, out) == TierAnswer::here);
      REQUIRE(same_bytes(out, behind.base));
    } else {
      const auto step = tiers.step();
      REQUIRE(step.ok());
      REQUIRE(step->moved);
      REQUIRE(step->to == Tier::file);
    }
    settle(tiers);
    REQUIRE(tiers.take_device(there.base, handle) == TierAnswer::here);
  }
}

TEST_CASE("an upload that stays impossible displaces nothing in host memory") {
  const Anchor below = anchor(1, 4, 0), small = anchor(4, 2, 0), wanted = anchor(2, 2, 0),
               bystander = anchor(3, 2, 0);
  Device::handle handle;
  Fragment out;
  {  // What fills the device would have to go down beside what is wanted there, and host memory is
     // too small for both.
    Pool pool = pool_for(4);
    kvmeld::stores::MemoryStore tiers_store;
    AnchorTiers tiers(
        tiers_store,
        {.device_bytes = 2 * base_bytes, .host_bytes = 2 * base_bytes, .file_bytes = 1 << 20},
        Device{});
    REQUIRE(tiers.commit(pool, below).ok());
    REQUIRE(tiers.take_device(below.base, handle) == TierAnswer::being_fetched);
    REQUIRE(tiers.step()->to == Tier::device);
    REQUIRE(tiers.commit(pool, bystander).ok());
    REQUIRE(tiers.commit(pool, wanted).ok());
    for (int i = 0; i < 9; ++i)
      REQUIRE(tiers.take_device(wanted.base, handle) == TierAnswer::being_fetched);
    settle(tiers);
    REQUIRE(tiers.take(bystander.base, out) == TierAnswer::here);
    REQUIRE(tiers.bytes(Tier::file) == 0);
    REQUIRE(tiers.take_device(below.base, handle) == TierAnswer::here);
  }
  {  // What is wanted there is in the file: it does not come to host memory for nothing, but it
     // does for who wants it there.
    Pool pool = pool_for(4);
    kvmeld::stores::MemoryStore tiers_store;
    AnchorTiers tiers(tiers_store,
                      {.device_bytes = base_bytes, .host_bytes = base_bytes, .file_bytes = 1 << 20},
                      Device{});
    REQUIRE(tiers.commit(pool, small).ok());
    REQUIRE(tiers.take_device(small.base, handle) == TierAnswer::being_fetched);
    REQUIRE(tiers.step()->to == Tier::device);
    REQUIRE(tiers.commit(pool, wanted).ok());
    REQUIRE(tiers.commit(pool, bystander).ok());
    for (int i = 0; i < 9; ++i)
      REQUIRE(tiers.take_device(wanted.base, handle) == TierAnswer::being_fetched);
    settle(tiers);
    REQUIRE(tiers.take(bystander.base, out) == TierAnswer::here);
    REQUIRE(tiers.take(wanted.base, out) == TierAnswer::being_fetched);
    settle(tiers);
    REQUIRE(tiers.take(wanted.base, out) == TierAnswer::here);
    // Once the device has room it goes there.
    pool.erase(small.id);
    tiers.retain(pool.snapshot()->table);
    REQUIRE(tiers.take_device(wanted.base, handle) == TierAnswer::being_fetched);
    settle(tiers);
    REQUIRE(tiers.take_device(wanted.base, handle) == TierAnswer::here);
  }
}

TEST_CASE("an anchor without a Δ for the context is not gone") {
  const Anchor a = anchor(1);
  Pool pool = pool_for(4);
  kvmeld::stores::MemoryStore tiers_store;
  AnchorTiers tiers(tiers_store, {});
  REQUIRE(tiers.commit(pool, a).ok());
  const auto shell = pool.snapshot()->table.anchor(0);
  const auto got = tiers.take({&shell, 1}, {context.low + 9, context.high});
  REQUIRE(got.answer != TierAnswer::here);
  REQUIRE(got.offsets.empty());
  REQUIRE(got.gone_anchors.empty());
  const auto known = tiers.take({&shell, 1}, context);
  REQUIRE(known.answer == TierAnswer::here);
  REQUIRE(known.offsets.size() == 1);
}

TEST_CASE("readers, two steppers and a writer at once") {
  constexpr std::uint8_t names = 10;
  const auto all = anchors(names);
  const Device device;
  Pool pool = pool_for(8);
  kvmeld::stores::MemoryStore store;
  const kvmeld::anchors::TierOptions options{.device_bytes = 2 * delta_bytes,
                                             .host_bytes = 3 * base_bytes,
                                             .file_bytes = 8 * base_bytes,
                                             .device_hits = 2,
                                             .ahead_bytes = base_bytes};
  AnchorTiers tiers(store, options, device);
  std::atomic<bool> stop{false};
  std::atomic<int> broken{0}, here{0};
  std::vector<std::thread> threads;
  for (std::uint64_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      test::Random random(r);
      while (!stop.load()) {
        const Anchor& a = all[random.below(names)];
        const Fragment& part = random.below(2) == 0 ? a.base : delta(a);
        Fragment out;
        Device::handle handle;
        if (tiers.take(part, out) == TierAnswer::here) {
          here.fetch_add(1);
          if (!same_bytes(out, part)) broken.fetch_add(1);
        }
        if (tiers.take_device(delta(a), handle) == TierAnswer::here &&
            !std::equal(handle->begin(), handle->end(), delta(a).payloads()[0].bytes.get()))
          broken.fetch_add(1);
        if (tiers.bytes(Tier::device) > options.device_bytes ||
            tiers.bytes(Tier::host) > options.host_bytes ||
            tiers.bytes(Tier::file) > options.file_bytes)
          broken.fetch_add(1);
      }
    });
  }
  for (int s = 0; s < 2; ++s) {
    threads.emplace_back([&] {
      while (!stop.load()) {
        const auto step = tiers.step();
        if (!step.ok()) broken.fetch_add(1);
        if (!step.ok() || !step->moved) std::this_thread::yield();
      }
    });
  }
  test::Random random(99);
  for (int i = 0; i < 400; ++i) {
    const Anchor& a = all[random.below(names)];
    if (!tiers.commit(pool, a).ok()) broken.fetch_add(1);
    if (i % 7 == 0) {
      const auto whole = tiers.fetch(delta(a));
      if (!whole.ok() && whole.status().code() != ErrorCode::payload_missing) broken.fetch_add(1);
    }
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  REQUIRE(broken == 0);
  REQUIRE(here > 0);
  REQUIRE(tiers.bytes(Tier::device) == *device.live);
  REQUIRE(tiers.bytes(Tier::file) == store.used_bytes());
  for (const Anchor& a : all) pool.erase(a.id);
  tiers.retain(pool.snapshot()->table);
  REQUIRE(tiers.bytes(Tier::host) == 0);
  REQUIRE(*device.live == 0);
  REQUIRE(store.used_bytes() == 0);
}
