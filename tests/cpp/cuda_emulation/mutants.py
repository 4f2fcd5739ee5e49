"""Whether the tests of the emulated CUDA kernels see that one synchronization is missing.

Each statement of the kernels of attention and selection that only orders (a barrier, a fence, a
wait, an arrival, a commit) is removed in turn; the tests must fail, by a wrong result, a stall or a
race that ThreadSanitizer reports, or the statement must be among those in mutants.json, with the
reason why nothing needs it there. From the root: python tests/cpp/cuda_emulation/mutants.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Annotated, NamedTuple

import typer

ROOT = Path(__file__).parents[3]
KERNELS = Path("csrc/kernels/cuda")
FILES = (
    "attend_forward_sm90.cuh", "pipeline_sm90.cuh", "column_sums_sm90.cuh", "forward_rows.cuh",
    "attend_forward.cuh", "column_sums.cuh", "select_memory.cuh",
    "attend_forward_float.cuh", "column_sums_float.cuh",
)  # fmt: skip
# Not fence_accumulators(), which is for the compiler alone, and wait_for_earlier_launches(), since
# emulated launches do not overlap.
_NAMES = (
    r"__syncthreads|__syncwarp|sync|[\w.:]*(?:fence|fence_async_proxy|wgmma_fence|wait_for_(?:space|tile|stage)|"
    r"release|arrive\w*|wait|give|wgmma_wait<\d>|wgmma_commit|cp_async_wait<\d>|cp_async_commit|"
    r"cp_async_mbarrier_arrive)"
)
STATEMENT = re.compile(rf"^ *(?:if (?:constexpr )?\(.*\) )?(?:{_NAMES})\([^;]*\);", re.MULTILINE)
# The first finds most mutants soon.
FILTERS = ("*RecalledKeys*", "*")
SECONDS = 900


class Mutant(NamedTuple):
    """A statement of a file, by its text and its number among equal ones."""

    file: str
    statement: str
    number: int
    begin: int

    @property
    def key(self) -> str:
        """What the list of equivalent mutants names it by."""
        return f"{self.file}: {self.statement} #{self.number}"


def find_mutants(file: str) -> list[Mutant]:
    """Return the statements of a file that only order others."""
    found: list[Mutant] = []
    for match in STATEMENT.finditer((ROOT / KERNELS / file).read_text()):
        statement = match[0].strip()
        number = sum(mutant.statement == statement for mutant in found)
        found.append(Mutant(file, statement, number, match.start()))
    return found


def make_tree(folder: Path) -> Path:
    """Copy what the tests are built from, and configure it with ThreadSanitizer."""
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("csrc", "tests/cpp", "CMakeLists.txt", "CMakePresets.json", "VERSION"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, folder / part)
    command = ["cmake", "--preset", "threads"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def survives(tree: Path, mutant: Mutant) -> bool:
    """Return whether all tests pass without a statement."""
    path = tree / KERNELS / mutant.file
    text = (ROOT / KERNELS / mutant.file).read_text()
    end = text.index(";", mutant.begin)
    path.write_text(text[: mutant.begin] + text[end + 1 :])
    program = "test_select_memory" if mutant.file.startswith("select") else "test_attention"
    build = ["cmake", "--build", "build/threads", "--target", program]
    try:
        if subprocess.run(build, cwd=tree, capture_output=True).returncode:
            raise RuntimeError(f"{mutant.key}: what is left does not compile")
        for tests in FILTERS:
            command = [f"build/threads/tests/cpp/kernels/cuda/{program}", f"--gtest_filter={tests}"]
            subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    finally:
        path.write_text(text)
    return True


def main(
    jobs: Annotated[int, typer.Option(min=1, help="Mutants at a time.")] = 2,
    file: Annotated[str | None, typer.Option(help=f"One of {', '.join(FILES)}.")] = None,
) -> None:
    """Remove each synchronization of the CUDA kernels in turn, and run the tests."""
    listed = json.loads(Path(__file__).with_suffix(".json").read_text())
    mutants = [x for name in ([file] if file else FILES) for x in find_mutants(name)]
    trees: Queue[Path] = Queue()
    for number in range(jobs):
        trees.put(make_tree(ROOT / "build" / "mutants" / str(number)))

    def check(mutant: Mutant) -> bool:
        tree = trees.get()
        survived = survives(tree, mutant)
        trees.put(tree)
        result = "survived" if survived else "found"
        if survived and mutant.key in listed:
            result = f"equivalent: {listed[mutant.key]}"
        print(f"{mutant.key}: {result}", flush=True)
        return survived and mutant.key not in listed

    with ThreadPoolExecutor(jobs) as pool:
        missed = sum(pool.map(check, mutants))
    print(f"{len(mutants)} mutants, {missed} that no test finds")
    raise typer.Exit(missed > 0)


if __name__ == "__main__":
    typer.run(main)
