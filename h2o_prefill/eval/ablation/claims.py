"""Who computes what: claims of processes, also on several machines, on files of one folder.

A claim is a file that its owner created exclusively and touches from time to time. One that was not
touched for the length of a lease has expired, and the next claim of the same work is the file with
the next number: since only one process can create that, only one takes over. No file is ever
removed, so that no number is given out twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
from pathlib import Path

_BEATS_PER_LEASE = 4


class Claims:
    """The claims in a folder.

    Parameters
    ----------
    folder : Path
        Made if it is not there.
    lease_seconds : float
        The time without a sign of life after which an owner counts as dead; the same for all
        processes.
    """

    def __init__(self, folder: Path, lease_seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lease_seconds = lease_seconds
        self._taken: list[Path] = []

    def take(self, key: str) -> Claim | None:
        """Claim a piece of work; None if another process holds it.

        Who gets it must look again whether the work is done: its last owner may just have finished.
        """
        number = 0
        while (path := self._path(key, number)).exists():
            if not self._expired(path):
                return None
            number += 1
        owner = {"host": platform.node(), "pid": os.getpid()}
        try:
            with open(path, "x", encoding="utf-8") as file:
                self._taken.append(path)
                json.dump(owner, file)
        except FileExistsError:
            return None
        return Claim(path, self._path(key, number + 1), self._lease_seconds / _BEATS_PER_LEASE)

    def give_up(self) -> None:
        """Give up all claims, also of finished work: for a process that ends by an error.

        A claim that is held does this itself, but Ctrl-C may come before and after it is.
        """
        for path in self._taken:
            _expire(path)

    def _path(self, key: str, number: int) -> Path:
        return self._folder / f"{key}.{number}"

    def _expired(self, path: Path) -> bool:
        # By the clock of the file system: those of two machines may differ.
        clock = self._folder / "clock"
        clock.touch()
        return clock.stat().st_mtime - path.stat().st_mtime > self._lease_seconds


class Claim:
    """A claim held; as a context manager, it is kept alive in the block.

    A block that raises gives the claim up at once, so that another process need not wait.

    Parameters
    ----------
    path, successor : Path
        Its own file, and that of the process which takes over.
    beat_seconds : float
        Time between signs of life.
    """

    def __init__(self, path: Path, successor: Path, beat_seconds: float) -> None:
        self._path = path
        self._successor = successor
        self._beat_seconds = beat_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def held(self) -> bool:
        """Return whether nobody took over, as happens to a process that was suspended."""
        return not self._successor.exists()

    def __enter__(self) -> Claim:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._stop.set()
        self._thread.join()
        if kind is not None:
            _expire(self._path)

    def _beat(self) -> None:
        while not self._stop.wait(self._beat_seconds) and self.held():
            # A file server that does not answer once is no reason to end: the next beat may do.
            with contextlib.suppress(OSError):
                os.utime(self._path)


def _expire(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path, (0, 0))
