#!/usr/bin/env bash
# Installs what is missing, builds the tests and runs them; then the tests that were skipped, and why; the last lines are ctest's
# summary.
#
#   bash tests/run.sh            all tests but the long ones
#   bash tests/run.sh FILTER     the tests whose name matches the regular expression, for example unit/rope or laws/
#   bash tests/run.sh --long     also long simulations, an hour of each fuzzer, and the gates on the
#                                real models (fetches 1.6 GB)
#   bash tests/run.sh --strict   fails where a test was skipped for want of anything but a GPU, CUDA, or a right that containers lack
#
# KVMELD_JOBS sets the number of jobs, KVMELD_CACHE where the engine and the models are kept.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/examples/support/common.sh"
. "$root/examples/support/build.sh"

filter='' long=OFF strict=
while [ $# -gt 0 ]; do
  case $1 in
    --long) long=ON; shift ;;
    --strict) strict=1; shift ;;
    -*) die "unknown flag $1 (--long, --strict, or a filter)" ;;
    *) filter=$1; shift ;;
  esac
done

need_packages "${test_packages[@]}"
engine=$(bash "$root/examples/support/get_engine.sh")
models=
# Where the packages are gone, or there is no network, only the tests that read a model are lost.
if model=$(bash "$root/examples/support/get_model.sh" smollm2); then models="smollm2=$model"
else say "skipped: tests on SmolLM2-135M (the file could not be fetched)"; fi
if model=$(bash "$root/examples/support/get_model.sh" gemma3); then models="$models;gemma3=$model"
else say "skipped: tests on Gemma 3 270M (the file could not be fetched)"; fi
if [ $long = ON ]; then models="$models;default=$(bash "$root/examples/support/get_model.sh")"; fi
export KVMELD_TEST_MODELS=${models#;}
export KVMELD_TEST_LONG=$([ $long = ON ] && echo 1 || echo 0)

# No optimisation: the build is most of the time, and what needs another level asks for it itself.
say "configuring and building with $KVMELD_JOBS jobs"
configure "$root" "$root/build/tests" --preset ci -DKVMELD_LLAMA_ROOT="$engine" -DKVMELD_TEST_LONG=$long
targets=()
if [ -n "$filter" ]; then
  # A test unit/NAME is built by the target unit_NAME; where the filter names anything else, everything is built.
  mapfile -t names < <(cd "$root/build/tests" && ctest -N -R "$filter" | sed -nE 's,^ *Test +#[0-9]+: ,,p')
  [ ${#names[@]} -gt 0 ] || die "no test matches '$filter'"
  for name in "${names[@]}"; do
    case $name in
      unit/* | laws/* | engine/* | sim/* | fuzz/* | redis/* | grpc/* | mpi/* | identity/* | cuda/*) targets+=("${name//\//_}") ;;
      compile/headers_*) targets+=("${name//\//_}") ;;
      compile/* | consume/* | long/*) ;;
      *) targets=(all); break ;;
    esac
  done
fi
if [ -z "$filter" ] || [ ${#targets[@]} -gt 0 ]; then build "$root/build/tests" "${targets[@]}"; fi

cd "$root/build/tests"
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
status=0
ctest -j "$KVMELD_JOBS" --output-on-failure --no-tests=error --output-junit "$log/junit.xml" ${filter:+-R "$filter"} 2>&1 |
  awk -v held="$log/summary" '/^[0-9]+% tests passed, / { summary = 1 } summary { print > held; next } { print; fflush() }' || status=$?
# The reason is the line that a test printed before it ended as skipped.
awk '/<testcase / { name = $0; sub(/.*<testcase name="/, "", name); sub(/".*/, "", name); skipped = 0; reason = "(no reason given)" }
     /<skipped/ { skipped = 1 }
     /skipped: / { reason = $0; sub(/.*skipped: /, "", reason); sub(/<\/system-out>.*/, "", reason) }
     /<\/testcase>/ && skipped { print name ": " reason }' "$log/junit.xml" >"$log/skipped"
if [ -s "$log/skipped" ]; then printf 'Skipped tests, and why:\n'; sed 's/^/  /' "$log/skipped"; echo; fi
may_be_skipped='^[^:]*: (no CUDA device|one CUDA device|no nvcc|no right to )'
if [ -n "$strict" ] && grep -vE "$may_be_skipped" "$log/skipped" >"$log/missed"; then
  printf 'These tests should have run here (--strict):\n'; sed 's/^/  /' "$log/missed"; echo
  status=1
fi
cat "$log/summary" 2>/dev/null || true
exit "$status"
