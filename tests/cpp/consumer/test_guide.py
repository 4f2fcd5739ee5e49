"""The projects of the C++ guide build and run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def blocks_of(title):
    section = re.search(
        rf"^## {title}\n(.*?)(^## |\Z)", (ROOT / "docs/cpp.md").read_text(), re.M | re.S
    )[1]
    found = re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S)
    return dict(reversed(found))  # the first of each language


def run(folder, blocks):
    # PyTorch's headers, which the examples have parsed.
    parsed = f'target_compile_options({{}} PRIVATE "SHELL:-include {os.environ["H2O_PARSED"]}")\n'
    target = re.search(r"add_executable\((\w+)", blocks["cmake"])[1]
    (folder / "CMakeLists.txt").write_text(blocks["cmake"] + parsed.format(target))
    (folder / "main.cpp").write_text(blocks["cpp"])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", blocks["sh"]],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_project_of_the_guide(tmp_path):
    output = run(tmp_path, blocks_of("Build"))
    assert re.search(r"^6001 tokens, \[1, 8, 1, 64\]$", output, re.M), output


def test_the_chat_of_the_guide(tmp_path):
    pytest.importorskip("openvino_tokenizers", reason="needs openvino-tokenizers")
    blocks = blocks_of("Programs without Python")
    assert blocks["cpp"].count("\n") <= 25
    run(tmp_path, blocks)
    lost = subprocess.run([tmp_path / "build" / "chat"], capture_output=True, text=True)
    assert lost.returncode == 1
    assert re.fullmatch(r"error: there is no package model.*\n", lost.stderr), lost.stderr
