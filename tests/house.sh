#!/usr/bin/env bash
# Measures the layout of the tree against its rules and fails where one is broken.
#
#   bash tests/house.sh                the figures, one a line: name, value, bound
#   bash tests/house.sh --list NAME    all that one figure counts, e.g. --list public_names
#   bash tests/house.sh --write-names  writes tests/public_names.txt: a new name is a decision
#   bash tests/house.sh --self-test    breaks each rule once in a small tree; each must be named
#
# Needs Debian's python3-clang and clang-format, of version 14.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# The bindings of libclang are a package of the system's Python, which need not be the first one.
python=python3
if ! python3 -c 'import clang.cindex' 2>/dev/null && [ -x /usr/bin/python3 ]; then
  python=/usr/bin/python3
fi
exec "$python" -B "$here/support/house.py" "$@"
