"""Files that are written whole or not at all."""

import errno
import os
import threading

import pytest

from h2o_prefill._atomic_write import replaced_file


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    target = tmp_path / "figure.png"
    target.write_text("old")
    target.chmod(0o600)
    with replaced_file(target) as path:
        path.write_text("new")
        assert target.read_text() == "old"
        assert path.suffix == ".png", "matplotlib chooses the format by it"
        assert path.stat().st_mode & 0o777 == 0o600
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyboardInterrupt), replaced_file(target) as path:
        path.write_text("ha")
        raise KeyboardInterrupt
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_symbolic_link_stays_one_and_a_new_file_has_the_mode_that_open_gives(tmp_path):
    target, link, opened = tmp_path / "folder" / "file", tmp_path / "link", tmp_path / "opened"
    target.parent.mkdir()
    link.symlink_to(target)
    opened.touch()
    with replaced_file(link) as path:
        path.write_text("new")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode == opened.stat().st_mode


def test_what_is_no_regular_file_is_written_directly(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with replaced_file(pipe) as path:
        path.write_text("new")
    reader.join()
    assert read == ["new"] and pipe.is_fifo()


@pytest.mark.parametrize(
    ("target", "why", "number"),
    [("/dev/full", "No space left", errno.ENOSPC), ("/no/such/file", "No such file", errno.ENOENT)],
)
def test_an_error_names_the_target(target, why, number):
    message = f"cannot write '{target}': {why}"
    with pytest.raises(OSError, match=message) as caught, replaced_file(target) as path:
        path.write_text("new")
    assert caught.value.errno == number
    with pytest.raises(ValueError, match="null byte"), replaced_file("a\0b"):
        pass
