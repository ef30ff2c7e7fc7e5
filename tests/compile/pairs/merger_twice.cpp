// Two policies for one slot.
// error: kvmeld: merger(parts...) got two policies for one slot (select, order, align, fuse, seam)
#include <kvmeld/state/merger.hpp>

#ifdef KVMELD_BAD
const auto merger = kvmeld::merger(kvmeld::ById{}, kvmeld::ByProvenance{});
#else
const auto merger = kvmeld::merger(kvmeld::ById{}, kvmeld::SelectAll{});
#endif
