// The start of docs/start.md with llama.cpp, compiled and run on a model of a few layers.
#include <memory>
#include <vector>

#include "support/catch.hpp"
#include "support/llama_context.hpp"
#include "support/llama_tiny_model.hpp"

// example-begin: llama
#include <kvmeld/engine/llama.hpp>
#include <kvmeld/kvmeld.hpp>

using Shape = std::shared_ptr<const kvmeld::Geometry>;

// What the context's cache is made of. LoRAs and control vectors would change K/V: say which.
kvmeld::Result<Shape> shape_of(const llama_model* model, const llama_context_params& parameters) {
  auto geometry =
      kvmeld::llama::geometry(model, parameters, {.adapters = kvmeld::Adapters::none()});
  if (!geometry) return geometry.error();
  return Shape(std::make_shared<kvmeld::Geometry>(*std::move(geometry)));
}

// Lets the model read an agent's notes behind a lead-in, and keeps the notes' K/V.
kvmeld::Result<kvmeld::Fragment> read_notes(llama_context* context, const Shape& shape,
                                            std::vector<llama_token> lead_in,
                                            const std::vector<llama_token>& notes) {
  using namespace kvmeld;
  const Context dropped{.lead_in = lead_in_digest(lead_in)};
  const auto drop = static_cast<std::int64_t>(lead_in.size());
  lead_in.insert(lead_in.end(), notes.begin(), notes.end());
  llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
  const llama_batch batch =
      llama_batch_get_one(lead_in.data(), static_cast<std::int32_t>(lead_in.size()));
  if (llama_decode(context, batch) != 0) return Status(ErrorCode::engine_failure, "llama_decode");
  const auto state = llama::read(context, 0, shape);
  if (!state) return state.error();
  return seal(
      state->view(),
      {.tokens = lead_in, .positions = state->positions(), .drop_first = drop, .context = dropped});
}

// Puts what all have read into sequence 1, behind which any agent can go on. Sequence 2 is spare.
kvmeld::Status meld(llama_context* context, const Shape& shape, const kvmeld::FragmentSet& said) {
  using namespace kvmeld;
  const auto made = plan(said, merger(ByDot{}, Aligner{Concat{}}), {.geometry = *shape});
  if (!made) return made.error();
  const auto form = llama::read(context, 0, shape);  // how this engine lays a sequence out
  if (!form) return form.error();
  auto blob = llama::make_state(shape, form->form(), made->positions(), made->token_ids());
  if (!blob) return blob.error();
  std::vector<std::byte> workspace(made->workspace_bytes());
  KVMELD_TRY(run(exec::cpu, *made, workspace, blob->mutable_ref()).status());
  return llama::write(context, 1, 2, *blob);
}
// example-end

TEST_CASE("what two agents read stands in one sequence, and the engine goes on from there") {
  const test::TinyModelFile file(test::TinyModel{});
  const test::EngineModel model(file.path());
  const llama_context_params parameters = test::engine_parameters();
  const test::EngineContext context(model, parameters);
  REQUIRE(context.get() != nullptr);
  const auto shape = shape_of(model.get(), parameters);
  INFO(shape.status().message());
  REQUIRE(shape.ok());
  std::vector<llama_token> lead_in, first, second;
  for (int i = 0; i < 6; ++i) lead_in.push_back(3 + i);
  for (int i = 0; i < 20; ++i) first.push_back(20 + i);
  for (int i = 0; i < 30; ++i) second.push_back(60 + i);
  kvmeld::FragmentSet said;
  std::uint64_t agent = 0;
  for (const auto* notes : {&first, &second}) {
    const auto read = read_notes(context.get(), *shape, lead_in, *notes);
    INFO(read.status().message());
    REQUIRE(read.ok());
    REQUIRE(said.insert(*read, kvmeld::Dot{agent++, 0}).ok());
  }
  const kvmeld::Status melded = meld(context.get(), *shape, said);
  INFO(melded.message());
  REQUIRE(melded.ok());
  CHECK(llama_memory_seq_pos_max(context.memory(), 1) == 49);
  REQUIRE(kvmeld::llama::detail::decode(context.get(), 1, std::vector<llama_token>{7}, 50).ok());
  CHECK(llama_memory_seq_pos_max(context.memory(), 1) == 50);
}
