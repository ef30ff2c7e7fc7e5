// A replica that does not say in which life it is.
// error: Epoch
#include <kvmeld/session/replica_options.hpp>

#ifdef KVMELD_BAD
const kvmeld::ReplicaOptions<> options{.self = 1, .merger = kvmeld::does_not_render};
#else
const kvmeld::ReplicaOptions<> options{.self = 1, .epoch = 1, .merger = kvmeld::does_not_render};
#endif
