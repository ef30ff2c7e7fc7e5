// A replica that does not say in which life it is.
// error: Epoch
#include <kvmeld/replica/replica.hpp>

#ifdef KVMELD_BAD
const kvmeld::replica::ReplicaOptions options{.self = 1,
                                              .merger = kvmeld::replica::does_not_render};
#else
const kvmeld::replica::ReplicaOptions options{
    .self = 1, .epoch = 1, .merger = kvmeld::replica::does_not_render};
#endif
