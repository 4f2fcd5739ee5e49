"""Switch a model to sparse prefill, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from h2o_prefill.config import LAYER_FIELDS, PrefillConfig
from h2o_prefill.hf.attention import h2o_prefill_attention
from h2o_prefill.hf.forward import EnabledState, check_idle
from h2o_prefill.hf.hooks import ForwardHook, handle_of
from h2o_prefill.hf.kinds import (
    NAME,
    attends_to_tokens_alone,
    can_be_sparse,
    chooses_keys,
    enabled_of,
    is_attention,
    is_cross_attention,
    layer_type,
    why_none_sparse,
    window_of,
)
from h2o_prefill.hf.masks import h2o_prefill_mask
from h2o_prefill.hf.report import ModelReport, attention_layers, explain, no_model
from h2o_prefill.hf.sharded import check_shardable
from h2o_prefill.hf.stages import layers_here, with_heads_here
from h2o_prefill.identity import model_text
from h2o_prefill.profile import settings_of
from h2o_prefill.selection import SelectionRule, Selector
from h2o_prefill.vocabulary import text_for


class PrefillHandle:
    """Sparse prefill of one model, on until `disable` is called or its `with` ends."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: PrefillConfig,
        strict: bool,
        token_text: Tensor | None = None,
        profile: str = "",
        process_group: Any = None,
        select: SelectionRule | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.strict = strict
        self.active = False
        self._entered = False
        self._text: tuple[Any, str] | None = None
        self.token_text = token_text
        self.profile = profile
        self.process_group = process_group
        self.select = select
        self.state = EnabledState(config, strict)
        self._hooks: list[Any] = []

    def enable(self) -> PrefillHandle:
        """Enable the model, in place of a handle that was active before.

        A handle that cannot be enabled leaves the one before as it was. Raises what the function
        `enable` raises, and ValueError if the model shares its config object with an enabled one.
        """
        earlier = _handles_of(self.model)
        for handle in earlier:
            handle.disable()
        enabled = self.state
        try:
            self.state = self._new_enabled_state()
            self._switch_on()
        except BaseException:
            self.state = enabled
            for handle in earlier:
                handle._switch_on()
            raise
        return self

    def _new_enabled_state(self) -> EnabledState:
        configs = _configs_of(self.model)
        if any(enabled_of(config) for config in configs):
            raise ValueError(
                f"{_name(self.model)} shares its config object with a model that is enabled; "
                "give each model its own (copy.deepcopy)"
            )
        previous = [(c, c._attn_implementation) for c in configs]
        by_mask = _causal_by_mask(self.model, configs, self.config)
        reported = self.state.reported
        return EnabledState(
            self.config,
            self.strict,
            previous,
            reported,
            by_mask,
            token_text=self.token_text,
            profile=self.profile,
            select=None if self.select is None else Selector(self.select),
        )

    def _switch_on(self) -> None:
        """Switch the model over with the settings as they are, or leave it as it was."""
        try:
            _switch(self.model)
            _look_at_layers(self.model, self.state)
            for module in self.model.modules():
                if module is self.model or isinstance(module, PreTrainedModel):
                    self._hooks += ForwardHook(module, self.state, self).attach(module)
            self.state.mark(on=True)
            self.active = True
        finally:
            if not self.active:
                self._restore()

    def disable(self) -> None:
        """Restore the attention that the model had. Does nothing if it is not enabled.

        Raises RuntimeError during a forward of the model, in this thread or in another.
        """
        if self.state.on:
            check_idle(self.state, _name(self.model))
            self._switch_off()

    def model_text(self) -> str:
        """Return what tells models apart; weights are read again only where they have changed."""
        marks = self.state.marks(self.model)
        if self._text is None or self._text[0] != marks:
            self._text = marks, model_text(self.model, marks)
        return self._text[1]

    def report(self) -> ModelReport:
        """Return what each attention layer does, and its calls so far (`explain`)."""
        return explain(self.model)

    def __repr__(self) -> str:
        where = f"on {_name(self.model)}" if self.active else f"off {_name(self.model)}"
        return f"<PrefillHandle {self.config.to_string()!r} {where}>"

    def __enter__(self) -> PrefillHandle:
        if self._entered:
            raise ValueError("the handle is entered already; nested use is not possible")
        if not self.active:
            self.enable()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        self.disable()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # which is of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Switch a copy of an enabled model over, in another process too."""
        self.__dict__.update(state)
        if self.active:
            register()
            self.state.mark(on=True)

    def _switch_off(self) -> None:
        self.active = False
        self.state.mark(on=False)
        self._restore()

    def _restore(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for config, name in self.state.previous:
            # Not the public setter: it would spread the choice of a config over its sub-configs.
            config._attn_implementation_internal = name


def enable(
    model: PreTrainedModel,
    config: PrefillConfig | str | None = None,
    *,
    tokenizer: Any = None,
    strict: bool = False,
    process_group: Any = None,
    select: SelectionRule | None = None,
    **overrides: Any,
) -> PrefillHandle:
    """Make a Hugging Face model prefill sparsely, until `disable` or the end of the `with` block.

    Calls with at least one chunk of new tokens are sparse. Decoding, short calls and everything
    that is not supported stay dense, with one warning for each reason. On CPUs, plain causal calls
    that PyTorch's attention would compute go through `ops.dense_attention`, and layers whose
    window, or chunk, is shorter than the prompt through operators that visit no key outside of it,
    with the same results up to rounding; other dense calls through the attention that the model had
    before.

    In a batch with padding, left, right or both, every row is computed as if it were alone: it is
    sparse if it has more than one chunk of tokens itself, in the first call of such a batch only.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder. It is enabled when this function returns; a `with` block disables it at
        its end.
    config : PrefillConfig or str, optional
        Settings, or the name of a preset; "h2o" is the algorithm as specified, "profile" the
        profile of the model, which `h2o-prefill calibrate --save` writes. Default: the profile if
        there is one, or else "recommended". A profile is `h2o_prefill.json` in the folder that the
        model was loaded from, or a file for its architecture in the user's cache or in this
        package; a line on stderr says that it was taken, and `config` of the handle is its text.
    tokenizer : optional
        The model's tokenizer: with `recall_characters`, lexical recall compares the text of the
        tokens too.
    strict : bool
        Raise NotImplementedError where a long call would fall back to dense attention.
    process_group : ProcessGroup or DeviceMesh, optional
        Processes, each with the whole model, over which `chunked_prefill` spreads the tokens of a
        prompt; a mesh has one dimension. All other calls are as without it.
    select : callable, optional
        A rule that chooses the keys of earlier chunks in place of the scores, as
        `h2o_prefill.selection.snapkv`. It gets a `SelectionContext` before every chunk of every
        sparse layer but the first chunk of a prompt, and returns positions before the chunk, int32
        or int64 [B, Hkv, any], -1 where absent: others, and one twice, are a ValueError. Recall,
        `dense_tail` and the measuring of errors are as without it; errors do not widen the sets.
    **overrides
        Fields of `PrefillConfig` to change in it.

    Returns
    -------
    PrefillHandle
        A context manager with `enable()` and `disable()`.

    Raises
    ------
    ValueError
        If an argument is wrong, the model does not use transformers' attention interface, or its
        profile cannot be read or is of another architecture.
    NotImplementedError
        If `strict` and no layer of the model can be sparse.
    RuntimeError
        If the model is enabled already and this is called during one of its forwards.

    Examples
    --------
    >>> with enable(model, chunk_size=1024, local_window=256, heavy_budget=256):
    ...     model.generate(**inputs)
    """
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise no_model(model)
    chosen, profile = settings_of(model, config, overrides)
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for name in LAYER_FIELDS:
        given = getattr(chosen, name)
        numbers = [item if isinstance(item, int) else item[0] for item in given]
        if layers is not None and any(number >= layers for number in numbers):
            raise ValueError(f"layers of {name} must be < {layers}, got {given}")
    layers_here(model)
    chosen = with_heads_here(model, chosen)
    if process_group is not None:
        check_shardable(model, chosen)
    text = text_for(tokenizer, chosen)
    if select is not None and (chosen.exact or process_group is not None):
        raise ValueError("select must not be given with exact=True or a process_group")
    return PrefillHandle(model, chosen, strict, text, profile, process_group, select).enable()


def disable(model: PreTrainedModel) -> None:
    """Restore the attention that a model had before `enable`; does nothing if it is not enabled.

    Raises RuntimeError during a forward of the model, in this thread or in another.

    A copy of an enabled model (copy.deepcopy, pickle) is enabled too, and has no other handle.
    """
    for handle in _handles_of(model):
        handle.disable()


@contextlib.contextmanager
def paused(model: PreTrainedModel) -> Iterator[PrefillHandle | None]:
    """Give a model its own attention for a block; yield the handle that it is enabled through.

    The handle may be enabled and disabled in the block. At its end the model is as before, with
    the calls and errors that were counted before.
    """
    handles = _handles_of(model)
    states = [handle.state for handle in handles]
    try:
        for handle in handles:
            handle.disable()
        yield handles[0] if handles else None
    finally:
        disable(model)
        for handle, state in zip(handles, states, strict=True):
            if not state.on:
                handle.state = state
                handle._switch_on()


def register() -> str:
    """Register the attention function and the mask function with transformers.

    `enable` does this. Call it yourself to load a model with `attn_implementation="h2o_prefill"`:
    it is dense until `enable` switches it on.
    """
    AttentionInterface.register(NAME, h2o_prefill_attention)
    # Without a mask function of this name every layer would get no mask at all, padded rows
    # included.
    AttentionMaskInterface.register(NAME, h2o_prefill_mask)
    return NAME


def _handles_of(model: PreTrainedModel) -> list[PrefillHandle]:
    """Return the handles that a model, or one inside of it, is enabled through, each once."""
    if not isinstance(model, nn.Module):
        raise no_model(model)
    handles = (handle_of(module) for module in model.modules())
    return list({id(handle): handle for handle in handles if handle is not None}.values())


def _configs_of(model: PreTrainedModel) -> list[Any]:
    """Return every Hugging Face config inside a model, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop(0)
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _causal_by_mask(model: PreTrainedModel, configs: list[Any], config: PrefillConfig) -> list[Any]:
    """Return the Hugging Face configs of self-attention layers that need their masks to be causal.

    These are layers that say that they are not causal: encoders, and decoders which leave
    causality to their masks; and layers that choose keys among those that the mask shows, unless
    the config has others which can be sparse. In a model whose layers add the mask to their logits
    themselves, and so have no config that could name our attention function, it is all `configs`.
    """
    numbered = [m for m in model.modules() if is_attention(m) and hasattr(m, "layer_idx")]
    switched: list[Any] = [module for module in numbered if hasattr(module, "config")]
    if numbered and not switched:
        return configs
    others = [m.config for m in switched if can_be_sparse(m, config) and not chooses_keys(m)]
    choosing = [m.config for m in switched if chooses_keys(m)]
    by_choice = [one for one in choosing if all(one is not other for other in others)]
    return by_choice + [
        module.config
        for path, module in model.named_modules()
        if getattr(module, "is_causal", None) is False
        and hasattr(module, "config")
        and not is_cross_attention(module, path)
    ]


def _switch(model: PreTrainedModel) -> None:
    """Set our implementation on the text decoder, and only there: a vision tower keeps its own."""
    name: str | dict[str, str] = register()
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    if text is not config:
        keys = [key for key in config.sub_configs if getattr(config, key, None) is text]
        name = {keys[0]: NAME} if keys else NAME
    model.set_attn_implementation(name)
    # Transformers only logs a warning when a model cannot be switched over.
    if config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise ValueError(
            f"{_name(model)} does not use transformers' attention interface, so its attention "
            "cannot be replaced"
        )


def _look_at_layers(model: PreTrainedModel, enabled: EnabledState) -> None:
    """Record the kinds of the layers of an enabled model; report if none can be sparse."""
    modules = [module for module in model.modules() if is_attention(module)]
    numbered = [module for module in modules if hasattr(module, "layer_idx")]
    configs = [getattr(module, "config", None) for module in numbered]
    switched = any(getattr(one, "_attn_implementation", None) == NAME for one in configs)
    layers = attention_layers(model, NAME)
    candidates = [layer for layer in layers if can_be_sparse(layer, enabled.config)]
    windows = [window_of(layer) for layer in candidates]
    enabled.only_windows = bool(windows) and None not in windows
    enabled.leaves_window_masks = all(attends_to_tokens_alone(layer) for layer in layers)
    if enabled.leaves_window_masks:
        enabled.windows = {window_of(layer): layer_type(layer) for layer in layers}
        enabled.windows.pop(None, None)
    why = None
    if layers:
        kinds = why_none_sparse(layers, enabled.config, bool(model.config.is_encoder_decoder))
        why = None if kinds is None else f"its attention is {kinds}"
    elif not modules:
        why = "it has no attention layers"
    elif numbered and not switched:
        why = "its attention layers do not use transformers' attention interface"
    if why is not None:
        enabled.report(f"no layer of {_name(model)} can be sparse: {why}")


def _name(thing: object) -> str:
    return type(thing).__name__
