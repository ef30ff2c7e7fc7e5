#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/cache/hash.hpp>
#include <kvmeld/config.hpp>
#include <kvmeld/state/detail/reconcile_solver.hpp>
#include <kvmeld/state/reconcile_item.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN

/// Finds the entries in which two replicas differ, by messages whose bytes grow with the difference and not with the sets.
///
/// One object on each side, no clock and no I/O: one side calls `start` and sends what it returns; both feed what arrives to
/// `receive` and send what that returns, until it says `done`. Both then hold the same answer, each from its side.
///
/// Cost, both ways together: at most 1.3 × 32 bytes for each id that differs, and at most 256 bytes more for the session; of
/// each differing id 32 bytes are the id itself, sent once where one side lacks it, and none where both hold it with different
/// tags. Messages: about 5 to 12 for each window of cells (`ReconcileLimits::message_bytes`); work: O(n) hashes and, where few
/// of many differ, about 35 products in GF(2^32) an item; memory: O(n) and the message.
///
/// How. Ids are hashed with the session's salt. Signs summed over all hashes estimate how many differ (Alon, Matias, Szegedy
/// 1996). The hashes are cut into cells of about 24 differences. Of each cell the side with fewer items sends count, 64-bit
/// fingerprint and a sketch: power sums of 32-bit hashes, 4 bytes for each difference (PinSketch; Dodis et al. 2008). The other
/// side adds its own, finds the polynomial whose roots are the differing hashes, tries its own items on it, sends the ids of
/// those that are roots and what is left of the polynomial, and the first side tries its items on that and sends their ids.
/// Too many differences in a cell: more sums are sent, the earlier ones stay. Where most items differ, 24-bit hashes are
/// listed instead. Fingerprints confirm each cell, then the whole; hashes that met are salted anew. Then the same again over
/// hashes of (id, tag) of the ids that both hold. Range fingerprints: Meyer, Range-Based Set Reconciliation, 2023.
///
/// What a message may do: nothing in it is believed before the fingerprints agree, so that a flipped bit ends in an error or in
/// the right answer. A peer that lies about its own set gets the answer for that lie. It can make this side do up to
/// 3 × 256 products an item, and can make it hold as much as it sends itself. After an error the session is over.
///
/// Deterministic for the items and the salt. The salt should be hard to guess where others choose the ids.
class Reconciliation {
 public:
  /// @param mine ascending by id, no id twice; must outlive the session.
  explicit Reconciliation(std::span<const ReconcileItem> mine, const ReconcileLimits& limits = {}) : items_(mine), limits_(limits) {}

  /// The first message. Only one of the two sides calls it.
  ///
  /// Errors: `invalid_argument` for items that do not ascend or a session that has begun; `quota_exceeded` for too many items.
  KVMELD_LAZY [[nodiscard]] Result<std::vector<std::byte>> start(std::uint64_t salt) {
    if (phase_ != Phase::fresh) return fail(detail::error(ErrorCode::invalid_argument, "the session has begun at step ", step_));
    if (Status status = begin(salt); !status) return fail(std::move(status));
    initiated_ = true;
    ByteWriter out;
    head(out, Kind::hello);
    out.value(salt);
    out.varint(items_.size());
    out.value(stage_.fingerprint);
    estimate_.write(out, id_counters);
    phase_ = Phase::plan;
    return remember(std::move(out), {});
  }

  /// What follows from a message of the peer.
  ///
  /// Over a transport that loses: the side that started sends its last message again when nothing comes, the other one does so
  /// only when it waits for the very last message. A message that came before changes nothing, and is answered as before
  /// by the side that did not start, and by the other one when it is done.
  ///
  /// Errors: `corrupt`, `truncated` or `oversized` for bytes that contradict themselves or the session, `version_mismatch`,
  /// `quota_exceeded` for a set above the limits, and those of `start`.
  KVMELD_LAZY [[nodiscard]] Result<ReconcileReply> receive(std::span<const std::byte> message) {
    if (phase_ == Phase::failed) return failure_;
    ByteReader in(message);
    const auto first = in.value<std::uint8_t>();
    const std::uint64_t step = in.varint();
    if (!in.ok()) return fail(in.status("reconciliation message"));
    if (first >> 4U != version) return fail(detail::error(ErrorCode::version_mismatch, "reconciliation message of version ", first >> 4U));
    const bool theirs = (step % 2 == 1) == initiated_;
    if (theirs && step < step_) return again(step, message);
    if (step != step_ || phase_ == Phase::done) return fail(detail::error(ErrorCode::corrupt, "step ", step, " of a reconciliation that is at ", step_));
    ++step_;
    ByteWriter out;
    if (Status status = take(static_cast<Kind>(first & 15U), in, out); !status) return fail(std::move(status));
    if (Status status = in.finish("reconciliation message"); !status) return fail(std::move(status));
    if (phase_ == Phase::done) finish();
    ReconcileReply reply{.message = {}, .done = phase_ == Phase::done};
    if (out.size() != 0) reply.message = remember(std::move(out), message);
    return reply;
  }

