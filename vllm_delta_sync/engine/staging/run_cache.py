"""The runs that one rank reads from: those that its controller has read, or none."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import ChainError, DigestError, TensorMismatchError, UnsupportedError
from vllm_delta_sync.trust import Keyring


class RunCache:
    """Opens runs by URL and digest of run.json, so that nobody can change them between controller and rank.

    Args:
        trusted: public keys whose signatures count where a rank reads documents by itself.
        store: values of ``StoreOptions``; None: as the settings say.
        cache: what objects are read through; None: each is fetched whenever it is needed.
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
        self._known: dict[tuple[str, str], Run] = {}

    def open(self, url: str, info: str | None = None) -> Run:
        """The run at a URL. Args: info: digest of its run.json; None: any.

        Raises:
            DigestError: another run is there. Else as ``open_run``.
        """
        try:
            run = open_run(url, self._keyring, self._store, self._cache)
        except (ChainError, TensorMismatchError, UnsupportedError) as error:
            # Of what the controller has read these would mean that this model can never follow it.
            raise DigestError(
                f"{url!r} shows this rank another run than its controller has read: {error.message}"
            ) from error
        if info is not None and run.info.digest != info:
            run.close()
            raise DigestError(f"run.json at {url!r} has SHA-256 {run.info.digest}, this rank's controller read {info}")
        return run

    def at(self, url: str, info: str) -> Run:
        """As ``open``, but each run only once."""
        if (url, info) not in self._known:
            self._known[url, info] = self.open(url, info)
        return self._known[url, info]
