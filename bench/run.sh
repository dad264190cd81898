#!/usr/bin/env bash
# Runs the benchmarks of bench/suites and prints the results as Markdown. `./run bench` calls it; it needs build/release.
#
#   bench/run.sh [--quick] [SUITE ...]
#
# Environment:
#   LLAMA_CPP     folder of llama.cpp's programs, built natively: the model shapes run in turns with it
#   IK_LLAMA_CPP  the same for ik_llama.cpp
#   PYTHON        Python to use (default python3); with the packages tokenizers and torch it measures these too
#   TRACES        folder of recorded traffic (default ../shared/data/traces); missing traces are skipped
#   TOKENIZER, TEXT  folder with tokenizer.json, and the text to encode
#   SHAPES        folder for the random-weight models, 36 GB (default build/bench/shapes)
#   RESULTS       folder for raw rounds as JSON (default build/bench/results)
#   BUILD         build folder (default build/release)
#   MOESAIC_TUNING  a file that `moesaic tune` wrote (default off: built-in choices)
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
