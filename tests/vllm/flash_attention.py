"""FlashAttention in plain PyTorch: a CPU build of vLLM has none for its CUDA backend."""

import torch


def flash_attn_varlen_func(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    seqused_k,
    block_table,
    softmax_scale,
    window_size,
    softcap,
    causal,
    **_,
):
    """Attend with queries [T, Hq, D] of requests to pages [blocks, size, Hkv, D], write `out`."""
    assert causal
    starts = cu_seqlens_q.tolist()
    for i, total in enumerate(seqused_k.tolist()):
        rows = slice(starts[i], starts[i + 1])
        blocks = block_table[i, : -(-total // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:total] for x in (k, v))
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(total)[-scores.shape[1] :, None] - torch.arange(total)
        hidden = (distance < 0) | (distance > (window_size[0] if window_size[0] >= 0 else total))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values)


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, *_):
    """Write keys and values [T, Hkv, D] into pages [blocks, size, Hkv, D]."""
    slots = slot_mapping.long()
    blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[blocks, offsets] = key[: len(slots)]
    value_cache[blocks, offsets] = value[: len(slots)]


def get_flash_attn_version(**_):
    """Return the version whose schedule is not made ahead of a step."""
    return 2
