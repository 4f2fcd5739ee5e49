"""What a comparison of sparse with dense attention found, layer by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention.pattern_measures import memory_jaccard


@dataclass(frozen=True)
class AttentionMeasures:
    """Errors of sparse attention against dense attention on the same q, k and v.

    The formulas are those of `measure_attention`. Layers with fewer heads than others are filled up
    with NaN, and with empty memory sets.

    Attributes
    ----------
    l1_error : Tensor
        fp32 [layers, Hq]: relative L1 error of the output. NaN if the dense output is 0 throughout.
    mass_recall : Tensor
        fp32 [layers, Hq]: share of the dense softmax mass on visible keys, mean of the rows.
    mass_recall_lowest : Tensor
        fp32 [layers, Hq]: that of the row with the least.
    l1_error_by_chunk, mass_recall_by_chunk : Tensor
        fp32 [chunks, layers, Hq]: the same over the rows of each chunk.
    memory : Tensor
        int32 [chunks, layers, Hkv, K + L + H]: the set after each chunk, to which the next one
        attends, ascending, -1 where absent.
    layers : tuple of int
        Indices of the layers measured: those that a sparse prefill prefills sparsely.
    query_heads, kv_heads : tuple of int
        Heads of each of these layers.
    chunk_ends : tuple of int
        Where each chunk ends; the last is T.
    config : PrefillConfig
    """

    l1_error: Tensor
    mass_recall: Tensor
    mass_recall_lowest: Tensor
    l1_error_by_chunk: Tensor
    mass_recall_by_chunk: Tensor
    memory: Tensor
    layers: tuple[int, ...]
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    chunk_ends: tuple[int, ...]
    config: PrefillConfig

    @property
    def jaccard(self) -> Tensor:
        """Jaccard index of the sets after chunks c and c + 1, fp32 [chunks - 1, layers, Hkv]."""
        return memory_jaccard(self.memory, self.chunk_ends[-1])

    def to_dict(self) -> dict[str, Any]:
        """Return the measures as plain dicts, lists and numbers; errors and shares in 0 .. 1.

        `summary` and `by_chunk` hold the mean over all query heads of all layers and the worst
        head, and the mean over all KV heads of the Jaccard index of the set that a chunk attends to
        and that of the chunk before; `by_layer` every head, and the set after the last chunk too.
        """
        return {
            "config": asdict(self.config),
            "tokens": self.chunk_ends[-1],
            "summary": {
                **_means_and_worst(self, self.l1_error, self.mass_recall),
                "jaccard_mean": _mean(self.jaccard[:-1]),
            },
            "by_chunk": [self._chunk(chunk) for chunk in range(len(self.chunk_ends))],
            "by_layer": [self._layer(row) for row in range(len(self.layers))],
        }

    def _chunk(self, chunk: int) -> dict[str, Any]:
        return {
            "chunk": chunk,
            "end": self.chunk_ends[chunk],
            **_means_and_worst(
                self, self.l1_error_by_chunk[chunk], self.mass_recall_by_chunk[chunk]
            ),
            # Chunks attend to the set after the chunk before: the first has none, the second no
            # other to compare with.
            "jaccard_mean": _mean(self.jaccard[chunk - 2]) if chunk >= 2 else None,
        }

    def _layer(self, row: int) -> dict[str, Any]:
        heads, kv_heads = self.query_heads[row], self.kv_heads[row]
        return {
            "layer": self.layers[row],
            "l1_error": self.l1_error[row, :heads].tolist(),
            "mass_recall": self.mass_recall[row, :heads].tolist(),
            "mass_recall_lowest": self.mass_recall_lowest[row, :heads].tolist(),
            "l1_error_by_chunk": self.l1_error_by_chunk[:, row, :heads].tolist(),
            "mass_recall_by_chunk": self.mass_recall_by_chunk[:, row, :heads].tolist(),
            "jaccard": self.jaccard[:, row, :kv_heads].tolist(),
        }


def _means_and_worst(measures: AttentionMeasures, error: Tensor, recall: Tensor) -> dict[str, Any]:
    return {
        "l1_error_mean": _mean(error),
        "l1_error_worst": _worst(measures, error),
        "mass_recall_mean": _mean(recall),
        "mass_recall_worst": _worst(measures, -recall, sign=-1),
    }


def _mean(values: Tensor) -> float:
    return values.double().nanmean().item()


def _worst(measures: AttentionMeasures, values: Tensor, sign: int = 1) -> dict[str, Any]:
    """Return the highest of [layers, Hq] and where it is."""
    place = int(values.nan_to_num(nan=-torch.inf).argmax())
    row, head = divmod(place, values.shape[1])
    return {
        "value": sign * values[row, head].item(),
        "layer": measures.layers[row],
        "head": head,
    }
