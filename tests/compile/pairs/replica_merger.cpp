// A replica that does not say what it renders with.
// error: MergerDigest
#include <kvmeld/replica/replica.hpp>

#ifdef KVMELD_BAD
const kvmeld::replica::ReplicaOptions options{.self = 1, .epoch = 1};
#else
const kvmeld::replica::ReplicaOptions options{
    .self = 1, .epoch = 1, .merger = kvmeld::replica::does_not_render};
#endif
