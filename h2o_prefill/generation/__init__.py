"""Generation after sparse prefill: models, prompts and sampling.

| file | job |
| --- | --- |
| models.py, gguf.py | load a model by its name |
| packages.py, cpp_tokenizer.py, weights.py | write and load a package of a whole model |
| prompts.py, text.py | token ids of prompts and texts |
| runs.py | what every run shares: progress, settings, checks, greedy generation |
| generate.py | a prompt whose text is streamed; sampling |
"""

from __future__ import annotations

from h2o_prefill.generation.models import DEFAULT_MODEL, DTYPES, load_model
from h2o_prefill.generation.text import DATASETS, Corpus, load_text
