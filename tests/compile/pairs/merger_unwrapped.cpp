// An alignment policy that is not wrapped: the error says how.
// error: wrap alignment and fusion policies: Aligner{policy}, Fuser{policy}
#include <kvmeld/merger.hpp>
#include <kvmeld/policies/token_match.hpp>

#ifdef KVMELD_BAD
const auto merger = kvmeld::merger(kvmeld::TokenMatch{});
#else
const auto merger = kvmeld::merger(kvmeld::Aligner{kvmeld::TokenMatch{}});
#endif
