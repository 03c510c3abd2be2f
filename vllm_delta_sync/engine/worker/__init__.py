"""What runs in each worker process of vLLM: the extension that ``collective_rpc`` reaches, and its thread.

May import ``engine.staging`` and what is below. Begin with ``rank_worker``.
"""
