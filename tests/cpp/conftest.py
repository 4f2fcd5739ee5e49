"""The example programs.

H2O_EXAMPLES names the folder of the programs. CTest runs these tests.
"""

import os
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def program():
    """Return what runs a program by name; standard output and error are kept as text."""
    pytest.importorskip("openvino_tokenizers", reason="needs openvino-tokenizers")

    def run(name, *arguments, **options):
        path = Path(os.environ["H2O_EXAMPLES"]) / name
        command = [path, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, **options)

    return run