  [[nodiscard]] bool done() const noexcept { return phase_ == Phase::done; }
  /// Complete once `done()`; empty before.
  [[nodiscard]] const ReconcileDifference& result() const noexcept { return result_; }

 private:
  enum class Phase : std::uint8_t { fresh, plan, cells, answers, tags, done, failed };
  enum class Kind : std::uint8_t { hello = 1, plan, cells, answers, close, tags, equal };
  static constexpr unsigned version = 1;
  static constexpr unsigned id_counters = 48, tag_counters = 24;

  KVMELD_LAZY [[nodiscard]] Status fail(Status status) {
    phase_ = Phase::failed;
    failure_ = std::move(status);
    return failure_;
  }
  void head(ByteWriter& out, Kind kind) {
    out.value(static_cast<std::uint8_t>((version << 4U) | static_cast<unsigned>(kind)));
    out.varint(step_++);
  }
  KVMELD_LAZY [[nodiscard]] std::vector<std::byte> remember(ByteWriter&& out, std::span<const std::byte> answered) {
    last_reply_ = out.take();
    last_received_ = XXH3_64bits(answered.data(), answered.size());
    return last_reply_;
  }
  KVMELD_LAZY [[nodiscard]] Result<ReconcileReply> again(std::uint64_t step, std::span<const std::byte> message) {
    ReconcileReply reply{.message = {}, .done = phase_ == Phase::done};
    const bool answers = !initiated_ || phase_ == Phase::done;  // else one message doubled would double all that follow
    if (answers && step + 2 == step_ && last_received_ == XXH3_64bits(message.data(), message.size())) reply.message = last_reply_;
    return reply;
  }

  KVMELD_LAZY [[nodiscard]] Status begin(std::uint64_t salt) {
    if (items_.size() > limits_.items) return detail::error(ErrorCode::quota_exceeded, items_.size(), " items, the limit is ", limits_.items);
    for (std::size_t i = 1; i < items_.size(); ++i) {
      if (!detail::id_before(items_[i - 1].id, items_[i].id)) return detail::error(ErrorCode::invalid_argument, "item ", i, " does not follow item ", i - 1, " by its id");
    }
    stage_.salt = salt;
    stage_.elements.resize(items_.size());
    for (std::size_t i = 0; i < items_.size(); ++i) {
      stage_.elements[i] = {detail::id_hash(items_[i].id, salt), static_cast<std::uint32_t>(i)};
    }
    count_elements();
    return {};
  }
  KVMELD_LAZY void count_elements() {
    estimate_ = {};
    stage_.fingerprint = detail::cell_fingerprint(stage_.elements);
    for (const detail::ReconcileElement& e : stage_.elements) estimate_.add(e.hash);
  }

  KVMELD_LAZY [[nodiscard]] Status take(Kind kind, ByteReader& in, ByteWriter& out) {
    switch (kind) {
      case Kind::hello:
        if (phase_ == Phase::fresh) return take_hello(in, out);
        break;
      case Kind::plan:
        if (phase_ == Phase::plan) return take_plan(in, out);
        break;
      case Kind::cells:
        if (phase_ == Phase::cells) return solve(in, out);
        break;
      case Kind::answers:
        if (phase_ == Phase::answers) return tell(in, out);
        break;
      case Kind::close:
        if (phase_ == Phase::answers || phase_ == Phase::plan) return take_close(in, out);
        break;
      case Kind::tags:
        if (phase_ == Phase::tags) return take_tags(in, out);
        break;
      case Kind::equal:
        if (phase_ != Phase::tags) break;
        phase_ = Phase::done;
        return {};
    }
    return detail::error(ErrorCode::corrupt, "reconciliation message of kind ", static_cast<unsigned>(kind), " at step ", step_ - 1);
  }

