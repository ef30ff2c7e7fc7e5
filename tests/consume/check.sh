#!/usr/bin/env bash
# check.sh CONSUMER SOURCE_TREE: builds and runs one consumer outside the tree.
set -euo pipefail
consumer=$1 tree=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "${BASH_SOURCE[0]}")"/*.cpp "$work/"

quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; echo "failed: $*"; exit 1; }; }

install_kvmeld() {
  quietly cmake -G Ninja -S "$tree" -B "$work/kvmeld-build"
  quietly cmake --install "$work/kvmeld-build" --prefix "$work/prefix"
  [ -f "$work/prefix/share/licenses/kvmeld/LICENSE" ] || { echo "the licence is not installed"; exit 1; }
  rm -rf "$work/kvmeld-build"  # so that nothing of it can be what the consumer finds
}

# project LINE...: a consumer's CMakeLists.txt; no CUDA anywhere.
project() {
  printf '%s\n' 'cmake_minimum_required(VERSION 3.22)' 'project(consumer LANGUAGES CXX)' "$@" >"$work/CMakeLists.txt"
}

build_and_run() {
  quietly cmake -G Ninja -S "$work" -B "$work/build" "$@"
  quietly cmake --build "$work/build"
  "$work/build/consumer"
}

case $consumer in
  find_package)
    install_kvmeld
    project 'find_package(kvmeld 0.1 REQUIRED)' 'add_executable(consumer consumer.cpp other.cpp)' \
      'target_link_libraries(consumer PRIVATE kvmeld::kvmeld)'
    build_and_run -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
    # The language standard is all that a user's command line may gain.
    if grep -oE ' -(m|W|f|O)[^ ]*' "$work/build/compile_commands.json"; then echo "these flags leaked"; exit 1; fi ;;
  compiled)  # with the companion library, beside a file that knows headers alone
    install_kvmeld
    project 'find_package(kvmeld 0.1 REQUIRED COMPONENTS compiled)' 'add_library(other OBJECT other.cpp)' \
      'target_link_libraries(other PRIVATE kvmeld::kvmeld)' 'add_executable(consumer consumer.cpp)' \
      'target_link_libraries(consumer PRIVATE other kvmeld::compiled)' \
      'add_library(plugin SHARED plugin.cpp)' 'set_target_properties(plugin PROPERTIES CXX_VISIBILITY_PRESET hidden)' \
      'target_link_libraries(plugin PRIVATE kvmeld::compiled)'
    build_and_run -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
    # A shared library that hides its symbols hides the companion's too: two plugins keep to their own copies.
    nm -DC --defined-only "$work/build/libplugin.so" >"$work/exports"
    grep -q ' streams_from()' "$work/exports" || { echo "the plugin lacks its entry"; exit 1; }
    if grep ' kvmeld::' "$work/exports" | head -3 | grep .; then echo "the plugin exports these"; exit 1; fi
    grep -q 'KVMELD_COMPILED=1 .*/consumer.cpp' "$work/build/compile_commands.json" || { echo "no KVMELD_COMPILED"; exit 1; }
    if grep -q 'KVMELD_COMPILED.*/other.cpp' "$work/build/compile_commands.json"; then echo "KVMELD_COMPILED leaked"; exit 1; fi ;;
  add_subdirectory)
    project "add_subdirectory(\"$tree\" kvmeld)" 'add_executable(consumer consumer.cpp other.cpp)' \
      'target_link_libraries(consumer PRIVATE kvmeld::kvmeld)'
    build_and_run ;;
  plain_include)
    quietly "${CXX:-c++}" -std=c++20 -I"$tree/include" "$work/consumer.cpp" "$work/other.cpp" -pthread -o "$work/consumer"
    "$work/consumer"
    # A value that means neither way stops at the first header, not at the linker.
    if "${CXX:-c++}" -std=c++20 -I"$tree/include" -DKVMELD_COMPILED=0 -fsyntax-only "$work/consumer.cpp" 2>"$work/log"; then
      echo "KVMELD_COMPILED=0 compiles"; exit 1
    fi
    grep -q 'KVMELD_COMPILED is 1 in users' "$work/log" || { cat "$work/log"; exit 1; } ;;
  strict)
    quietly "${CXX:-c++}" -std=c++20 -I"$tree/include" -fno-exceptions -fno-rtti -Wall -Wextra -Wconversion -Wshadow -Werror \
      "$work/consumer.cpp" "$work/other.cpp" -pthread -o "$work/consumer"
    "$work/consumer" ;;
  missing_component)
    install_kvmeld
    project 'find_package(kvmeld REQUIRED COMPONENTS teleport)' 'add_executable(consumer consumer.cpp)'
    if cmake -G Ninja -S "$work" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/log" 2>&1; then
      echo "a component that does not exist was found"; exit 1
    fi
    tr -s ' \n' ' ' <"$work/log" | grep -o "kvmeld::teleport: there is no component 'teleport'" || { cat "$work/log"; exit 1; }
    project 'find_package(kvmeld REQUIRED OPTIONAL_COMPONENTS teleport)' 'add_executable(consumer consumer.cpp other.cpp)' \
      'target_link_libraries(consumer PRIVATE kvmeld::kvmeld)'
    rm -rf "$work/build"
    build_and_run -DCMAKE_PREFIX_PATH="$work/prefix" ;;
  llama_component)
    install_kvmeld
    project 'find_package(kvmeld REQUIRED COMPONENTS llama)' 'add_executable(consumer engine.cpp)' \
      'target_link_libraries(consumer PRIVATE kvmeld::llama)'
    build_and_run -DCMAKE_PREFIX_PATH="$work/prefix" -DKVMELD_LLAMA_ROOT="$KVMELD_LLAMA_ROOT" ;;
  *) echo "unknown consumer $consumer"; exit 1 ;;
esac
