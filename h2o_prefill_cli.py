"""Entry of the command line: answers Ctrl-C while `h2o_prefill` is still importing PyTorch."""

import os
import signal
import sys


def main() -> None:
    """Run the command line; exit with what to install if a package is missing."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        from h2o_prefill.cli.app import app
    except ModuleNotFoundError as error:
        needed = f"error: the command line needs the package {error.name}: "
        sys.exit(f"{needed}pip install 'h2o_prefill[hf]'")
    except ImportError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    signal.signal(signal.SIGINT, handler)
    app(prog_name="h2o-prefill")


def _exit_at_once(*_: object) -> None:
    # Some libraries catch exceptions during their import. There is nothing to clean up yet.
    os.write(2, b"interrupted: nothing was done yet\n")
    os._exit(130)


if __name__ == "__main__":
    main()
