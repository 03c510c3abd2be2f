"""Keys and signatures: whose word about a run's weights counts, and what a receiver has seen before.

May import ``format``. Begin with ``keyring``. docs/SECURITY.md has the threat model.
"""

from vllm_delta_sync.trust.keyring import Keyring

__all__ = ["Keyring"]
