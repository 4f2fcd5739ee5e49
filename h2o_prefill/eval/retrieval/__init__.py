"""Needle in a haystack: retrieval from long prompts, sparse against dense prefill."""
