"""The timer of every comparison; time and memory of prefill, sparse against dense."""
