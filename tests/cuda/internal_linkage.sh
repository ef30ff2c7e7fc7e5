#!/usr/bin/env bash
# internal_linkage.sh NM OBJECT...: two libraries for different architectures may meet in one process, so no kernel, and
# nothing between a caller and a kernel, may be a symbol that the linker shares.
set -euo pipefail
nm=$1
shift
launchers='run_rows|launch_rows|run_on_device|gather_on_device|ask_device|check_device\(|probe_arithmetic|probe_faults|Stream::bulk'
entry_points='kvmeld::v0::(run|render|gather)(<.*)?\(kvmeld::v0::gpu::Stream'
for object in "$@"; do
  symbols=$("$nm" -C --defined-only "$object")
  grep -qE "$launchers" <<<"$symbols" || { echo "$object launches nothing: is this check still about kvmeld?"; exit 1; }
  shared=$("$nm" -gC --defined-only "$object" | grep -E "$launchers|$entry_points" || true)
  if [[ -n $shared ]]; then
    echo "$object shares"
    echo "$shared"
    exit 1
  fi
done
echo "no kernel and no launcher is shared by $# objects"
