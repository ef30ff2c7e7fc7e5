#pragma once

/// Language checks, the namespace, and the few macros that every other header uses.

#if (defined(_MSVC_LANG) && _MSVC_LANG < 202002L) || (!defined(_MSVC_LANG) && __cplusplus < 202002L)
#error "kvmeld needs C++20: compile with -std=c++20 (g++ >= 12, clang >= 14, nvcc >= 12)"
#else

#if defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ < 14
#error "kvmeld needs clang 14 or newer"
#elif defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "kvmeld needs g++ 12 or newer (Debian: apt install g++-12, then -DCMAKE_CXX_COMPILER=g++-12)"
#endif

#if defined(__FAST_MATH__)
#error "kvmeld promises identical bytes everywhere: compile without -ffast-math"
#endif

#include <bit>
#include <cstddef>
#include <cstdint>

#include <kvmeld/version.hpp>

static_assert(std::endian::native == std::endian::little,
              "kvmeld stores little-endian bytes as they lie in memory");

/// Everything public lives in `kvmeld::v0`, inlined into `kvmeld`, so that two versions can share a
/// process.
#define KVMELD_NAMESPACE_BEGIN \
  namespace kvmeld {           \
  inline namespace v0 {
#define KVMELD_NAMESPACE_END \
  }                          \
  }

/// Marks an expression that runs on the host and, under nvcc, on the device.
#if defined(__CUDACC__)
#define KVMELD_HD __host__ __device__
#else
#define KVMELD_HD
#endif

/// Marks a class whose returned values must not be discarded. Empty under nvcc, which takes every
/// assignment of one for a discarded value.
#if defined(__CUDACC__)
#define KVMELD_NODISCARD_CLASS
#else
#define KVMELD_NODISCARD_CLASS [[nodiscard]]
#endif

/// Marks a function body that is inlined into the wrapper of each instruction set
/// (docs/numerics.md).
#define KVMELD_ALWAYS_INLINE inline __attribute__((always_inline))
#define KVMELD_NOINLINE __attribute__((noinline))
/// Forces a lambda to be inlined into the loop that calls it.
#define KVMELD_INLINE_LAMBDA __attribute__((always_inline))

/// Keeps clang from unrolling the loop that follows. clang unrolls short constant loops before it
/// vectorises; it then no longer vectorises strided pairs, and files with many such loops take
/// minutes to compile.
#if defined(__clang__)
#define KVMELD_KEEP_LOOP _Pragma("clang loop unroll(disable)")
#else
#define KVMELD_KEEP_LOOP
#endif

/// 1 where functions can be compiled for AVX2 and AVX-512 beside the baseline and chosen at run
/// time; define it as 0 to do without.
#ifndef KVMELD_X86_DISPATCH
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(__CUDA_ARCH__)
#define KVMELD_X86_DISPATCH 1
#else
#define KVMELD_X86_DISPATCH 0
#endif
#endif
#if KVMELD_X86_DISPATCH
#define KVMELD_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define KVMELD_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#else
#define KVMELD_TARGET_AVX2
#define KVMELD_TARGET_AVX512
#endif

/// Marks a function whose body can be compiled once, into the companion library, instead of into
/// every user's object.
///
/// Header-only use needs no library: the macro then means `inline`, and the header includes the
/// bodies at its end. Users of the companion library (CMake: `kvmeld::compiled`) have
/// `KVMELD_COMPILED` defined as 1 and see declarations only; the library's one source has it
/// defined as 2 and holds the bodies, and the template instances that `KVMELD_INSTANCE` names. The
/// macro sets no visibility: the library is static, and a shared library that links it exports its
/// symbols as its own flags say.
#if !defined(KVMELD_COMPILED)
#define KVMELD_API inline
#define KVMELD_BODIES 1
#elif KVMELD_COMPILED == 1
#define KVMELD_API
#define KVMELD_BODIES 0
#define KVMELD_INSTANCE extern template
#elif KVMELD_COMPILED == 2
#define KVMELD_API
#define KVMELD_BODIES 1
#define KVMELD_INSTANCE template
#else
#error "KVMELD_COMPILED is 1 in users of kvmeld::compiled, 2 in its own source, and else undefined"
#endif

/// Marks a function that only error paths call: it is compiled for size, and branches to it are
/// taken for unlikely.
#define KVMELD_COLD __attribute__((cold))

KVMELD_NAMESPACE_BEGIN

/// Building blocks of the components and of user-written policies: rows, bytes, plans.
///
/// These names are public and documented, but unlike the others they may change in a minor version.
namespace extend {}

namespace detail {
using namespace extend;  // the core uses these names unqualified
}  // namespace detail

/// `a * b + c` with one rounding, on every backend.
///
/// The only way in which a product may reach an addition in code that makes cache bytes: compilers
/// contract `a * b + c` or not as they please, and headers cannot forbid it.
[[nodiscard]] KVMELD_HD inline float fma(float a, float b, float c) noexcept {
  return __builtin_fmaf(a, b, c);
}
[[nodiscard]] KVMELD_HD inline double fma(double a, double b, double c) noexcept {
  return __builtin_fma(a, b, c);
}

KVMELD_NAMESPACE_END

#endif  // C++20
