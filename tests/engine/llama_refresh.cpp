// Fragments read again by a live engine behind the merged caches of the others.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <kvmeld/calibrate.hpp>
#include <kvmeld/engine/detail/llama_geometry.hpp>
#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>

#include "support/catch.hpp"
#include "support/llama_context.hpp"
#include "support/llama_tiny_model.hpp"

// example-begin: a round with llama.cpp
// One round of one agent: its fragment, read again behind what the others hold, takes its place.
kvmeld::Status refresh_round(llama_context* context, const kvmeld::llama::StateForm& form,
                             kvmeld::FragmentSet& said, const kvmeld::FragmentId& mine,
                             std::uint64_t agent, std::uint64_t& next_dot) {
  using namespace kvmeld;
  const Target target{said.find(mine)->fragment.geometry()};
  llama::Refresher read(context, form, merger(ByDot{}), target);  // sequences 0 and 1 are empty
  const auto again = read(said, mine);
  if (!again) return again.error();
  KVMELD_TRY(said.insert(*again, Dot{agent, next_dot++}));
  return said.supersede(mine, again->id(), Dot{agent, next_dot++});
}
// example-end

using namespace kvmeld;

namespace {

std::vector<TokenId> drawn_tokens(int count, int salt) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 131 + salt * 17) % 300);
  return tokens;
}
std::vector<TokenId> joined(std::vector<TokenId> a, const std::vector<TokenId>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// One model and the caches of agents in it, sealed plainly behind a prefix.
struct Agents {
  test::TinyModelFile file;
  test::EngineModel model;
  llama_context_params parameters = test::engine_parameters();
  test::EngineContext context;
  std::shared_ptr<const Geometry> geometry;
  llama::StateForm form;
  std::vector<TokenId> prefix = drawn_tokens(9, 1);
  std::vector<Fragment> own;
  FragmentSet set;

  explicit Agents(const test::TinyModel& tiny, const std::vector<std::vector<TokenId>>& texts)
      : file(tiny), model(file.path()), context(model, parameters) {
    geometry = std::make_shared<const Geometry>(
        *llama::geometry(model.get(), parameters, {.adapters = Adapters::none()}));
    const llama::SequenceState state = encode(prefix);
    form = state.form();
    const auto head = seal(state.view(), {.role = Role::prefix, .tokens = prefix});
    REQUIRE(head.ok());
    REQUIRE(set.insert(*head).ok());
    for (const std::vector<TokenId>& text : texts) {
      const std::vector<TokenId> tokens = joined(prefix, text);
      const llama::SequenceState behind = encode(tokens);
      const auto span = seal(behind.view(), {.tokens = tokens,
                                             .positions = behind.positions(),
                                             .drop_first = std::ssize(prefix),
                                             .context = {.prefix = head->id()}});
      REQUIRE(span.ok());
      REQUIRE(set.insert(*span, Dot{own.size(), 0}).ok());
      own.push_back(*span);
    }
  }

  llama::SequenceState encode(const std::vector<TokenId>& tokens) {
    llama_memory_seq_rm(context.memory(), 3, -1, -1);
    REQUIRE(llama::detail::decode(context.get(), 3, tokens, 0).ok());
    auto state = llama::read(context.get(), 3, geometry);
    REQUIRE(state.ok());
    llama_memory_seq_rm(context.memory(), 3, -1, -1);
    return *std::move(state);
  }
  /// One round: all agents read the round before. Returns the tokens that the engine decoded.
  std::int64_t refresh(std::uint64_t round) {
    llama::Refresher read(context.get(), form, merger(ByDot{}), Target{*geometry});
    std::vector<Fragment> next;
    for (const Fragment& fragment : own) {
      auto made = read(set, fragment.id());
      INFO((made ? "" : made.error().message()));
      REQUIRE(made.ok());
      next.push_back(*std::move(made));
    }
    for (std::size_t a = 0; a < own.size(); ++a) {
      REQUIRE(set.insert(next[a], Dot{a, 2 * round - 1}).ok());
      REQUIRE(set.supersede(own[a].id(), next[a].id(), Dot{a, 2 * round}).ok());
      own[a] = next[a];
    }
    return read.decoded();
  }
  /// How far the merge of the set is from full text, layer by layer at worst: ‖x̂ − x‖ / ‖x‖ of K
  /// and V.
  double off(const llama::SequenceState& full) {
    const auto made = kvmeld::plan(set, merger(ByDot{}), {.geometry = *geometry});
    REQUIRE(made.ok());
    auto blob = llama::make_state(geometry, form, made->positions(), made->token_ids());
    REQUIRE(blob.ok());
    std::vector<std::byte> workspace(made->workspace_bytes());
    REQUIRE(run(exec::seq, *made, workspace, blob->mutable_ref()).ok());
    double worst = 0;
    const KvCacheRef merged = blob->mutable_ref();
    REQUIRE(merged.tokens() == full.view().tokens());
    for (std::size_t p = 0; p < merged.planes().size(); ++p) {
      const PlaneRef& a = merged.planes()[p];
      const PlaneRef& b = full.view().planes()[p];
      double error = 0, size = 0;
      std::vector<float> x(static_cast<std::size_t>(a.shape.channels)), y(x.size());
      for (std::int64_t t = 0; t < merged.tokens(); ++t) {
        for (std::int64_t h = 0; h < a.shape.heads; ++h) {
          extend::gather_row(a, a.slots.slot(t), h, reinterpret_cast<std::byte*>(x.data()));
          extend::gather_row(b, b.slots.slot(t), h, reinterpret_cast<std::byte*>(y.data()));
          for (std::size_t c = 0; c < x.size(); ++c) {
            error += (double(x[c]) - double(y[c])) * (double(x[c]) - double(y[c]));
            size += double(y[c]) * double(y[c]);
          }
        }
      }
      worst = std::max(worst, std::sqrt(error / size));
    }
    return worst;
  }
};

}  // namespace

