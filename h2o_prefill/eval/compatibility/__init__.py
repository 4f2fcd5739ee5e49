"""Which model classes of transformers go sparse."""
