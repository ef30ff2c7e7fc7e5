#pragma once

/// What each message of a reconciliation holds, and what follows from it.

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/codec/byte_reader.hpp>
#include <kvmeld/codec/byte_writer.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/state/detail/reconcile_estimate.hpp>
#include <kvmeld/state/detail/reconcile_solver.hpp>
#include <kvmeld/state/detail/reconcile_teller.hpp>
#include <kvmeld/state/reconcile_item.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

/// Messages. Who starts sends `hello`; the other one plans the stage over the ids. The side that is
/// found to have fewer elements describes `cells`, the other one `answers`, and closes. Then `tags`
/// begins the stage over the tags, as `hello` did, or `equal` says that they do not differ.
/// Integers are little-endian, counts varints.
enum class ReconcileKind : std::uint8_t {
  none = 0,
  hello = 1,  ///< salt u64, count, fingerprint u64, 48 counters
  /// Own count, form u8, number of cells, power sums of a cell; where the planner has fewer
  /// elements, `cells`.
  plan = 2,
  /// What open cells wait for; number of cells opened, of each count, fingerprint u64, elements.
  cells = 3,
  answers = 4,  ///< of each open cell, `CellAnswer` u8 and what goes with it
  /// The last answers, fingerprint u64 of the closing side; after the ids, fingerprint u64 of their
  /// tags.
  close = 5,
  tags = 6,   ///< fingerprint u64, 30 counters
  equal = 7,  ///< nothing
};

/// One side's part, without the frames around its messages.
class ReconcileSession {
 public:
  ReconcileSession(std::span<const ReconcileItem> items, const ReconcileLimits& limits)
      : items_(items), limits_(limits) {}

  [[nodiscard]] bool done() const noexcept { return waits_ == Waits::nothing; }
  /// What `start` or `take` has written; none where there is nothing to say.
  [[nodiscard]] ReconcileKind said() const noexcept { return said_; }

  KVMELD_LAZY [[nodiscard]] Status start(std::uint64_t salt, ByteWriter& out) {
    KVMELD_TRY(begin(salt));
    out.value(salt);
    out.varint(items_.size());
    out.value(stage_.fingerprint);
    estimate_.write(out, id_counters);
    say(ReconcileKind::hello, Waits::plan);
    return {};
  }

  KVMELD_LAZY [[nodiscard]] Status take(ReconcileKind kind, ByteReader& in, ByteWriter& out) {
    using Kind = ReconcileKind;
    said_ = Kind::none;
    if (kind == Kind::hello && waits_ == Waits::hello) return take_hello(in, out);
    if (kind == Kind::tags && waits_ == Waits::tags) return take_tags(in, out);
    if (kind == Kind::plan && waits_ == Waits::plan) return take_plan(in, out);
    if (kind == Kind::cells && waits_ == Waits::cells) return take_cells(in, out);
    if (kind == Kind::answers && waits_ == Waits::answers) return take_answers(in, out);
    if (kind == Kind::close && (waits_ == Waits::answers || waits_ == Waits::plan))
      return take_close(in, out);
    if (kind == Kind::equal && waits_ == Waits::tags) {
      waits_ = Waits::nothing;
      return {};
    }
    return error(ErrorCode::corrupt, "reconciliation message of kind ", static_cast<unsigned>(kind),
                 " out of turn");
  }

  /// What differs, once `done`; frees the rest.
  KVMELD_LAZY [[nodiscard]] ReconcileDifference finish() {
    if (stage_.tags) found_.different = ids_of(stage_.mine);
    std::sort(found_.theirs_only.begin(), found_.theirs_only.end(), id_before);
    stage_ = {};
    return std::move(found_);
  }

 private:
  enum class Waits : std::uint8_t { hello, plan, cells, answers, tags, nothing };
  static constexpr unsigned id_counters = 48, tag_counters = 30;

