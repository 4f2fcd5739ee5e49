"""The project of the C++ guide builds and runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "cpp.md"


def test_the_project_of_the_guide(tmp_path):
    section = re.search(r"^## Build\n(.*?)^##", PAGE.read_text(), re.M | re.S)[1]
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S))
    (tmp_path / "CMakeLists.txt").write_text(blocks["cmake"])
    (tmp_path / "main.cpp").write_text(blocks["cpp"])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", blocks["sh"]],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^6001 tokens, \[1, 8, 1, 64\]$", done.stdout, re.M), done.stdout
