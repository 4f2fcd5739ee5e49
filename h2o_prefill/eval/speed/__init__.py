"""Time and memory of prefill, sparse against dense."""
