// A replica that does not say what it renders with.
// error: MergerDigest
#include <kvmeld/session/replica_options.hpp>

#ifdef KVMELD_BAD
const kvmeld::ReplicaOptions<> options{.self = 1, .epoch = 1};
#else
const kvmeld::ReplicaOptions<> options{.self = 1, .epoch = 1, .merger = kvmeld::does_not_render};
#endif
