#!/usr/bin/env bash
# Everything that needs a GPU: tests with compute-sanitizer beside them, times, kernels in depth.
# Each part takes three minutes or less. Needs a CUDA build of PyTorch, and nvcc where the package
# at hand has no CUDA kernels: they are built first.
#
#   benchmarks/run_gpu.sh [--part tests|times|depth|models|crossover|vllm] [folder]
#
# Logs and JSON go to the folder, by default build/gpu. PYTHON names the interpreter that has
# PyTorch. What fails or runs out of time does not keep the rest from running; the exit status says
# whether anything did. The part vllm is for the plugin: FA3 names the folder vllm_flash_attn of
# vLLM's wheel, with _vllm_fa3_C in it; VLLM the Python of an environment with vLLM and this package.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}"
parts=(tests times depth models crossover)
if [ "${1:-}" = --part ]; then
  parts=("$2")
  shift 2
fi
results="${1:-build/gpu}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
export PYTHONPATH="$PWD" CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONUNBUFFERED=1

# run NAME SECONDS COMMAND...: runs a command with a time limit, its output in NAME.log.
run() {
  local name="$1" limit="$2" begin=$SECONDS
  shift 2
  timeout -k 5 "$limit" "$@" >"$results/$name.log" 2>&1
  local code=$?
  echo "$name: $([ $code = 0 ] && echo passed || echo "FAILED ($code)") in $((SECONDS - begin)) s"
  if [ $code != 0 ]; then
    tail -n 15 "$results/$name.log"
    echo "$name" >>"$results/failed"
  fi
}
rm -f "$results/failed"

facts='import h2o_prefill, torch
print("%d.%d" % torch.cuda.get_device_capability(), torch.ops.h2o_prefill.has_cuda())'
read -r capability has_kernels < <("$PYTHON" -c "$facts" 2>/dev/null)
if [ "${has_kernels:-}" != True ]; then
  capability="$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')" || exit 1
  # Built in place, for the GPU that is there, so that nothing has to be installed.
  export TORCH_CUDA_ARCH_LIST="$capability" H2O_WITH_CUDA=ON H2O_BUILD_DIR="$PWD/build/gpu-cmake"
  run build 300 "$PYTHON" setup.py -q build_ext --inplace
  [ -e "$results/failed" ] && exit 1
fi
"$PYTHON" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)'

# The kernels for every GPU and, on Hopper, its own, which are the default there.
paths=(sm80)
[ "$capability" = 9.0 ] && paths+=(sm90)
on_path() { echo env "H2O_PREFILL_CUDA_SM90=$([ "$1" = sm90 ] && echo 1 || echo 0)"; }

tests() {
  local attention=(tests/python/ops/test_{cuda,operators,prefill_attention}.py)
  for path in "${paths[@]}"; do
    run "tests-$path" 150 $(on_path "$path") "$PYTHON" -m pytest -v -n 6 --maxfail=40 \
      -o faulthandler_timeout=60 -p no:cacheprovider -k cuda \
      $([ "$path" = sm80 ] && echo tests/python/ops || echo "${attention[@]}") &
    # The sanitizer slows kernels down a hundred times: a few problems of every kernel.
    command -v compute-sanitizer >/dev/null || continue
    for tool in memcheck racecheck synccheck; do
      local problem="cuda and latent"
      [ $tool = racecheck ] && problem="cuda and (chunks or budgets)"
      run "sanitizer-$tool-$path" 130 $(on_path "$path") compute-sanitizer --tool "$tool" \
        --error-exitcode 9 "$PYTHON" -m pytest -v -p no:cacheprovider tests/python/ops/test_operators.py \
        -k "$problem" &
    done
  done
  run tests-models 150 "$PYTHON" -m pytest -v -n 3 -p no:cacheprovider --runslow tests/python/hf/test_cuda.py &
  wait
}

# bench NAME SECONDS PROGRAM COMMAND OPTIONS...
bench() {
  local name="$1" limit="$2"
  shift 2
  run "$name" "$limit" "${environment[@]}" "$PYTHON" "benchmarks/$1.py" "${@:2}" --device cuda --json "$results/$name.json"
}

