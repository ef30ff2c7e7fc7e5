#pragma once

/// What an agent's session does at a safe point.

#include <kvmeld/session/agent_session.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// The lead-in of what is said behind a merged cache: what was rendered, and what was carried
/// behind it.
[[nodiscard]] inline Digest128 swapped_lead_in(const Digest128& render_id,
                                               std::span<const Fragment> carried) {
  Hasher hasher;
  hasher.text("kvmeld.lead_in.swapped");
  hasher.value(render_id.low);
  hasher.value(render_id.high);
  for (const Fragment& fragment : carried)
    hasher.bytes(std::as_bytes(std::span(fragment.id().bytes)));
  return hasher.digest();
}

}  // namespace detail

template <class M, BlobStore S, Transport T, SwapMemory Memory, ExecutionPolicy E,
          Authenticator Auth, ContentHash Hash, Compressor C>
Result<std::optional<SwapReport>> AgentSession<M, S, T, Memory, E, Auth, Hash, C>::try_swap() {
  if (auto newer = worker_.take()) ready_ = std::move(newer);
  if (!ready_) return std::optional<SwapReport>();
  const double begin = steady_ms();
  const std::uint64_t request = ready_->request;
  const auto end = [&](Status status) {
    const std::lock_guard lock(mutex_);
    installing_ = 0;
    ended_.emplace(request, status);
    std::erase_if(asked_, [&](const Asked& a) { return a.request <= request; });
    ready_.reset();
    return status;
  };
  if (!ready_->status) return end(ready_->status);
  KVMELD_TRY(end_span().status());  // a variant that is not whole yet: the next safe point will do
  std::vector<Fragment> carried, kept;  // with and without what nobody takes
  Asked asked;
  {
    const std::lock_guard lock(mutex_);
    const auto at = std::find_if(asked_.begin(), asked_.end(),
                                 [&](const Asked& a) { return a.request == request; });
    // of a round that ended with the old cache
    if (at == asked_.end() || (at->round != 0 && request != round_request_)) {
      ready_.reset();
      return std::optional<SwapReport>();
    }
    asked = *at;
    installing_ = request;
    for (const Said& said : said_) {
      if (!said.fragment.valid() || asked.had(said.id)) continue;
      carried.push_back(said.fragment);
      if (!said.refused) kept.push_back(said.fragment);
    }
  }
  bool forget_refused = false;
  SwapReport report;
  report.render = ready_->rendered->report;
  report.render_ms = ready_->rendered->render_ms;
  report.round = asked.round;
  report.missing = asked.missing;
  const auto install = [&] {
    return memory_.install(std::shared_ptr(ready_->rendered), carried,
                           options_.target.first_position);
  };
  auto installed = install();
  // what nobody takes does not keep out what others said
  if (!installed && kept.size() < carried.size()) {
    carried = std::move(kept);
    installed = install();
    forget_refused = installed.ok();
  }
  if (!installed) return end(installed.error());
  report.install = *installed;
  SpanStart next;
  next.context.prefix = options_.start.context.prefix;
  next.context.lead_in = detail::swapped_lead_in(report.render.render_id, carried);
  next.first_position = installed->next_position;
  next.variant_position = options_.start.variant_position;
  span_.begin(next);
  report.swap_ms = steady_ms() - begin;
  (void)end({});
  const std::lock_guard lock(mutex_);
  std::erase_if(said_, [&](const Said& said) { return forget_refused && said.refused; });
  for (Said& said : said_) {  // the set has them; what is asked for and lacks them carries them yet
    const auto has = [&](const Asked& a) { return a.had(said.id); };
    if (has(asked) && std::all_of(asked_.begin(), asked_.end(), has)) said.fragment = {};
  }
  ++counted_.swaps;
  counted_.swap_ms += report.swap_ms;
  counted_.import_ms += report.install.import_ms;
  counted_.carried_tokens += static_cast<std::uint64_t>(report.install.carried_tokens);
  ++counted_.renders;
  counted_.render_ms += report.render_ms;
  return std::optional(std::move(report));
}

KVMELD_NAMESPACE_END