  KVMELD_LAZY [[nodiscard]] Status take_hello(ByteReader& in, ByteWriter& out) {
    const auto salt = in.value<std::uint64_t>();
    KVMELD_TRY(begin(salt));
    stage_.their_count = in.varint();
    return take_summary(in, out, id_counters);
  }
  KVMELD_LAZY [[nodiscard]] Status take_tags(ByteReader& in, ByteWriter& out) {
    begin_tags();
    return take_summary(in, out, tag_counters);
  }
  /// Fingerprint and counters of the peer's elements: plans the stage.
  KVMELD_LAZY [[nodiscard]] Status take_summary(ByteReader& in, ByteWriter& out, unsigned counters) {
    if (in.ok() && stage_.their_count > limits_.items) {
      return detail::error(ErrorCode::quota_exceeded, "the peer announces ", stage_.their_count, " items, the limit is ", limits_.items);
    }
    stage_.their_fingerprint = in.value<std::uint64_t>();
    const double estimate = estimate_.read(in, stage_.their_count, counters);
    KVMELD_TRY(in.status("reconciliation message"));
    const std::uint64_t ours = stage_.elements.size();
    if (stage_.their_count == ours && stage_.their_fingerprint == stage_.fingerprint) {
      stage_.plan.cells = 0;
      head(out, Kind::close);
      return close(out);
    }
    stage_.plan = detail::plan_cells((std::min)(ours, stage_.their_count), (std::max)(ours, stage_.their_count), estimate, stage_.tags);
    detail::cut(stage_);
    head(out, Kind::plan);
    out.varint(ours);
    out.value(stage_.plan.form);
    out.varint(stage_.plan.cells);
    out.varint(stage_.plan.capacity);
    phase_ = ours <= stage_.their_count ? Phase::answers : Phase::cells;
    if (phase_ == Phase::answers) detail::tell_next(out, stage_, window());
    return {};
  }
  KVMELD_LAZY [[nodiscard]] Status take_plan(ByteReader& in, ByteWriter& out) {
    stage_.their_count = in.varint();
    const auto form = in.value<std::uint8_t>();
    const std::uint64_t cells = in.varint();
    const std::uint64_t capacity = in.varint();
    KVMELD_TRY(in.status("reconciliation plan"));
    const std::uint64_t ours = stage_.elements.size(), fewer = (std::min)(ours, stage_.their_count);
    if (stage_.their_count > limits_.items) {
      return detail::error(ErrorCode::quota_exceeded, "the peer announces ", stage_.their_count, " items, the limit is ", limits_.items);
    }
    stage_.plan.form = static_cast<detail::CellForm>(form);
    if (form > 1 || cells == 0 || cells > detail::max_cells || capacity == 0 || capacity > detail::max_capacity ||
        (form == 0 && cells * capacity > 64 + 4 * fewer) || (stage_.tags && stage_.their_count != ours)) {
      return detail::error(ErrorCode::corrupt, "reconciliation plan of ", cells, " cells of form ", form, " and capacity ", capacity, " for ", fewer, " elements");
    }
    stage_.plan.cells = static_cast<std::uint32_t>(cells);
    stage_.plan.capacity = static_cast<std::uint32_t>(capacity);
    detail::cut(stage_);
    if (stage_.their_count <= ours) {
      summed_ = true;
      phase_ = Phase::cells;
      return solve(in, out);
    }
    head(out, Kind::cells);
    detail::tell_next(out, stage_, window());
    phase_ = Phase::answers;
    return {};
  }

  /// Cells that may be open at once, so that a message that names all that two cells hold stays within the limit.
  [[nodiscard]] std::size_t window() const noexcept {
    const std::uint64_t names = stage_.plan.form == detail::CellForm::sketch ? 2 * stage_.plan.capacity : (stage_.elements.size() + stage_.their_count) / stage_.plan.cells;
    return (std::max)(std::size_t{1}, limits_.message_bytes / static_cast<std::size_t>(16 + 40 * names));
  }

