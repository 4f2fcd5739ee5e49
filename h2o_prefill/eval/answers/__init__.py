"""Greedy answers about long texts, sparse against dense prefill."""
