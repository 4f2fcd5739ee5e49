"""Perplexity over a grid of settings."""
