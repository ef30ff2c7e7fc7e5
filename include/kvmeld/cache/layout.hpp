#pragma once

/// Every layout of a cache that this build can view: docs/layouts.md says which engine has which,
/// and what to declare.

#include <kvmeld/cache/dlpack.hpp>
#include <kvmeld/cache/layout_contiguous.hpp>
#include <kvmeld/cache/layout_latent.hpp>
#include <kvmeld/cache/layout_paged.hpp>
#include <kvmeld/cache/layout_placement.hpp>
#include <kvmeld/cache/layout_pool.hpp>
