// Two policies for one slot.
// error: kvmeld: merger(parts...) got two policies for one slot (select, order, align, fuse, seam)
#include <kvmeld/merger.hpp>

#ifdef KVMELD_BAD
const auto merger = kvmeld::merger(kvmeld::ById{}, kvmeld::ByDot{});
#else
const auto merger = kvmeld::merger(kvmeld::ById{}, kvmeld::SelectAll{});
#endif
