"""Search QA: questions to answer by searching a corpus; see `env.py`."""
