"""A whole model as one graph that prefills and decodes: for programs without Python."""

from __future__ import annotations

import platform
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._inductor.cpu_vec_isa import pick_vec_isa
from transformers import AttentionInterface, PreTrainedModel

from h2o_prefill import ops
from h2o_prefill._library import build_info
from h2o_prefill.config import PrefillConfig
from h2o_prefill.fingerprint import digest, fingerprint
from h2o_prefill.functional import NO_RECALL, LayerOptions, RecallLists
from h2o_prefill.hf.call import Attended, Call
from h2o_prefill.hf.kinds import count_heads, is_causal, layer_type, moving_rope, window_of
from h2o_prefill.hf.report import attention_layers
from h2o_prefill.package import STATE_OF_LAYER, PackageInfo

_ATTENTION = "h2o_prefill_package"

# Tokens that a graph and its model are compared on, spread over the vocabulary.
_COMPARED, _STEP = 24, 7919

_TOLERANCE = 0.1  # above what roundings in 16 bits change


class PackagedModel(nn.Module):
    """A model whose attention layers keep their state in tensors that each call is given."""

    token_text: Tensor | None

    def __init__(self, model: Any, config: PrefillConfig, token_text: Tensor | None = None) -> None:
        super().__init__()
        self.model, self.config, self.settings = model, config, config.native.to_fields()
        self.register_buffer("token_text", token_text if config.recall_characters else None)

    def forward(self, token_ids: Tensor, rows: Tensor, *state: Tensor) -> Tensor:
        """Return the logits [R, vocabulary] of some tokens of a call."""
        prompt, position, *layers = state
        tokens = token_ids.shape[1]
        positions = position[0] + torch.arange(tokens)
        prompt.index_copy_(1, positions, token_ids)
        recall = NO_RECALL
        if self.config.recall:
            lookup = prompt, position, tokens, self.settings, self.token_text
            recall = ops.recall_at_position(*lookup)
        out = self.model(
            token_ids,
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            package_state=layers,
            package_call=(position, recall, self.settings),
        )
        ops.advance_position_(position, tokens, self.settings)
        return out.logits[0]


def attend_in_place(*args: Any, **kwargs: Any) -> Attended:
    """Attend as `PackagedModel` says, with the buffers of the layer."""
    call = Call(*args, **kwargs)
    settled: tuple[Tensor, RecallLists, str] | None = call.kwargs.get("package_call")
    if settled is None:
        raise ValueError("model must pass on the arguments of its forward, to be exported")
    position, recall, settings = settled
    first = STATE_OF_LAYER * call.number
    buffers = call.kwargs["package_state"][first : first + STATE_OF_LAYER]
    window = window_of(call.module)
    options = LayerOptions(recall, call.number, settings, call.logit_options, window)
    query, key, value = (x.to(buffers[0].dtype) for x in (call.query, call.key, call.value))
    state: Any = *buffers, position
    out = ops.prefill_attention_(query, key, value, *state, *options.arguments)
    return out.to(call.query.dtype).transpose(1, 2), None


