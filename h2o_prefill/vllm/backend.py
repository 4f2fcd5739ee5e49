"""What leaves rows of long prompts to this library, over vLLM's attention on any device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention as Layer
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionType

from h2o_prefill.functional import RecallLists
from h2o_prefill.vllm import runner
from h2o_prefill.vllm.plan import Pages, Row
from h2o_prefill.vllm.runner import first_of, logger, refused

# Of the classes below, which come before vLLM's among the bases of a class.
Base: Any = object


@dataclass
class Plan:
    """What is ours of a step, for a group of layers, and what is left."""

    rows: list[Row]
    starts: list[int]  # of the requests in the batch
    blocks: Tensor  # [requests, blocks], the pages of each
    rest: Any  # metadata of the other requests, None if there are none
    rest_tokens: Tensor  # of the batch


class Builder(Base):
    """Adds a plan to the metadata of a step."""

    # vLLM would copy the metadata of one group of layers for another, whose pages are others.
    supports_update_block_table = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, Layer, self.layer_names)
        ours = {name: x for name, x in layers.items() if getattr(x.impl, "is_ours", False)}
        count = self.vllm_config.model_config.get_total_num_hidden_layers()
        spec = self.kv_cache_spec
        is_chunked = getattr(spec, "attention_chunk_size", None) is not None
        is_other = bool(ours) and not self.reads_pages()
        for name, layer in ours.items():
            numbers = [int(part) for part in name.split(".") if part.isdecimal()]
            reasons = {
                "pages of another layout": is_other,
                "local attention": is_chunked,
                "layers without a number": len(numbers) != 1,
                "layers of a draft model": numbers and numbers[0] >= count,
            }
            layer.impl.is_ours = is_ours(first_of(reasons))
        self._is_ours = any(layer.impl.is_ours for layer in ours.values())

    def reads_pages(self) -> bool:
        """Return whether `Attention.pages_of` reads back what vLLM writes."""
        return True

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, **kwargs)
        metadata.h2o_prefill = self._plan(common_attn_metadata) if self._is_ours else None
        return metadata

    def _plan(self, common: Any) -> Plan | None:
        # The lengths that the host knows, which are right for prompts: nothing waits for a device.
        totals, count, steps = common.seq_lens_cpu_upper_bound, common.num_reqs, runner.current
        is_causal = common.causal is True and not common.mm_req_doc_ranges
        if steps is None or totals is None or not is_causal:
            return None
        starts = common.query_start_loc_cpu[: count + 1].tolist()
        lengths = [end - begin for begin, end in pairwise(starts)]
        rows = steps.rows(lengths, totals[:count].tolist())
        if not rows:
            return None
        ours = {row.index for row in rows}
        others = [index for index in range(count) if index not in ours]
        tokens = [x for index in others for x in range(starts[index], starts[index + 1])]
        rest, device = None, common.seq_lens.device
        for piece in (piece for row in rows for piece in row.pieces):
            piece.recall = _moved(piece.recall, device)
        positions = async_tensor_h2d(tokens, device, dtype=torch.int64)
        if others:
            part = _of_requests(common, others, [lengths[index] for index in others], positions)
            # As drafts do: vLLM has one buffer for the schedule of a step, which the batch has.
            rest = super().build(0, part, fast_build=True)
        return Plan(rows, starts, common.block_table_tensor, rest, positions)


class Attention(Base):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = first_of(self.reasons()) or refused(get_current_vllm_config())
        self.is_ours = is_ours(reason)

    def reasons(self) -> dict[str, object]:
        """Return for which reasons the layer stays vLLM's, and whether they hold."""
        return {
            "layers of encoders": self.attn_type != AttentionType.DECODER,
            "pages of 8 bits": self.kv_cache_dtype.startswith("fp8"),
            "ALiBi": self.alibi_slopes is not None,
            "sliding windows": self.sliding_window not in (-1, (-1, -1)),
            "capped logits": self.logits_soft_cap,
            "attention sinks of the model": self.sinks is not None,
        }

    @staticmethod
    def pages_of(kv_cache: Tensor) -> Pages:
        """Return views of keys and values [pages, Hkv, size, D]."""
        raise NotImplementedError

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
        def attend(query: Tensor, metadata: Any, output: Tensor) -> Tensor:
            given = layer, query, key, value, kv_cache, metadata, output
            return super(Attention, self).forward(*given, *scales, **more)

        plan = getattr(attn_metadata, "h2o_prefill", None)
        if plan is None or not self.is_ours:
            return attend(query, attn_metadata, output)
        if plan.rest is not None:
            queries = query[plan.rest_tokens]
            part = torch.empty_like(queries)
            attend(queries, plan.rest, part)
            output[plan.rest_tokens] = part
        number, pages = extract_layer_index(layer.layer_name), self.pages_of(kv_cache)
        for row in plan.rows:
            tokens = slice(plan.starts[row.index], plan.starts[row.index + 1])
            queries, out = (x[tokens].transpose(0, 1)[None] for x in (query, output))
            row.attend(number, queries, pages, plan.blocks[row.index], self.scale, out)
        return output


def is_ours(reason: str | None) -> bool:
    """Return whether there is no reason for attention to stay vLLM's; log one."""
    if reason is not None:
        logger.warning_once("h2o_prefill: %s: attention stays vLLM's", reason)
    return reason is None


def _moved(lists: RecallLists, device: torch.device) -> RecallLists:
    """Return lists on a device, where another group of layers may have put them."""
    one, two, three = (
        async_tensor_h2d(x, device) if x is not None and x.is_cpu else x for x in lists
    )
    return one, two, three


def _of_requests(common: Any, wanted: list[int], lengths: list[int], tokens: Tensor) -> Any:
    """Return the metadata of some requests of a batch, whose lengths and tokens these are."""
    device = common.seq_lens.device
    index = async_tensor_h2d(wanted, device, dtype=torch.int64)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=common.query_start_loc_cpu.dtype)
    return common.replace(
        query_start_loc=async_tensor_h2d(starts, device),
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[index],
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[wanted],
        num_reqs=len(wanted),
        num_actual_tokens=len(tokens),
        max_query_len=max(lengths),
        block_table_tensor=common.block_table_tensor[index],
        slot_mapping=common.slot_mapping[tokens],
    )
