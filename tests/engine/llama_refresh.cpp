// Fragments read again by a live engine behind the merged caches of the others.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

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