  void say(ReconcileKind kind, Waits waits) noexcept {
    said_ = kind;
    waits_ = waits;
  }
  KVMELD_LAZY [[nodiscard]] Status begin(std::uint64_t salt) {
    if (items_.size() > limits_.items) return too_many("a set", items_.size());
    for (std::size_t i = 1; i < items_.size(); ++i) {
      if (!id_before(items_[i - 1].id, items_[i].id)) {
        return error(ErrorCode::invalid_argument, "item ", i, " does not follow item ", i - 1,
                     " by its id");
      }
    }
    stage_.salt = salt;
    stage_.elements.resize(items_.size());
    for (std::size_t i = 0; i < items_.size(); ++i)
      stage_.elements[i] = {id_hash(items_[i].id, salt), static_cast<std::uint32_t>(i)};
    count_elements();
    return {};
  }
  KVMELD_LAZY [[nodiscard]] Status too_many(std::string_view who, std::uint64_t items) const {
    return error(ErrorCode::quota_exceeded, who, " of ", items, " items, the limit is ",
                 limits_.items);
  }
  KVMELD_LAZY void count_elements() {
    estimate_ = {};
    stage_.fingerprint = cell_fingerprint(stage_.elements);
    for (const ReconcileElement& e : stage_.elements) estimate_.add(e.hash);
  }

  KVMELD_LAZY [[nodiscard]] Status take_hello(ByteReader& in, ByteWriter& out) {
    const auto salt = in.value<std::uint64_t>();
    KVMELD_TRY(begin(salt));
    stage_.their_count = in.varint();
    return make_plan(in, out, id_counters);
  }
  KVMELD_LAZY [[nodiscard]] Status take_tags(ByteReader& in, ByteWriter& out) {
    begin_tags();
    return make_plan(in, out, tag_counters);
  }
  KVMELD_LAZY [[nodiscard]] Status make_plan(ByteReader& in, ByteWriter& out, unsigned counters) {
    if (stage_.their_count > limits_.items) return too_many("a peer", stage_.their_count);
    stage_.their_fingerprint = in.value<std::uint64_t>();
    const double estimate = estimate_.read(in, stage_.their_count, counters);
    KVMELD_TRY(in.status("reconciliation summary"));
    const std::uint64_t ours = stage_.elements.size(), theirs = stage_.their_count;
    if (theirs == ours && stage_.their_fingerprint == stage_.fingerprint) return close(out);
    stage_.plan =
        plan_cells((std::min)(ours, theirs), (std::max)(ours, theirs), estimate, stage_.tags);
    cut(stage_);
    out.varint(ours);
    out.value(stage_.plan.form);
    out.varint(stage_.plan.cells);
    out.varint(stage_.plan.capacity);
    say(ReconcileKind::plan, ours <= theirs ? Waits::answers : Waits::cells);
    if (ours <= theirs) tell_next(out, stage_, window());
    return {};
  }
  KVMELD_LAZY [[nodiscard]] Status take_plan(ByteReader& in, ByteWriter& out) {
    stage_.their_count = in.varint();
    const auto form = in.value<std::uint8_t>();
    const std::uint64_t cells = in.varint();
    const std::uint64_t capacity = in.varint();
    KVMELD_TRY(in.status("reconciliation plan"));
    const std::uint64_t ours = stage_.elements.size(), fewer = (std::min)(ours, stage_.their_count);
    if (stage_.their_count > limits_.items) return too_many("a peer", stage_.their_count);
    if (form > 1 || cells == 0 || cells > max_cells || capacity == 0 || capacity > max_capacity ||
        (form == 0 && cells * capacity > 64 + 4 * fewer) ||
        (stage_.tags && stage_.their_count != ours)) {
      return error(ErrorCode::corrupt, "reconciliation plan of ", cells, " cells of form ", form,
                   " and capacity ", capacity, " for ", fewer, " elements");
    }
    stage_.plan = {static_cast<CellForm>(form), static_cast<std::uint32_t>(cells),
                   static_cast<std::uint32_t>(capacity)};
    cut(stage_);
    if (stage_.their_count <= ours) {
      their_sum_ = true;
      return take_cells(in, out);
    }
    tell_next(out, stage_, window());
    say(ReconcileKind::cells, Waits::answers);
    return {};
  }

  /// Cells that may be open at once, so that naming all that they hold, or twice what they are
  /// expected to, stays within a message.
  [[nodiscard]] std::size_t window() const noexcept {
    const bool sketch = stage_.plan.form == CellForm::sketch;
    const std::uint64_t names =
        sketch ? 2 * stage_.plan.capacity
               : (stage_.elements.size() + stage_.their_count) / stage_.plan.cells;
    return (std::max)(std::size_t{1},
                      limits_.message_bytes / static_cast<std::size_t>(16 + 40 * names));
  }

