"""What a result must be."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Of float32 results against the float64 oracle, relative to the largest magnitude above 1.
FLOAT32_TOLERANCE = 1e-5


@dataclass
class Judge:
    """Compares results."""

    # Whether memory sets must be the oracle's where scores are nearly the same too.
    strict: bool = False

    def near(
        self, what: str, actual: Tensor, expected: Tensor, tolerance: float | None = None
    ) -> None:
        """Check that a result is within `tolerance`, else within some units of its dtype.

        The tolerance is relative to the largest magnitude above 1. Integers must be equal.
        """
        if not actual.is_floating_point():
            self.same(what, actual, expected.to(actual.dtype))
            return
        if tolerance is None:
            tolerance = max(FLOAT32_TOLERANCE, 2.5 * torch.finfo(actual.dtype).eps)
        self._within(what, actual, expected.double(), tolerance * max(1.0, _largest(expected)))

    def same(self, what: str, actual: Tensor | None, expected: Tensor | None) -> None:
        """Check that two tensors are equal, bit for bit, or both missing."""
        if actual is None or expected is None:
            self.true(f"{what}: one is there and the other is not", actual is expected)
        elif not actual.is_sparse and not actual.is_meta:
            exactly = {"rtol": 0, "atol": 0, "equal_nan": True, "msg": lambda m: f"{what}: {m}"}
            torch.testing.assert_close(actual, expected, **exactly)

    def finite(self, what: str, actual: Tensor) -> None:
        """Check that there is neither an infinity nor a NaN."""
        self.true(f"{what}: infinities or NaNs", bool(torch.isfinite(actual).all()))

    def true(self, what: str, holds: bool) -> None:
        """Check anything else."""
        if not holds:
            raise AssertionError(what)

    def _within(self, what: str, actual: Tensor, truth: Tensor, limit: float) -> None:
        shapes = f"{list(actual.shape)}, expected {list(truth.shape)}"
        self.true(f"{what}: shape {shapes}", actual.shape == truth.shape)
        finite = torch.isfinite(actual) == torch.isfinite(truth)
        self.true(f"{what}: infinities or NaNs", bool(finite.all()))
        error = _largest(actual.double() - truth)
        self.true(f"{what}: error {error:.3g} > {limit:.3g}", error <= limit)


def _largest(x: Tensor) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    finite = x[torch.isfinite(x)]
    return finite.abs().max().item() if finite.numel() else 0.0
