"""Threads that wait sleep, as in __main__.py: read when PyTorch is imported."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
