#!/usr/bin/env bash
# Runs every benchmark that this machine supports and prints markdown. Called by `./run bench`; needs build/release.
#
#   bench/run.sh [--quick] [SUITE ...]
#
# Environment:
#   LLAMA_CPP     folder of llama.cpp's programs, built natively, to compare the model shapes with, in alternation
#   IK_LLAMA_CPP  the same for ik_llama.cpp
#   PYTHON        Python (default python3); its packages tokenizers and torch, if installed, are compared as well. Placement
#                 needs numpy and scipy, and the layers of science need moesaic
#   TRACES        recorded traffic (default ../shared/data/traces); missing traces are skipped
#   TOKENIZER, TEXT  folder with tokenizer.json, and the text to encode
#   SHAPES        folder of the random-weight models, 36 GB (default build/bench/shapes)
#   RESULTS       folder of the raw results as JSON (default build/bench/results)
#   BUILD         build folder (default build/release)
#   MOESAIC_TUNING  file of `moesaic tune` to use (default off: built-in choices)
set -euo pipefail
export MOESAIC_TUNING=${MOESAIC_TUNING:-off}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for argument in "$@"; do
  case "$argument" in
    --quick) ;;
    -*) printf 'usage: bench/run.sh [--quick] [SUITE ...], not "%s"\n' "$argument" >&2; exit 2 ;;
  esac
done

printf '# Benchmarks of %s\n\n' "$(git describe --always --dirty 2>/dev/null || echo 'an exported tree')"
date -u '+%F %R UTC, load average '"$(cut -d' ' -f1-3 /proc/loadavg)"
printf '\n## Machine\n\n```\n'
"${BUILD:-build/release}/bin/moesaic" doctor
printf '```\n\n'
[ -n "${LLAMA_CPP:-}" ] || printf 'llama.cpp is not measured: LLAMA_CPP is not set.\n'
[ -n "${IK_LLAMA_CPP:-}" ] || printf 'ik_llama.cpp is not measured: IK_LLAMA_CPP is not set.\n'
exec python3 bench/run_suites.py "$@"
