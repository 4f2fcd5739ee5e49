"""Sparse prefill for Hugging Face models. Importing this package imports transformers.

| file | job |
| --- | --- |
| enable.py | switch a model to sparse prefill, and back |
| prefill.py | prefill a prompt in several calls |
| hooks.py | the hooks before and after a forward |
| masks.py, attention.py | the two functions that transformers calls |
| compiled.py | what these two are in a compiled graph |
| rules.py | when a call is sparse, else why it is not |
| dense.py | the attention that the model had before |
| call.py, layer_kinds.py | one call to attend, and the kind of its layer |
| forward.py | what one forward knows, and which of them run |
| padding.py | the spans of the rows of a padded batch |
| cache.py, layer.py | caches that calls of one prompt share, and their layers |
| prefix_cache.py | texts that were prefilled, for prompts that begin with them |
| session.py | what a session file has of a cache, and the hash of a model |
| snapshot.py | a cache before a forward, in case that fails |
| sharded.py | prompts whose tokens are spread over several processes |
| stages.py | models that transformers spreads over several processes |
| state.py | the state of one enabled model, and what its compiled graph is told |
| report.py | which layers are and were sparse |
| export.py | a whole model as one graph |
"""

from __future__ import annotations

from h2o_prefill.hf.cache import ChunkedPrefillCache, StaticPrefillCache
from h2o_prefill.hf.enable import PrefillHandle, disable, enable, register
from h2o_prefill.hf.kinds import NAME
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.prefill import chunked_prefill
from h2o_prefill.hf.prefix_cache import PrefixCache
from h2o_prefill.hf.report import LayerReport, ModelReport, explain
from h2o_prefill.hf.sharded import gather_cache
