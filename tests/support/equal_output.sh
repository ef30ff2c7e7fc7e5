#!/usr/bin/env bash
# Runs every program given and fails unless all print the same; prints what they agree on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
first=
for program in "$@"; do
  "$program" >"$folder/out"
  [ -s "$folder/out" ] || { echo "$program printed nothing"; exit 1; }
  if [ -z "$first" ]; then first=$program; mv "$folder/out" "$folder/first"; continue; fi
  diff "$folder/first" "$folder/out" || { echo "differs: $first and $program"; exit 1; }
done
cat "$folder/first"
echo "equal in $# builds"
