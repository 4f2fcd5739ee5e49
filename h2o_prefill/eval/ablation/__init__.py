"""Perplexity over a grid of settings, shared by any number of processes."""
