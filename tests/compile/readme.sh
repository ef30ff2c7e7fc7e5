#!/usr/bin/env bash
# Compiles the README's first example word for word and runs it.
#   readme.sh README COMPILER INCLUDE_FLAG
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
awk '/^```cpp/ && !done {inside=1; next} /^```/ {if (inside) done=1; inside=0} inside' "$1" >"$work/example.cpp"
[ -s "$work/example.cpp" ] || { echo "README has no C++ example"; exit 1; }
"$2" -std=c++20 -O1 -Wall -Wextra -Werror "$3" "$work/example.cpp" -pthread -o "$work/example"
"$work/example" | tee "$work/out"
grep -q '^216 tokens, content [0-9a-f]\{32\}$' "$work/out"
