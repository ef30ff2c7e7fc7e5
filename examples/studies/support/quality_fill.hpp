#pragma once
// One question dealt to agents, and what each method leaves in the engine for the question to be
// put to.

#include "engine.hpp"
#include "prompt.hpp"
#include "quality_caches.hpp"
#include "quality_choose.hpp"
#include "quality_data.hpp"
#include "quality_edit.hpp"
#include "quality_leads.hpp"
#include "quality_measure.hpp"
#include "quality_method.hpp"
#include "quality_policies.hpp"
#include "splice.hpp"
#include "summaries.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace quality {

inline constexpr const char* system_text =
    "Answer the question from the passages. Answer with a few words.\n\nPassages:\n";
inline constexpr const char* summary_text =
    "Summarise these passages in a few short sentences for a colleague who has not read them.";
inline constexpr double summary_share = 0.5;
inline constexpr std::size_t recall_tokens = 24;
inline constexpr llama_seq_id first_joined = 2;  ///< 0 the cache, 1 the spare, up to 8 agents
inline constexpr float ape_temperature = 0.9F;
inline constexpr float pced_contrast = 0.5F;

inline kvmeld::Status refused() {
  return {kvmeld::ErrorCode::engine_failure, "the engine refused a prompt; is it too long?"};
}

/// What a method left for the question to be put to.
struct Filled {
  std::vector<Held> held;
  Join join;
  Before before;
  Cost cost;  ///< after the question is known
};

/// One question dealt to some agents.
struct Dealt {
  const Item& item;
  const std::vector<Item>& items;
  std::vector<std::vector<std::size_t>> shares;  // (agent, passage)
  Tokens prefix;
  std::vector<Tokens> notes;  // (agent, token)
  Asked asked;
};

inline Dealt make_dealt(const Engine& engine, const Item& item, const std::vector<Item>& items,
                        std::size_t agents, std::uint64_t seed) {
  Dealt out{item, items, deal(item, agents, seed), {}, {}, {}};
  const example::Frame frame = example::make_frame(engine, system_text, item.question);
  out.prefix = engine.tokens(frame.prefix, true, true);
  for (const auto& share : out.shares) {
    Tokens notes;
    for (const std::size_t p : share)
      example::append(notes, engine.tokens(line_of(item.passages[p])));
    out.notes.push_back(std::move(notes));
  }
  // of the passages, any may be asked for
  example::Draw draw(seed * 31 + agents + item.question.size());
  draw.next();
  const Passage& passage = item.passages[draw.below(item.passages.size())];
  const example::Frame recall =
      example::make_frame(engine, system_text, "Repeat the passage titled " + passage.title + ":");
  out.asked.question = engine.tokens(frame.middle, true);
  out.asked.gold = engine.tokens(item.answers[0]);
  out.asked.request = engine.tokens(recall.middle, true);
  out.asked.passage = engine.tokens(passage.text);
  if (out.asked.passage.size() > recall_tokens) out.asked.passage.resize(recall_tokens);
  out.asked.answers = item.answers;
  return out;
}

/// Ids that end a sentence or a line, among those of the notes.
inline std::vector<kvmeld::TokenId> sentence_ends(const Engine& engine,
                                                  const std::vector<Tokens>& notes) {
  std::vector<kvmeld::TokenId> out;
  for (const Tokens& some : notes) out.insert(out.end(), some.begin(), some.end());
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  std::erase_if(out, [&](kvmeld::TokenId id) {
    const std::string text = engine.text(id);
    return text.empty() || std::string(".!?\n").find(text.back()) == std::string::npos;
  });
  return out;
}

/// Sequence 0 holds text that an agent reads: what it knew before the question, and what it reads
/// after.
inline kvmeld::Status fill_text(Engine& engine, const Dealt& dealt, const Method& method,
                                Filled& out) {
  using Source = Method::Source;
  Tokens known = dealt.prefix, after;
  if (method.source == Source::full_text) {
    after = std::move(known);
    known = {};
    for (const Tokens& notes : dealt.notes) example::append(after, notes);
  } else if (method.source != Source::none) {
    example::append(known, dealt.notes[0]);
  }
  out.before.tokens = known.size();
  if (method.source == Source::text_summary) {
    const Tokens request =
        engine.tokens(example::make_frame(engine, system_text, summary_text).middle, true);
    std::vector<Tokens> summaries;
    const std::size_t decoded = engine.decoded();
    if (!example::write_summaries(engine, dealt.prefix, dealt.notes, request, summary_share,
                                  summaries))
      return refused();
    out.before.tokens += engine.decoded() - decoded;
    after = example::joined(engine, summaries, out.cost.bytes);
  }
  engine.forget_all();
  if (!known.empty() && !engine.prefill(known, 0, 0)) return refused();
  const example::Stopwatch watch;
  if (!after.empty() && !engine.prefill(after, static_cast<llama_pos>(known.size()), 0))
    return refused();
  out.cost.prefill_ms = watch.milliseconds();
  out.cost.prefilled_tokens = after.size();
  out.cost.length = static_cast<llama_pos>(known.size() + after.size());
  out.held = {{0, out.cost.length}};
  return {};
}

