"""Keys and signatures: which signatures on a run's documents are valid, and what a receiver has seen before.

May import ``format``. Begin with ``keyring``. docs/SECURITY.md has the threat model.
"""

from vllm_delta_sync.trust.keyring import Keyring

__all__ = ["Keyring"]
