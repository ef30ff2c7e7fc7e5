#pragma once
// Catch2 under one name: 2.13 (Debian 12) is one header, 3.x is many.

#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
