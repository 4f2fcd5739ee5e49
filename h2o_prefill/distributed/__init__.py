"""Prefill over several processes, on torch.distributed.

| file | job |
| --- | --- |
| group.py | one group of processes: what all must agree on, and what they pass on to all |
| pipeline.py | chunks of a prompt through the stages of a model |

This package knows modules and tensors alone: `h2o_prefill.hf` makes stages of transformers' models.
"""

from __future__ import annotations

from h2o_prefill.distributed.group import DistributedPrefillError, Ranks
from h2o_prefill.distributed.pipeline import PipelinePrefill
