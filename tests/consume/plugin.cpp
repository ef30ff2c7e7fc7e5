// A shared library that exports one function of its own.
#include <kvmeld/exec.hpp>

__attribute__((visibility("default"))) long long streams_from();

long long streams_from() { return kvmeld::exec::streaming().threshold_bytes; }
