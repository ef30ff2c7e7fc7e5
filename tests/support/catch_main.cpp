// The test runner's main.
#include "catch_run.hpp"

int main(int argc, char** argv) { return test::run_cases(argc, argv); }
