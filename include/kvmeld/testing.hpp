#pragma once

/// A deterministic simulation of members that merge their caches while everything around them
/// fails: for tests of one's own policies.
///
/// Not part of <kvmeld/kvmeld.hpp>. One thread, one seed, no real time, network or disk. See
/// docs/convergence.md.

#include <kvmeld/testing/check_convergence.hpp>
