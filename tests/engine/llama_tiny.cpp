// The adapter on a live engine, with small random models that the test writes itself.

#include <cmath>

#include <kvmeld/engine/llama.hpp>
#include <kvmeld/policy.hpp>

#include "support/catch.hpp"
#include "support/comma_locale.hpp"
#include "support/llama_context.hpp"
#include "support/llama_tiny_model.hpp"

using namespace kvmeld;

namespace {

struct Live {
  explicit Live(const test::TinyModel& tiny, llama_context_params p = test::engine_parameters())
      : file(tiny), model(file.path()), parameters(p), context(model, p) {
    REQUIRE(model.get() != nullptr);
    REQUIRE(context.get() != nullptr);
  }
  std::shared_ptr<const Geometry> geometry(const std::string& gguf = {}) const {
    llama::GeometryOptions options;
    options.adapters = Adapters::none();
    options.gguf_path = gguf;
    const Result<Geometry> g = llama::geometry(model.get(), parameters, options);
    INFO((g ? "" : g.error().message()));
    REQUIRE(g.ok());
    return std::make_shared<const Geometry>(*g);
  }
  test::TinyModelFile file;
  test::EngineModel model;
  llama_context_params parameters;
  test::EngineContext context;
};

std::vector<llama_token> made_up_tokens(int count, int vocabulary = 300) {
  std::vector<llama_token> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 137 + 11) % vocabulary);
  return tokens;
}

std::vector<float> next_logits(const Live& live, llama_seq_id sequence, llama_token token,
                               llama_pos position) {
  std::int32_t one = 1;
  std::int8_t output = 1;
  llama_seq_id* sequences = &sequence;
  llama_batch batch{};
  batch.n_tokens = 1;
  batch.token = &token;
  batch.pos = &position;
  batch.n_seq_id = &one;
  batch.seq_id = &sequences;
  batch.logits = &output;
  REQUIRE(llama_decode(live.context.get(), batch) == 0);
  const float* logits = llama_get_logits_ith(live.context.get(), 0);
  std::vector<float> copy(logits, logits + 300);
  llama_memory_seq_rm(live.context.memory(), sequence, position, -1);
  return copy;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double off = 0.0, size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    off += (double(a[i]) - double(b[i])) * (double(a[i]) - double(b[i]));
    size += double(a[i]) * double(a[i]);
  }
  return std::sqrt(off / size);
}

llama::StateBlob copy_of(const llama::SequenceState& state,
                         const std::shared_ptr<const Geometry>& geometry) {
  Result<llama::StateBlob> blob = llama::make_state(geometry, state.form(), state.positions());
  REQUIRE(blob.ok());
  llama::detail::copy_rows(state.view(), blob->mutable_ref());
  return *std::move(blob);
}

std::vector<std::byte> exported(const Live& live, llama_seq_id sequence,
                                const std::shared_ptr<const Geometry>& geometry) {
  const Result<llama::SequenceState> state = llama::read(live.context.get(), sequence, geometry);
  REQUIRE(state.ok());
  return {state->bytes().begin(), state->bytes().end()};
}

/// What equal caches may differ by in a decode when cells lie, or batches are cut, elsewhere: sums
/// in another order, and, with flash attention on the CPU, an accumulator of values in f16.
double engine_floor(bool flash) { return flash ? 2e-3 : 1e-5; }

void check_probe(const Live& live, const std::shared_ptr<const Geometry>& geometry,
                 double engine_scale = 1.0) {
  const Result<llama::ProbeReport> report = llama::probe(live.context.get(), geometry, 0, 1);
  INFO((report ? "" : report.error().message()));
  REQUIRE(report.ok());
  CHECK(report->engine_can_shift == (geometry->layers[0].planes[0].type != ElementType::bf16));
  CHECK(report->norm_change < 1e-6);
  CHECK(report->engine_shift_scale == Approx(engine_scale).margin(0.002));
  CHECK(llama_memory_seq_pos_max(live.context.memory(), 0) == -1);
  CHECK(llama_memory_seq_pos_max(live.context.memory(), 1) == -1);
}

}  // namespace

