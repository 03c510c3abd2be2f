"""The object cache: a directory shared by the processes of one node, so that each object is downloaded once.

Start with ``object_cache``. May import ``bucket`` and what is below.
"""

from vllm_delta_sync.cache.object_cache import ObjectCache

__all__ = ["ObjectCache"]
