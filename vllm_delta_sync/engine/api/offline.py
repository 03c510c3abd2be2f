"""Offline vLLM: follow a run with an ``LLM`` object, between two ``generate`` calls."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_delta_sync.engine import WORKER_EXTENSION
from vllm_delta_sync.engine.api import weight_transfer
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.compat.features import check_features
from vllm_delta_sync.engine.compat.layout_checks import check_layout
from vllm_delta_sync.engine.core.ports import OfflineEnginePort
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.errors import EngineError
from vllm_delta_sync.settings import load_settings


class OfflineSync:
    """Moves an ``LLM`` from version to version. Use from the thread that uses the ``LLM``."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def to(self, version: int | None = None) -> dict[str, Any]:
        """Bring the weights to a version, newer or older; what the setting ``target`` says if None.

        Returns:
            ``status()``.

        Raises:
            DeltaSyncError: with the weights still those of the version served before.
        """
        served = self._receiver.served_version
        if version is not None and served is not None and version < served:
            return self.rollback(version)
        self._receiver.advance(version)
        return self.status()

    def rollback(self, version: int) -> dict[str, Any]:
        """Go back to an older version: without the bucket if ``status()["undo"]`` has it, else through the chain.

        Returns:
            ``status()``.

        Raises:
            NotFoundError: it is not published, or not kept any more. ChainError: it is newer than what is served.
            DeltaSyncError: with the weights still those of the version served before.
        """
        self._receiver.rollback(version)
        self._receiver.release()
        return self.status()

    def status(self) -> dict[str, Any]:
        """The same document as ``GET /delta_sync/status``."""
        return self._receiver.status()

    def verify(self) -> dict[str, Any]:
        """Rescan all weights against the served version: {"verdict", "version", "mismatched", "chain", …}.

        Raises:
            EngineError: no version is served yet.
        """
        return self._receiver.verify()


def attach(llm: Any, bucket: str, trusted_keys: str | Sequence[str | Path] | None = None) -> OfflineSync:
    """Attach to a run. The ``LLM`` must have been made with ``worker_extension_cls=WORKER_EXTENSION``.

    Args:
        llm: a ``vllm.LLM``.
        bucket: run URL; other settings come from the environment and the settings file (docs/REFERENCE.md).
        trusted_keys: public key files; in one string, separated by commas. None: as the settings say.

    Raises:
        EngineError: this is no ``LLM``, the extension is missing, or an option or the layout is not supported.
        SettingsError: a setting cannot be used.
    """
    if not hasattr(llm, "llm_engine"):
        raise EngineError(
            f"attach is for a vllm.LLM, this is {type(llm).__name__}; for a vllm.AsyncLLM call "
            "await attach_async(engine, bucket=URL)"
        )
    settings = load_settings({"bucket": bucket, "trusted_keys": joined_keys(trusted_keys)})
    config = llm.llm_engine.vllm_config
    patches.check_extension(config, WORKER_EXTENSION)
    check_features(config)
    check_layout(config, offline=True)
    patches.warn_untested()
    sync = OfflineSync(Receiver(OfflineEnginePort(llm, settings), settings))
    if patches.transfer_backend(config) in (None, weight_transfer.BACKEND):
        weight_transfer.install_offline(llm, weight_transfer.Checks(settings.bucket, sync.status), sync.to)
    return sync


def joined_keys(trusted_keys: str | Sequence[str | Path] | None) -> str | None:
    """Public key files as the setting has them."""
    return trusted_keys if trusted_keys is None or isinstance(trusted_keys, str) else ",".join(map(str, trusted_keys))
