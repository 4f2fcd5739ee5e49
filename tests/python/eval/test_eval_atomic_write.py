"""Files that are written whole or not at all, also by processes that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from h2o_prefill.eval import atomic_write
from h2o_prefill.eval.atomic_write import (
    build_folder_once,
    check_folder,
    check_writable,
    replaced_file,
)


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), replaced_file(target) as path:
        path.write_text("ha")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "figure.png"
    target.write_text("old")
    with replaced_file(target) as path:
        path.write_text("new")
        assert target.read_text() == "old"
        assert path.suffix == ".png", "writers of figures choose their format by it"
    assert target.read_text() == "new"


def test_a_new_file_has_the_mode_that_open_gives(tmp_path: Path, umask: int) -> None:
    with replaced_file(tmp_path / "file") as path:
        path.write_text("new")
    assert _mode(tmp_path / "file") == 0o666 & ~umask


def test_an_old_files_mode_stays(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    target.chmod(0o604)
    with replaced_file(target) as path:
        path.write_text("new")
    assert _mode(target) == 0o604


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "file"
    link = tmp_path / "link"
    link.symlink_to(target)
    with replaced_file(link) as path:
        path.write_text("new")
    assert link.is_symlink() and target.read_text() == "new"


def test_what_is_no_regular_file_is_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with replaced_file(pipe) as path:
        path.write_text("new")
    reader.join()
    assert read == ["new"] and pipe.is_fifo()


def test_a_full_disk_is_an_error_that_names_the_target() -> None:
    with (
        pytest.raises(OSError, match="cannot write '/dev/full': No space left"),
        replaced_file("/dev/full") as path,
    ):
        path.write_text("new")


def test_two_writers_of_a_file_do_not_meet(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with replaced_file(target) as first:
        first.write_text("first")
        with replaced_file(target) as second:
            second.write_text("second")
        assert target.read_text() == "second"
    assert target.read_text() == "first"


@pytest.mark.parametrize("name", ["file", "new/file"])
def test_a_check_changes_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("old")
    before = (tmp_path / "file").stat().st_mtime_ns
    if name == "file":
        check_writable(tmp_path / "file")
    check_folder((tmp_path / name).parent)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert (tmp_path / "file").stat().st_mtime_ns == before


# The folder of processes takes no files, from nobody.
@pytest.mark.parametrize(
    ("name", "why"),
    [(".", "Is a directory"), ("/proc/file", ""), ("no/file", "No such file or directory")],
)
def test_files_that_cannot_be_written_are_found(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(OSError, match=f"cannot write '.*': {why}"):
        check_writable(tmp_path / name)


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/new/folder"])
def test_folders_that_cannot_be_made_are_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write"):
        check_folder(tmp_path / name)


# Writes files of one digit each, one version after another.
_WRITER = """
import importlib.util, itertools, pathlib, sys
spec = importlib.util.spec_from_file_location("atomic_write", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for version in itertools.count():
    with module.replaced_file(sys.argv[2]) as path, open(path, "w") as file:
        for _ in range(64):
            file.write(str(version % 10) * 65536)
    print(version, flush=True)
"""


def _kill_while_writing(target: Path, rng: random.Random) -> None:
    """Kill a writer some time after its first version."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, atomic_write.__file__, str(target)],
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    time.sleep(rng.uniform(0, 0.05))
    writer.send_signal(signal.SIGKILL)
    writer.communicate()


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_a_whole_file_and_little_else(tmp_path: Path, kills: int) -> None:
    target = tmp_path / "file.json"
    rng = random.Random(0)
    abandoned = 0
    for _ in range(kills):
        _kill_while_writing(target, rng)
        text = target.read_text()
        assert len(text) == 64 * 65536 and len(set(text)) == 1
        others = [path for path in tmp_path.iterdir() if path != target]
        abandoned += len(others)
        assert len(others) <= 1, "each writer removes what the one before it left"
    assert abandoned > 0, "some were killed in the middle of a file"
    with replaced_file(target) as path:
        path.write_text("new")
    assert list(tmp_path.iterdir()) == [target]


def test_an_abandoned_folder_is_removed_by_the_next_build(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "file").touch()

    abandoned = tmp_path / ".model.0123abcd.part"
    abandoned.mkdir()
    (abandoned / "half").touch()
    build_folder_once(tmp_path / "model", build)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_is_being_built_is_left_alone(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        if not (tmp_path / "model").exists():
            build_folder_once(tmp_path / "model", lambda other: (other / "file").touch())
        assert folder.exists()

    build_folder_once(tmp_path / "model", build)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
