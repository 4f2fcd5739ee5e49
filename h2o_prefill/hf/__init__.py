"""Sparse prefill for Hugging Face models. Importing this package imports transformers.

| file | job |
| --- | --- |
| enable.py | switch a model over, and back |
| names.py, registration.py | the name that transformers knows us by |
| mask_function.py | what transformers calls to make a mask |
| attention_function.py | what transformers calls to attend |
| in_graph.py, graph_call.py | what these two are in a compiled graph, and what it is told |
| attention_call.py, layer_kinds.py | one call to attend, and the kind of its layer |
| eligibility.py | when a call is sparse |
| padding.py | where the rows of a padded batch lie |
| sparse.py, dense.py | the two ways that a call can go |
| chosen_keys.py | the dense way of models that choose their own keys |
| cache.py, layer.py, hybrid_layer.py | a cache that calls of one prompt share, and its layers |
| static.py | the same in buffers of one size |
| token_history.py, recall.py | the ids of the cached tokens, and what is recalled by them |
| rollback.py | put a cache back after a forward that failed |
| explain.py | what each layer does and did |
| export.py | a whole model as one graph |
| prefill.py, prompt.py | prefill a prompt in several calls, whatever form it has |
| hooks.py, forward.py | what happens before and after a forward |
| forwards.py | which forwards run, so that none is switched over half-way |
| forward_context.py, enabled_state.py | what one forward, and one enabled model, know |
"""

from __future__ import annotations

from h2o_prefill.hf.cache import ChunkedPrefillCache
from h2o_prefill.hf.enable import PrefillHandle, disable, enable
from h2o_prefill.hf.explain import LayerReport, ModelReport, explain
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.names import NAME
from h2o_prefill.hf.prefill import chunked_prefill
from h2o_prefill.hf.registration import register
from h2o_prefill.hf.static import StaticPrefillCache

__all__ = [
    "NAME",
    "ChunkedPrefillCache",
    "ChunkedPrefillLayer",
    "LayerReport",
    "ModelReport",
    "PrefillHandle",
    "StaticPrefillCache",
    "chunked_prefill",
    "disable",
    "enable",
    "explain",
    "register",
]
