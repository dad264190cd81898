#!/usr/bin/env bash
# Runs every benchmark that this machine supports and prints markdown. Called by `./run bench`; needs build/release.
#
#   bench/run.sh [--quick]
#
# Environment:
#   LLAMA_CPP     folder of llama.cpp's programs, built natively, to compare the model shapes with, in alternation
#   IK_LLAMA_CPP  the same for ik_llama.cpp
#   PYTHON        Python (default python3); its packages tokenizers and torch, if installed, are compared as well
#   TRACES        recorded traffic (default ../shared/data/traces); missing traces are skipped
#   TOKENIZER, TEXT  folder with tokenizer.json, and the text to encode
#   SHAPES        folder of the random-weight models, 36 GB (default build/bench/shapes)
#   RESULTS       folder of the raw results as JSON (default build/bench/results)
#   BUILD         build folder (default build/release)
#   MOESAIC_TUNING  file of `moesaic tune` to use (default off: built-in choices)
set -euo pipefail
export MOESAIC_TUNING=${MOESAIC_TUNING:-off}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=
[ $# -le 1 ] || { printf 'usage: bench/run.sh [--quick], not "%s"\n' "$*" >&2; exit 2; }
case "${1:-}" in
  --quick) quick=--quick ;;
  "") ;;
  *) printf 'usage: bench/run.sh [--quick], not "%s"\n' "$1" >&2; exit 2 ;;
esac
build=${BUILD:-build/release}
python=${PYTHON:-python3}
shapes=${SHAPES:-build/bench/shapes}
results=${RESULTS:-build/bench/results}
mkdir -p "$results"
seconds=0.5
filter=.
if [ -n "$quick" ]; then seconds=0.1 filter='(int8|bf16)(_4096|_512)?/threads:(0|'$(nproc)')/'; fi  # all threads only

section() { printf '\n## %s\n\n' "$*"; }
fenced() { printf '```\n'; "$@"; printf '```\n'; }

printf '# Benchmarks of %s\n\n' "$(git describe --always --dirty 2>/dev/null || echo 'an exported tree')"
date -u '+%F %R UTC, load average '"$(cut -d' ' -f1-3 /proc/loadavg)"
section Machine
fenced "$build/bin/moesaic" doctor

section 'Model shapes, random weights'
[ -n "${LLAMA_CPP:-}" ] || printf 'Without llama.cpp: LLAMA_CPP is not set.\n\n'
[ -n "${IK_LLAMA_CPP:-}" ] || printf 'Without ik_llama.cpp: IK_LLAMA_CPP is not set.\n\n'
"$python" bench/peers/shapes.py "$build/bin/moesaic" "$shapes" --json "$results/shapes.json" $quick

section 'Quantizing eight times the memory'
size=(--gib 8 --memory 1G)
if [ -n "$quick" ]; then size=(--gib 2 --memory 256M --rounds 1); fi
"$python" bench/quantize_bounds.py "$build/bin/moesaic" "$shapes" "${size[@]}"

section 'Operators, compared with PyTorch'
if "$python" -c 'import torch' 2>/dev/null; then
  "$python" bench/peers/operators.py "$build/bin" --json "$results/operators.json" $quick
else
  printf 'Skipped: %s has no package torch.\n' "$python"
fi

section Tokenizer
text_file=${TEXT:-../shared/data/text/wikitext-2_valid.txt}
tokenizer=${TOKENIZER:-models/moesaic-tiny}
[ -f "$text_file" ] || text_file=models/moesaic-tiny/heldout.jsonl
if "$python" -c 'import tokenizers' 2>/dev/null; then
  fenced "$python" bench/tokenizer_vs_hf.py "$build/bin/text_tokenizer_bench" "$tokenizer" "$text_file"
else
  printf 'Skipped: %s has no package tokenizers.\n' "$python"
fi

section Kernels
for bench in kernels_gemm_bench kernels_attention_bench; do
  fenced "$build/bin/$bench" --benchmark_min_time="$seconds" --benchmark_filter="$filter" \
    --benchmark_color=false 2>/dev/null
done

section 'Long contexts'
long=() samples=20 recall=()
if [ -n "$quick" ]; then long=(--batch 1 --rounds 5) samples=4 recall=(--lengths 4096 --budgets 512,2048 --all-budgets ''); fi
"$build/bin/longcontext_attention_bench" "${long[@]}"
printf '\n'
"$python" bench/longcontext/quality.py "$build/bin/moesaic" --samples "$samples" "${recall[@]}"

section Cache
fenced "$build/bin/cache_tree_bench" --benchmark_min_time="$seconds" --benchmark_color=false 2>/dev/null
traces=${TRACES:-../shared/data/traces}
swe=$traces/swe-agent_demonstrations.tar.gz
played=()
[ ! -f "$traces/mooncake_synthetic_trace.jsonl.gz" ] || played+=("$traces/mooncake_synthetic_trace.jsonl.gz")
if [ -f "$swe" ]; then
  mkdir -p build/bench
  "$python" bench/cache/agent_trace.py "$swe" >build/bench/swe-agent.jsonl
  played+=(build/bench/swe-agent.jsonl)
fi
if [ "${#played[@]}" -gt 0 ]; then
  printf '\n'
  fenced "$build/bin/cache_trace_sim" "${played[@]}"
else
  printf '\nNo recorded traffic in %s.\n' "$traces"
fi
printf '\n'
fenced "$build/bin/cache_preemption_bench" models/moesaic-tiny --prompt 128 --output 400 --share 0.45

section 'Agents against the server, moesaic-tiny'
printf 'Eight sessions of four calls, four at once, all with one system prompt; with and without the prefix cache.\n'
root=$PWD
bin=$(realpath "$build")/bin
repeat=3
if [ -n "$quick" ]; then repeat=1; fi
mkdir -p build/bench/agent
(cd build/bench/agent &&  # the servers' logs
  "$python" "$root/bench/agent/run.py" agent --model "$root/models/moesaic-tiny" --vocabulary 1536 --repeat "$repeat" \
    --system 512 --first 1024 --last 3072 --turns 4 --sessions 8 --concurrency 4 --output 32 \
    --server "moesaic=$bin/moesaic serve {model} --port {port} --no-access-log" \
    --server "no-prefix-cache=$bin/moesaic serve {model} --port {port} --no-access-log --no-prefix-cache")