TEST_CASE("the engine prints metadata in the locale of the moment; the geometry is the same") {
  test::TinyModel tiny;
  tiny.rope_base = 23456.5;
  const auto plain = Live(tiny).geometry();
  CHECK(plain->layers[0].rope.base == 23456.5);
  const test::CommaLocale comma;
  comma.require();
  const auto other = Live(tiny).geometry();
  CHECK(other->layers[0].rope.base == 23456.5);
  CHECK(*other == *plain);
  CHECK(llama::detail::without_locale("10000,000000") == "10000.000000");
  CHECK(llama::detail::without_locale("-1\xd9\xab"
                                      // the Arabic separator is of two bytes
                                      "5e-05") == "-1.5e-05");
  for (const char* as_it_is : {"1.000,5", "1,5,5", ",5", "5,", "4", "", "a,b", "llama", "1.5"}) {
    CHECK(llama::detail::without_locale(as_it_is) == as_it_is);
  }
}

TEST_CASE("probe passes with both pairings, plain and transposed V, and every element type") {
  for (const char* architecture : {"llama", "qwen2"}) {
    for (const bool flash : {true, false}) {
      for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0}) {
        test::TinyModel tiny;
        tiny.architecture = architecture;
        tiny.channels = 64;
        llama_context_params parameters = test::engine_parameters();
        parameters.flash_attn_type =
            flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        parameters.type_k = type;
        parameters.type_v = type == GGML_TYPE_Q8_0 && !flash ? GGML_TYPE_F16 : type;
        INFO(architecture << " flash " << flash << " type " << ggml_type_name(type));
        const Live live(tiny, parameters);
        const auto geometry = live.geometry();
        CHECK(geometry->layers[0].rope.pairing ==
              (tiny.architecture == "llama" ? RopePairing::interleaved : RopePairing::half_split));
        CHECK(geometry->layers[0].planes[0].hadamard == (type == GGML_TYPE_Q8_0 ? 64 : 0));
        check_probe(live, geometry);
      }
    }
  }
}

TEST_CASE("probe refuses a rope that is not the engine's") {
  const Live live(test::TinyModel{});
  const auto code = [&](auto&& change) {
    Geometry wrong = *live.geometry();
    for (LayerShape& layer : wrong.layers) change(layer.rope);
    const auto report =
        llama::probe(live.context.get(), std::make_shared<const Geometry>(wrong), 0, 1);
    return report ? ErrorCode::ok : report.error().code();
  };
  CHECK(code([](RopeSpec&) {}) == ErrorCode::ok);
  CHECK(code([](RopeSpec& rope) { rope.base *= 1.1; }) == ErrorCode::rope_mismatch);
  CHECK(code([](RopeSpec& rope) { rope.pairing = RopePairing::half_split; }) ==
        ErrorCode::rope_mismatch);
  CHECK(code([](RopeSpec& rope) { rope.rotary_channels = 16; }) == ErrorCode::rope_mismatch);
  CHECK(code([](RopeSpec& rope) { rope = {}; }) == ErrorCode::invalid_argument);  // nobody said
  CHECK(code([](RopeSpec& rope) { rope = RopeSpec::none(); }) ==
        ErrorCode::invalid_argument);  // the keys are marked rotary
  CHECK(code([](RopeSpec& rope) { rope.scaling = RopeScaling::linear, rope.factor = 1.05; }) ==
        ErrorCode::rope_mismatch);
}

