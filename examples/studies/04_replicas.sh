# A Redis server of this run's own, on a socket in a folder that goes with it. Sourced by run.sh.
more_packages=(redis-server libhiredis-dev)

start() {
  redis_folder=$(mktemp -d)
  redis-server --port 0 --unixsocket "$redis_folder/redis.sock" --dir "$redis_folder" --appendonly yes --save '' --loglevel warning \
    >"$redis_folder/log" 2>&1 &
  redis_pid=$!
  trap 'kill "$redis_pid" 2>/dev/null; wait "$redis_pid" 2>/dev/null; rm -rf "$redis_folder"' EXIT
  for _ in $(seq 100); do [ -S "$redis_folder/redis.sock" ] && break; sleep 0.05; done
  [ -S "$redis_folder/redis.sock" ] || { cat "$redis_folder/log" >&2; die "redis-server did not start"; }
  flags=(--redis "$redis_folder/redis.sock" "${flags[@]}")
}