  KVMELD_LAZY [[nodiscard]] Status take_cells(ByteReader& in, ByteWriter& out) {
    solve(in, out, stage_, items_);
    KVMELD_TRY(in.status("reconciliation cells"));
    if (stage_.settled()) return close(out);
    say(ReconcileKind::answers, Waits::cells);
    return {};
  }
  KVMELD_LAZY [[nodiscard]] Status take_answers(ByteReader& in, ByteWriter& out) {
    tell(in, out, stage_, items_);
    KVMELD_TRY(in.status("reconciliation answers"));
    if (stage_.settled())
      return error(ErrorCode::corrupt, "answers settle all ", stage_.plan.cells,
                   " cells and do not close");
    tell_next(out, stage_, window());
    say(ReconcileKind::cells, Waits::answers);
    return {};
  }
  /// This side is through; its fingerprint lets the other one check what it has.
  KVMELD_LAZY [[nodiscard]] Status close(ByteWriter& out) {
    if (their_sum_) stage_.their_fingerprint = stage_.seen_fingerprint;
    KVMELD_TRY(check());
    out.value(stage_.fingerprint);
    say(ReconcileKind::close, stage_.tags ? Waits::nothing : Waits::tags);
    if (!stage_.tags) {
      keep_common();
      out.value(cell_fingerprint(stage_.elements));
    }
    return {};
  }
  KVMELD_LAZY [[nodiscard]] Status take_close(ByteReader& in, ByteWriter& out) {
    const std::size_t before = out.size();
    tell(in, out, stage_, items_);
    const bool planned = waits_ == Waits::answers;  // else the other side saw equal fingerprints
    if (!planned) stage_.their_count = stage_.elements.size();
    stage_.their_fingerprint = in.value<std::uint64_t>();
    const std::uint64_t tags = stage_.tags ? 0 : in.value<std::uint64_t>();
    KVMELD_TRY(in.status("reconciliation close"));
    if (out.size() != before || (planned && !stage_.settled())) {
      return error(ErrorCode::corrupt, stage_.open.size(),
                   " cells are open where all should be settled");
    }
    KVMELD_TRY(check());
    if (stage_.tags) {
      waits_ = Waits::nothing;
      return {};
    }
    keep_common();
    if (tags == cell_fingerprint(stage_.elements)) {
      say(ReconcileKind::equal, Waits::nothing);
      return {};
    }
    begin_tags();
    out.value(stage_.fingerprint);
    estimate_.write(out, tag_counters);
    say(ReconcileKind::tags, Waits::plan);
    return {};
  }
  KVMELD_LAZY [[nodiscard]] Status check() const {
    if (stage_.agrees() && (!stage_.tags || stage_.mine.size() == stage_.theirs.size())) return {};
    return error(ErrorCode::corrupt, "reconciliation found ", stage_.mine.size(), " and ",
                 stage_.theirs.size(),
                 " differing elements, and they do not explain the fingerprints");
  }

  /// After the ids: the elements of both sides stay, hashed with their tags.
  KVMELD_LAZY void keep_common() {
    std::vector<bool> alone(items_.size());
    for (const std::uint32_t i : stage_.mine) alone[i] = true;
    found_.mine_only = ids_of(stage_.mine);
    for (const TheirElement& their : stage_.theirs) found_.theirs_only.push_back(their.id);
    std::erase_if(stage_.elements, [&](const ReconcileElement& e) { return alone[e.item]; });
    for (ReconcileElement& e : stage_.elements)
      e.hash = mix_bits(e.hash + mix_bits(items_[e.item].tag + stage_.salt));
  }
  KVMELD_LAZY void begin_tags() {
    ReconcileStage next;
    next.tags = true;
    next.salt = stage_.salt;
    next.elements = std::move(stage_.elements);
    next.their_count = next.elements.size();
    stage_ = std::move(next);
    their_sum_ = false;
    count_elements();
  }
  KVMELD_LAZY [[nodiscard]] std::vector<FragmentId> ids_of(
      std::vector<std::uint32_t>& numbers) const {
    std::sort(numbers.begin(), numbers.end());
    std::vector<FragmentId> ids;
    ids.reserve(numbers.size());
    for (const std::uint32_t i : numbers) ids.push_back(items_[i].id);
    return ids;
  }

  std::span<const ReconcileItem> items_;
  ReconcileLimits limits_;
  Waits waits_ = Waits::hello;
  ReconcileKind said_ = ReconcileKind::none;
  bool their_sum_ = false;  // the peer's fingerprint is what those of its cells come to
  ReconcileStage stage_;
  DifferenceEstimate estimate_;
  ReconcileDifference found_;
};

}  // namespace detail

KVMELD_NAMESPACE_END
