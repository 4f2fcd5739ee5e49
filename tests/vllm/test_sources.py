"""What the plugin uses is there in all sources of vLLM that tests/vllm/run.sh has taken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_prefill.vllm import contract

SOURCES = sorted(Path(sys.prefix, "sources").glob("*"))
PROBE = """
import vllm
from h2o_prefill.vllm import contract
print(vllm.__version__, *map(contract.problem, ("cpu", "cuda")))
"""


def test_the_oldest_and_the_newest_are_there():
    minors = [tuple(map(int, path.name.split(".")[:2])) for path in SOURCES]
    assert (minors[0], minors[-1]) == contract.TESTED


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_names_and_signatures_are_there(path, tmp_path):
    # Read, not installed: without kernels, in the PyTorch of the build that is.
    variables = {**os.environ, "PYTHONPATH": str(path), "VLLM_TARGET_DEVICE": "cpu"}
    command = [sys.executable, "-c", PROBE]
    options = {"env": variables, "cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(command, check=True, timeout=300, **options)
    assert done.stdout.splitlines()[-1] == f"{path.name} None None"
