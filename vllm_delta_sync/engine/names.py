"""Names under which vLLM knows this package. Imports nothing of ours: vLLM's plugin loads it in every process."""

import importlib

PLUGIN_NAME = "delta_sync"
"""Name of the entry points, for ``VLLM_PLUGINS``."""
WORKER_EXTENSION = "vllm_delta_sync.engine.WorkerExtension"
"""For ``--worker-extension-cls``; a class that derives from it will do too."""
LOAD_FORMAT = "delta_sync"
"""Name of ``DeltaSyncLoader``: ``--load-format delta_sync`` loads the weights from the bucket."""
TRANSFER_BACKEND = "delta_bucket"
"""Name of our backend of vLLM's weight transfer API."""


def is_our_extension(name: str | None) -> bool:
    """Return whether ``worker_extension_cls`` names our worker extension, or a class that derives from it.

    vLLM takes only one extension, so users with methods of their own in workers derive theirs from ours. What cannot be
    imported is not ours; vLLM reports it where it needs it.
    """
    if name == WORKER_EXTENSION:
        return True
    module, _, attribute = (name or "").rpartition(".")
    if not module:
        return False
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception:  # noqa: BLE001  whatever another package raises, vLLM reports
        return False
    package, _, own = WORKER_EXTENSION.rpartition(".")
    bases = found.__mro__ if isinstance(found, type) else ()
    return any(base.__name__ == own and base.__module__.startswith(f"{package}.") for base in bases)
