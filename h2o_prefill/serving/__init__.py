"""An OpenAI-compatible server of one model: protocol, the worker that runs the model, routes."""