inline kvmeld::Result<Fragments> fragments_of(Engine& engine, const Dealt& dealt,
                                              const Method& method, Caches& caches,
                                              Before& before) {
  if (method.rounds > 0) return caches.refreshed(method.rounds, method.top, before);
  if (method.lead == Method::Lead::none) return caches.plain(method.rotate, before);
  return caches.led(leads_of(engine, method.lead, dealt.items, dealt.item, dealt.shares), before);
}

/// All tokens of the merged sequence.
inline Tokens all_tokens(const Dealt& dealt) {
  Tokens all = dealt.prefix;
  for (const Tokens& notes : dealt.notes) example::append(all, notes);
  return all;
}

/// Marks the share of all passages' tokens that the method would have computed again, by scores of
/// the merge without seam. `cost` gains what the answering agent computes for that.
inline kvmeld::Result<SeamChosen> choose_tokens(Engine& engine, QueryTap& tap, const Dealt& dealt,
                                                const Method& method, Caches& caches,
                                                const Fragments& fragments, Cost& cost) {
  if (kvmeld::Status status = caches.render(fragments, kvmeld::SeamNone{}, true, cost); !status)
    return status;
  const Tokens all = all_tokens(dealt);
  kvmeld::Result<std::vector<double>> scores{std::vector<double>{}};
  const example::Stopwatch watch;
  if (method.seam == Method::Seam::query) {
    auto merged = kvmeld::llama::read(engine.context(), 0, caches.geometry(true));
    if (!merged) return merged.error();
    tap.start();
    const bool asked = engine.prefill(dealt.asked.question, static_cast<llama_pos>(all.size()), 0);
    scores = attention_mass(tap.stop(), *merged, all);
    if (!asked) return refused();
    cost.prefilled_tokens = dealt.asked.question.size();
    cost.prefill_ms = watch.milliseconds();
  } else {
    auto merged = kvmeld::llama::read(engine.context(), 0, caches.geometry(true));
    if (!merged) return merged.error();
    const auto full = caches.full();
    if (!full) return full.error();
    scores = deviation(merged->view(), (*full)->view());
  }
  if (!scores) return scores.error();
  const auto count = static_cast<std::size_t>(
      std::ceil(method.amount * static_cast<float>(all.size() - dealt.prefix.size())));
  return SeamChosen{highest(*scores, dealt.prefix.size(), dealt.notes, count)};
}

/// Sequence 0 holds a merge whose later fragments' beginnings were computed again; the mean of what
/// that changed is added to the rest of each fragment (AgentKVShift, arXiv 2607.21604).
template <class Seam>
kvmeld::Status fill_offset(Engine& engine, const Dealt& dealt, Caches& caches,
                           const Fragments& fragments, const Seam& seam, Cost& cost) {
  if (kvmeld::Status status = caches.render(fragments, kvmeld::SeamNone{}, true, cost); !status)
    return status;
  auto cached = kvmeld::llama::read(engine.context(), 0, caches.geometry(true));
  if (!cached) return cached.error();
  if (kvmeld::Status status = caches.render(fragments, seam, true, cost); !status) return status;
  auto seamed = kvmeld::llama::read(engine.context(), 0, caches.geometry(true));
  if (!seamed) return seamed.error();
  const auto holes = caches.holes(fragments, seam, true);
  if (!holes) return holes.error();
  const example::Stopwatch watch;
  const Tokens all = all_tokens(dealt);
  std::vector<const MeanOffset*> of_token(all.size(), nullptr);
  std::vector<MeanOffset> offsets;
  offsets.reserve(dealt.notes.size());
  std::size_t first = dealt.prefix.size() + dealt.notes[0].size();
  for (std::size_t agent = 1; agent < dealt.notes.size(); ++agent) {
    Stretch stretch{first, std::vector<std::uint8_t>(dealt.notes[agent].size(), 0)};
    for (const std::int64_t hole : *holes) {
      const auto at = static_cast<std::size_t>(hole);
      if (at >= first && at < first + stretch.recomputed.size()) stretch.recomputed[at - first] = 1;
    }
    auto offset = MeanOffset::measure(cached->view(), seamed->view(), stretch);
    if (!offset) return offset.error();
    offsets.push_back(*std::move(offset));
    for (std::size_t i = 0; i < stretch.recomputed.size(); ++i)
      if (stretch.recomputed[i] == 0) of_token[first + i] = &offsets.back();
    first += stretch.recomputed.size();
  }
  kvmeld::Status added;
  const kvmeld::Geometry& geometry = *caches.geometry(true);
  const kvmeld::Status status = edit(engine, caches.geometry(true), all,
                                     [&](const kvmeld::CacheRow& row, std::vector<float>& values) {
                                       const MeanOffset* offset =
                                           of_token[static_cast<std::size_t>(row.token)];
                                       if (offset != nullptr && added)
                                         added = offset->add(geometry, row, values);
                                     });
  cost.recompute_ms += watch.milliseconds();
  return added ? status : added;
}

