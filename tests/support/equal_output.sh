#!/usr/bin/env bash
# Runs every program and fails unless all print the same; prints what they agree on.
#
#   equal_output.sh COUNT LACKING PROGRAM...    as many programs as COUNT, at least 2 and no two alike. Where there are fewer,
#                                               LACKING says why: those that there are must agree, and the test ends as skipped.
set -euo pipefail
fail() { echo "$*"; exit 1; }
count=$1 lacking=$2; shift 2
[ "$count" -ge 2 ] || fail "$count programs are no comparison"
[ "$(printf '%s\n' "$@" | sort -u | wc -l)" = $# ] || fail "one program twice: $*"
if [ -z "$lacking" ]; then [ $# = "$count" ] || fail "$# programs where $count are to be compared"
else [ $# -lt "$count" ] || fail "$# programs, and yet '$lacking' of $count"
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
first=
for program in "$@"; do
  "$program" >"$folder/out" || fail "$program failed"
  [ -s "$folder/out" ] || fail "$program printed nothing"
  if [ -z "$first" ]; then first=$program; mv "$folder/out" "$folder/first"; continue; fi
  diff "$folder/first" "$folder/out" || fail "differs: $first and $program"
done
[ -z "$first" ] || cat "$folder/first"
if [ -n "$lacking" ]; then echo "skipped: $# of $count builds were compared ($lacking)"; exit 77; fi
echo "equal in $# builds"
