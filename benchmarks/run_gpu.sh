#!/usr/bin/env bash
# Everything that needs a GPU, in under 9 minutes: build for the GPU that is there, tests,
# compute-sanitizer on a few of them, benchmarks. Needs nvcc and a CUDA build of PyTorch.
#
#   benchmarks/run_gpu.sh [folder]   logs and JSON go to the folder, by default build/gpu
#
# PYTHON names the interpreter that has PyTorch, cmake and ninja. A part that fails or runs out of
# time does not keep the next ones from running; the exit status says whether any did.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}"
results="${1:-build/gpu}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
failed=()

# part NAME SECONDS COMMAND...: runs a command with a time limit, its output in NAME.log.
part() {
  local name="$1" limit="$2" begin=$SECONDS
  shift 2
  if timeout "$limit" "$@" >"$results/$name.log" 2>&1; then
    echo "$name: passed in $((SECONDS - begin)) s"
  else
    echo "$name: FAILED ($?) after $((SECONDS - begin)) s, see $results/$name.log"
    tail -n 15 "$results/$name.log"
    failed+=("$name")
  fi
}

"$PYTHON" - <<'EOF' || exit 1
import sys, torch
if not torch.cuda.is_available():
    sys.exit("PyTorch finds no GPU")
print(torch.cuda.get_device_name(), "torch", torch.__version__)
EOF
capability="$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')"
# The instructions of Hopper that its successors lack have an architecture of their own.
[ "$capability" = 9.0 ] && capability=9.0a

# Built beside the sources, in place, so that nothing has to be installed.
export TORCH_CUDA_ARCH_LIST="$capability" H2O_WITH_CUDA=ON H2O_BUILD_DIR="$PWD/build/gpu-cmake"
export PYTHONPATH="$PWD" CUBLAS_WORKSPACE_CONFIG=:4096:8
part build 150 "$PYTHON" setup.py -q build_ext --inplace
if [ ${#failed[@]} -gt 0 ]; then exit 1; fi

part tests 90 "$PYTHON" -m pytest -q --maxfail=20 -k cuda tests/python/ops
# On Hopper once more with its own kernels, where they take the problem; the sanitizer sees both kinds.
hopper=()
if [ "$capability" = 9.0a ]; then
  hopper=(env H2O_PREFILL_CUDA_SM90=1)
  part tests-sm90 60 "${hopper[@]}" "$PYTHON" -m pytest -q --maxfail=20 -k cuda tests/python/ops
fi

# The sanitizer slows kernels down a hundred times: one problem of every kernel.
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    part "sanitizer-$tool" 45 "${hopper[@]}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$PYTHON" -m pytest -q -p no:cacheprovider tests/python/ops/test_cuda.py -k every_kernel
  done
else
  echo "sanitizer: skipped, compute-sanitizer is not installed"
fi

# bench RESULT SECONDS PROGRAM ARGUMENTS...
bench() {
  local name="$1" limit="$2" program="$3"
  shift 3
  part "bench-$name" "$limit" "$PYTHON" "benchmarks/$program.py" "$@" --device cuda \
    --json "$results/$name.json"
}
lengths=1024,4096,8192,16384,32768,65536,131072
bench prefill 60 layer prefill --seconds 2 --lengths "$lengths"
bench intra_chunk 20 operators intra_chunk --seconds 1
bench memory 20 operators memory --seconds 1
bench colsum 25 operators colsum --seconds 2
bench linear 40 linear linear --seconds 1.5 --lengths "$lengths"
if [ ${#hopper[@]} -gt 0 ]; then
  export H2O_PREFILL_CUDA_SM90=1
  bench prefill_sm90 60 layer prefill --seconds 2 --lengths "$lengths"
  bench colsum_sm90 25 operators colsum --seconds 2
fi

echo "total: $SECONDS s"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
