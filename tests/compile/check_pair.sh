#!/usr/bin/env bash
# check_pair.sh SOURCE COMPILER FLAG...: the source builds, and with -DKVMELD_BAD it does not, with the right sentence.
#
# Comments in the source say what is expected of the bad half:
#   // error: TEXT             some line of the compiler's output holds TEXT (taken literally); may be repeated
#   // error_lines: N          exactly N lines of it are errors
#   // bad_flags: FLAG...      flags for the bad half, after the others
#   // not_for: COMPILER...    names (g++, clang++, nvcc) for which no test is made (read by CMakeLists.txt)
set -uo pipefail
source=$1 compiler=$2
shift 2
field() { sed -n "s,^// $1: ,,p" "$source"; }

name=$(basename "$compiler")
case $name in
  nvcc*) command=("$compiler" -std=c++20 -x cu -cuda -o /dev/null) ;;  # its front end, which is what reads C++
  *) command=("$compiler" -std=c++20 -fsyntax-only) ;;
esac

if ! output=$("${command[@]}" "$@" "$source" 2>&1); then
  echo "the good half must build:"; echo "$output"; exit 1
fi
read -r -a bad_flags <<<"$(field bad_flags)"
if output=$("${command[@]}" "$@" -DKVMELD_BAD "${bad_flags[@]}" "$source" 2>&1); then
  echo "the bad half must not build"; exit 1
fi
failed=0
while IFS= read -r sentence; do
  [ -z "$sentence" ] && continue
  grep -qF -- "$sentence" <<<"$output" || { echo "missing sentence: $sentence"; failed=1; }
done <<<"$(field error)"
lines=$(field error_lines)
if [ -n "$lines" ]; then
  found=$(grep -cE ': (fatal )?error[: ]' <<<"$output")
  [ "$found" = "$lines" ] || { echo "$found error lines, expected $lines"; failed=1; }
fi
[ "$failed" = 0 ] || echo "$output"
exit "$failed"