TEST_CASE("scalings: linear, yarn with norms kept, and factors from the file") {
  for (const char* architecture : {"llama", "qwen2"}) {
    test::TinyModel tiny;
    tiny.architecture = architecture;
    tiny.rope_scaling = "linear";
    check_probe(Live(tiny), Live(tiny).geometry());
    tiny.rope_scaling = "yarn";
    const Live yarn(tiny);
    CHECK(yarn.geometry()->layers[0].rope.scaling == RopeScaling::yarn);
    // The engine's own shift applies YaRN's magnitude a second time; ours leaves norms alone.
    check_probe(yarn, yarn.geometry(), 1.0 + 0.1 * std::log(4.0));
  }
  test::TinyModel tiny;
  for (int i = 0; i < 16; ++i) tiny.rope_factors.push_back(1.0F + 0.4F * static_cast<float>(i));
  const Live live(tiny);
  const auto with_file = live.geometry(live.file.path());
  CHECK(with_file->layers[0].rope.scaling == RopeScaling::explicit_factors);
  CHECK(with_file->layers[0].rope.factors == tiny.rope_factors);
  check_probe(live, with_file);
  CHECK(llama::probe(live.context.get(), live.geometry(), 0, 1).error().code() ==
        ErrorCode::rope_mismatch);
}

TEST_CASE("sliding windows: two sections, two bases, round trip and a refusal to recompute") {
  test::TinyModel tiny;
  tiny.architecture = "gemma3";
  tiny.layers = 7;
  tiny.rope_base = 1000000.0F;
  tiny.window = 24;
  for (const bool flash : {true, false}) {
    llama_context_params parameters = test::engine_parameters();
    parameters.flash_attn_type =
        flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    const Live live(tiny, parameters);
    const auto geometry = live.geometry();
    CHECK(geometry->layers[5].window == 0);
    CHECK(geometry->layers[6].window == 24);
    CHECK(geometry->layers[6].rope.base == 10000.0);
    check_probe(live, geometry);
    const std::vector<llama_token> tokens = made_up_tokens(60);
    REQUIRE(llama::detail::decode(live.context.get(), 0, tokens, 0).ok());
    const Result<llama::SequenceState> state = llama::read(live.context.get(), 0, geometry);
    REQUIRE(state.ok());
    CHECK(state->layout().sections[0].cells() == 60);
    CHECK(state->layout().sections[1].cells() == 24);
    CHECK(llama::write(live.context.get(), 1, 2, copy_of(*state, geometry), llama::Verify::bytes)
              .ok());
    CHECK(difference(next_logits(live, 0, 5, 60), next_logits(live, 1, 5, 60)) <
          engine_floor(flash));
    const Hole hole{30, 30, 7};
    CHECK(llama::recompute(live.context.get(), 1, 2, std::span(&hole, 1)).error().code() ==
          ErrorCode::unsupported);
  }
}

TEST_CASE("what the adapter cannot hold is refused by name") {
  test::TinyModel axes;
  axes.architecture = "qwen2vl";
  axes.rope_sections = {4, 6, 6, 0};
  const Live live(axes);
  llama::GeometryOptions any;
  CHECK(llama::geometry(live.model.get(), live.parameters, any).error().code() ==
        ErrorCode::invalid_argument);  // which adapters
  any.adapters = Adapters::none();
  CHECK(llama::geometry(live.model.get(), live.parameters, any).error().code() ==
        ErrorCode::unsupported);
  any.any_architecture = true;
  CHECK(llama::geometry(live.model.get(), live.parameters, any).error().code() ==
        ErrorCode::rope_unsupported);

  test::TinyModel large;
  large.rope_base = 500000.0F;
  const Live scaled(large);  // context 4096: not of the kind that carries factors
  llama_context_params q4 = test::engine_parameters();
  q4.type_k = GGML_TYPE_Q4_0;
  CHECK(llama::geometry(scaled.model.get(), q4, any).error().code() == ErrorCode::unsupported);
  any.gguf_path = "/nowhere.gguf";
  CHECK(llama::geometry(scaled.model.get(), scaled.parameters, any).error().code() ==
        ErrorCode::invalid_argument);

  // Fingerprints tell adapters, models and tokenizers apart.
  llama::GeometryOptions named;
  named.model = "weights";
  named.adapters = Adapters::none();
  CHECK(llama::geometry(scaled.model.get(), scaled.parameters, named)->model == "weights");
  named.adapters = Adapters::of({{.name = "style", .scale = 0.5F}});
  CHECK(llama::geometry(scaled.model.get(), scaled.parameters, named)->model ==
        *adapted_model("weights", named.adapters));
  named.model.clear();
  CHECK(llama::geometry(scaled.model.get(), scaled.parameters, named)->model ==
        *adapted_model(llama::model_fingerprint(scaled.model.get()), named.adapters));
  test::TinyModel other;
  other.hidden = 128;
  const Live second(other);
  CHECK(Live(test::TinyModel{}).geometry()->model == Live(test::TinyModel{}).geometry()->model);
  CHECK(second.geometry()->model != Live(test::TinyModel{}).geometry()->model);
}

