"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file in the same folder, which replaces `target` at the end of the block.

    If the block raises, `target` stays as it was. A symbolic link stays, and the file that it
    points to is replaced. What is no regular file, such as /dev/stdout, is written directly.
    """
    # `resolve` would turn /dev/stdout into the name of a pipe that no path leads to.
    path = Path(target).expanduser()
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        path = path.resolve()
        # The suffix stays last: matplotlib chooses the format by it.
        scratch = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
        try:
            yield scratch
            if path.exists():
                shutil.copymode(path, scratch)
            with open(scratch, "rb") as written:
                os.fsync(written.fileno())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        # The error names what the user asked for, not the temporary file.
        why = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write {str(target)!r}: {why}") from error