def describe_package(
    model: PreTrainedModel,
    config: PrefillConfig,
    capacity: int,
    weights: str = "",
    kv: str = "",
    token_text: Tensor | None = None,
    machine: str = "",
) -> PackageInfo:
    """Return what the package of a model will hold; ValueError if it cannot be exported.

    `weights` is the format of the weights, `kv` the dtype of keys and values, by default the
    model's; token_text as in `lexical_recall`; `machine` as in `write_package`.
    """
    here = platform.machine()
    machine = machine or here
    hf_config: Any = model.config.get_text_config(decoder=True)
    longest = hf_config.max_position_embeddings
    if not 2 <= capacity <= longest:
        raise ValueError(
            f"capacity must be in [2, {longest}], the tokens that the model takes, got {capacity}"
        )
    layers, kinds = attention_layers(model, None), ("full_attention", "sliding_attention")
    if [layer.layer_idx for layer in layers] != list(range(hf_config.num_hidden_layers)):
        raise ValueError("model must have one attention layer in each layer to be exported")
    if not all(is_causal(layer) and layer_type(layer) in kinds for layer in layers):
        raise ValueError("model must be causal, with full attention or windows, to be exported")
    if rope := moving_rope(hf_config):
        kind = rope["rope_type"]
        raise ValueError(f"model must have rotary frequencies that stay the same, got {kind}")
    heads, dtype = hf_config.num_attention_heads, str(model.dtype).removeprefix("torch.")
    kv, text = kv or dtype, "" if token_text is None else digest(token_text)
    end_ids: Any = getattr(model.generation_config, "eos_token_id", None)
    end_ids = [end_ids] if isinstance(end_ids, int) else end_ids or []
    return PackageInfo(
        model=type(model).__name__,
        settings=config.native.to_fields(),
        dtype=kv,
        capacity=capacity,
        vocabulary=hf_config.vocab_size,
        layers=len(layers),
        kv_heads=count_heads(model)[1],
        head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        end_ids=tuple(end_ids),
        h2o_prefill=build_info()["version"],
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        model_hash=fingerprint(model, text, kv),
        weights=weights or dtype,
        machine=machine,
        cpu_features=str(pick_vec_isa()).upper() if machine == here else "",
    )


def export_model(
    model: PreTrainedModel, info: PackageInfo, token_text: Tensor | None = None
) -> torch.export.ExportedProgram:
    """Export a model for calls of any number of tokens; token_text as in `lexical_recall`.

    Raises ValueError for a model whose graph gives other logits than it gives itself: one that has
    other state than keys and values, or changes attention in a way that the operator does not.
    """
    AttentionInterface.register(_ATTENTION, attend_in_place)
    previous = model.config._attn_implementation
    tokens, state = min(64, info.capacity), info.new_state()
    example = (torch.zeros(1, tokens, dtype=torch.int64), torch.arange(3) % tokens, *state)
    dim = torch.export.Dim
    sizes: Any = {1: dim("tokens", max=info.capacity)}, {0: dim("rows", max=info.capacity)}
    shapes = *sizes, tuple({} for _ in state)
    model.set_attn_implementation(_ATTENTION)
    try:
        packaged = PackagedModel(model, PrefillConfig.parse(info.settings), token_text)
        with torch.no_grad():
            program = torch.export.export(packaged, example, dynamic_shapes=shapes, strict=False)
    except RuntimeError as error:
        raise ValueError(f"model cannot be exported: {str(error).splitlines()[0]}") from error
    finally:
        model.set_attn_implementation(previous)
    _check_same_logits(model, program, info)
    return program


def _check_same_logits(
    model: PreTrainedModel, program: torch.export.ExportedProgram, info: PackageInfo
) -> None:
    """Raise ValueError if a graph differs from its model on a few tokens, in dense calls."""
    token_ids = torch.arange(1, min(_COMPARED, info.capacity) + 1)[None] * _STEP % info.vocabulary
    graph, state, begin = program.module(), info.new_state(), 0
    with torch.no_grad():
        expected = model(token_ids, use_cache=False).logits[0].float()
        # The second call goes on from the state that the first one left.
        for part in token_ids.split(max(1, min(_COMPARED // 2, info.config.sparse_from - 1)), 1):
            rows = torch.arange(part.shape[1])
            theirs = expected[begin + rows]
            differences = (graph(part, rows, *state).float() - theirs).norm(dim=1)
            # Of most tokens: after unlikely ones roundings in 16 bits may change a lot.
            typical = (differences / theirs.norm(dim=1)).median()
            if not typical < _TOLERANCE:
                raise ValueError(
                    f"model cannot be exported: logits of its graph differ by {typical:.0%}"
                )
            begin += len(rows)
