#!/usr/bin/env bash
# Installs what is missing, fetches the engine and the model, builds one example and runs it.
#
#   bash examples/run.sh [NN] [FLAG...]        NN: 01 (default), 02, ...; flags go to the example
#   bash examples/run.sh 01 --model PATH --agents 2
#
# Whatever was fetched or built is kept: a second run starts within seconds. Results go to build/*.json.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/examples/support/common.sh"
. "$root/examples/support/build.sh"

number=01
case ${1:-} in [0-9] | [0-9][0-9]) number=$(printf '%02d' "$((10#$1))"); shift ;; esac
sources=("$root/examples/${number}"_*.cpp)
[ -f "${sources[0]}" ] || die "there is no example $number; there are: $(cd "$root/examples" && echo [0-9]*.cpp)"
name=$(basename "${sources[0]}" .cpp)

# The model may be named here; the rest is the example's own.
model_flags=() flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --model) [ $# -ge 2 ] || die "--model needs a path"; model_flags=(--model "$2"); shift 2 ;;
    --model=*) model_flags=(--model "${1#--model=}"); shift ;;
    *) flags+=("$1"); shift ;;
  esac
done

# An example that needs servers or several processes says so in NN_name.sh: packages in `more_packages`, and a function `start`
# that may add to `flags` or put words before the program in `launcher`.
more_packages=() launcher=()
start() { :; }
if [ -f "$root/examples/$name.sh" ]; then . "$root/examples/$name.sh"; fi

need_packages "${example_packages[@]}" "${more_packages[@]}"
engine=$(bash "$root/examples/support/get_engine.sh")
model=$(bash "$root/examples/support/get_model.sh" "${model_flags[@]}")

say "building example $name"
configure "$root" "$root/build/examples" -DCMAKE_BUILD_TYPE=Release -DKVMELD_BUILD_EXAMPLES=ON -DKVMELD_LLAMA_ROOT="$engine"
build "$root/build/examples" "$name"

say "running $name with $(basename "$model")"
cd "$root"
start
status=0
"${launcher[@]}" "$root/build/examples/examples/$name" --model "$model" "${flags[@]}" || status=$?
exit $status
