"""Generation after sparse prefill: models, prompts and sampling."""

from __future__ import annotations

from h2o_prefill.generation.models import DEFAULT_MODEL, DTYPES, load_model
from h2o_prefill.generation.text import DATASETS, Corpus, load_text
