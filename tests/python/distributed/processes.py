"""Functions that run in every process of a group, and their results."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from h2o_prefill.distributed import DistributedPrefillError

# What the server of forks imports once for all processes.
PRELOADED = ["h2o_prefill.hf", "transformers.models.llama.modeling_llama", "torch._dynamo"]

# Processes get this path, and import the module of a test by its name in pytest. Last: what is
# installed comes first.
sys.path.append(str(Path(__file__).parents[3]))

Raised = tuple[str, str, dict[str, Any]]  # class, text and attributes of an error


def run(
    count: int, work: Callable[..., Any], *args: Any, timeout: float = 30.0, limit: float = 120.0
) -> list[Any]:
    """Call `work(rank, *args)` in processes of one gloo group; return what each returned.

    The group has this `timeout`. A process that died, or did not end, has the result None.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            given = (theirs, rank, count, f"{folder}/store", timeout, work, args)
            processes.append(context.Process(target=_work, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        deadline = time.monotonic() + limit
        results = [_receive(end, deadline) for end in ends]
        for process in processes:
            process.kill()
            process.join()
    for result in results:
        if isinstance(result, str):
            raise AssertionError(result)
    return [result and result[0] for result in results]


def _receive(end: Any, deadline: float) -> Any:
    try:
        return end.recv() if end.poll(max(0.0, deadline - time.monotonic())) else None
    except EOFError:
        return None


def _work(
    end: Any, rank: int, count: int, store: str, timeout: float, work: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.utils.logging.disable_progress_bar()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    dist.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=timeout), rank=rank, world_size=count
    )
    try:
        result = (work(rank, *args),)
    except BaseException:
        result = traceback.format_exc()
    end.send(result)
    # The group of a failed run cannot be closed in order, and others may still talk to this rank.
    time.sleep(timeout)
    os._exit(0)


def random_ids(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    """Return int64 [batch, length] without special tokens."""
    return torch.randint(1, 257, (batch, length), generator=torch.Generator().manual_seed(seed))


def load(folder: Path, **sizes: int) -> Any:
    """Return this process's part of a saved model, or the whole without sizes."""
    options = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", **options
    )
    return model.eval()


def strike(name: str) -> None:
    """Raise an error, or send this process a signal, by its name."""
    if name == "error":
        raise ZeroDivisionError
    os.kill(os.getpid(), getattr(signal, name))


def assert_survivors_raise(work: Callable[..., Any], folder: Path, victim: int, name: str) -> None:
    """Run `work` on three ranks and lose one; it returns an error and its seconds."""
    timeout = 6.0
    results = run(3, work, folder, victim, name, timeout=timeout, limit=25.0)
    lost = results.pop(victim)
    assert lost[0][0] == "ZeroDivisionError" if name == "error" else lost is None
    for error, seconds in results:
        assert error[0] == DistributedPrefillError.__name__
        assert "waited at layer" in error[1]
        assert {"rank", "layer", "peer"} <= error[2].keys()
        assert seconds < timeout + 5


def assert_refused(errors: Iterable[tuple[str, Raised | None]]) -> None:
    """Assert that each error is a ValueError whose message contains the text before it."""
    for text, error in errors:
        assert error is not None, text
        assert error[0] == "ValueError" and text in error[1]


def error_of(function: Callable[[], Any]) -> Raised | None:
    """Return the error that a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), vars(error)
    return None
