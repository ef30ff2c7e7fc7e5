// The probe on published models: interleaved and half-split pairs, two rope bases with sliding
// windows.
//
// KVMELD_TEST_MODELS names the files, as NAME=PATH joined by semicolons; tests/run.sh fetches them.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include <kvmeld/engine/llama.hpp>

#include "support/catch.hpp"
#include "support/llama_context.hpp"

using namespace kvmeld;

TEST_CASE("probe passes on published models") {
  const char* const named = std::getenv("KVMELD_TEST_MODELS");
  std::string_view rest = named == nullptr ? "" : named;
  if (rest.empty()) {
    return test::skip("no model files (KVMELD_TEST_MODELS)");
  }
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(';'));
    rest.remove_prefix(one.size() < rest.size() ? one.size() + 1 : one.size());
    const std::string path(one.substr(one.find('=') + 1));
    const test::EngineModel model(path);
    INFO(one);
    REQUIRE(model.get() != nullptr);
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
      llama_context_params parameters = test::engine_parameters();
      parameters.type_k = type;
      parameters.type_v = type;
      const test::EngineContext context(model, parameters);
      REQUIRE(context.get() != nullptr);
      llama::GeometryOptions options;
      options.adapters = Adapters::none();
      options.gguf_path = path;
      const Result<Geometry> geometry = llama::geometry(model.get(), parameters, options);
      INFO((geometry ? "" : geometry.error().message()));
      REQUIRE(geometry.ok());
      const auto report =
          llama::probe(context.get(), std::make_shared<const Geometry>(*geometry), 0, 1);
      INFO(ggml_type_name(type) << ": " << (report ? "" : report.error().message()));
      REQUIRE(report.ok());
      CHECK(report->norm_change < 1e-6);
      std::printf("%.*s %s: first layer %.2g, above %.2g, engine's shift %.2g\n",
                  static_cast<int>(one.find('=')), one.data(), ggml_type_name(type),
                  report->first_layer_error, report->deep_error, report->engine_shift_error);
    }
  }
}
