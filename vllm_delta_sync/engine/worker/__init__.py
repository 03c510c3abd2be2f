"""What runs in each worker process of vLLM: it receives calls, and holds the rank's state and thread.

May import ``engine.staging`` and what is below. Begin with ``rank_worker``.
"""
