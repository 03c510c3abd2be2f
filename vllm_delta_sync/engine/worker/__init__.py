"""What runs in each worker process of vLLM: the extension that receives calls, the rank's state and thread.

May import ``engine.staging`` and what is below. Begin with ``rank_worker``.
"""
