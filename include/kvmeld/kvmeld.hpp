#pragma once

/// kvmeld: merges the KV caches of several agents, so that they share what they have understood as
/// tensors.
///
/// One include for hosts: needs no nvcc, no engine, no network library. Engines, CUDA and
/// transports have headers of their own.

#include <kvmeld/config.hpp>

// A user of an older standard has just read the one line that says so; the rest would bury it.
#if __cplusplus >= 202002L

#include <kvmeld/align/aligner.hpp>
#include <kvmeld/align/alignment.hpp>
#include <kvmeld/align/order.hpp>
#include <kvmeld/align/seam.hpp>
#include <kvmeld/align/select.hpp>
#include <kvmeld/align/token_match.hpp>
#include <kvmeld/cache/adapters.hpp>
#include <kvmeld/cache/cache_rows.hpp>
#include <kvmeld/cache/check_view.hpp>
#include <kvmeld/cache/content_digest.hpp>
#include <kvmeld/cache/fragment.hpp>
#include <kvmeld/cache/fragment_view.hpp>
#include <kvmeld/cache/geometry.hpp>
#include <kvmeld/cache/host_cache.hpp>
#include <kvmeld/cache/kv_cache_ref.hpp>
#include <kvmeld/cache/rope.hpp>
#include <kvmeld/cache/seal.hpp>
#include <kvmeld/cache/verify_fragment.hpp>
#include <kvmeld/cache/verify_rope.hpp>
#include <kvmeld/exec/exec.hpp>
#include <kvmeld/fuse/cluster.hpp>
#include <kvmeld/fuse/fold.hpp>
#include <kvmeld/fuse/fuser.hpp>
#include <kvmeld/fuse/head_rows.hpp>
#include <kvmeld/fuse/krum.hpp>
#include <kvmeld/fuse/medoid.hpp>
#include <kvmeld/fuse/order_statistics.hpp>
#include <kvmeld/fuse/weights.hpp>
#include <kvmeld/state/fragment_set.hpp>
#include <kvmeld/state/merger.hpp>
#include <kvmeld/state/plan.hpp>
#include <kvmeld/state/render.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor/element.hpp>
#include <kvmeld/tensor/tensor_view.hpp>
#include <kvmeld/version.hpp>

#endif  // C++20
