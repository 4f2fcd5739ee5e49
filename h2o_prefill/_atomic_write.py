"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

_File = torch.classes.h2o_prefill.AtomicFile


@contextlib.contextmanager
def replaced_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file in the same folder, which replaces `target` at the end of the block.

    If the block raises, `target` stays as it was. A symbolic link stays, and the file that it
    points to is replaced. The temporary file keeps the suffix, by which matplotlib chooses the
    format. What is no regular file, such as /dev/stdout, is written directly.
    """
    path = Path(target).expanduser()
    try:
        # The native class would follow /dev/stdout to the name of a pipe that no path leads to.
        if path.exists() and not path.is_file():
            yield path
            return
        with native_errors():
            file = _File(os.fspath(path))
        try:
            yield Path(file.scratch())
            with native_errors():
                file.commit()
        finally:
            file.discard()
    except OSError as error:
        # The error names what the user asked for, not the temporary file.
        if "cannot write" in str(error):
            raise
        why = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write {str(target)!r}: {why}") from error


@contextlib.contextmanager
def native_errors() -> Iterator[None]:
    """Make ValueError and OSError of one line, with its errno, of what C++ throws."""
    try:
        yield
    except ValueError as error:
        raise ValueError(first_line(error)) from error
    except RuntimeError as error:
        line = first_line(error)
        found = re.match(r"\[Errno (\d+)\] (.*)", line)
        raise OSError(*((int(found[1]), found[2]) if found else (None, line))) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error, and the next one if it ends in a colon; or its class.

    C++ errors append a backtrace.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
