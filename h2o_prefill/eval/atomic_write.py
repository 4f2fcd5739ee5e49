"""Files and folders that are written whole or not at all.

What is written goes to a temporary neighbour, `.NAME.<random>.part.SUFFIX`, which takes the place
of its target in one step at the end. Its writer holds a lock on it, which the system releases even
if the process is killed: a neighbour without a lock is abandoned, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

_DIGITS = 8


@contextlib.contextmanager
def replaced_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to that takes the place of a file at the end of the block.

    A block that raises, or a process that is killed in it, leaves the file as it was. The new file
    has the access rights of the old one, or those that `open` gives. What is no regular file, like
    /dev/stdout or a pipe, is written directly.

    Parameters
    ----------
    target : path
        The file; a symbolic link stays, and what it points to is replaced.

    Raises
    ------
    OSError
        If it cannot be written. The message names the target.
    """
    # `resolve` would turn /dev/stdout into the name of a pipe that no path leads to.
    path = Path(target).expanduser()
    with _errors_name(path):
        if _is_special(path):
            yield path
            return
        path = path.resolve()
        with _neighbour(path, _create_file) as scratch:
            if path.exists():
                scratch.chmod(stat.S_IMODE(path.stat().st_mode))
            yield scratch
            _flush(scratch)
            os.replace(scratch, path)


def build_folder_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `build` if it does not exist yet.

    Of two processes that build at once, one wins.

    Parameters
    ----------
    folder : Path
        What to return; its parent is created.
    build : callable
        Takes the folder to fill.
    """
    if folder.is_dir():
        return folder
    with _errors_name(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _neighbour(folder, Path.mkdir) as scratch:
        build(scratch)
        for file in scratch.rglob("*"):
            _flush(file)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def check_writable(target: str | os.PathLike[str]) -> None:
    """Find out whether `replaced_file` can write a file, and leave the file as it is.

    Raises
    ------
    OSError
        If it cannot. The message names the target.
    """
    path = Path(target).expanduser()
    with _errors_name(path):
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not os.access(path, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if not _is_special(path):
            # The only answer that holds for every user and file system.
            with _neighbour(path.resolve(), _create_file):
                pass


def check_folder(target: str | os.PathLike[str]) -> None:
    """Find out whether a folder can be made and files be written to it, and do neither.

    Raises
    ------
    OSError
        If not. The message names the folder.
    """
    path = Path(target).expanduser()
    with _errors_name(path):
        existing = path.resolve()
        while not os.path.lexists(existing):
            existing = existing.parent
        if not existing.is_dir():
            raise OSError(errno.ENOTDIR, f"{str(existing)!r} is a file")
        with _neighbour(existing / "probe", _create_file):
            pass


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _create_file(path: Path) -> None:
    with open(path, "xb"):
        pass


@contextlib.contextmanager
def _neighbour(path: Path, create: Callable[[Path], None]) -> Iterator[Path]:
    """Give a new file or folder beside `path`, locked; the end removes it if it was not moved."""
    _remove_abandoned(path)
    scratch, lock = _create_locked(path, create)
    try:
        yield scratch
    finally:
        _remove(scratch)
        os.close(lock)


def _create_locked(path: Path, create: Callable[[Path], None]) -> tuple[Path, int]:
    while True:
        # The suffix stays last: writers of figures choose their format by it.
        scratch = path.with_name(
            f".{path.stem}.{secrets.token_hex(_DIGITS // 2)}.part{path.suffix}"
        )
        create(scratch)
        try:
            lock = os.open(scratch, os.O_RDONLY)
        except FileNotFoundError:
            continue
        # A file system without locks does without the removal of what is abandoned.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        # Another writer may have taken it for abandoned before it was locked.
        if scratch.exists():
            return scratch, lock
        os.close(lock)


def _remove_abandoned(path: Path) -> None:
    pattern = f".{glob.escape(path.stem)}.{'[0-9a-f]' * _DIGITS}.part{glob.escape(path.suffix)}"
    for scratch in path.parent.glob(pattern):
        with contextlib.suppress(OSError):
            lock = os.open(scratch, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(scratch)
            finally:
                os.close(lock)


def _remove(scratch: Path) -> None:
    if scratch.is_dir():
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        scratch.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    if path.is_file():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Let errors of the system name what the user asked for, not a temporary file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write {str(path)!r}: {why}") from error
