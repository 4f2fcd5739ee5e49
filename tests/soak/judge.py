"""What a result must be, and how near to its limit each dtype came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_prefill.testing import FLOAT32_TOLERANCE

# float64 results that differ in the order of additions alone, relative to the largest magnitude.
FLOAT64_TOLERANCE = 1e-9
# Errors of earlier layers are in the input of a later one: how many times the error of the stock
# model is allowed.
MODEL_PEER_FACTOR = 6.0
# As FLOAT64_TOLERANCE, of a model that computes a part of it in float32.
MIXED_TOLERANCE = 1e-5


class WrongResult(AssertionError):
    """A result that is not what it must be."""


@dataclass
class Worst:
    """The comparison of a dtype that came nearest to its limit."""

    error: float = 0.0
    limit: float = 1.0
    compared: int = 0

    @property
    def ratio(self) -> float:
        """The error as a part of the limit."""
        return self.error / self.limit


@dataclass
class Judge:
    """Compares results, and counts."""

    worst: dict[str, Worst] = field(default_factory=dict)
    # By kind, how many exceptions were injected and arrived.
    exceptions: dict[str, int] = field(default_factory=dict)

    def close(
        self, what: str, actual: Tensor, truth: Tensor, peer: Tensor, of_model: bool = False
    ) -> None:
        """Check that a result is as near to the truth as its dtype allows.

        The limits are those of `h2o_prefill.testing.assert_close_to_reference`.
        """
        self.finite(what, actual)
        if actual.shape != truth.shape:
            raise WrongResult(f"{what}: shape {list(actual.shape)}, expected {list(truth.shape)}")
        if actual.numel() == 0:
            return
        error = (actual.double() - truth).abs().max().item()
        peer_error = (peer.double() - truth).abs().max().item()
        magnitude = max(1.0, truth.abs().max().item())
        if actual.dtype in (torch.float32, torch.float64):
            limit = FLOAT32_TOLERANCE * magnitude
            if of_model:
                limit = max(limit, MODEL_PEER_FACTOR * peer_error)
        else:
            factor = MODEL_PEER_FACTOR if of_model else 2
            limit = factor * peer_error + torch.finfo(actual.dtype).eps * magnitude / 2
        self._note(what, actual.dtype, error, limit)

    def nearly(
        self, what: str, actual: Tensor, expected: Tensor, tolerance: float = FLOAT64_TOLERANCE
    ) -> None:
        """Check that two float64 results differ in the order of additions alone."""
        self.finite(what, actual)
        if actual.shape != expected.shape:
            raise WrongResult(
                f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
            )
        error = (actual - expected).abs().max().item()
        limit = tolerance * max(1.0, expected.abs().max().item())
        self._note(what, torch.float64, error, limit)

    def same(self, what: str, actual: Tensor | None, expected: Tensor | None) -> None:
        """Check that two tensors are equal, bit for bit."""
        if actual is None or expected is None:
            if actual is not expected:
                raise WrongResult(f"{what}: one is there and the other is not")
            return
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            raise WrongResult(
                f"{what}: {actual.dtype} {list(actual.shape)}, "
                f"expected {expected.dtype} {list(expected.shape)}"
            )
        if not torch.equal(actual, expected):
            differ = (actual != expected).sum().item()
            largest = (actual.double() - expected.double()).abs().max().item()
            raise WrongResult(
                f"{what}: {differ} of {actual.numel()} elements differ, by {largest:.3g} at most"
            )

    def finite(self, what: str, actual: Tensor) -> None:
        """Check that there is neither an infinity nor a NaN."""
        if not torch.isfinite(actual).all():
            raise WrongResult(f"{what}: infinities or NaNs")

    def true(self, what: str, holds: bool) -> None:
        """Check anything else."""
        if not holds:
            raise WrongResult(what)

    def refuses(self, what: str, call: Callable[[], object]) -> None:
        """Check that a call with a wrong argument raises ValueError, and count it."""
        self.raises(ValueError, what, call)
        self.count("ValueError of a wrong call")

    def raises(self, kind: type[BaseException], what: str, call: Callable[[], object]) -> None:
        """Check that a call raises."""
        try:
            call()
        except kind:
            return
        raise WrongResult(f"{what}: no {kind.__name__}")

    def count(self, kind: str) -> None:
        """Count an injected exception."""
        self.exceptions[kind] = self.exceptions.get(kind, 0) + 1

    def _note(self, what: str, dtype: torch.dtype, error: float, limit: float) -> None:
        worst = self.worst.setdefault(str(dtype).removeprefix("torch."), Worst())
        worst.compared += 1
        if error / limit > worst.ratio:
            worst.error, worst.limit = error, limit
        if error > limit:
            raise WrongResult(f"{what}: error {error:.3g} > {limit:.3g}")
