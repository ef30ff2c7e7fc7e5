#!/usr/bin/env bash
# What equal_output.sh must refuse, and what it must accept.
set -euo pipefail
script=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/equal_output.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
program() { printf '#!/bin/sh\n%s\n' "$2" >"$folder/$1"; chmod +x "$folder/$1"; }
program a 'echo 1'; program b 'echo 1'; program other 'echo 2'; program silent ':'; program broken 'echo 1; exit 3'
expect() {  # STATUS ARGUMENT...
  local want=$1 status=0; shift
  (cd "$folder" && bash "$script" "$@") >"$folder/said" 2>&1 || status=$?
  [ "$status" = "$want" ] || { echo "equal_output.sh $*: status $status instead of $want"; cat "$folder/said"; exit 1; }
}
expect 0 2 '' ./a ./b
expect 1 2 '' ./a
expect 1 2 '' ./a ./a
expect 1 3 '' ./a ./b
expect 1 1 '' ./a
expect 1 0 ''
expect 1 2 '' ./a ./other
expect 1 2 '' ./a ./silent
expect 1 2 '' ./silent ./a
expect 1 2 '' ./a ./broken
expect 1 2 '' ./a ./missing
expect 77 3 'no clang++' ./a ./b
expect 77 2 'no clang++' ./a
expect 1 3 'no clang++' ./a ./other
expect 1 2 'no clang++' ./a ./b
echo "what is equal passes, and nothing else"
