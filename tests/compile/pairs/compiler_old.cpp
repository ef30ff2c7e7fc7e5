// g++ 11 is told which compiler is needed, in one line and not in a hundred.
// error: kvmeld needs g++ 12 or newer
// bad_flags: -U__GNUC__ -D__GNUC__=11
// not_for: clang++ nvcc
#include <kvmeld/config.hpp>
