"""`python -m h2o_prefill.cli`."""

from __future__ import annotations

from h2o_prefill.cli import main

main()
