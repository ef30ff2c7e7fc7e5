// A user who compiles as C++17 reads one line that says so, not the fallout of it.
// bad_flags: -std=c++17
// error: kvmeld needs C++20
// error_lines: 1
// not_for: nvcc
#include <kvmeld/kvmeld.hpp>
