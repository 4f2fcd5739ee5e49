"""Switch a model to sparse prefill, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from h2o_prefill.config import PrefillConfig
from h2o_prefill.hf.attention import h2o_prefill_attention
from h2o_prefill.hf.entry import entry_of, unwrap, wrap
from h2o_prefill.hf.forward import check_idle
from h2o_prefill.hf.kinds import NAME, EnabledState, count_heads, enabled_of
from h2o_prefill.hf.masks import h2o_prefill_mask
from h2o_prefill.hf.parallel import layers_here
from h2o_prefill.hf.report import ModelReport, look_at_layers, no_model, report_of, why_refused
from h2o_prefill.presets import chosen_config
from h2o_prefill.vocabulary import text_for


class PrefillHandle:
    """Sparse prefill of one model, on until `disable` is called or its `with` ends."""

    def __init__(self, model: PreTrainedModel, state: EnabledState) -> None:
        self.model = model
        self.state = state
        self.config = state.config

    @property
    def active(self) -> bool:
        """Whether the model is enabled through this handle."""
        return self.state.on

    def enable(self) -> PrefillHandle:
        """Enable the model, in place of a handle that was active before, as `enable` does.

        If that fails, the model is as it was.
        """
        earlier, before = handles_of(self.model), self.state
        for handle in earlier:
            handle.disable()
        try:
            self.state = self._new_state()
            self._switch_on()
        except BaseException:
            self.state = before
            for handle in earlier:
                handle._switch_on()
            raise
        return self

    def _new_state(self) -> EnabledState:
        configs, before = _configs_of(self.model), self.state
        if any(enabled_of(config) for config in configs):
            raise ValueError(
                f"{type(self.model).__name__} shares its config object with a model that is "
                "enabled; give each model its own (copy.deepcopy)"
            )
        return EnabledState(
            before.config,
            before.strict,
            [(config, config._attn_implementation) for config in configs],
            before.reported,
            token_text=before.token_text,
        )

    def _switch_on(self) -> None:
        """Switch the model over with the settings as they are, or leave it as it was."""
        try:
            _switch(self.model)
            look_at_layers(self.model, self.state)
            for module in self.model.modules():
                if isinstance(module, PreTrainedModel):
                    wrap(module, self)
            self.state.mark(on=True)
        finally:
            if not self.state.on:
                self._restore()

    def disable(self) -> None:
        """Restore the attention that the model had, as the function `disable` does."""
        if self.state.on:
            check_idle(self.state, type(self.model).__name__)
            self.state.mark(on=False)
            self._restore()

    def report(self) -> ModelReport:
        """Return what each attention layer does, and its calls so far (`explain`)."""
        return explain(self.model)

    def __enter__(self) -> PrefillHandle:
        return self if self.active else self.enable()

    def __exit__(self, *error: object) -> None:
        self.disable()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Switch a copy of an enabled model over, in another process too."""
        self.__dict__.update(state)
        if self.active:
            register()
            self.state.mark(on=True)

    def _restore(self) -> None:
        for module in self.model.modules():
            unwrap(module)
        for config, name in self.state.previous:
            # Not the public setter: it would spread the choice of a config over its sub-configs.
            config._attn_implementation_internal = name


def enable(
    model: PreTrainedModel,
    config: PrefillConfig | str | None = None,
    *,
    tokenizer: Any = None,
    strict: bool = False,
    **overrides: Any,
) -> PrefillHandle:
    """Make a Hugging Face model prefill sparsely, until `disable` or the end of the `with` block.

    Prompts are sparse from the length on at which that is faster on the model's device
    (`min_prefill`). Decoding and everything that is not supported stay dense, with one warning for
    each reason. On CPUs, plain causal calls that PyTorch's attention would compute go through
    `ops.dense_attention`, and layers whose window is shorter than the prompt through an operator
    that visits no key outside of it, with the same results up to rounding.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder.
    config : PrefillConfig or str, optional
        Settings, or the name of a preset; "h2o" is the algorithm as specified. Default:
        "recommended".
    tokenizer : optional
        The model's tokenizer: with `recall_characters`, lexical recall compares the text of the
        tokens too.
    strict : bool
        Raise NotImplementedError where a long call would fall back to dense attention.
    **overrides
        Fields of `PrefillConfig` to change in it.

    Returns
    -------
    PrefillHandle
        A context manager with `enable()` and `disable()`; the model is enabled already.

    Raises
    ------
    ValueError
        If an argument is wrong, the model does not use transformers' attention interface or
        chooses its keys itself, or it shares its config object with an enabled one.
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
    chosen = chosen_config(config, overrides)
    layers, heads = count_heads(model)
    if layers > 1:
        chosen.check_fits(layers)
    layers_here(model)
    processes = getattr(model, "_tp_size", None) or 1
    if heads % processes:
        raise ValueError(f"tp_size must divide the number of KV heads, {heads}, got {processes}")
    state = EnabledState(chosen, strict, token_text=text_for(tokenizer, chosen))
    return PrefillHandle(model, state).enable()


def disable(model: PreTrainedModel) -> None:
    """Restore the attention that a model had before `enable`; does nothing if it is not enabled.

    Raises RuntimeError during a forward of the model, in this thread or in another. A copy of an
    enabled model (copy.deepcopy, pickle) is enabled too, and has no other handle.
    """
    for handle in handles_of(model):
        handle.disable()


def explain(model: PreTrainedModel) -> ModelReport:
    """Return what each attention layer of a model does, and its calls so far.

    The model may be enabled or not. `print` the report for a table.
    """
    handles = handles_of(model)
    return report_of(model, handles[0].state if handles else None)


@contextlib.contextmanager
def paused(model: PreTrainedModel) -> Iterator[PrefillHandle | None]:
    """Give a model its own attention for a block; yield the handle that it is enabled through.

    The handle may be enabled and disabled in the block. After it the model is as before, with what
    was counted before.
    """
    handles = [(handle, handle.state) for handle in handles_of(model)]
    disable(model)
    try:
        yield handles[0][0] if handles else None
    finally:
        disable(model)
        for handle, state in handles:
            handle.state = state
            handle._switch_on()


def register() -> str:
    """Register our functions, for models that are loaded with this attention; `enable` does too."""
    AttentionInterface.register(NAME, h2o_prefill_attention)
    # Without a mask function of this name layers would get no mask at all, padded rows included.
    AttentionMaskInterface.register(NAME, h2o_prefill_mask)
    return NAME


def handles_of(model: PreTrainedModel) -> list[PrefillHandle]:
    """Return the handles that a model, or one inside of it, is enabled through, each once."""
    if not isinstance(model, nn.Module):
        raise no_model(model)
    entries = (entry_of(module) for module in model.modules())
    return list(dict.fromkeys(entry.handle for entry in entries if entry is not None))


def _configs_of(model: PreTrainedModel) -> list[Any]:
    """Return every Hugging Face config inside a model, each once."""
    configs: dict[int, Any] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    for config in waiting:
        if id(config) not in configs and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())


def _switch(model: PreTrainedModel) -> None:
    """Set our implementation on the text decoder, and only there: a vision tower keeps its own."""
    name: str | dict[str, str] = register()
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    if text is not config:
        keys = [key for key in config.sub_configs if getattr(config, key, None) is text]
        name = {keys[0]: NAME} if keys else NAME
    model.set_attn_implementation(name)
    if why := why_refused(model):
        raise ValueError(f"{type(model).__name__} {why}, so its attention cannot be replaced")
