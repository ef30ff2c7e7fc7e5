#pragma once

/// kvmeld merges the KV caches of several LLM agents, so that they share context as tensors instead
/// of as text.
///
/// This header is all that host code includes; it needs no nvcc, no engine and no network library.
/// Engines, CUDA and transports have headers of their own.

#include <kvmeld/config.hpp>

// Under an older standard, config.hpp has already reported the one error that matters; including
// the rest would only hide it among others.
#if __cplusplus >= 202002L

#include <kvmeld/cache_view.hpp>
#include <kvmeld/check_view.hpp>
#include <kvmeld/exec.hpp>
#include <kvmeld/fragment.hpp>
#include <kvmeld/fragment_set.hpp>
#include <kvmeld/gather.hpp>
#include <kvmeld/geometry.hpp>
#include <kvmeld/merger.hpp>
#include <kvmeld/policies/mean.hpp>
#include <kvmeld/policies/order.hpp>
#include <kvmeld/policies/robust.hpp>
#include <kvmeld/policies/select.hpp>
#include <kvmeld/policies/token_match.hpp>
#include <kvmeld/policy.hpp>
#include <kvmeld/render.hpp>
#include <kvmeld/rope.hpp>
#include <kvmeld/status.hpp>
#include <kvmeld/tensor.hpp>
#include <kvmeld/version.hpp>

#endif  // C++20
