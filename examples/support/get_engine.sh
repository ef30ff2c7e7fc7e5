#!/usr/bin/env bash
# Builds llama.cpp once, into a cache outside the repository, and prints the folder that holds its include/ and lib/.
#
#   bash examples/support/get_engine.sh [VERSION]
#
# The source is the tree inside the PyPI source package llama-cpp-python. Only the library target is built: shared, CPU
# only, no tools, no network code. The instruction set is a fixed tier (AVX2 with FMA and F16C where this machine has
# it, else the platform's baseline) and part of the folder's name, never -march=native, so machines can share a cache.
# (ggml's run-time dispatch builds some fifteen CPU backends, which costs ten times as long as this whole build.)
# KVMELD_CACHE moves the cache.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

version=${1:-0.3.36}
tier=baseline tier_options=()
if [ "$(uname -m)" = x86_64 ]; then
  switch=OFF
  if [ "$(grep -m1 '^flags' /proc/cpuinfo | grep -owE 'avx2|fma|f16c|bmi2' | sort -u | wc -l)" = 4 ]; then tier=avx2 switch=ON; fi
  for feature in SSE42 AVX AVX2 FMA F16C BMI2; do tier_options+=("-DGGML_$feature=$switch"); done
fi
home=$KVMELD_CACHE/engine/llama-cpp-python-$version-$tier
if [ -f "$home/READY" ]; then echo "$home"; exit 0; fi

need_tool cmake cmake
need_tool ninja ninja-build
need_tool g++ g++
hold_lock engine
if [ -f "$home/READY" ]; then echo "$home"; exit 0; fi

work=$(mktemp -d -p "$KVMELD_CACHE")
trap 'rm -rf "$work"' EXIT

say "engine: fetching llama-cpp-python $version (77 MB of source)"
# Not --no-binary :all:, which would also build the build backend from source.
pip_download "$work/dl" --no-binary llama-cpp-python "llama-cpp-python==$version" ||
  die "the source package llama-cpp-python==$version could not be fetched; with your own llama.cpp: configure with -DKVMELD_LLAMA_ROOT=FOLDER (include/ and lib/ in it)"
mkdir "$work/src"
tar -xzf "$work"/dl/llama_cpp_python-*.tar.gz -C "$work/src" --strip-components=1 --wildcards '*/vendor/llama.cpp/*'
source=$work/src/vendor/llama.cpp
[ -f "$source/include/llama.h" ] || die "the source package has no vendor/llama.cpp/include/llama.h"

say "engine: building llama.cpp with $KVMELD_JOBS jobs (about two minutes on two cores)"
launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
cmake -S "$source" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
  -DCMAKE_INSTALL_RPATH='$ORIGIN' -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON \
  -DGGML_NATIVE=OFF "${tier_options[@]}" -DGGML_OPENMP=OFF -DGGML_BLAS=OFF -DGGML_LLAMAFILE=ON -DGGML_CCACHE=OFF \
  -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF \
  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
  "${launcher[@]}" >"$work/configure.log" 2>&1 || { tail -n 20 "$work/configure.log" >&2; die "configuring llama.cpp failed"; }
# One line for every tenth step: enough to see that it moves, short enough for a log.
cmake --build "$work/build" --target llama -j "$KVMELD_JOBS" 2>&1 | tee "$work/build.log" |
  awk -F'[][/]' '/^\[[0-9]+\/[0-9]+\]/ { if ($2 % 10 == 0 || $2 == $3) { printf "   engine: step %d of %d\n", $2, $3; fflush() } }' >&2 ||
  { tail -n 20 "$work/build.log" >&2; die "building llama.cpp failed"; }

# Everything goes to a sibling folder first and is moved as one: a run that was stopped leaves nothing half-filled.
mkdir -p "$work/home/include" "$work/home/lib"
cp "$source"/include/*.h "$source"/ggml/include/*.h "$work/home/include/"
cp -a "$work"/build/bin/lib*.so* "$work/home/lib/"
cp "$source/LICENSE" "$work/home/"

say "engine: checking that a program builds, links and starts with it"
cat >"$work/check.c" <<'C'
#include <llama.h>
int main(void) { llama_backend_init(); int found = ggml_backend_dev_count() > 0; llama_backend_free(); return !found; }
C
gcc -I"$work/home/include" "$work/check.c" -o "$work/check" -L"$work/home/lib" -lllama -lggml -lggml-base \
  -Wl,-rpath,"$work/home/lib" && "$work/check" >/dev/null 2>&1 || die "the engine was built, but a program cannot use it"

mkdir -p "$(dirname "$home")"
rm -rf "$home"
mv "$work/home" "$home"
touch "$home/READY"
say "engine: ready in $home ($(du -shL "$home/lib" | cut -f1) of libraries)"
echo "$home"
