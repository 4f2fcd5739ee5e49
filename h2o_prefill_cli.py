"""Entry of the command line: answers Ctrl-C while `h2o_prefill` is still importing PyTorch."""

import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        from h2o_prefill.cli import main as run
    except ImportError as error:
        sys.exit(f"error: {error}")
    run()


def _exit_at_once(*_: object) -> None:
    # Some libraries catch exceptions during their import. There is nothing to clean up yet.
    os.write(2, b"interrupted: nothing was done yet\n")
    os._exit(130)


if __name__ == "__main__":
    main()
