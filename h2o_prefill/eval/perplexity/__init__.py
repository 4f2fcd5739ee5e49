"""Perplexity of sparse against dense prefill."""
