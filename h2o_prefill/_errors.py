"""Errors of C++ and of other libraries, in one line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator


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
