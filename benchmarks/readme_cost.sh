#!/usr/bin/env bash
# What README's first example costs the compiler at -O2: user seconds (the least of RUNS, taken in turns) and bytes of the object, with
# headers alone, with the companion library, and from other trees, each with its own README.
#   readme_cost.sh [RUNS] [OTHER_TREE...]     CXX names the compiler (g++)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
runs=${1:-3}
shift || true
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

names=() trees=() flags=()
add() { names+=("$1"); trees+=("$2"); flags+=("${3:-}"); }
add "headers alone" "$root"
add "with the companion" "$root" -DKVMELD_COMPILED=1
for other in "$@"; do add "$other" "$other"; done
for i in "${!names[@]}"; do
  awk '/^```cpp/ && !done {inside=1; next} /^```/ {if (inside) done=1; inside=0} inside' "${trees[i]}/README.md" >"$work/$i.cpp"
  echo 999 >"$work/$i.least"
done

TIMEFORMAT=%U
for ((run = 0; run < runs; ++run)); do
  for i in "${!names[@]}"; do
    read -r -a more <<<"${flags[i]}"
    seconds=$({ time "${CXX:-g++}" -std=c++20 -O2 "${more[@]}" -c -I "${trees[i]}/include" "$work/$i.cpp" -o "$work/$i.o"; } 2>&1)
    awk -v s="$seconds" '{ print (s < $1 ? s : $1) }' "$work/$i.least" >"$work/least" && mv "$work/least" "$work/$i.least"
  done
done
for i in "${!names[@]}"; do
  printf '%-24s %8.2f s %9d bytes\n' "${names[i]}" "$(cat "$work/$i.least")" "$(stat -c %s "$work/$i.o")"
done