TEST_CASE("of two agents, one round gives the cache of full text") {
  for (const char* architecture : {"llama", "qwen2", "gemma3"}) {
    test::TinyModel tiny;
    tiny.architecture = architecture;
    if (tiny.architecture == "gemma3") tiny.layers = 7, tiny.window = 24, tiny.rope_base = 1e6F;
    const std::vector<std::vector<TokenId>> texts{drawn_tokens(31, 2), drawn_tokens(40, 3)};
    Agents agents(tiny, texts);
    const llama::SequenceState full =
        agents.encode(joined(joined(agents.prefix, texts[0]), texts[1]));
    INFO(architecture);
    const double plain = agents.off(full);
    CHECK(plain > .02);
    CHECK(agents.refresh(1) == 71);
    // The first keeps its plain encoding, the second was read behind it: nothing is left but
    // rounding, and layers with a window begin where the window does.
    const double once = agents.off(full);
    CHECK(once < 1e-3);
    // and another round changes nothing that is read
    CHECK(agents.refresh(2) == 71);
    CHECK(agents.off(full) < 1e-3);
    // sequences are as they were
    for (const llama_seq_id sequence : {0, 1})
      CHECK(llama_memory_seq_pos_max(agents.context.memory(), sequence) == -1);
  }
}

TEST_CASE("of three agents, rounds come nearer to full text than the plain merge") {
  const std::vector<std::vector<TokenId>> texts{drawn_tokens(21, 2), drawn_tokens(30, 3),
                                                drawn_tokens(17, 4)};
  Agents agents({}, texts);
  std::vector<TokenId> all = agents.prefix;
  for (const auto& text : texts) all = joined(all, text);
  const llama::SequenceState full = agents.encode(all);
  const double plain = agents.off(full);
  agents.refresh(1);
  const double once = agents.off(full);
  INFO(plain << " " << once);
  CHECK(once < plain);
}

TEST_CASE("a round of one agent after the other is as good, for whoever has read the ones before") {
  const std::vector<std::vector<TokenId>> texts{drawn_tokens(21, 2), drawn_tokens(30, 3)};
  Agents agents({}, texts);
  const llama::SequenceState full =
      agents.encode(joined(joined(agents.prefix, texts[0]), texts[1]));
  std::uint64_t next_dot = 1;
  const Status done =
      refresh_round(agents.context.get(), agents.form, agents.set, agents.own[1].id(), 1, next_dot);
  INFO(done.message());
  REQUIRE(done.ok());
  CHECK(next_dot == 3);
  CHECK(in_force(agents.set).size() == 3);
  CHECK(agents.off(full) < 1e-3);
}

TEST_CASE("what a refresher cannot do leaves the sequences empty") {
  Agents agents({}, {drawn_tokens(20, 2), drawn_tokens(20, 3)});
  llama::Refresher read(agents.context.get(), agents.form, merger(ByDot{}),
                        Target{*agents.geometry});
  const auto unknown = read(agents.set, FragmentId{});
  REQUIRE_FALSE(unknown.ok());
  CHECK(unknown.error().code() == ErrorCode::not_found);
  REQUIRE(agents.set.evict(agents.own[0].id()).ok());
  const auto evicted = read(agents.set, agents.own[0].id());
  REQUIRE_FALSE(evicted.ok());
  CHECK(evicted.error().code() == ErrorCode::not_found);
  CHECK(read.decoded() == 0);
  // a sequence that is in use
  REQUIRE(llama::detail::decode(agents.context.get(), 1, agents.prefix, 0).ok());
  const auto busy = read(agents.set, agents.own[1].id());
  REQUIRE_FALSE(busy.ok());
  CHECK(busy.error().code() == ErrorCode::invalid_argument);
}

