#pragma once
// Catch2 under one name: 2.13 (Debian 12) is one header, 3.x is many.

#include <string>
#include <vector>

#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

namespace test {

/// Why parts of this program did not run.
inline std::vector<std::string>& skipped() {
  static std::vector<std::string> reasons;
  return reasons;
}
/// Says that the rest of a test case cannot run on this machine: `return test::skip("no
/// /dev/shm");`. The program goes on, and ends as skipped if nothing failed.
inline void skip(const std::string& reason) {
  skipped().push_back(reason);
  SUCCEED(reason);
}

}  // namespace test
