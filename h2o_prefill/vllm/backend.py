"""vLLM's attention on CPUs, which leaves rows of long prompts to this library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention as Layer
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import cpu_attn

from h2o_prefill.vllm import runner
from h2o_prefill.vllm.plan import Row
from h2o_prefill.vllm.runner import logger, refused


@dataclass
class Plan:
    """What is ours of a step, for a group of layers, and what is left."""

    rows: list[Row]
    starts: list[int]  # of the requests in the batch
    blocks: Tensor  # [requests, blocks], the pages of each
    rest: Any  # metadata of the other requests, None if there are none
    rest_tokens: Tensor  # of the batch


class Backend(cpu_attn.CPUAttentionBackend):
    """vLLM's backend, under its own name, with the builder and the attention below."""

    @staticmethod
    def get_impl_cls() -> Any:
        return Attention

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder


class Builder(cpu_attn.CPUAttentionMetadataBuilder):
    """Adds a plan to vLLM's metadata of a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, Layer, self.layer_names)
        ours = [name for name, layer in layers.items() if getattr(layer.impl, "is_ours", False)]
        reason = None
        if ours and not _reads_pages(self):
            reason = "pages of another layout"
        elif any(sum(part.isdecimal() for part in name.split(".")) != 1 for name in ours):
            reason = "layers without a number"
        if reason is not None:
            logger.warning_once("h2o_prefill: %s: attention stays vLLM's", reason)
            for name in ours:
                layers[name].impl.is_ours = False
        self._is_ours = bool(ours) and reason is None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any) -> Any:
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, **kwargs)
        metadata.h2o_prefill = None
        if not self._is_ours or common.causal is not True or common.mm_req_doc_ranges:
            return metadata
        bounds = common.query_start_loc_cpu[: common.num_reqs + 1]
        lengths, totals = bounds.diff(), common.seq_lens[: common.num_reqs].tolist()
        steps = runner.current
        if steps is not None and (rows := steps.rows(lengths.tolist(), totals)):
            is_other = torch.ones(common.num_reqs, dtype=torch.bool)
            is_other[[row.index for row in rows]] = False
            tokens = is_other.repeat_interleave(lengths).nonzero().flatten()
            rest = None
            if is_other.any():
                rest = super().build(0, _of_requests(common, is_other, tokens), **kwargs)
            blocks = common.block_table_tensor
            metadata.h2o_prefill = Plan(rows, bounds.tolist(), blocks, rest, tokens)
        return metadata


class Attention(cpu_attn.CPUAttentionBackendImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reasons = {
            "layers of encoders": self.attn_type != AttentionType.DECODER,
            "pages of 8 bits": self.is_fp8_kv_cache,
            "ALiBi": self.alibi_slopes is not None,
            "sliding windows": self.sliding_window != -1,
            "capped logits": bool(self.logits_soft_cap),
            "attention sinks of the model": self.sinks is not None,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        reason = reason or refused(get_current_vllm_config())
        self.is_ours = reason is None
        if reason is not None:
            logger.warning_once("h2o_prefill: %s: attention stays vLLM's", reason)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **more: Any,
    ) -> Tensor:
        held, plan = (key, value, kv_cache), getattr(attn_metadata, "h2o_prefill", None)
        if plan is None or not self.is_ours:
            return super().forward(layer, query, *held, attn_metadata, output, *scales, **more)
        if plan.rest is not None:
            part = torch.empty_like(output[plan.rest_tokens])
            queries = query[plan.rest_tokens]
            super().forward(layer, queries, *held, plan.rest, part, *scales, **more)
            output[plan.rest_tokens] = part
        number, pages = extract_layer_index(layer.layer_name), pages_of(kv_cache)
        for row in plan.rows:
            tokens = slice(plan.starts[row.index], plan.starts[row.index + 1])
            queries, out = (x[tokens].transpose(0, 1)[None] for x in (query, output))
            row.attend(number, queries, pages, plan.blocks[row.index], self.scale, out)
        return output


def pages_of(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of keys and values [pages, Hkv, size, D].

    Of a page [Hkv, size, 2 D], the first half is keys [D, size], and the second values [size, D].
    """
    count, heads, size, both = kv_cache.shape
    halves = kv_cache.view(count, heads, 2, both // 2, size)
    return halves[:, :, 0].transpose(2, 3), halves[:, :, 1].view(count, heads, size, both // 2)


def _reads_pages(builder: Builder) -> bool:
    """Return whether `pages_of` reads back what vLLM writes: its layout depends on the CPU."""
    spec = builder.kv_cache_spec
    heads, size, dim = spec.num_kv_heads, spec.block_size, spec.head_size
    if getattr(spec, "head_size_v", dim) != dim or spec.dtype != builder.dtype:
        return False
    pages = torch.zeros(3, heads, size, 2 * dim, dtype=spec.dtype)
    caches = pages.view(3, heads, 2 * size, dim).chunk(2, dim=2)
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randn(2 * size, heads, dim, generator=drawn).to(spec.dtype) for _ in range(2)]
    slots = torch.arange(size, 3 * size)
    _custom_ops.cpu_attn_reshape_and_cache(
        *rows, *caches, slots, builder.isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    written = (x[1:].transpose(1, 2).flatten(0, 1) for x in pages_of(pages))
    return all(x.equal(row) for x, row in zip(written, rows, strict=True))


def _of_requests(common: Any, wanted: Tensor, tokens: Tensor) -> Any:
    """Return the metadata of some requests of a batch, whose tokens these are."""
    index, bounds = wanted.nonzero().flatten(), common.query_start_loc_cpu
    lengths = bounds.diff()[index]
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=bounds.dtype), (1, 0))
    return common.replace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[index],
        num_reqs=len(index),
        num_actual_tokens=len(tokens),
        max_query_len=int(lengths.max()),
        block_table_tensor=common.block_table_tensor[index],
        slot_mapping=common.slot_mapping[tokens],
    )
