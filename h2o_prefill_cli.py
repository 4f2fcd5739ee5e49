"""The entry of the command line, which answers Ctrl-C while PyTorch is still being imported.

Not a part of the package `h2o_prefill`, because importing any part of that imports PyTorch first.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    answers = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if answers:
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        from h2o_prefill.cli import load
    except ImportError as error:
        sys.exit(f"error: {error}")
    app = load()
    if answers:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app(prog_name="h2o-prefill")


def _exit_at_once(signum: int, frame: FrameType | None) -> None:
    # An exception could surface anywhere in an import, where some libraries would report it in
    # their own way. There is nothing to clean up yet.
    os.write(sys.stderr.fileno(), b"interrupted: nothing was done yet\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
