#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <kvmeld/state/render.hpp>

KVMELD_NAMESPACE_BEGIN

/// A plan whose merger's type is forgotten: what engines need to make room for it, and to render
/// it. A copy shares the plan.
class CandidatePlan {
 public:
  template <class M>
  explicit CandidatePlan(Plan<M> plan) {
    auto shared = std::make_shared<const Plan<M>>(std::move(plan));
    core_ = &shared->core();
    run_ = [](const void* self, const exec::Threads& exec, std::span<std::byte> workspace,
              const MutableKvCacheRef& out, const RunOptions& options) {
      return kvmeld::run(exec, *static_cast<const Plan<M>*>(self), workspace, out, options);
    };
    workspace_bytes_ = shared->workspace_bytes();
    plan_ = std::move(shared);
  }

  /// Output tokens, holes included: rows that `out` must have.
  [[nodiscard]] std::int64_t tokens() const noexcept { return core_->outputs(); }
  [[nodiscard]] std::span<const std::int64_t> positions() const noexcept {
    return core_->positions;
  }
  /// Id of each output token; −1 where it is not known.
  [[nodiscard]] std::span<const TokenId> token_ids() const noexcept { return core_->tokens; }
  /// Output tokens that the engine computes after the render, ascending.
  [[nodiscard]] std::span<const Hole> holes() const noexcept { return core_->holes; }
  [[nodiscard]] const std::shared_ptr<const Geometry>& shared_geometry() const noexcept {
    return core_->geometry;
  }
  [[nodiscard]] const Digest128& render_id() const noexcept { return core_->render_id; }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept { return workspace_bytes_; }

  /// `kvmeld::run` with the plan's own merger; its bytes and its errors.
  [[nodiscard]] Result<RenderReport> run(const exec::Threads& exec, std::span<std::byte> workspace,
                                         const MutableKvCacheRef& out,
                                         const RunOptions& options = {}) const {
    return run_(plan_.get(), exec, workspace, out, options);
  }

 private:
  std::shared_ptr<const void> plan_;
  const detail::PlanCore* core_ = nullptr;
  Result<RenderReport> (*run_)(const void*, const exec::Threads&, std::span<std::byte>,
                               const MutableKvCacheRef&, const RunOptions&) = nullptr;
  std::size_t workspace_bytes_ = 0;
};

/// A merger with a name and without its type, so that mergers of different policies stand in one
/// list and one is chosen at run time.
///
/// Two calls through a pointer a render; rows are fused by the merger's own code. A copy shares the
/// merger.
class Candidate {
 public:
  template <class M>
  Candidate(std::string name, M merger)
      : name_(std::move(name)),
        digest_(merger.digest()),
        reproducible_(M::reproducible),
        merger_(std::make_shared<const M>(std::move(merger))),
        plan_([](const void* self, const FragmentSet& set,
                 const Target& target) -> Result<CandidatePlan> {
          auto made = kvmeld::plan(set, *static_cast<const M*>(self), target);
          if (!made) return made.error();
          return CandidatePlan(*std::move(made));
        }) {}

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// The merger's, which replicas compare.
  [[nodiscard]] const Digest128& digest() const noexcept { return digest_; }
  [[nodiscard]] bool reproducible() const noexcept { return reproducible_; }
  /// `kvmeld::plan` with the candidate's merger; its errors.
  [[nodiscard]] Result<CandidatePlan> plan(const FragmentSet& set, const Target& target) const {
    return plan_(merger_.get(), set, target);
  }

 private:
  std::string name_;
  Digest128 digest_;
  bool reproducible_ = false;
  std::shared_ptr<const void> merger_;
  Result<CandidatePlan> (*plan_)(const void*, const FragmentSet&, const Target&) = nullptr;
};

KVMELD_NAMESPACE_END
