"""``RunCache`` opens the runs that one rank reads from, and refuses any that its controller has not read."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import ChainError, DigestError, TensorMismatchError, UnsupportedError
from vllm_delta_sync.trust import Keyring


class RunCache:
    """Opens runs by URL and digest of run.json, so that controller and rank cannot be shown different runs.

    Args:
        trusted: public keys that a rank trusts where it reads documents itself.
        store: values of ``StoreOptions``; None means those of the settings.
        cache: the object cache to read through; if None, every read downloads.
    """

    def __init__(
        self,
        trusted: Sequence[str] = (),
        store: Mapping[str, Any] | None = None,
        cache: ObjectCache | None = None,
    ) -> None:
        self._keyring = Keyring(trusted)
        self._store = None if store is None else StoreOptions(**store)
        self._cache = cache
        self._opened: dict[tuple[str, str], Run] = {}

    def open(self, url: str, info: str | None = None) -> Run:
        """Open the run at a URL.

        Args:
            info: required digest of its run.json; None accepts any run.

        Raises:
            DigestError: another run is there. DeltaSyncError: as ``open_run``.
        """
        try:
            run = open_run(url, self._keyring, self._store, self._cache)
        except (ChainError, TensorMismatchError, UnsupportedError) as error:
            # The controller refuses runs with these errors, so here they mean that the bucket shows another run.
            raise DigestError(
                f"{url!r} shows this rank another run than its controller has read: {error.message}"
            ) from error
        if info is not None and run.info.digest != info:
            run.close()
            raise DigestError(f"run.json at {url!r} has SHA-256 {run.info.digest}, this rank's controller read {info}")
        return run

    def open_cached(self, url: str, info: str) -> Run:
        """As ``open``, but opens each run only once."""
        if (url, info) not in self._opened:
            self._opened[url, info] = self.open(url, info)
        return self._opened[url, info]
