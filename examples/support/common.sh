# Shared by the scripts of examples, tests and benchmarks; sourced, never run.
# Messages go to stderr, so that a script's stdout can be an answer.

KVMELD_CACHE=${KVMELD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvmeld}
KVMELD_JOBS=${KVMELD_JOBS:-$(nproc 2>/dev/null || echo 2)}

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# as_root COMMAND...: as it is for root, through sudo for anyone else.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "this needs root: $* (or install the packages by hand)"
  fi
}

# need_packages PACKAGE...: installs what dpkg does not list yet, and says nothing when all is there.
need_packages() {
  command -v dpkg-query >/dev/null || { say "not a Debian system; needed packages: $*"; return 0; }
  local package missing=()
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return 0
  say "installing: ${missing[*]}"
  local log; log=$(mktemp)
  if ! { as_root apt-get update -q && as_root env DEBIAN_FRONTEND=noninteractive \
         apt-get install -q -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2; rm -f "$log"; die "apt-get could not install: ${missing[*]}"
  fi
  rm -f "$log"
}

# need_tool COMMAND PACKAGE...: packages for a command that may come from elsewhere than apt.
need_tool() { local tool=$1; shift; command -v "$tool" >/dev/null || need_packages "$@"; }

# pip_download FOLDER ARGUMENT...: fetches from the package index that pip is configured for; installs nothing.
pip_download() {
  local folder=$1; shift
  local python=python3 log
  mkdir -p "$folder"
  $python -m pip --version >/dev/null 2>&1 || need_packages python3 python3-pip
  # A python3 that is not Debian's may lack pip even after that.
  $python -m pip --version >/dev/null 2>&1 || python=/usr/bin/python3
  log=$(mktemp)
  if ! $python -m pip download --disable-pip-version-check --no-deps --progress-bar off -q -d "$folder" "$@" >"$log" 2>&1; then
    tail -n 5 "$log" >&2; rm -f "$log"; return 1
  fi
  rm -f "$log"
}

# hold_lock NAME: one script at a time fills a part of the cache; released when the script ends.
hold_lock() {
  mkdir -p "$KVMELD_CACHE"
  exec 8>"$KVMELD_CACHE/.lock.$1"
  flock -n 8 || { say "waiting for another run that fills the cache"; flock 8; }
}
