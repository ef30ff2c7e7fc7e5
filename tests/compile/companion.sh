#!/usr/bin/env bash
# The companion library (cmake/compiled.cpp) against headers alone, with the README's first example.
#   companion.sh SOURCE_TREE COMPILER
# Both ways print one digest, and so does a program of one file of each kind. An object that uses the
# companion has at most 200 KB at -O2 and defines nothing that the library defines.
set -euo pipefail
tree=$1 compiler=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
compile() { "$compiler" -std=c++20 "-I$tree/include" -Wall -Wextra -Werror "$@"; }

awk '/^```cpp/ && !done {inside=1; next} /^```/ {if (inside) done=1; inside=0} inside' "$tree/README.md" >example.cpp
# The same as a function of a second file, and of a third, whose main calls both.
function_of() { sed -e "s/^int main() {/int $1() {/" -e '$ s/^}$/  return 0;\n}/' example.cpp; }
function_of other >other.cpp
{ function_of one; echo 'int other();'; echo 'int main() { return one() + other(); }'; } >both.cpp
grep -q '^int other() {' other.cpp || { echo "README's example has no main"; exit 1; }

compile -O0 -DKVMELD_COMPILED=2 -c "$tree/cmake/compiled.cpp" -o library.o
compile -O2 -DKVMELD_COMPILED=1 -c example.cpp -o with.o
compile -O0 -c other.cpp -o other.o
compile -O0 -DKVMELD_COMPILED=1 -c both.cpp -o both.o
echo 'int other(); int main() { return other(); }' >only.cpp
"$compiler" only.cpp other.o -pthread -o alone
"$compiler" with.o library.o -pthread -o with
"$compiler" both.o other.o library.o -pthread -o mixed
"$compiler" other.o both.o library.o -pthread -o mixed_again

./alone >alone.out
cat alone.out
grep -q '^216 tokens, content [0-9a-f]\{32\}$' alone.out
./with | cmp - alone.out
./mixed | cmp - <(cat alone.out alone.out)
./mixed_again | cmp - <(cat alone.out alone.out)

bytes=$(stat -c %s with.o)
[ "$bytes" -le 204800 ] || { echo "the example's object has $bytes bytes with the companion"; exit 1; }
# What the library has as its own (T, and the template instances, W), a user's object asks for.
nm --defined-only library.o | awk '$2 == "T" {print $3}' | sort -u >library.own
nm --defined-only with.o | awk '{print $3}' | sort -u >with.own
[ "$(wc -l <library.own)" -gt 50 ] || { echo "the library defines next to nothing"; exit 1; }
comm -12 library.own with.own >twice
[ ! -s twice ] || { echo "defined in the library and in the user's object:"; c++filt <twice; exit 1; }
nm -C --undefined-only with.o >asked
for core in 'detail::plan_core(' 'detail::render_rows<' 'detail::check_output(' 'Fragment> kvmeld::v0::seal<'; do
  grep -qF "$core" asked || { echo "the user's object does not take $core from the library"; exit 1; }
done
echo "$bytes bytes"
