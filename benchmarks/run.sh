#!/usr/bin/env bash
# Installs what is missing, builds the benchmarks (Release, no -march) and runs them.
#
#   bash benchmarks/run.sh [FILTER] [FLAG...]      FILTER: a regular expression over benchmark names
#   bash benchmarks/run.sh --avx2 [FILTER] [FLAG...]  the same without AVX-512: what processors get that have none
#   bash benchmarks/run.sh --table                 prints build/benchmarks.json as the table of docs/performance.md
#
# Writes build/benchmarks.json in Google Benchmark's format. Every benchmark carries the counter `ratio`: its
# baseline's time in the same run ÷ its own. Flags go to the program (--benchmark_repetitions=5 and so on).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/examples/support/common.sh"
. "$root/examples/support/build.sh"
cd "$root"

if [ "${1:-}" = --table ]; then exec python3 benchmarks/table.py build/benchmarks.json; fi
folder=$root/build/benchmarks isa_flags=()
if [ "${1:-}" = --avx2 ]; then folder=$root/build/benchmarks-avx2 isa_flags=(-DCMAKE_CXX_FLAGS=-DKVMELD_NO_AVX512); shift; fi
filter=.
case ${1:-} in '' | --*) ;; *) filter=$1; shift ;; esac

need_packages "${benchmark_packages[@]}"
# Imports need the engine and the default model; where they cannot be had, they alone are left out.
engine_flags=()
if grep -qE -- "$filter" <<<$'state/import/llama/verify:positions/tokens:2048\nstate/import/llama/verify:bytes/tokens:512'; then
  if engine=$(bash examples/support/get_engine.sh) && KVMELD_BENCH_MODEL=$(bash examples/support/get_model.sh); then
    engine_flags=(-DKVMELD_LLAMA_ROOT="$engine")
    export KVMELD_BENCH_MODEL
  else
    say "skipped: state/import (no engine, or no model)"
  fi
fi
say "building the benchmarks"
configure "$root" "$folder" -DCMAKE_BUILD_TYPE=Release -DKVMELD_BUILD_BENCHMARKS=ON "${isa_flags[@]}" "${engine_flags[@]}"
build "$folder" kvmeld_benchmarks

# The processor: a figure says little without it.
field() { sed -nE "s/^$1[[:space:]]*: //p" /proc/cpuinfo 2>/dev/null | head -n 1; }
processor="$(field vendor_id) family $(field 'cpu family') model $(field model): $(field 'model name')"
if [ ${#isa_flags[@]} -gt 0 ]; then processor+=", without AVX-512"; fi

# Google Benchmark leaves the file empty when nothing matched.
part=$folder/run.json
rm -f "$part"
"$folder/benchmarks/kvmeld_benchmarks" --benchmark_filter="$filter" --benchmark_counters_tabular=true \
  --benchmark_out="$part" --benchmark_out_format=json --benchmark_context="processor=${processor//,/;}" "$@"

# Compile time of each header is measured by the script that the tests use.
headers=()
while IFS= read -r header; do
  if grep -qE -- "$filter" <<<"compile_time/$header"; then headers+=("$header"); fi
done < <(cd include && find kvmeld -name '*.hpp' -not -name 'llama*' | sort)
times=$folder/compile_time.json
rm -f "$times"
if [ ${#headers[@]} -gt 0 ]; then
  say "compile time of ${#headers[@]} headers"
  python3 tests/compile/header_time.py --include include --runs 3 --json "${headers[@]}" >"$times"
fi

python3 benchmarks/table.py --merge "$part" "$times" build/benchmarks.json
say "written: build/benchmarks.json (as a table: bash benchmarks/run.sh --table)"