times() {
  for path in "${paths[@]}"; do
    local environment=($(on_path "$path"))
    for preset in h2o recommended; do
      bench "prefill_${preset}_$path" 60 layer prefill --preset $preset --shape llama3 --seconds 6 \
        --lengths 4096,8192,32768,131072
      bench "kernels_${preset}_$path" 40 layer kernels --preset $preset
    done
  done
}

depth() {
  for path in "${paths[@]}"; do
    local environment=($(on_path "$path"))
    bench "colsum_$path" 30 operators colsum --seconds 1
    bench "intra_chunk_$path" 30 operators intra_chunk --seconds 1
    bench "memory_$path" 30 operators memory --seconds 1
  done
}

# Layers of Llama-3-8B, the last logits included: dense by PyTorch beside the presets.
models() {
  local model=(models model --model llama3-8b-layers --dtype bfloat16 --seconds 6)
  local environment=($(on_path "${paths[-1]}"))
  for preset in h2o recommended; do
    bench "model_$preset" 60 "${model[@]}" --preset $preset --layers 6 --lengths 8192,32768
    bench "model_131072_$preset" 60 "${model[@]}" --preset $preset --layers 2 --lengths 131072
  done
}

# The GPU's row in csrc/common/device_costs.h, and what min_prefill=auto chooses.
crossover() {
  for path in "${paths[@]}"; do
    local environment=($(on_path "$path"))
    bench "crossover_$path" 120 layer crossover --dtype bfloat16,float16 --seconds 1 \
      --lengths 2048,4096,8192,16384,32768,65536
  done
}

# What the plugin of vLLM does on a GPU: without vLLM, then the whole of it with random weights.
vllm() {
  local environment=($(on_path "${paths[-1]}"))
  local flash=(${FA3:+--fa3 "$FA3"}) lengths=8192,32768,65536,131072
  bench pages 100 pages --lengths $lengths --seconds 2 "${flash[@]}"
  bench pages_steps 60 pages --lengths 131072 --size 16 --step 2048,8192 --seconds 2 "${flash[@]}"
  bench pages_ranks 60 pages --lengths 32768,131072 --size 16 --ranks 2,4,8 --seconds 2 "${flash[@]}"
  command -v compute-sanitizer >/dev/null &&
    run sanitizer-pages 130 compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" -m pytest -v \
      -p no:cacheprovider tests/python/ops/test_paged_sparse_attention.py -k cuda
  [ -n "${VLLM:-}" ] || return 0
  local folder="$results/llama3-8b" settings length
  "$VLLM" - "$folder" <<'END'
import sys

from transformers import LlamaConfig

sizes = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131584}
sizes |= {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
config = LlamaConfig(intermediate_size=14336, torch_dtype="bfloat16", **sizes)
config.architectures = ["LlamaForCausalLM"]
config.save_pretrained(sys.argv[1])
END
  # `vllm bench latency`, which vLLM's builds for CPUs have under no name.
  cat >"$results/latency.py" <<'END'
from vllm.benchmarks import latency
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    latency.add_cli_args(parser)
    latency.main(parser.parse_args())
END
  for length in ${lengths//,/ }; do
    for settings in dense h2o recommended,max_widen=2; do
      run "vllm_${length}_$settings" 170 env H2O_PREFILL_CUDA=1 H2O_PREFILL_SETTINGS=$settings \
        "$VLLM" "$results/latency.py" --model "$folder" --load-format dummy --skip-tokenizer-init \
        --disable-detokenize --attention-backend FLASH_ATTN --max-model-len 131584 \
        --max-num-batched-tokens 8192 --no-enable-prefix-caching --batch-size 1 --input-len "$length" \
        --output-len 2 --num-iters-warmup 1 --num-iters 3 \
        --output-json "$results/vllm_${length}_$settings.json"
    done
  done
}

for part in "${parts[@]}"; do $part; done
echo "total: $SECONDS s"
if [ -e "$results/failed" ]; then
  echo "failed: $(tr '\n' ' ' <"$results/failed")"
  exit 1
fi