TEST_CASE("a state that is written is the state that was read") {
  for (const bool flash : {true, false}) {
    llama_context_params parameters = test::engine_parameters();
    parameters.flash_attn_type =
        flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    const Live live(test::TinyModel{}, parameters);
    const auto geometry = live.geometry();
    REQUIRE(llama::detail::decode(live.context.get(), 0, made_up_tokens(80), 0).ok());
    const Result<llama::SequenceState> state = llama::read(live.context.get(), 0, geometry);
    REQUIRE(state.ok());
    CHECK(state->form().transposed_values == !flash);
    // something to be replaced
    REQUIRE(llama::detail::decode(live.context.get(), 3, made_up_tokens(9), 0).ok());
    CHECK(llama::write(live.context.get(), 3, 2, copy_of(*state, geometry), llama::Verify::bytes)
              .ok());
    CHECK(exported(live, 0, geometry).size() == exported(live, 3, geometry).size());
    CHECK(llama_memory_seq_pos_max(live.context.memory(), 2) == -1);
    CHECK(difference(next_logits(live, 0, 5, 80), next_logits(live, 3, 5, 80)) <
          engine_floor(flash));

    // Nothing is a state too.
    const Result<llama::SequenceState> nothing = llama::read(live.context.get(), 1, geometry);
    REQUIRE(nothing.ok());
    CHECK(nothing->positions().empty());
    CHECK(llama::write(live.context.get(), 3, 2, copy_of(*nothing, geometry), llama::Verify::bytes)
              .ok());
    CHECK(llama_memory_seq_pos_max(live.context.memory(), 3) == -1);
  }
}

TEST_CASE("a state is appended where the target ends, and nowhere else") {
  const Live live(test::TinyModel{});
  const auto geometry = live.geometry();
  const std::vector<llama_token> tokens = made_up_tokens(50);
  REQUIRE(llama::detail::decode(live.context.get(), 0, tokens, 0).ok());
  REQUIRE(llama::detail::decode(live.context.get(), 1, std::span(tokens).first(20), 0).ok());
  const Result<llama::SequenceState> state = llama::read(live.context.get(), 0, geometry);
  REQUIRE(state.ok());
  const auto tail = [&](std::size_t from) {
    llama::StateBlob blob =
        *llama::make_state(geometry, state->form(), state->positions().subspan(from));
    for (std::size_t p = 0; p < blob.mutable_ref().planes().size(); ++p) {
      const PlaneRef& in = state->view().planes()[p];
      const MutablePlaneRef& out = blob.mutable_ref().planes()[p];
      std::vector<std::byte> row(128);
      for (std::int64_t t = 0; t < out.tokens; ++t)
        for (std::int64_t head = 0; head < in.shape.heads; ++head) {
          ::kvmeld::extend::gather_row(in, in.slots.slot(t + static_cast<std::int64_t>(from)), head,
                                       row.data());
          ::kvmeld::extend::scatter_row(out, out.slots.slot(t), head, row.data());
        }
    }
    return blob;
  };
  const std::vector<std::byte> before = exported(live, 1, geometry);
  CHECK(llama::append(live.context.get(), 1, 2, tail(21)).code() == ErrorCode::position_gap);
  CHECK(llama::append(live.context.get(), 1, 2, tail(19)).code() == ErrorCode::duplicate_position);
  CHECK(exported(live, 1, geometry) == before);
  CHECK(llama::append(live.context.get(), 1, 2, tail(20), llama::Verify::bytes).ok());
  CHECK(llama_memory_seq_pos_max(live.context.memory(), 1) == 49);
  CHECK(llama_memory_seq_pos_max(live.context.memory(), 2) == -1);
  CHECK(difference(next_logits(live, 0, 5, 50), next_logits(live, 1, 5, 50)) < engine_floor(true));
}

