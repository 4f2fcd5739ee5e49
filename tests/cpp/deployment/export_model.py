"""Exports a small decoder that attends by `prefill_attention_`, for programs without Python.

    python export_model.py FOLDER

writes model.pt (TorchScript), model.pt2 (an AOTInductor package) and replay.pt: a prompt, the empty
buffers, and what the eager model answered. run_exported.cpp runs the first two and compares.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from h2o_prefill import ChunkedSparseAttention, PrefillConfig, ops
from h2o_prefill.functional import recall_lists

VOCABULARY = 61
CONFIG = PrefillConfig.parse(
    "recommended,chunk_size=64,local_window=8,heavy_budget=8,sink_tokens=2,recall_block=16,"
    "wide_layers=1,wide_factor=2"
)
# Tokens of the calls over the prompt; single tokens are decoded after it.
CALLS = (150, 20, 64)
NUM_DECODED = 4


class Decoder(nn.Module):
    """Two layers of attention and MLP with rotary position embedding.

    Its keys, values, scores and memory sets lie in buffers that the caller allocates once. Every
    call changes them in place, and advances the position.
    """

    heads: int
    kv_heads: int
    head_dim: int
    num_layers: int

    def __init__(self, hidden: int = 64, heads: int = 4, kv_heads: int = 2, num_layers: int = 2):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.num_layers = num_layers
        kv_width = kv_heads * self.head_dim
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.query_key_value = nn.ModuleList(
            nn.Linear(hidden, hidden + 2 * kv_width, bias=False) for _ in range(num_layers)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(hidden)
        self.attention = ChunkedSparseAttention(CONFIG)
        # No parameter of any layer: TorchScript and torch.export take it as a constant.
        powers = -torch.arange(self.head_dim // 2) / (self.head_dim // 2)
        self.register_buffer("frequencies", 10000.0**powers)

    def forward(
        self,
        token_ids: Tensor,
        buffers: list[Tensor],
        position: Tensor,
        recall: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Return the logits after the last token of a call."""
        length = token_ids.shape[1]
        positions = (position[0] + torch.arange(length)).unsqueeze(1)
        angles = positions * self.frequencies
        hidden = self.embed(token_ids)
        for layer, (project, mlp) in enumerate(zip(self.query_key_value, self.mlp)):  # noqa: B905
            x = project(self.norm(hidden)).view(1, length, -1, self.head_dim).transpose(1, 2)
            query, key, value = x.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            attended = self.attention.attend_(
                self.rotate(query, angles),
                self.rotate(key, angles),
                value,
                buffers[4 * layer],
                buffers[4 * layer + 1],
                buffers[4 * layer + 2],
                buffers[4 * layer + 3],
                position,
                recall=recall,
                layer=layer,
            )
            hidden = hidden + attended.transpose(1, 2).flatten(2)
            hidden = hidden + mlp(self.norm(hidden))
        self.attention.advance_(position, length)
        return F.linear(self.norm(hidden[:, -1]), self.embed.weight)

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Apply rotary position embedding to [1, H, T, D]."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def new_buffers(model: Decoder, capacity: int) -> list[Tensor]:
    """Return key, value, scores and memory of each layer, as at the beginning of a prompt."""
    heads, width = model.kv_heads, model.head_dim
    return [
        buffer
        for layer in range(model.num_layers)
        for buffer in (
            torch.zeros(1, heads, capacity, width),
            torch.zeros(1, heads, capacity, width),
            torch.zeros(1, heads, capacity),
            torch.full((1, heads, CONFIG.of_layer(layer).memory_size), -1, dtype=torch.int32),
        )
    ]


def run(model: nn.Module, prompt: Tensor, buffers: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prefill a prompt in several calls and decode."""
    token_ids, position = prompt, torch.zeros(2, dtype=torch.int64)
    recall = recall_lists(prompt[:, :0], 0, CONFIG)
    logits = []
    for tokens in (*CALLS, *[1] * NUM_DECODED):
        begin = int(position[0])
        end = begin + tokens
        # A dense call does not look at the lists; those of the last sparse call will do.
        if CONFIG.is_sparse_call(begin, tokens):
            recall = recall_lists(token_ids[:, :end], begin, CONFIG)
        # Not [:, begin:end]: torch.compile would make another graph for each stride.
        new = token_ids[0, begin:end].unsqueeze(0)
        logits.append(model(new, buffers, position, recall))
        if end == token_ids.shape[1]:
            token_ids = torch.cat([token_ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
    return token_ids, torch.cat(logits)


def export(model: Decoder, capacity: int) -> torch.export.ExportedProgram:
    """Export a model for calls of any number of tokens."""
    token_ids = torch.arange(100).remainder(30).unsqueeze(0)
    recall = ops.lexical_recall(token_ids, 0, 64, 16, 6)
    dynamic = torch.export.Dim.DYNAMIC
    entries = torch.export.Dim("entries")
    shapes = (
        {1: torch.export.Dim("tokens", max=capacity)},
        [{2: dynamic}, {2: dynamic}, {2: dynamic}, {}] * model.num_layers,
        {},
        ({0: dynamic}, {0: entries}, {0: entries}),
    )
    example = (token_ids, new_buffers(model, capacity), torch.zeros(2, dtype=torch.int64), recall)
    return torch.export.export(model, example, dynamic_shapes=shapes)


def main(folder: Path) -> None:
    """Write the three files."""
    torch.manual_seed(0)
    model = Decoder().eval()
    # Words that come again, so that there is something to recall.
    words = torch.randint(0, VOCABULARY, (20, 3))
    prompt = words[torch.randint(0, 20, (100,))].reshape(1, -1)[:, : sum(CALLS)]
    capacity = sum(CALLS) + NUM_DECODED
    with torch.inference_mode():
        token_ids, logits = run(model, prompt, new_buffers(model, capacity))
    folder.mkdir(parents=True, exist_ok=True)
    replay = {
        "prompt": prompt,
        "calls": torch.tensor(CALLS),
        "buffers": new_buffers(model, capacity),
        "token_ids": token_ids.clone(),
        "logits": logits.clone(),
        "settings": CONFIG.to_string(),
    }
    torch.save(replay, folder / "replay.pt")
    torch.jit.script(model).save(str(folder / "model.pt"))
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            export(model, capacity), package_path=str(folder / "model.pt2")
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
