#pragma once
// What both mains run: cases without an assertion fail, and so does a filter that finds none; what
// passed but for parts that could not run here ends with 77, which ctest counts as skipped.
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#endif

#include <cstdio>

#include "catch.hpp"

namespace test {

inline int run_cases(int argc, char** argv) {
  Catch::Session session;
  if (const int wrong = session.applyCommandLine(argc, argv); wrong != 0) return wrong;
#ifdef CATCH_CONFIG_RUNNER
  constexpr auto no_tests = Catch::WarnAbout::NoTests;
#else
  constexpr auto no_tests = Catch::WarnAbout::UnmatchedTestSpec;
#endif
  session.configData().warnings =
      static_cast<Catch::WarnAbout::What>(Catch::WarnAbout::NoAssertions | no_tests);
  const int failed = session.run();
  for (const std::string& reason : skipped()) std::printf("skipped: %s\n", reason.c_str());
  return failed != 0 || skipped().empty() ? failed : 77;
}

}  // namespace test
