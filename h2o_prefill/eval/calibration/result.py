"""What a calibration of layers found."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import AttentionFlops


@dataclass(frozen=True)
class LayerCalibration:
    """What each layer's sparse attention costs a model.

    Attributes
    ----------
    config : PrefillConfig
        The settings measured, with the layers found among its `wide_layers` or `dense_layers`.
    kl_before, kl_after : float
        Mean KL(dense || sparse) in nats a token, of the settings as given and of `config`.
    kl_by_layer : dict of int to float
        The same of the settings as given with this layer dense too; layers that they keep dense,
        or wide if such are looked for, are not in it.
    flops_before, flops_after : AttentionFlops
        Attention of both on the windows measured.
    context : int
        Tokens of a window.
    windows : list of int
    """

    config: PrefillConfig
    kl_before: float
    kl_after: float
    kl_by_layer: dict[int, float]
    flops_before: AttentionFlops
    flops_after: AttentionFlops
    context: int
    windows: list[int]

    @property
    def ranking(self) -> list[int]:
        """Layers, that with the lowest KL when it is dense first."""
        return rank_layers(self.kl_by_layer)


def rank_layers(kl_by_layer: dict[int, float]) -> list[int]:
    """Return layers, that with the lowest KL first."""
    return sorted(kl_by_layer, key=lambda layer: kl_by_layer[layer])
