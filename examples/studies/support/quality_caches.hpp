#pragma once
// What the agents of one question hold, as fragments: encoded right behind the prefix, behind a
// lead-in that is dropped, or behind the merged caches of all others.

#include "engine.hpp"
#include "splice.hpp"

#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace quality {

using example::Cost;
using example::Engine;
using example::Geometries;
using example::Tokens;
using Fragments = std::vector<kvmeld::Fragment>;

/// What the agents of a method did before there was a question, all of them together.
struct Before {
  std::size_t tokens = 0;  ///< decoded
  std::size_t bytes = 0;   ///< of K/V moved between them
};

/// Everything is encoded once and kept; sequences 0 and 1 are used and emptied.
class Caches {
 public:
  Caches(Engine& engine, const Geometries& geometries, const kvmeld::exec::Threads& exec,
         Tokens prefix, std::vector<Tokens> notes)
      : engine_(engine),
        geometries_(geometries),
        exec_(exec),
        prefix_(std::move(prefix)),
        notes_(std::move(notes)) {}

  [[nodiscard]] const std::shared_ptr<const kvmeld::Geometry>& geometry(bool rotate) const {
    return rotate ? geometries_.declared : geometries_.unrotated;
  }

  /// Each agent's passages right behind the prefix. Without `rotate` their keys are declared to
  /// have no position, so that a merge leaves them at the angles at which they were read.
  kvmeld::Result<Fragments> plain(bool rotate, Before& before) {
    if (kvmeld::Status status = encode_plain(); !status) return status;
    Fragments out;
    for (std::size_t i = 0; i < notes_.size(); ++i) {
      auto one = sealed(plain_[i], notes_[i].size(), {}, rotate);
      if (!one) return one.error();
      out.push_back(*std::move(one));
      before.tokens += prefix_.size() + notes_[i].size();
    }
    return out;
  }

  /// Each agent's passages behind its lead-in, and beside them the encoding without, which is read
  /// of the fragment that renders first.
  kvmeld::Result<Fragments> led(const std::vector<Tokens>& leads, Before& before) {
    if (kvmeld::Status status = encode_plain(); !status) return status;
    Fragments out;
    for (std::size_t i = 0; i < notes_.size(); ++i) {
      engine_.forget_all();
      auto encoded = encode(leads[i], notes_[i]);
      if (!encoded) return encoded.error();
      auto one = both(*encoded, i, kvmeld::lead_in_digest(leads[i]));
      if (!one) return one.error();
      out.push_back(*std::move(one));
      before.tokens += prefix_.size() + leads[i].size() + 2 * notes_[i].size();
    }
    engine_.forget_all();
    return out;
  }

  /// After so many rounds in which every agent read its own passages again behind the merged caches
  /// of others, as the round before left them, and kept only its own rows. The others are all, or
  /// where `top` is above 0 the `top` ones that share most token ids with it.
  kvmeld::Result<Fragments> refreshed(std::size_t rounds, std::size_t top, Before& before) {
    std::vector<Round>& done = rounds_[top];
    if (done.empty()) {
      Before first;
      auto one = plain(true, first);
      if (!one) return one.error();
      done.push_back({*std::move(one), first});
    }
    while (done.size() <= rounds) {
      Round next{{}, done.back().before};
      for (std::size_t i = 0; i < notes_.size(); ++i) {
        auto one = reread(done.back().fragments, i, others_of(i, top), next.before);
        if (!one) return one.error();
        next.fragments.push_back(*std::move(one));
      }
      done.push_back(std::move(next));
    }
    before = done[rounds].before;
    return done[rounds].fragments;
  }

  /// What one agent that read everything would hold; empties sequence 0.
  kvmeld::Result<const kvmeld::llama::SequenceState*> full() {
    if (!full_) {
      Tokens all;
      for (const Tokens& notes : notes_) example::append(all, notes);
      auto one = encode({}, all);
      if (!one) return one.error();
      full_ = std::move(one->state);
      engine_.forget_all();
    }
    return &*full_;
  }

