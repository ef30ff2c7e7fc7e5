// An aligner before the last part, which would be ignored. error: kvmeld: a part of a Chain before
// the last neither aligns nor transforms: only the last part aligns
#include <kvmeld/policies/projection.hpp>
#include <kvmeld/policies/token_match.hpp>

#ifdef KVMELD_BAD
const kvmeld::Aligner aligner{kvmeld::Chain{kvmeld::TokenMatch{}, kvmeld::Concat{}}};
#else
const kvmeld::Aligner aligner{kvmeld::Chain{kvmeld::TokenMatch{}}};
#endif
