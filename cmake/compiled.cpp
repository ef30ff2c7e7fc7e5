// The one source of the companion library `kvmeld::compiled`: every body that headers otherwise hold
// as inline functions, compiled once (KVMELD_COMPILED=2). Needs nothing but kvmeld's own headers.

#if !defined(KVMELD_COMPILED) || KVMELD_COMPILED != 2
#error "compile this file with -DKVMELD_COMPILED=2, and its users with -DKVMELD_COMPILED"
#endif

#include <kvmeld/kvmeld.hpp>
