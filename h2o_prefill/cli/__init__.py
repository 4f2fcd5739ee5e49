"""The command line, `h2o-prefill`."""
