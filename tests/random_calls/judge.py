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


class WrongResult(AssertionError):
    """A result that is not what it must be."""


@dataclass
class Worst:
    """The comparison of a dtype that came nearest to its limit."""

    error: float = 0.0
    limit: float = 1.0
    compared: int = 0


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
        self._comparable(what, actual, truth)
        if actual.numel() == 0:
            return
        peer_error = (peer.double() - truth).abs().max().item()
        magnitude = max(1.0, truth.abs().max().item())
        limit = FLOAT32_TOLERANCE * magnitude
        if actual.dtype.itemsize == 2:
            factor = MODEL_PEER_FACTOR if of_model else 2
            limit = factor * peer_error + torch.finfo(actual.dtype).eps * magnitude / 2
        elif of_model:
            limit = max(limit, MODEL_PEER_FACTOR * peer_error)
        self._note(what, actual, truth, limit)

    def near(
        self, what: str, actual: Tensor, expected: Tensor, tolerance: float | None = None
    ) -> None:
        """Check that a result is within `tolerance`, else within some units of its dtype.

        The tolerance is relative to the largest magnitude above 1. Integers must be equal.
        """
        if not actual.is_floating_point():
            self.same(what, actual, expected.to(actual.dtype))
            return
        self._comparable(what, actual, expected)
        if tolerance is None:
            tolerance = max(FLOAT32_TOLERANCE, 2.5 * torch.finfo(actual.dtype).eps)
        magnitude = max([1.0, *expected.abs().max().view(1).tolist()] if expected.numel() else [1])
        self._note(what, actual, expected.double(), tolerance * magnitude)

    def same(self, what: str, actual: Tensor | None, expected: Tensor | None) -> None:
        """Check that two tensors are equal, bit for bit, or both missing."""
        if actual is None or expected is None:
            self.true(f"{what}: one is there and the other is not", actual is expected)
            return
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            raise WrongResult(
                f"{what}: {actual.dtype} {list(actual.shape)}, "
                f"expected {expected.dtype} {list(expected.shape)}"
            )
        if actual.is_sparse or actual.is_meta or torch.equal(actual, expected):
            return
        differ = (actual != expected) & ((actual == actual) | (expected == expected))
        if differ.any():
            largest = (actual.double() - expected.double()).abs().max().item()
            raise WrongResult(
                f"{what}: {int(differ.sum())} of {actual.numel()} elements differ, by "
                f"{largest:.3g} at most"
            )

    def finite(self, what: str, actual: Tensor) -> None:
        """Check that there is neither an infinity nor a NaN."""
        self.true(f"{what}: infinities or NaNs", bool(torch.isfinite(actual).all()))

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

    def _comparable(self, what: str, actual: Tensor, expected: Tensor) -> None:
        shapes = list(actual.shape), list(expected.shape)
        self.true(f"{what}: shape {shapes[0]}, expected {shapes[1]}", shapes[0] == shapes[1])
        finite = torch.isfinite(actual) == torch.isfinite(expected)
        self.true(f"{what}: infinities or NaNs", bool(finite.all()))

    def _note(self, what: str, actual: Tensor, truth: Tensor, limit: float) -> None:
        finite = torch.isfinite(truth)
        error = (actual[finite].double() - truth[finite]).abs().max().item() if finite.any() else 0
        worst = self.worst.setdefault(str(actual.dtype).removeprefix("torch."), Worst())
        worst.compared += 1
        if error / limit > worst.error / worst.limit:
            worst.error, worst.limit = error, limit
        self.true(f"{what}: error {error:.3g} > {limit:.3g}", error <= limit)