  /// The prefix and the fragments named, inserted in the order given, each from a replica of its
  /// own.
  kvmeld::Result<kvmeld::FragmentSet> set_of(const Fragments& fragments, bool rotate,
                                             std::span<const std::size_t> order) {
    auto prefix = prefix_fragment(rotate);
    if (!prefix) return prefix.error();
    kvmeld::FragmentSet set;
    for (const std::size_t i : order) {
      kvmeld::FragmentSet one;
      if (kvmeld::Status status = one.insert(fragments[i], kvmeld::Dot{i, 0}); !status)
        return status;
      auto joined = join(set, one);
      if (!joined) return joined.error();
      set = *std::move(joined);
    }
    if (kvmeld::Status status = set.insert(*prefix); !status) return status;
    return set;
  }

  /// Renders into sequence 0, in the agents' order; `cost` says what that took.
  template <class Seam>
  kvmeld::Status render(const Fragments& fragments, const Seam& seam, bool rotate, Cost& cost) {
    auto set = set_of(fragments, rotate, everyone());
    if (!set) return set.error();
    engine_.forget_all();
    return example::render_into(engine_, exec_, *set, kvmeld::merger(kvmeld::ByDot{}, seam),
                                geometry(rotate), prefix_state_->form(), cost);
  }

  /// The positions that a render with this seam leaves to the engine.
  template <class Seam>
  kvmeld::Result<std::vector<std::int64_t>> holes(const Fragments& fragments, const Seam& seam,
                                                  bool rotate) {
    auto set = set_of(fragments, rotate, everyone());
    if (!set) return set.error();
    const auto plan =
        kvmeld::plan(*set, kvmeld::merger(kvmeld::ByDot{}, seam), {.geometry = *geometry(rotate)});
    if (!plan) return plan.error();
    std::vector<std::int64_t> out;
    for (const kvmeld::Hole& hole : plan->holes()) out.push_back(hole.position);
    return out;
  }

  /// What a render of the fragments would hold after they were inserted in this order.
  kvmeld::Result<kvmeld::Digest128> digest_of(const Fragments& fragments, bool rotate,
                                              std::span<const std::size_t> order) {
    auto set = set_of(fragments, rotate, order);
    if (!set) return set.error();
    const auto plan =
        kvmeld::plan(*set, kvmeld::merger(kvmeld::ByDot{}), {.geometry = *geometry(rotate)});
    if (!plan) return plan.error();
    auto blob = kvmeld::llama::make_state(geometry(rotate), prefix_state_->form(),
                                          plan->positions(), plan->token_ids());
    if (!blob) return blob.error();
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto report =
        kvmeld::run(exec_, *plan, workspace, blob->mutable_ref(), {.content_digest = true});
    if (!report) return report.error();
    return *report->content_digest;
  }

