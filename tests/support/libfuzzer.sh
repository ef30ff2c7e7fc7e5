#!/usr/bin/env bash
# Builds one fuzz target with libFuzzer under the address and undefined sanitizers, and runs it.
#
#   libfuzzer.sh COMPILER SOURCE WORK_FOLDER INCLUDE...      KVMELD_FUZZ_SECONDS: how long (3600)
set -euo pipefail
compiler=$1 source=$2 folder=$3; shift 3
mkdir -p "$folder/corpus"
includes=()
for path in "$@"; do includes+=(-I "$path"); done
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$folder/probe.cpp"
if ! "$compiler" -fsanitize=fuzzer "$folder/probe.cpp" -o "$folder/probe" 2>/dev/null; then
  echo "skipped: $compiler has no libFuzzer"; exit 77
fi
"$compiler" -std=c++20 -O1 -g1 -DKVMELD_LIBFUZZER -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all "${includes[@]}" "$source" -o "$folder/fuzz"
exec "$folder/fuzz" -max_total_time="${KVMELD_FUZZ_SECONDS:-3600}" -max_len=8192 -rss_limit_mb=4096 -print_final_stats=1 -verbosity=0 "$folder/corpus"
