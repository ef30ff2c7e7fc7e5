// Tensor files: round trips, the bytes of a file written by hand, and refusals of what no honest
// writer makes.
#include <cmath>
#include <string>

#include <kvmeld/safetensors.hpp>

#include "support/catch.hpp"
#include "support/random_cache.hpp"

using namespace kvmeld;

namespace {

using Bytes = std::vector<std::byte>;

/// A file of a header and `data` bytes 0, 1, 2, ….
Bytes file(const std::string& header, std::size_t data) {
  Bytes out(8 + header.size() + data);
  const std::uint64_t length = header.size();
  std::memcpy(out.data(), &length, 8);
  std::memcpy(out.data() + 8, header.data(), header.size());
  for (std::size_t i = 0; i < data; ++i) out[8 + header.size() + i] = static_cast<std::byte>(i);
  return out;
}

ErrorCode code(const std::string& header, std::size_t data) {
  const Bytes bytes = file(header, data);
  return parse_safetensors(bytes).status().code();
}

}  // namespace

TEST_CASE("a file written by hand is read") {
  const Bytes bytes =
      file(R"( {"b" : {"shape":[2,3],"data_offsets":[0,6],"dtype":"U8"}, )"
           R"("__metadata__":{"k\u00e9\n\"":"v\ud83d\ude00","":"x"},)"
           "\n    "
           R"("a":{"dtype":"BF16","shape":[],"data_offsets":[6,8]},)"
           R"("none":{"dtype":"F32","shape":[0,18446744073709],"data_offsets":[6,6]}}   )",
           8);
  const auto read = parse_safetensors(bytes);
  REQUIRE(read);
  REQUIRE(read->tensors.size() == 3);
  CHECK(read->find("missing") == nullptr);
  REQUIRE(read->find("b") != nullptr);
  CHECK(read->find("b")->shape == std::vector<std::uint64_t>{2, 3});
  CHECK(read->find("b")->elements() == 6);
  CHECK(read->find("b")->bytes[5] == std::byte{5});
  CHECK(read->find("a")->shape.empty());
  CHECK((*to_floats<float>(*read->find("a")))[0] == to_float(bf16{0x0706}));
  CHECK(read->find("none")->elements() == 0);
  CHECK(to_floats<double>(*read->find("b")).status().code() == ErrorCode::unsupported);
  REQUIRE(read->find_metadata("k\xC3\xA9\n\"") != nullptr);
  CHECK(*read->find_metadata("k\xC3\xA9\n\"") == "v\xF0\x9F\x98\x80");
  CHECK(read->find_metadata("none") == nullptr);
}

TEST_CASE("what is written is read again, whatever the order of adding") {
  const std::vector<double> wide{1.0 / 3.0, -2.5, 1e300};
  const std::vector<float> narrow{0.1F, -7.0F};
  const std::uint16_t halves[] = {0x3C00, 0xC000};
  SafetensorsWriter a, b;
  a.floats<double>("wide", {3, 1}, wide);
  a.floats<float>("narrow \"1\"\\", {2}, narrow);
  a.tensor("half", StoredType::f16, {2}, std::as_bytes(std::span(halves)));
  a.tensor("empty", StoredType::i64, {4, 0}, {});
  a.metadata("one", "line\nbreak\x01");
  a.metadata("two", "");
  b.metadata("two", "");
  b.tensor("empty", StoredType::i64, {4, 0}, {});
  b.tensor("half", StoredType::f16, {2}, std::as_bytes(std::span(halves)));
  b.floats<float>("narrow \"1\"\\", {2}, narrow);
  b.metadata("one", "line\nbreak\x01");
  b.floats<double>("wide", {3, 1}, wide);
  const auto bytes = a.finish();
  REQUIRE(bytes);
  CHECK(*bytes == *b.finish());
  const auto read = parse_safetensors(*bytes);
  REQUIRE(read);
  CHECK(*to_floats<double>(*read->find("wide")) == wide);
  CHECK(*to_floats<float>(*read->find("narrow \"1\"\\")) == narrow);
  CHECK(*to_floats<float>(*read->find("half")) == std::vector<float>{1.0F, -2.0F});
  CHECK(*read->find_metadata("one") == "line\nbreak\x01");
  for (const StoredTensor& tensor : read->tensors) {
    CHECK((tensor.bytes.data() - bytes->data()) %
              static_cast<std::ptrdiff_t>(element_bytes(tensor.type)) ==
          0);
  }
  CHECK(parse_safetensors(*SafetensorsWriter{}.finish())->tensors.empty());
}