  [[nodiscard]] std::vector<std::size_t> everyone() const {
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < notes_.size(); ++i) order.push_back(i);
    return order;
  }

 private:
  struct Encoded {
    kvmeld::llama::SequenceState state;
    Tokens tokens;  ///< all of the sequence
  };
  struct Round {
    Fragments fragments;
    Before before;
  };

  static kvmeld::Status refused() {
    return {kvmeld::ErrorCode::engine_failure,
            "the engine refused passages; is the context too small?"};
  }

  /// Decodes the tokens behind what sequence 0 holds and takes the sequence out of the engine.
  kvmeld::Result<Encoded> decode(Tokens held, const Tokens& more) {
    if (!more.empty() && !engine_.prefill(more, static_cast<llama_pos>(held.size()), 0))
      return refused();
    auto state = kvmeld::llama::read(engine_.context(), 0, geometries_.declared);
    if (!state) return state.error();
    example::append(held, more);
    return Encoded{*std::move(state), std::move(held)};
  }

  /// Prefix, lead-in and passages from nothing.
  kvmeld::Result<Encoded> encode(const Tokens& lead, const Tokens& notes) {
    engine_.forget_all();
    Tokens all = prefix_;
    example::append(all, lead);
    example::append(all, notes);
    return decode({}, all);
  }

  kvmeld::Status encode_plain() {
    if (!plain_.empty()) return {};
    auto prefix = encode({}, {});
    if (!prefix) return prefix.error();
    prefix_state_ = std::move(prefix->state);
    for (const Tokens& notes : notes_) {
      auto one = encode({}, notes);
      if (!one) return one.error();
      plain_.push_back(*std::move(one));
    }
    engine_.forget_all();
    return {};
  }

  kvmeld::Result<kvmeld::Fragment> prefix_fragment(bool rotate) {
    if (kvmeld::Status status = encode_plain(); !status) return status;
    kvmeld::Fragment& prefix = prefix_fragment_[rotate ? 0 : 1];
    if (prefix.valid()) return prefix;
    const auto view = kvmeld::llama::view_state(prefix_state_->bytes(), geometry(rotate));
    if (!view) return view.error();
    auto made = kvmeld::seal(
        view->cache,
        {.role = kvmeld::Role::prefix, .tokens = prefix_, .positions = prefix_state_->positions()});
    if (made) prefix = *made;
    return made;
  }

  /// How the last `keep` tokens of a sequence are sealed.
  kvmeld::Result<kvmeld::SealOptions> options(const Encoded& one, std::size_t keep,
                                              const kvmeld::Digest128& lead, bool rotate) {
    auto prefix = prefix_fragment(rotate);
    if (!prefix) return prefix.error();
    return kvmeld::SealOptions{.tokens = one.tokens,
                               .positions = one.state.positions(),
                               .drop_first = static_cast<std::int64_t>(one.tokens.size() - keep),
                               .context = {.prefix = prefix->id(), .lead_in = lead}};
  }

  kvmeld::Result<kvmeld::Fragment> sealed(const Encoded& one, std::size_t keep,
                                          const kvmeld::Digest128& lead, bool rotate) {
    auto how = options(one, keep, lead, rotate);
    if (!how) return how.error();
    const auto view = kvmeld::llama::view_state(one.state.bytes(), geometry(rotate));
    if (!view) return view.error();
    return kvmeld::seal(view->cache, *how);
  }

  /// An agent's passages as they were read behind `lead`, and beside them as read without it.
  kvmeld::Result<kvmeld::Fragment> both(const Encoded& one, std::size_t agent,
                                        const kvmeld::Digest128& lead) {
    const std::size_t keep = notes_[agent].size();
    auto fragment = sealed(one, keep, lead, true);
    if (!fragment) return fragment.error();
    auto how = options(plain_[agent], keep, {}, true);
    if (!how) return how.error();
    return kvmeld::with_variant(*fragment, plain_[agent].state.view(), *how);
  }

  /// Behind whom an agent reads again, in the merged order.
  [[nodiscard]] std::vector<std::size_t> others_of(std::size_t agent, std::size_t top) const {
    std::vector<std::size_t> others = everyone();
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(agent));
    if (top == 0 || top >= others.size()) return others;
    const std::set<llama_token> own(notes_[agent].begin(), notes_[agent].end());
    const auto shared = [&](std::size_t other) {
      const std::set<llama_token> theirs(notes_[other].begin(), notes_[other].end());
      return std::count_if(theirs.begin(), theirs.end(),
                           [&](llama_token token) { return own.contains(token); });
    };
    std::stable_sort(others.begin(), others.end(),
                     [&](std::size_t a, std::size_t b) { return shared(a) > shared(b); });
    others.resize(top);
    std::sort(others.begin(), others.end());
    return others;
  }

  /// One agent's share of a round.
  kvmeld::Result<kvmeld::Fragment> reread(const Fragments& last, std::size_t agent,
                                          const std::vector<std::size_t>& others, Before& before) {
    auto set = set_of(last, true, others);
    if (!set) return set.error();
    engine_.forget_all();
    Cost cost;
    if (kvmeld::Status status =
            example::render_into(engine_, exec_, *set, kvmeld::merger(kvmeld::ByDot{}),
                                 geometry(true), prefix_state_->form(), cost);
        !status)
      return status;
    Tokens held = prefix_;
    std::vector<kvmeld::FragmentId> ids;
    for (const std::size_t i : others) {
      example::append(held, notes_[i]);
      ids.push_back(last[i].id());
    }
    auto encoded = decode(std::move(held), notes_[agent]);
    if (!encoded) return encoded.error();
    engine_.forget_all();
    before.tokens += notes_[agent].size();
    before.bytes += cost.bytes;
    return kvmeld::refresh::seal(last[agent], encoded->state.view(), encoded->state.positions(),
                                 kvmeld::refresh::context_digest(ids));
  }

  Engine& engine_;
  const Geometries& geometries_;
  const kvmeld::exec::Threads& exec_;
  Tokens prefix_;
  std::vector<Tokens> notes_;
  std::optional<kvmeld::llama::SequenceState> prefix_state_, full_;
  std::vector<Encoded> plain_;
  kvmeld::Fragment prefix_fragment_[2];
  std::map<std::size_t, std::vector<Round>> rounds_;  // by `top`, then by rounds done
};

}  // namespace quality
