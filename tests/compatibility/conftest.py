"""What the tests of model classes share."""

from hf_helpers import sparse_layers  # noqa: F401
