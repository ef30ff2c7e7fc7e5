// Where xxhash.h is missing the error names the packages that have it.
// error: kvmeld needs xxhash.h: install libxxhash-dev
// bad_flags: -nostdinc -nostdinc++
// not_for: nvcc
#include <kvmeld/hash.hpp>
