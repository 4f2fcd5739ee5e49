"""`python -m h2o_prefill.cli`."""

from h2o_prefill_cli import main

main()