/// Sequence 0 holds the agents' merged caches.
inline kvmeld::Status fill_merged(Engine& engine, QueryTap& tap, const Dealt& dealt,
                                  const Method& method, Caches& caches, const Fragments& fragments,
                                  Filled& out) {
  using Seam = Method::Seam;
  const auto render = [&](const auto& seam) {
    return caches.render(fragments, seam, method.rotate, out.cost);
  };
  kvmeld::Status status;
  if (method.seam == Seam::none) {
    status = render(kvmeld::SeamNone{});
    if (status && method.temperature)
      status = cool_keys(engine, caches.geometry(true), all_tokens(dealt), dealt.prefix.size(),
                         ape_temperature);
  } else if (method.seam == Seam::first) {
    status = render(SeamFirst{static_cast<std::int64_t>(method.amount)});
  } else if (method.seam == Seam::share) {
    const kvmeld::SeamShare seam{.share = method.amount,
                                 .boundary_tokens = sentence_ends(engine, dealt.notes)};
    status = method.offset ? fill_offset(engine, dealt, caches, fragments, seam, out.cost)
                           : render(seam);
  } else {
    Cost choosing;
    const auto seam = choose_tokens(engine, tap, dealt, method, caches, fragments, choosing);
    if (!seam) return seam.error();
    status = render(*seam);
    out.cost.prefill_ms = choosing.prefill_ms;
    out.cost.prefilled_tokens += choosing.prefilled_tokens;
  }
  out.cost.bytes += out.before.bytes;
  out.held = {{0, out.cost.length}};
  return status;
}

/// Logits of what each agent says and, last, of what is said without passages, as one: for each
/// token the most that an agent gives it, in contrast to none of them (PCED, arXiv 2601.08670, with
/// all agents weighed alike).
inline std::vector<float> contrast(std::span<const std::vector<float>> each) {
  const std::vector<float>& prior = each.back();
  const double prior_total = example::log_sum_exp(prior);
  std::vector<float> out(prior.size(), -1e30F);
  for (std::size_t k = 0; k + 1 < each.size(); ++k) {
    const double total = example::log_sum_exp(each[k]);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto own = static_cast<float>(static_cast<double>(each[k][i]) - total);
      const auto other = static_cast<float>(static_cast<double>(prior[i]) - prior_total);
      out[i] = std::max(out[i], own + pced_contrast * (own - other));
    }
  }
  return out;
}

/// Every agent's own cache in a sequence of its own, and one of the prefix alone: nothing is merged
/// but logits, whose bytes count for one token of the answer.
inline kvmeld::Status fill_joined(Engine& engine, const Dealt& dealt, Filled& out) {
  engine.forget_all();
  const auto prefix = static_cast<llama_pos>(dealt.prefix.size());
  if (!engine.prefill(dealt.prefix, 0, 0)) return refused();
  for (std::size_t agent = 0; agent < dealt.notes.size(); ++agent) {
    const Tokens& notes = dealt.notes[agent];
    const auto sequence = first_joined + static_cast<llama_seq_id>(agent);
    engine.branch(0, sequence);
    if (!engine.prefill(notes, prefix, sequence)) return refused();
    out.held.push_back({sequence, prefix + static_cast<llama_pos>(notes.size())});
    out.before.tokens += dealt.prefix.size() + notes.size();
  }
  out.held.push_back({0, prefix});
  out.join = contrast;
  out.cost.prefilled_tokens = dealt.asked.question.size() * dealt.notes.size();
  out.cost.bytes = dealt.notes.size() * engine.vocabulary_size() * sizeof(float);
  return {};
}

/// Fills the engine as the method says; where fragments are merged, gives them to
/// `inspect(fragments)` before.
template <class Inspect>
kvmeld::Status fill(Engine& engine, QueryTap& tap, const Dealt& dealt, const Method& method,
                    Caches& caches, const Inspect& inspect, Filled& out) {
  if (method.source == Method::Source::logits) return fill_joined(engine, dealt, out);
  if (method.source != Method::Source::merged) return fill_text(engine, dealt, method, out);
  auto fragments = fragments_of(engine, dealt, method, caches, out.before);
  if (!fragments) return fragments.error();
  if (kvmeld::Status status = inspect(*fragments); !status) return status;
  return fill_merged(engine, tap, dealt, method, caches, *fragments, out);
}

}  // namespace quality
