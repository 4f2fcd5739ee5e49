"""`python -m h2o_prefill.cli`."""

from __future__ import annotations

from . import main

main()
