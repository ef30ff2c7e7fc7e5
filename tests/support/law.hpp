#pragma once
// RapidCheck inside a Catch2 test case.

#include <rapidcheck.h>

#include "catch.hpp"

namespace test {

/// Fails the test case when `property` has a counterexample; RapidCheck prints it, shrunk, with the
/// seed that found it (RC_PARAMS="seed=..." runs it again, RC_PARAMS="max_success=1000" tries
/// longer).
template <class Property>
void law(const char* sentence, Property&& property) {
  INFO(sentence);
  REQUIRE(rc::check(sentence, property));
}

}  // namespace test
