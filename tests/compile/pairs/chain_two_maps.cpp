// Two parts that map: the second would never run.
// error: kvmeld: two parts of a Chain transform; compose their maps into one: compose(a, b)
#include <kvmeld/policies/projection.hpp>
#include <kvmeld/policies/token_match.hpp>

#ifdef KVMELD_BAD
const kvmeld::Aligner aligner{
    kvmeld::Chain{kvmeld::Projection{}, kvmeld::Projection{}, kvmeld::TokenMatch{}}};
#else
const kvmeld::Aligner aligner{kvmeld::Chain{kvmeld::Projection{}, kvmeld::TokenMatch{}}};
#endif
