"""Sparse prefill for Hugging Face models. Importing this package imports transformers.

| floor | file | job |
| --- | --- | --- |
| 5 | enable.py | switch a model to sparse prefill, and back |
| | prefill.py | prefill a prompt in several calls |
| | report.py | which layers are and were sparse |
| | export.py | a whole model as one graph |
| 4 | attention.py, masks.py | the two functions that transformers calls |
| | entry.py | the wrapped `forward` and `generate` of a model |
| | parallel.py | models that are spread over several processes |
| 3 | forward.py, call.py | what one forward knows; one call to attend, and why it is dense |
| 2 | cache.py, layer.py | caches that calls of one prompt share, with session files; their layers |
| 1 | kinds.py | kinds of layers, the state of an enabled model, what no mask means in it |
"""

from __future__ import annotations

from h2o_prefill.hf.cache import ChunkedPrefillCache
from h2o_prefill.hf.enable import PrefillHandle, disable, enable, explain, register
from h2o_prefill.hf.kinds import NAME
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.prefill import chunked_prefill
from h2o_prefill.hf.report import LayerReport, ModelReport
