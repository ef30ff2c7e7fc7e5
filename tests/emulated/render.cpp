// The device tests on an emulated device (include/cuda_runtime.h).
#include <cuda_runtime.h>

#include <fstream>
#include <sstream>
#include <string>

#include "cuda/render.cu"

namespace {

std::string read(const char* path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

// Run from the top of the source tree.
TEST_CASE("docs/cuda.md shows the lines that the device tests compile") {
  const std::string page = read("docs/cuda.md");
  std::istringstream source(read("tests/cuda/render.cu"));
  REQUIRE_FALSE(page.empty());
  std::string line, shown;
  while (std::getline(source, line) && line != "  // begin docs/cuda.md") {
  }
  while (std::getline(source, line) && line != "  // end docs/cuda.md") {
    if (line.find("REQUIRE") == std::string::npos) shown += line.substr(2) + "\n";
  }
  REQUIRE_FALSE(shown.empty());
  CHECK(page.find(shown) != std::string::npos);
}
