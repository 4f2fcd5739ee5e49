"""Inputs of evaluations: models, texts, prompts, packages."""
