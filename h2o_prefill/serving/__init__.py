"""An OpenAI-compatible server of one model. Importing its modules imports FastAPI.

| file | job |
| --- | --- |
| app.py | routes, errors and streams of HTTP |
| protocol.py | requests and answers of the API |
| worker.py | the thread that runs the model, one request at a time |
| metrics.py | counters, as Prometheus reads them |
"""
