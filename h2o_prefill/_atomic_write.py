"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from h2o_prefill._errors import native_errors

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
