# Packages and building, for the run.sh of examples, tests and benchmarks; sourced after common.sh.

base_packages=(g++ cmake ninja-build ccache libxxhash-dev git ca-certificates)
model_packages=(python3 python3-pip unzip)
example_packages=("${base_packages[@]}" "${model_packages[@]}" nlohmann-json3-dev libcli11-dev)
test_packages=("${example_packages[@]}" clang clang-format python3-clang doxygen catch2 librapidcheck-dev libssl-dev libzstd-dev libhiredis-dev redis-server libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc openssl python3-grpcio python3-protobuf python3-xxhash libopenmpi-dev openmpi-bin libeigen3-dev libcpp-httplib-dev pkg-config python3-prometheus-client)
benchmark_packages=("${base_packages[@]}" "${model_packages[@]}" libbenchmark-dev libssl-dev libzstd-dev libhiredis-dev redis-server libeigen3-dev)

# configure SOURCE BUILD OPTION...: only when the options differ from last time's; ninja does the rest by itself.
configure() {
  local source=$1 folder=$2; shift 2
  local options="$source $*"
  if [ -f "$folder/build.ninja" ] && [ "$(cat "$folder/options.txt" 2>/dev/null)" = "$options" ]; then return 0; fi
  mkdir -p "$folder"
  local launcher=()
  if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  if ! cmake -G Ninja -S "$source" -B "$folder" "${launcher[@]}" "$@" >"$folder/configure.log" 2>&1; then
    cat "$folder/configure.log" >&2; die "configuring failed"
  fi
  grep -hE '^-- (kvmeld::|skipped)' "$folder/configure.log" >&2 || true
  printf '%s' "$options" >"$folder/options.txt"
}

# build FOLDER TARGET...: quiet when all goes well, apart from a line now and then; the compiler's words when not.
build() {
  local folder=$1; shift
  local status=0
  NINJA_STATUS='[%f/%t] ' cmake --build "$folder" -j "$KVMELD_JOBS" ${@:+--target "$@"} >"$folder/build.log" 2>&1 &
  local builder=$!
  local shown=
  while kill -0 "$builder" 2>/dev/null; do
    for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$builder" 2>/dev/null || break; sleep 0.5; done
    local step; step=$(tail -n 1 "$folder/build.log" | grep -oE '^\[[0-9]+/[0-9]+\]' || true)
    if [ -n "$step" ] && [ "$step" != "$shown" ] && kill -0 "$builder" 2>/dev/null; then printf '   build %s\n' "$step" >&2; shown=$step; fi
  done
  wait "$builder" || status=$?
  if [ "$status" != 0 ]; then grep -vE '^\[[0-9]+/[0-9]+\] ' "$folder/build.log" >&2 || true; die "building failed"; fi
}
