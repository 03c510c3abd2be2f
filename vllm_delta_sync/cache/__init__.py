"""A directory that the processes of one node share, so that each object is downloaded once.

May import ``bucket`` and what is below. Begin with ``object_cache``.
"""

from vllm_delta_sync.cache.object_cache import ObjectCache

__all__ = ["ObjectCache"]