TEST_CASE("a failed write leaves the target as it was and the spare empty") {
  llama_context_params parameters = test::engine_parameters();
  parameters.n_ctx = 256;
  const Live live(test::TinyModel{}, parameters);
  const auto geometry = live.geometry();
  REQUIRE(llama::detail::decode(live.context.get(), 0, made_up_tokens(100), 0).ok());
  REQUIRE(llama::detail::decode(live.context.get(), 1, made_up_tokens(20), 0).ok());
  const Result<llama::SequenceState> state = llama::read(live.context.get(), 0, geometry);
  REQUIRE(state.ok());
  const std::vector<std::byte> before = exported(live, 1, geometry);
  const auto unchanged = [&] {
    return exported(live, 1, geometry) == before &&
           llama_memory_seq_pos_max(live.context.memory(), 2) == -1;
  };
  const auto written = [&](llama::StateBlob blob) {
    return llama::write(live.context.get(), 1, 2, blob, llama::Verify::bytes).code();
  };

  // No room: 100 + 20 cells are taken, 200 are wanted.
  std::vector<std::int64_t> positions(200);
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int64_t>(i);
  CHECK(written(*llama::make_state(geometry, state->form(), positions)) ==
        ErrorCode::engine_failure);
  CHECK(unchanged());
  // The last layer is announced with another type: everything before it has been read by then.
  llama::StateBlob broken = copy_of(*state, geometry);
  broken.mutable_bytes()[state->layout().sections[0].values[2] - 12] = std::byte{1};
  CHECK(written(std::move(broken)) == ErrorCode::engine_failure);
  CHECK(unchanged());
  // Another model's: one layer too few.
  Geometry fewer = *geometry;
  fewer.layers.pop_back();
  CHECK(written(*llama::make_state(std::make_shared<const Geometry>(fewer), state->form(),
                                   state->positions())) == ErrorCode::engine_failure);
  CHECK(unchanged());
  // Sequences that cannot be.
  const llama::StateBlob good = copy_of(*state, geometry);
  CHECK(llama::write(live.context.get(), 1, 1, good).code() == ErrorCode::invalid_argument);
  // the spare is in use
  CHECK(llama::write(live.context.get(), 1, 0, good).code() == ErrorCode::invalid_argument);
  CHECK(llama::write(live.context.get(), 9, 2, good).code() == ErrorCode::invalid_argument);
  CHECK(unchanged());
  CHECK(llama::write(live.context.get(), 1, 2, good).ok());
  CHECK_FALSE(unchanged());
}

TEST_CASE("separate streams are read, and refused for writing") {
  llama_context_params parameters = test::engine_parameters();
  parameters.kv_unified = false;
  const Live live(test::TinyModel{}, parameters);
  const auto geometry = live.geometry();
  REQUIRE(llama::detail::decode(live.context.get(), 2, made_up_tokens(12), 0).ok());
  const Result<llama::SequenceState> state = llama::read(live.context.get(), 2, geometry);
  REQUIRE(state.ok());
  CHECK(state->form().streams == 4);
  CHECK(state->positions().size() == 12);
  CHECK(llama::write(live.context.get(), 0, 1, copy_of(*state, geometry)).code() ==
        ErrorCode::unsupported);
}

