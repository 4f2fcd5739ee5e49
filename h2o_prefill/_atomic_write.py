"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file in the same folder, which replaces `target` at the end of the block.

    If the block raises, `target` stays as it was. A symbolic link stays, and the file that it
    points to is replaced. The temporary file keeps the suffix, by which matplotlib chooses the
    format. What is no regular file, such as /dev/stdout, is written directly.
    """
    path = Path(target).expanduser()
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        path = path.resolve()
        scratch = path.with_name(f".{path.stem[:100]}.{secrets.token_hex(4)}{path.suffix[:100]}")
        scratch.touch(exist_ok=False)
        try:
            if path.exists():
                scratch.chmod(path.stat().st_mode)
            yield scratch
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        # The error names what the user asked for, not the temporary file.
        why = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write {str(target)!r}: {why}") from error
