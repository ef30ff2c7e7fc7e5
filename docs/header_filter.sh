#!/usr/bin/env bash
# Doxygen's filter for headers: the sentence at the head of each is the file's, not that of what follows.
#   header_filter.sh FILE
set -euo pipefail
awk 'NR == 2 && $0 == "" { print "/// @file"; next } { print }' "$1"
