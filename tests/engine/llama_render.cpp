// From two agents' caches in a live engine to one: read, seal, render into the bytes that are
// imported, recompute.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <kvmeld/engine/detail/llama_geometry.hpp>
#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>

#include "support/catch.hpp"
#include "support/llama_context.hpp"
#include "support/llama_tiny_model.hpp"

using namespace kvmeld;

namespace {

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double off = 0.0, size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    off += (double(a[i]) - double(b[i])) * (double(a[i]) - double(b[i]));
    size += double(a[i]) * double(a[i]);
  }
  return std::sqrt(off / size);
}

std::vector<TokenId> some_tokens(int count, int salt) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 131 + salt * 17) % 300);
  return tokens;
}

std::vector<TokenId> operator+(std::vector<TokenId> a, const std::vector<TokenId>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Agents {
  std::vector<TokenId> prefix = some_tokens(9, 1), first = some_tokens(31, 2),
                       second = some_tokens(40, 3);
  std::vector<TokenId> all = prefix + first + second;
};

template <class M>
void merge(llama_context* context, const std::shared_ptr<const Geometry>& geometry,
           const Agents& agents, const M& merger, RenderReport& report, std::int64_t& recomputed) {
  const auto encode = [&](const std::vector<TokenId>& tokens) {
    llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
    REQUIRE(llama::detail::decode(context, 0, tokens, 0).ok());
    Result<llama::SequenceState> state = llama::read(context, 0, geometry);
    REQUIRE(state.ok());
    return *std::move(state);
  };
  const llama::SequenceState prefix_state = encode(agents.prefix);
  const auto prefix = seal(prefix_state.view(), {.role = Role::prefix, .tokens = agents.prefix});
  REQUIRE(prefix.ok());
  FragmentSet set;
  REQUIRE(set.insert(*prefix).ok());
  std::uint64_t agent = 0;
  for (const std::vector<TokenId>* notes : {&agents.first, &agents.second}) {
    const std::vector<TokenId> tokens = agents.prefix + *notes;
    const llama::SequenceState state = encode(tokens);
    const auto span =
        seal(state.view(), {.tokens = tokens,
                            .positions = state.positions(),
                            .drop_first = static_cast<std::int64_t>(agents.prefix.size()),
                            .context = {.prefix = prefix->id()}});
    INFO((span ? "" : span.error().message()));
    REQUIRE(span.ok());
    REQUIRE(set.insert(*span, Dot{agent++, 0}).ok());
  }
  const auto plan = kvmeld::plan(set, merger, {.geometry = *geometry});
  INFO((plan ? "" : plan.error().message()));
  REQUIRE(plan.ok());
  Result<llama::StateBlob> blob =
      llama::make_state(geometry, prefix_state.form(), plan->positions(), plan->token_ids());
  REQUIRE(blob.ok());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto done = run(exec::seq, *plan, workspace, blob->mutable_ref(), {.content_digest = true});
  INFO((done ? "" : done.error().message()));
  REQUIRE(done.ok());
  report = *done;
  REQUIRE(llama::write(context, 1, 2, *blob, llama::Verify::bytes).ok());
  const auto filled = llama::recompute(context, 1, 2, plan->holes());
  INFO((filled ? "" : filled.error().message()));
  REQUIRE(filled.ok());
  recomputed = filled->tokens;
}

}  // namespace

TEST_CASE("two agents' caches become one") {
  for (const char* architecture : {"llama", "qwen2", "gemma3"}) {
    for (const bool flash : {true, false}) {
      test::TinyModel tiny;
      tiny.architecture = architecture;
      if (tiny.architecture == "gemma3") tiny.layers = 7, tiny.window = 24, tiny.rope_base = 1e6F;
      const test::TinyModelFile file(tiny);
      const test::EngineModel model(file.path());
      llama_context_params parameters = test::engine_parameters();
      parameters.flash_attn_type =
          flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
      const test::EngineContext context(model, parameters);
      REQUIRE(context.get() != nullptr);
      const auto geometry = std::make_shared<const Geometry>(
          *llama::geometry(model.get(), parameters, {.adapters = Adapters::none()}));
      INFO(architecture << " flash " << flash);
      const Agents agents;
      REQUIRE(llama::detail::decode(context.get(), 3, agents.all, 0).ok());
      const auto together = llama::read(context.get(), 3, geometry);
      REQUIRE(together.ok());
      const auto off = [&](std::size_t layer) {
        const auto merged = llama::read(context.get(), 1, geometry);
        REQUIRE(merged.ok());
        REQUIRE(merged->positions().size() == agents.all.size());
        return difference(llama::detail::layer_keys(together->view(), merged->view(), layer),
                          llama::detail::layer_keys(merged->view(), together->view(), layer));
      };

      RenderReport given, reversed, seam;
      std::int64_t recomputed = 0;
      merge(context.get(), geometry, agents, merger(ByDot{}), given, recomputed);
      CHECK(recomputed == 0);
      // Layer 0 sees only token and position, so a merge is exact there; further up it lacks what
      // the agents did not read.
      CHECK(off(0) < 1e-5);
      CHECK(off(2) > 1e-3);
      merge(context.get(), geometry, agents, merger(ByDot{.reversed = true}), reversed, recomputed);
      CHECK(off(0) > 0.1);
      CHECK(given.content_digest != reversed.content_digest);

      // a window shorter than the sequence: holes cannot be recomputed
      if (tiny.architecture == "gemma3") continue;
      merge(context.get(), geometry, agents, merger(ByDot{}, SeamAll{}), seam, recomputed);
      CHECK(recomputed == 71);  // all but the prefix
      for (std::size_t l = 0; l < 3; ++l) CHECK(off(l) < (flash ? 2e-3 : 1e-5));
    }
  }
}
