"""The name under which transformers finds our attention function and mask function."""

# No "flash", "sdpa" or "flex_attention" inside: transformers reads a meaning into those.
NAME = "h2o_prefill"