TEST_CASE("every element type of floats is read to its value") {
  const std::uint8_t eight[] = {0x38, 0xC0};  // 1, −2 in E4M3
  const std::uint8_t five[] = {0x3C, 0xC0};   // 1, −2 in E5M2
  SafetensorsWriter writer;
  writer.tensor("e4", StoredType::f8_e4m3, {2}, std::as_bytes(std::span(eight)));
  writer.tensor("e5", StoredType::f8_e5m2, {2}, std::as_bytes(std::span(five)));
  const auto bytes = writer.finish();
  REQUIRE(bytes);
  const auto read = parse_safetensors(*bytes);
  REQUIRE(read);
  CHECK(*to_floats<double>(*read->find("e4")) == std::vector<double>{1.0, -2.0});
  CHECK(*to_floats<float>(*read->find("e5")) == std::vector<float>{1.0F, -2.0F});
}

TEST_CASE("headers that contradict themselves or their file are refused") {
  const std::string good = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  CHECK(code(good, 4) == ErrorCode::ok);
  CHECK(code(good, 3) == ErrorCode::truncated);
  CHECK(code(good, 5) == ErrorCode::oversized);
  CHECK(code("{}", 0) == ErrorCode::ok);
  CHECK(code("", 0) == ErrorCode::corrupt);
  CHECK(code("{} x", 0) == ErrorCode::corrupt);
  CHECK(parse_safetensors(Bytes(7)).status().code() == ErrorCode::truncated);
  for (const std::uint64_t length : {std::uint64_t{55}, std::uint64_t{100'000'000},
                                     std::uint64_t{100'000'001}, ~std::uint64_t{0}}) {
    Bytes bytes = file(good, 0);
    std::memcpy(bytes.data(), &length, 8);
    CHECK(parse_safetensors(bytes).status().code() ==
          (length > 100'000'000 ? ErrorCode::oversized : ErrorCode::truncated));
  }
  const auto pair = [](const std::string& b, const std::string& name = "b") {
    return code(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},")" + name +
                    R"(":{"dtype":"F32","shape":[1],"data_offsets":)" + b + "}}",
                12);
  };
  CHECK(pair("[8,12]") == ErrorCode::ok);
  CHECK(pair("[4,8]") == ErrorCode::corrupt);  // overlap
  CHECK(pair("[0,4]") == ErrorCode::corrupt);
  CHECK(pair("[9,13]") == ErrorCode::corrupt);  // a hole
  CHECK(pair("[12,8]") == ErrorCode::corrupt);
  CHECK(pair("[8,12]", "a") == ErrorCode::corrupt);  // the name twice
  CHECK(pair("[8,11]") == ErrorCode::corrupt);       // not the type's size
  const auto entry = [](const std::string& body) { return code(R"({"a":{)" + body + "}}", 4); };
  CHECK(entry(R"("dtype":"F16","shape":[1],"data_offsets":[0,4])") == ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F31","shape":[1],"data_offsets":[0,4])") == ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","data_offsets":[0,4])") == ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4])") ==
        ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"more":"x")") ==
        ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])") == ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])") == ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","shape":[01],"data_offsets":[0,4])") == ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","shape":[1,],"data_offsets":[0,4])") == ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","shape":[9223372036854775807,)"
              R"(9223372036854775807],"data_offsets":[0,4])") == ErrorCode::oversized);
  CHECK(entry(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4])") ==
        ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])") == ErrorCode::corrupt);
  CHECK(entry(R"("dtype":"F32","shape":[1],"data_offsets":[0])") == ErrorCode::corrupt);
  CHECK(code(R"({"__metadata__":{"a":"b","a":"c"}})", 0) == ErrorCode::corrupt);
  CHECK(code(R"({"__metadata__":{"a":"b"},"__metadata__":{}})", 0) == ErrorCode::corrupt);
  CHECK(code(R"({"__metadata__":{"a":1}})", 0) == ErrorCode::corrupt);
  CHECK(code(R"({"__metadata__":{"\ud800":"x"}})", 0) == ErrorCode::corrupt);
  CHECK(code(R"({"__metadata__":{"\ud800\u0041":"x"}})", 0) == ErrorCode::corrupt);
  CHECK(code(R"({"__metadata__":{"\q":"x"}})", 0) == ErrorCode::corrupt);
  CHECK(code("{\"a\x02\":{}}", 0) == ErrorCode::corrupt);
  CHECK(code(std::string(100000, '['), 0) == ErrorCode::corrupt);
  CHECK(code("{\"" + std::string(100000, 'a'), 0) == ErrorCode::corrupt);
}

TEST_CASE("a writer refuses what no reader takes") {
  const float one = 1;
  SafetensorsWriter twice;
  twice.floats<float>("a", {1}, {&one, 1});
  twice.floats<float>("a", {1}, {&one, 1});
  CHECK(twice.finish().status().code() == ErrorCode::corrupt);
  SafetensorsWriter shape;
  shape.floats<float>("a", {2}, {&one, 1});
  CHECK(shape.finish().status().code() == ErrorCode::invalid_argument);
  SafetensorsWriter name;
  name.floats<float>("__metadata__", {1}, {&one, 1});
  CHECK(name.finish().status().code() == ErrorCode::invalid_argument);
}
