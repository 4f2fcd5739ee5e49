"""How many cases, and where they run."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz.sandbox import Sandbox
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_calls.draw import Draw

CASES = int(os.environ.get("H2O_FUZZ_CASES", "200"))

# A few hundred cases are the same ones every time; thousands are new ones.
settings.register_profile(
    "fuzz",
    max_examples=CASES,
    derandomize=CASES <= 200,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
settings.load_profile("fuzz")
torch.set_num_threads(1)
# Memory that nothing wrote holds NaN.
torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture
def sandbox(request: pytest.FixtureRequest) -> Callable[[Callable[[Any], None]], Sandbox]:
    """Make sandboxes that end with the test."""

    def make(function: Callable[[Any], None]) -> Sandbox:
        sanitized = "asan" in os.environ.get("LD_PRELOAD", "")
        box = Sandbox(function, limit_memory=not sanitized)
        request.addfinalizer(box.close)
        return box

    return make


@pytest.fixture
def fuzz(sandbox: Any) -> Callable[..., None]:
    """Check what a function draws, in a sandbox, as often as `CASES` says."""

    @st.composite
    def drawn(draw: Any, make: Callable[..., Any], *args: Any) -> Any:
        return make(Draw(draw(st.randoms(use_true_random=False))), *args)

    def run(check: Callable[[Any], None], make: Callable[..., Any], *args: Any) -> None:
        given(drawn(make, *args))(sandbox(check).run)()

    return run
