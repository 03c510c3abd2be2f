"""Who may say what a run's weights are: key files, signatures, the list of keys, and what was seen before."""

from vllm_delta_sync.trust.keyring import Keyring

__all__ = ["Keyring"]
