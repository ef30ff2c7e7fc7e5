#!/usr/bin/env bash
# Installs what is missing, builds one example or study and runs it; a study, or an example that reads a model, gets the engine and
# the model, too.
#
#   bash examples/run.sh [FLAG...]             study 01: two agents and more, full text against merges, on the real model
#   bash examples/run.sh NAME|NN [FLAG...]     an example (session, tiers, ...) or a study (01 or two_agents, quality, ...); flags go to it
#   bash examples/run.sh 01 --model PATH --agents 2
#   bash examples/run.sh --list                all of them
#
# Whatever was fetched or built is kept: a second run starts within seconds. Results of studies go to build/*.json.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/examples/support/common.sh"
. "$root/examples/support/build.sh"

if [ "${1:-}" = --list ]; then
  for source in "$root"/examples/*.cpp "$root"/examples/studies/*.cpp; do
    printf '%-20s %s\n' "$(basename "$source" .cpp)" "$(sed -n '1s,^// ,,p' "$source")"
  done
  exit 0
fi
wanted=01
case ${1:-} in '' | -*) ;; *) wanted=$1; shift ;; esac
source=
for candidate in "$root/examples/$wanted.cpp" "$root/examples/studies/$wanted"_*.cpp "$root/examples/studies/"[0-9][0-9]_"$wanted.cpp" \
  "$root/examples/studies/$wanted.cpp" "$root/examples/studies/"[0-9][0-9]_*"_$wanted.cpp"; do
  if [ -f "$candidate" ]; then source=$candidate; break; fi
done
[ -n "$source" ] || die "there is no example or study $wanted; bash examples/run.sh --list names them"
name=$(basename "$source" .cpp)

# The model may be named here; the rest is the program's own.
model_flags=() flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --model) [ $# -ge 2 ] || die "--model needs a path"; model_flags=(--model "$2"); shift 2 ;;
    --model=*) model_flags=(--model "${1#--model=}"); shift ;;
    *) flags+=("$1"); shift ;;
  esac
done

if ! grep -q 'kvmeld/engine/' "$source" && [ "$(dirname "$source")" = "$root/examples" ]; then
  need_packages "${base_packages[@]}"
  say "building example $name"
  configure "$root" "$root/build/examples_alone" -DCMAKE_BUILD_TYPE=Release -DKVMELD_BUILD_EXAMPLES=ON -DKVMELD_BUILD_STUDIES=OFF
  build "$root/build/examples_alone" "$name"
  cd "$root"
  say "running $name"
  exec "$root/build/examples_alone/examples/$name" "${flags[@]}"
fi

# One that needs servers or several processes says so in the NAME.sh beside it: packages in `more_packages`, and a function `start`
# that may add to `flags` or put words before the program in `launcher`.
more_packages=() launcher=()
start() { :; }
if [ -f "${source%.cpp}.sh" ]; then . "${source%.cpp}.sh"; fi

need_packages "${example_packages[@]}" "${more_packages[@]}"
engine=$(bash "$root/examples/support/get_engine.sh")
model=$(bash "$root/examples/support/get_model.sh" "${model_flags[@]}")

say "building $name"
configure "$root" "$root/build/examples" -DCMAKE_BUILD_TYPE=Release -DKVMELD_BUILD_EXAMPLES=ON -DKVMELD_LLAMA_ROOT="$engine"
build "$root/build/examples" "$name"

say "running $name with $(basename "$model")"
cd "$root"
start
status=0
"${launcher[@]}" "$root/build/examples/examples/$name" --model "$model" "${flags[@]}" || status=$?
exit $status
