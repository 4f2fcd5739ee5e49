"""Draws the picture of the page about the method from the operators themselves."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from h2o_prefill import PrefillConfig
from h2o_prefill.eval.attention_flops import find_recalled
from h2o_prefill.functional import lists_of_rows, sparse_attention

TOKENS = 512
CONFIG = PrefillConfig(
    chunk_size=64,
    local_window=24,
    heavy_budget=16,
    recall=2,
)
# Each kind of key that a query sees, in the order of the codes of `visible_keys`.
KINDS = {
    "not seen": "#f4f4f4",
    "own chunk": "#4c78a8",
    "local window": "#72b7b2",
    "heavy hitters": "#e45756",
    "recalled": "#f2b701",
}
FOLDER = Path(__file__).parent / "pictures"


def main() -> None:
    """Write the picture."""
    codes = visible_keys()
    figure = Figure(figsize=(5.6, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.imshow(codes, cmap=ListedColormap(list(KINDS.values())), vmin=0, vmax=len(KINDS) - 1)
    share = 100 * codes.gt(0).sum().item() / (TOKENS * (TOKENS + 1) / 2)
    axes.set_title(f"Queries see {share:.0f} % of what dense attention sees", fontsize=11)
    axes.set(xlabel="key position (tokens)", ylabel="query position (tokens)")
    patches = [Patch(facecolor=color, label=kind) for kind, color in list(KINDS.items())[1:]]
    axes.legend(handles=patches, loc="upper right", frameon=False)
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / "visible_keys.png", dpi=130, metadata={"Software": None})


def visible_keys() -> Tensor:
    """Prefill one KV head chunk by chunk; return which kind of key each query sees, [T, T]."""
    query, key, token_ids = _prompt()
    recalled = find_recalled(token_ids, CONFIG)
    codes = torch.zeros(TOKENS, TOKENS, dtype=torch.int64)
    state = None
    for begin in range(0, TOKENS, CONFIG.chunk_size):
        end = begin + CONFIG.chunk_size
        rows = slice(begin, end)
        codes[rows, rows] = 1
        codes[rows, rows].tril_()
        if state is not None:
            memory = state.checkpoint(1, CONFIG.to_string())[0][0, 0].long()
            for position in memory[memory >= 0].tolist():
                codes[rows, position] = 2 if position >= begin - CONFIG.local_window else 3
        # With the unit matrix as values, attention returns its weights.
        unit = torch.eye(end).expand(1, 1, end, end)
        lists = lists_of_rows(recalled, TOKENS, begin, end, CONFIG.recall_block)
        keys = key[:, :, :end]
        weights, state = sparse_attention(query[:, :, rows], keys, unit, state, CONFIG, lists)
        others = (weights[0, 0] > 0) & (codes[rows, :end] == 0)
        codes[rows, :end][others] = 4
    return codes


def _prompt() -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k [1, 1, T, 32] in which some keys get more attention, and token ids [1, T].

    A sink at the first position and a key every 37 tokens stand for the punctuation and names that
    get much attention in real models. The ids are of a large vocabulary, and 24 of them come again.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, _ = torch.randn(3, 1, 1, TOKENS, 32, generator=generator)
    common = torch.nn.functional.normalize(torch.randn(32, generator=generator), dim=0)
    query += 2 * common
    key[:, :, 5::37] += 6 * common
    key[:, :, 0] += 9 * common
    token_ids = torch.randint(50_000, (1, TOKENS), generator=generator)
    token_ids[:, 420:444] = token_ids[:, 70:94]
    return query, key, token_ids


if __name__ == "__main__":
    main()