  KVMELD_LAZY [[nodiscard]] Status solve(ByteReader& in, ByteWriter& out) {
    ByteWriter answers;
    detail::solve(in, answers, stage_, items_);
    KVMELD_TRY(in.status("reconciliation cells"));
    head(out, stage_.settled() ? Kind::close : Kind::answers);
    out.bytes(answers.written());
    if (!stage_.settled()) {
      phase_ = Phase::cells;
      return {};
    }
    return close(out);
  }
  KVMELD_LAZY [[nodiscard]] Status tell(ByteReader& in, ByteWriter& out) {
    head(out, Kind::cells);
    detail::tell(in, out, stage_, items_);
    KVMELD_TRY(in.status("reconciliation answers"));
    if (stage_.settled()) return detail::error(ErrorCode::corrupt, "answers settle all ", stage_.plan.cells, " cells and do not close");
    detail::tell_next(out, stage_, window());
    return {};
  }
  /// The solving side is through: its fingerprint lets the other one check what it has.
  KVMELD_LAZY [[nodiscard]] Status close(ByteWriter& out) {
    if (summed_) stage_.their_fingerprint = stage_.seen_fingerprint;
    KVMELD_TRY(check());
    out.value(stage_.fingerprint);
    if (!stage_.tags) {
      keep_common();
      out.value(tags_fingerprint());
    }
    phase_ = stage_.tags ? Phase::done : Phase::tags;
    return {};
  }
  KVMELD_LAZY [[nodiscard]] Status take_close(ByteReader& in, ByteWriter& out) {
    ByteWriter nothing;
    detail::tell(in, nothing, stage_, items_);
    const bool planned = phase_ == Phase::answers;
    stage_.their_fingerprint = in.value<std::uint64_t>();
    const std::uint64_t tags = stage_.tags ? 0 : in.value<std::uint64_t>();
    KVMELD_TRY(in.status("reconciliation close"));
    if (planned && !stage_.settled()) return detail::error(ErrorCode::corrupt, stage_.open.size(), " cells are open where all should be settled");
    if (!planned) stage_.their_count = stage_.elements.size();
    KVMELD_TRY(check());
    if (stage_.tags) {
      phase_ = Phase::done;
      return {};
    }
    keep_common();
    if (tags == tags_fingerprint()) {
      head(out, Kind::equal);
      phase_ = Phase::done;
      return {};
    }
    head(out, Kind::tags);
    begin_tags();
    out.value(stage_.fingerprint);
    estimate_.write(out, tag_counters);
    phase_ = Phase::plan;
    return {};
  }
  KVMELD_LAZY [[nodiscard]] Status check() const {
    if (!stage_.agrees() || (stage_.tags && stage_.mine.size() != stage_.theirs.size())) {
      return detail::error(ErrorCode::corrupt, "reconciliation found ", stage_.mine.size(), " and ", stage_.theirs.size(), " differing elements, and they do not explain the fingerprints");
    }
    return {};
  }

  /// Ids of items, ascending as the items do.
  KVMELD_LAZY [[nodiscard]] std::vector<FragmentId> ids_of(std::vector<std::uint32_t>& numbers) const {
    std::sort(numbers.begin(), numbers.end());
    std::vector<FragmentId> ids;
    ids.reserve(numbers.size());
    for (const std::uint32_t i : numbers) ids.push_back(items_[i].id);
    return ids;
  }
  /// After the ids: what was found becomes the result, the elements of both sides stay.
  KVMELD_LAZY void keep_common() {
    std::vector<bool> alone(items_.size());
    for (const std::uint32_t i : stage_.mine) alone[i] = true;
    mine_only_ = ids_of(stage_.mine);
    for (const detail::TheirElement& their : stage_.theirs) theirs_only_.push_back(their.id);
    std::erase_if(stage_.elements, [&](const detail::ReconcileElement& e) { return alone[e.item]; });
    for (detail::ReconcileElement& e : stage_.elements) {
      e.hash = detail::mix_bits(e.hash + detail::mix_bits(items_[e.item].tag + stage_.salt));
    }
  }
  [[nodiscard]] std::uint64_t tags_fingerprint() const noexcept { return detail::cell_fingerprint(stage_.elements); }
  KVMELD_LAZY void begin_tags() {
    detail::ReconcileStage next;
    next.tags = true;
    next.salt = stage_.salt;
    next.elements = std::move(stage_.elements);
    next.their_count = next.elements.size();
    summed_ = false;
    stage_ = std::move(next);
    count_elements();
  }
  KVMELD_LAZY void finish() {
    if (stage_.tags) result_.different = ids_of(stage_.mine);
    result_.mine_only = std::move(mine_only_);
    result_.theirs_only = std::move(theirs_only_);
    std::sort(result_.theirs_only.begin(), result_.theirs_only.end(), detail::id_before);
    stage_ = {};
  }

  std::span<const ReconcileItem> items_;
  ReconcileLimits limits_;
  Phase phase_ = Phase::fresh;
  bool initiated_ = false;
  bool summed_ = false;  // the peer's fingerprint is what its cells come to
  std::uint64_t step_ = 0;  // of the next message, either side's
  Status failure_;
  detail::ReconcileStage stage_;
  detail::DifferenceEstimate estimate_;
  std::vector<FragmentId> mine_only_, theirs_only_;
  ReconcileDifference result_;
  std::vector<std::byte> last_reply_;
  std::uint64_t last_received_ = 0;
};

KVMELD_NAMESPACE_END