TEST_CASE("recomputed holes are what one prefill makes") {
  for (const char* architecture : {"llama", "qwen2"}) {
    for (const bool flash : {true, false}) {
      test::TinyModel tiny;
      tiny.architecture = architecture;
      llama_context_params parameters = test::engine_parameters();
      parameters.flash_attn_type =
          flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
      parameters.n_batch = 16;  // stretches are longer than a batch
      parameters.n_ubatch = 16;
      const Live live(tiny, parameters);
      const auto geometry = live.geometry();
      const std::vector<llama_token> tokens = made_up_tokens(90);
      REQUIRE(llama::detail::decode(live.context.get(), 0, tokens, 0).ok());
      const Result<llama::SequenceState> state = llama::read(live.context.get(), 0, geometry);
      REQUIRE(state.ok());
      std::vector<Hole> holes;
      for (const std::int64_t p : {std::int64_t{0}, std::int64_t{1}})
        holes.push_back({p, p, tokens[static_cast<std::size_t>(p)]});
      for (std::int64_t p = 30; p < 55; ++p)
        holes.push_back({p, p, tokens[static_cast<std::size_t>(p)]});
      holes.push_back({89, 89, tokens[89]});

      // The rows of the holes hold nonsense.
      llama::StateBlob blob = copy_of(*state, geometry);
      std::vector<float> nonsense(32, 3.0F);
      for (const MutablePlaneRef& plane : blob.mutable_ref().planes())
        for (const Hole& hole : holes)
          for (std::int64_t head = 0; head < plane.shape.heads; ++head)
            ::kvmeld::extend::scatter_row(plane, plane.slots.slot(hole.output), head,
                                          reinterpret_cast<const std::byte*>(nonsense.data()));
      REQUIRE(llama::write(live.context.get(), 1, 2, blob).ok());
      const std::vector<float> expected = next_logits(live, 0, 5, 90);
      CHECK(difference(expected, next_logits(live, 1, 5, 90)) > 0.05);

      const Result<llama::RecomputeReport> report =
          llama::recompute(live.context.get(), 1, 2, std::span<const Hole>(holes));
      INFO(architecture << " flash " << flash << (report ? "" : report.error().message()));
      REQUIRE(report.ok());
      CHECK(report->tokens == 28);
      CHECK(report->runs == 3);
      CHECK(difference(expected, next_logits(live, 1, 5, 90)) < engine_floor(flash));
      const Result<llama::SequenceState> after = llama::read(live.context.get(), 1, geometry);
      REQUIRE(after.ok());
      REQUIRE(after->positions().size() == 90);
      CHECK(llama_memory_seq_pos_max(live.context.memory(), 2) == -1);
      for (std::size_t l = 0; l < 3; ++l)
        CHECK(difference(llama::detail::layer_keys(state->view(), after->view(), l),
                         llama::detail::layer_keys(after->view(), state->view(), l)) <
              engine_floor(flash));
    }
  }
}

TEST_CASE("holes that cannot be recomputed are refused, and the sequence stays") {
  const Live live(test::TinyModel{});
  const auto geometry = live.geometry();
  REQUIRE(llama::detail::decode(live.context.get(), 0, made_up_tokens(30), 0).ok());
  llama_memory_seq_rm(live.context.memory(), 0, 10, 12);  // a gap
  const std::vector<std::byte> before = exported(live, 0, geometry);
  const auto code = [&](std::vector<Hole> holes) {
    const auto report = llama::recompute(live.context.get(), 0, 1, std::span<const Hole>(holes));
    return report ? ErrorCode::ok : report.error().code();
  };
  CHECK(code({}) == ErrorCode::ok);
  CHECK(code({{0, 12, 5}}) == ErrorCode::position_gap);  // what stands before it is missing
  CHECK(code({{0, 5, 5}, {0, 5, 5}}) == ErrorCode::invalid_argument);
  CHECK(code({{0, -1, 5}}) == ErrorCode::invalid_argument);
  CHECK(code({{0, 5, -1}}) == ErrorCode::invalid_argument);
  CHECK(code({{0, 5, 300}}) == ErrorCode::invalid_argument);
  CHECK(exported(live, 0, geometry) == before);
  CHECK(llama_memory_seq_pos_max(live.context.memory(), 1) == -1);
  CHECK(code({{10, 10, 5}, {11, 11, 6}}) == ErrorCode::ok);  // the gap itself is the hole
  CHECK(exported(live, 0, geometry).size() > before.size());
}