namespace {

/// Log-probabilities of what follows each token, when these follow what sequence 0 holds.
std::vector<std::vector<double>> follow(Agents& agents, const std::vector<TokenId>& tokens,
                                        llama_pos first) {
  const auto vocabulary =
      static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(agents.model.get())));
  llama_memory_seq_cp(agents.context.memory(), 0, 3, -1, -1);
  std::vector<std::vector<double>> out;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    llama_token token = tokens[t];
    llama_pos position = first + static_cast<llama_pos>(t);
    std::int32_t one = 1;
    llama_seq_id sequence = 3, *sequences = &sequence;
    std::int8_t wanted = 1;
    llama_batch batch{};
    batch.n_tokens = 1;
    batch.token = &token;
    batch.pos = &position;
    batch.n_seq_id = &one;
    batch.seq_id = &sequences;
    batch.logits = &wanted;
    REQUIRE(llama_decode(agents.context.get(), batch) == 0);
    const float* const logits = llama_get_logits_ith(agents.context.get(), 0);
    double sum = 0;
    for (std::size_t v = 0; v < vocabulary; ++v) sum += std::exp(double(logits[v]));
    std::vector<double>& row = out.emplace_back();
    for (std::size_t v = 0; v < vocabulary; ++v) row.push_back(double(logits[v]) - std::log(sum));
  }
  llama_memory_seq_rm(agents.context.memory(), 3, -1, -1);
  return out;
}

}  // namespace

TEST_CASE("a recipe by evidence: the cheapest within a loss, from the text's own sentences") {
  constexpr TokenId stop = 299;
  std::vector<std::vector<TokenId>> texts{drawn_tokens(31, 2), drawn_tokens(40, 3)};
  for (auto& text : texts) {
    for (TokenId& id : text) id = id == stop ? 1 : id;
    text[14] = text[29] = stop;
  }
  Agents agents({}, texts);
  std::vector<std::vector<TokenId>> prompts;  // and what follows them
  for (const auto& text : texts) {
    for (const recipes::Completion& c : recipes::completions(text, std::vector{stop}, 2))
      prompts.emplace_back(text.begin() + c.begin, text.begin() + c.end);
  }
  REQUIRE(prompts.size() == 4);
  const std::vector<TokenId> all = joined(joined(agents.prefix, texts[0]), texts[1]);
  const auto length = static_cast<llama_pos>(all.size());
  REQUIRE(llama::detail::decode(agents.context.get(), 0, all, 0).ok());
  std::vector<std::vector<std::vector<double>>> full;
  for (const auto& prompt : prompts) full.push_back(follow(agents, prompt, length));
  llama_memory_seq_rm(agents.context.memory(), 0, -1, -1);

  const auto concat = merger(ByDot{});
  const auto half = merger(ByDot{}, SeamShare{.share = .5F, .boundary_tokens = {stop}});
  const ValidationCase plain{agents.set, Target{*agents.geometry}};
  std::vector<recipes::Recipe> tried{{Candidate("plain", concat), {plain}, 71},
                                     {Candidate("seam_50", half), {plain}, 71}};
  const std::int64_t reread = agents.refresh(1);
  const ValidationCase refreshed{agents.set, Target{*agents.geometry}};
  tried.push_back({Candidate("refresh_1", concat), {refreshed}, 71 + reread});

  const auto engine = [&](CandidateRender& render, std::size_t) -> Result<CaseScore> {
    const CandidatePlan& made = render.plan();
    auto blob = llama::make_state(agents.geometry, agents.form, made.positions(), made.token_ids());
    if (!blob) return blob.error();
    if (auto done = render.into(blob->mutable_ref()); !done) return done.error();
    KVMELD_TRY(llama::write(agents.context.get(), 0, 1, *blob));
    KVMELD_TRY(llama::recompute(agents.context.get(), 0, 1, made.holes()).status());
    CaseScore score{.score = 0, .divergence = 0, .cost_ms = 0};
    std::size_t tokens = 0;
    for (std::size_t p = 0; p < prompts.size(); ++p) {
      const auto now = follow(agents, prompts[p], length);
      for (std::size_t t = 0; t < now.size(); ++t, ++tokens) {
        for (std::size_t v = 0; v < now[t].size(); ++v)
          score.divergence += std::exp(full[p][t][v]) * (full[p][t][v] - now[t][v]);
      }
    }
    score.divergence /= static_cast<double>(tokens);
    llama_memory_seq_rm(agents.context.memory(), 0, -1, -1);
    return score;
  };
  const auto choose = [&](double loss) {
    const auto choice = recipes::choose(tried, loss, engine);
    INFO((choice ? "" : choice.error().message()));
    REQUIRE(choice.ok());
    REQUIRE(choice->rows.size() == 3);
    return *choice;
  };
  const recipes::Choice loose = choose(1e9);
  for (const recipes::Row& row : loose.rows) {
    INFO(row.figures.name << " " << row.figures.divergence << " " << row.figures.status.message());
    CHECK(row.figures.status.ok());
  }
  CHECK(loose.best == std::size_t{0});  // anything will do: the one that costs nothing
  CHECK(loose.rows[2].tokens_before == 142);
  CHECK(loose.rows[2].tokens_after == 0);
  CHECK(loose.rows[1].tokens_after > 0);
  // Of two agents one round is full text's cache but for rounding; nothing else is near.
  INFO(loose.rows[0].figures.divergence << " " << loose.rows[2].figures.divergence);
  CHECK(loose.rows[2].figures.divergence < loose.rows[0].figures.divergence / 100);
  CHECK(choose(loose.rows[0].figures.divergence / 10).best == std::size_t{2});
  CHECK_FALSE(choose(-1).best);
}
