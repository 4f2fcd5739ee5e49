"""Random calls, prompts and models in one process: every result right, and memory flat.

Some items; with H2O_SOAK_MINUTES, as many as take so long, which H2O_SOAK_SEED draws.
H2O_SOAK_ITEM is the number of one of these, to run it alone.
"""

import ctypes
import gc
import itertools
import os
import random
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from random_calls.calls import check_call, draw_call
from random_calls.draw import Draw, draw_settings
from random_calls.judge import Judge
from random_calls.operators import TENSORS
from random_calls.programs import check_program, draw_context
from soak import models

from h2o_prefill import ops

SECONDS = 60 * float(os.environ.get("H2O_SOAK_MINUTES", "0"))
SEED = int(os.environ.get("H2O_SOAK_SEED", "7"))
ITEM = int(os.environ.get("H2O_SOAK_ITEM", "-1"))
ITEMS = 20
LONGEST = 4096
MIB = 1 << 20
# The most that medians of the first and the last third of the readings may differ. The library
# keeps the temporaries of the largest call so far, and the heap what is less than a page. A page
# lost with every item takes far more in half an hour. Some constants are made once.
TOLERANCES = {"resident": 16 * MIB, "tensors": 16}
READINGS, WARM_UP = 30, 0.2
# More than any cache of settings keeps.
CACHED_SETTINGS = 400


def read_memory():
    """Collect garbage, give free memory back to the system, and read."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    return {"resident": pages * os.sysconf("SC_PAGESIZE"), "tensors": tensors}


def check_flat(readings):
    third = len(readings) // 3
    assert third >= 2, "too few readings of memory to judge"
    for quantity, limit in TOLERANCES.items():
        values = [reading[quantity] for reading in readings]
        growth = statistics.median(values[-third:]) - statistics.median(values[:third])
        assert growth <= limit, f"{quantity} grew by {growth:,.0f}, more than {limit:,}"


def run_call(draw, judge):
    """Make a valid or a broken call of an operator."""
    call = draw_call(draw, draw.choice(list(TENSORS)), ("valid", "broken"))
    check_call(call, judge, traces=False)


def run_prompts(draw, judge):
    """Run prompts through a context and the operators, in random steps."""
    check_program(draw_context(draw, LONGEST), judge)


# Name: (how often, what).
KINDS = {"call": (6, run_call), "prompts": (12, run_prompts), "model": (12, models.run_disturbed)}


def run_item(item, largest, kinds):
    """Run an item: in one thread or two, sometimes with memory poisoned with NaN."""
    weights = [weight for weight, _ in kinds.values()]
    kind = random.Random(f"{item} kind").choices(list(kinds), weights)[0]
    draw, threads = Draw(random.Random(f"{item} surroundings")), torch.get_num_threads()
    torch.set_num_threads(2 if draw.chance(0.2) else 1)
    # oneDNN keeps a compiled product for every new shape of 16-bit tensors: hundreds of MB.
    onednn, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    torch.use_deterministic_algorithms(draw.chance(0.25), warn_only=True)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # Settings are drawn that the library advises against, and models that stay dense.
            warnings.simplefilter("ignore")
            kinds[kind][1](Draw(random.Random(f"{item} work"), largest), Judge())
    except Exception as error:
        error.add_note(f"item {item} ({kind})")
        raise
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.mkldnn.enabled = onednn
        torch.set_num_threads(threads)


def run_items(kinds, largest, seconds=0.0):
    """Run items, the first ones of the largest size; return readings of memory after a while."""
    # Hundreds of thousands of objects that there are already, and take long to look at.
    gc.collect()
    gc.freeze()
    readings, begin = [], time.monotonic()
    try:
        for place in itertools.count():
            done = (time.monotonic() - begin) / seconds if seconds else place / ITEMS
            if done >= WARM_UP + (1 - WARM_UP) * len(readings) / READINGS and place > largest:
                readings.append(read_memory())
                print(f"{place:,} items, {readings[-1]}", flush=True)
            if done >= 1:
                return readings
            run_item(SEED * 10_000_000 + place, place < largest, kinds)
    finally:
        gc.unfreeze()


def fill_caches():
    """Build the models, and read more settings than any cache of settings keeps."""
    for name, dtype in itertools.product(models.FAMILIES, models.DTYPES):
        models.shared(name, dtype)
    draw, token = Draw(random.Random("settings")), torch.zeros(1, 1, 1, 8)
    for length in range(1, CACHED_SETTINGS):
        text = draw_settings(draw, length).replace(dense_layers=()).to_string()
        ops.chunked_sparse_attention(*[token] * 3, *[None] * 5, 0, text)


def test_items_are_right_and_memory_is_flat():
    if ITEM >= 0:
        return run_item(ITEM, ITEM % 10_000_000 < 12, KINDS)
    if SECONDS:
        fill_caches()
        return check_flat(run_items(KINDS, 12, SECONDS))
    return check_flat(run_items({kind: KINDS[kind] for kind in ("call", "prompts")}, 2))


def test_models_are_right():
    run_items({"model": KINDS["model"]}, 0)


@pytest.mark.parametrize(
    ("quantity", "leaked"),
    [("tensors", torch.empty(0).clone), ("resident", partial(torch.ones, 2 * MIB))],
)
def test_a_leak_is_found(quantity, leaked):
    kept = []
    readings = run_items({"leaking": (1, lambda *_: kept.extend(leaked() for _ in range(2)))}, 0)
    with pytest.raises(AssertionError, match=f"^{quantity} grew by"):
        check_flat(readings)
