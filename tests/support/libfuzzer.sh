#!/usr/bin/env bash
# Builds one harness with libFuzzer under the address and undefined sanitizers, and runs it from its
# own seeds; the libraries that it is built with are those of the tests.
#
#   libfuzzer.sh COMPILER TARGET WORK_FOLDER
#   libfuzzer.sh clang++ fuzz_wire_parse build/libfuzzer
#
# KVMELD_FUZZ_SECONDS: how long (3600).
set -euo pipefail
compiler=$1 target=$2 folder=$3
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$folder/$target"
probe=$folder/$target/probe
echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' >"$probe.cpp"
if ! "$compiler" -fsanitize=fuzzer "$probe.cpp" -o "$probe" 2>/dev/null; then
  echo "skipped: $compiler has no libFuzzer"; exit 77
fi
# One build folder for all of them, and one at a time in it.
(
  flock 9
  cmake -S "$root" -B "$folder/build" -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_BUILD_TYPE=None \
    -DKVMELD_BUILD_TESTS=ON -DKVMELD_TEST_PACKAGING=OFF -DKVMELD_TEST_LIBFUZZER=ON \
    >"$folder/configure.log"
  cmake --build "$folder/build" --target "$target" -- -j1
) 9>"$folder/lock"
mkdir -p "$folder/$target/corpus"
exec "$folder/build/tests/$target" -max_total_time="${KVMELD_FUZZ_SECONDS:-3600}" -max_len=8192 \
  -rss_limit_mb=4096 -print_final_stats=1 -verbosity=0 "$folder/$target/corpus"
