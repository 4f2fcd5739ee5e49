"""Saves the attention of a real model under `h2o_prefill.enable`, layer by layer, for C++.

    python save_prompt.py FOLDER

writes prompt.pt and attention.pt, the module for TorchScript. replay_prompt.cpp attends with the
same queries, keys and values, and compares the outputs.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AttentionInterface

import h2o_prefill
from h2o_prefill.generation import load_model, load_text
from h2o_prefill.generation.text import encode

# Smaller than the presets, so that a short prompt has several chunks and leaves keys out.
SETTINGS = (
    "recommended,min_prefill=none,chunk_size=128,local_window=32,heavy_budget=32,wide=1.0x2,"
    "error_rows=4"
)
# A prompt in two calls, and a token after it.
CALLS = (300, 280, 1)


@torch.inference_mode()
def record(model, token_ids: Tensor) -> list[list[dict[str, Tensor]]]:
    """Return query, key and value [1, H, T, D] of each call and layer, and what came out."""
    calls: list[list[dict[str, Tensor]]] = []
    with h2o_prefill.enable(model, SETTINGS, strict=True):
        attend = AttentionInterface()["h2o_prefill"]

        def attend_and_record(module, query, key, value, *args, **kwargs):
            out, weights = attend(module, query, key, value, *args, **kwargs)
            new = query.shape[2]
            calls[-1].append(
                {
                    "query": query.clone(),
                    "key": key[:, :, -new:].clone(),
                    "value": value[:, :, -new:].clone(),
                    "out": out.transpose(1, 2).clone(),
                }
            )
            return out, weights

        AttentionInterface.register("h2o_prefill", attend_and_record)
        try:
            cache = h2o_prefill.ChunkedPrefillCache(config=model.config)
            for tokens in token_ids.split(list(CALLS), dim=1):
                calls.append([])
                model(tokens, past_key_values=cache, logits_to_keep=1)
        finally:
            AttentionInterface.register("h2o_prefill", attend)
    return calls


def main(folder: Path) -> None:
    """Write the files."""
    model, tokenizer = load_model(dtype="bfloat16")
    token_ids = encode(tokenizer, load_text("pydoc").text)[: sum(CALLS)].unsqueeze(0)
    layer = model.get_decoder().layers[0].self_attn
    replay = {
        "settings": SETTINGS,
        "scale": float(layer.scaling),
        "token_ids": token_ids,
        "calls": record(model, token_ids),
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(replay, folder / "prompt.pt")
    torch.jit.script(h2o_prefill.ChunkedSparseAttention(SETTINGS)).save(folder / "attention.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
