#!/usr/bin/env bash
# Doxygen's filter for pages. Headings get names, PAGE_SLUG, and links to them use these: by itself it knows no heading's name.
#   page_links.sh FILE
set -euo pipefail
page=$(basename "$1" .md)
awk -v page="${page,,}" '
  /^```/ { code = !code }
  !code && /^##+ / {
    slug = tolower($0)
    sub(/^#+ /, "", slug)
    gsub(/[^a-z0-9 _-]/, "", slug)
    gsub(/ /, "-", slug)
    print $0 " {#" page "_" slug "}"
    next
  }
  { print }' "$1" |
  sed -E -e 's/\]\((docs\/)?([a-z_]+)\.md#([^)]*)\)/](#\2_\3)/g' -e "s/\]\(#([a-z0-9-]+)\)/](#${page,,}_\1)/g"
