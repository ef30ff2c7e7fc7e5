// Adapters in the model's name: the rule written out again, its independence of order, and caches
// that do not meet.
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <kvmeld/geometry.hpp>
#include <kvmeld/kvmeld.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::adapted_model;
using kvmeld::Adapter;
using kvmeld::AdapterKind;
using kvmeld::Adapters;
using kvmeld::ErrorCode;

std::string named(std::vector<Adapter> loaded) {
  const auto name = adapted_model("model", Adapters::of(std::move(loaded)));
  REQUIRE(name.ok());
  return *name;
}

// The documented bytes, put together by hand.
struct Bytes {
  std::vector<unsigned char> all;
  template <class T>
  void add(T value) {
    unsigned char raw[sizeof(T)];
    std::memcpy(raw, &value, sizeof(T));
    all.insert(all.end(), raw, raw + sizeof(T));
  }
  void text(const std::string& s) {
    add(std::uint64_t{s.size()});
    all.insert(all.end(), s.begin(), s.end());
  }
  std::string hex() const {
    const XXH128_hash_t h = XXH3_128bits(all.data(), all.size());
    char text[33];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(h.high64),
                  static_cast<unsigned long long>(h.low64));
    return text;
  }
};

}  // namespace

TEST_CASE("a model's name under adapters is the documented one") {
  CHECK(*adapted_model("model", Adapters::none()) == "model");
  Bytes bytes;
  bytes.text("kvmeld.adapters.v1");
  bytes.add(std::uint64_t{2});
  bytes.add(std::uint8_t{0});
  bytes.text("style.gguf");
  bytes.add(0.5F);
  bytes.add(std::int32_t{0});
  bytes.add(std::int32_t{0});
  bytes.add(std::uint8_t{1});
  bytes.text("calm");
  bytes.add(-1.25F);
  bytes.add(std::int32_t{3});
  bytes.add(std::int32_t{11});
  const Adapter style{.name = "style.gguf", .scale = 0.5F};
  const Adapter calm{.name = "calm",
                     .scale = -1.25F,
                     .kind = AdapterKind::control_vector,
                     .first_layer = 3,
                     .last_layer = 11};
  CHECK(named({style, calm}) == "model+adapters:" + bytes.hex());
  CHECK(named({calm, style}) == named({style, calm}));
}

TEST_CASE("everything that an adapter is tells names apart, and what has no effect does not") {
  const Adapter a{.name = "a"}, b{.name = "b"};
  std::vector<std::string> names{"model", named({a}), named({b}), named({a, b})};
  for (const Adapter& other :
       {Adapter{.name = "a", .scale = 0.5F}, Adapter{.name = "a", .scale = 1e-7F},
        Adapter{.name = "a", .scale = 4e-7F}, Adapter{.name = "a", .scale = -1.0F},
        Adapter{.name = "a", .kind = AdapterKind::control_vector},
        Adapter{.name = "a", .first_layer = 1, .last_layer = 2},
        Adapter{.name = "a", .last_layer = 2}, Adapter{.name = "ab"}}) {
    names.push_back(named({other}));
  }
  for (std::size_t i = 0; i < names.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) CHECK(names[i] != names[j]);
  CHECK(named({{.name = "a", .scale = 0.0F}}) == "model");
  CHECK(named({{.name = "z", .scale = -0.0F}, a}) == named({a}));
}

TEST_CASE("adapters that nobody declared, or that cannot be, are refused") {
  const auto code = [](const Adapters& adapters) {
    return adapted_model("model", adapters).status().code();
  };
  CHECK(code(Adapters{}) == ErrorCode::invalid_argument);
  CHECK(adapted_model("model", {}).status().message().find("Adapters::none()") !=
        std::string::npos);
  CHECK(code(Adapters::of({})) == ErrorCode::ok);
  CHECK(code(Adapters::of({{.name = ""}})) == ErrorCode::invalid_argument);
  for (const float scale :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    CHECK(code(Adapters::of({{.name = "a", .scale = scale}})) == ErrorCode::invalid_argument);
  CHECK(code(Adapters::of({{.name = "a", .first_layer = 3, .last_layer = 2}})) ==
        ErrorCode::invalid_argument);
  CHECK(code(Adapters::of({{.name = "a", .first_layer = -1}})) == ErrorCode::invalid_argument);
  CHECK(code(Adapters::of({{.name = "a", .kind = static_cast<AdapterKind>(2)}})) ==
        ErrorCode::unknown_field);
  CHECK(code(Adapters::of({{.name = "a"}, {.name = "b"}, {.name = "a", .scale = 2.0F}})) ==
        ErrorCode::invalid_argument);
  CHECK(code(Adapters::of({{.name = "a"}, {.name = "a", .kind = AdapterKind::control_vector}})) ==
        ErrorCode::ok);
}

TEST_CASE("K/V made under an adapter does not enter a cache of the plain model") {
  const auto plain = test::geometry(), adapted = test::geometry();
  adapted->model =
      *adapted_model(plain->model, Adapters::of({{.name = "style.gguf", .scale = 0.5F}}));
  const auto a = test::sealed(plain, 3, 1).fragment, b = test::sealed(adapted, 3, 2).fragment;
  CHECK(a.id() != test::sealed(adapted, 3, 1).fragment.id());
  for (const auto& target : {plain, adapted}) {
    kvmeld::FragmentSet set;
    // Whichever refuses first, the set or the plan: they do not meet.
    const bool both = set.insert(a, {1, 0}).ok() && set.insert(b, {2, 0}).ok();
    const auto made = kvmeld::plan(set, kvmeld::merger(kvmeld::ById{}), kvmeld::Target{*target});
    CHECK_FALSE((both && made.ok()));
    if (both) CHECK(made.status().code() == ErrorCode::geometry_mismatch);
  }
}
