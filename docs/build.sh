#!/usr/bin/env bash
# Builds the API reference: build/docs/html/index.html, searchable in the browser. Fails on any warning.
#
#   bash docs/build.sh              installs doxygen if it is missing
#   bash docs/build.sh --check      does not install: ends with 77 where there is none (ctest)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/examples/support/common.sh"
if [ "${1:-}" = --check ]; then
  command -v doxygen >/dev/null || { echo "skipped: no doxygen"; exit 77; }
else
  need_tool doxygen doxygen
fi
cd "$root"
rm -rf build/docs
mkdir -p build/docs
doxygen docs/Doxyfile
if [ -s build/docs/warnings.txt ]; then
  sed "s,$root/,,g" build/docs/warnings.txt
  die "the reference has warnings"
fi
say "written: build/docs/html/index.html"
