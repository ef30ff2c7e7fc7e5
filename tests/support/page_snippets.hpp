#pragma once
// Pages whose code is that of files that are built and run, word for word.

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <string>
#include <vector>

#include "catch.hpp"

namespace test {

/// Lines of a file without their indentation; none where it cannot be read.
inline std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    line.erase(0, std::min(line.find_first_not_of(' '), line.size()));
    lines.push_back(line);
  }
  return lines;
}

/// Demands that a page shows every snippet that the sources mark with example-begin and
/// example-end, and no other C++ code.
inline void check_page(const std::string& page_path, const std::vector<std::string>& source_paths) {
  const std::vector<std::string> page = lines_of(page_path);
  std::size_t shown = 0, tested = 0;
  for (const std::string& path : source_paths) {
    const std::vector<std::string> source = lines_of(path);
    INFO("tests run in the project's root; " << page_path << ", " << path);
    REQUIRE_FALSE(page.empty());
    REQUIRE_FALSE(source.empty());
    for (std::size_t i = 0; i < source.size(); ++i) {
      if (source[i].rfind("// example-begin", 0) != 0) continue;
      ++tested;
      const auto end = std::find(source.begin() + static_cast<std::ptrdiff_t>(i), source.end(),
                                 "// example-end");
      const std::vector<std::string> snippet(source.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                                             end);
      INFO(source[i]);
      CHECK(std::search(page.begin(), page.end(), snippet.begin(), snippet.end()) != page.end());
    }
  }
  for (const std::string& line : page) shown += line == "```cpp";
  CHECK(shown == tested);
}

}  // namespace test
