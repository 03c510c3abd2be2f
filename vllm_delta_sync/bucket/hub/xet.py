"""``upload``: sends content to the Hub's content store through hf_xet, with bounded memory and timeouts.

hf_xet splits content into chunks, skips those that the store has, and packs the others into blocks of 64 MB. It does
not detect a damaged chunk, so readers must check the digest of an object.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import hf_xet  # type: ignore[import-untyped]

from vllm_delta_sync.bucket.base import report_bytes
from vllm_delta_sync.bucket.hub.api import HubApi
from vllm_delta_sync.bucket.hub.errors import StaleError, text_of
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.settings import StoreOptions

_UPLOADS = 4
"""Blocks of 64 MB in flight. The default of hf_xet is up to 64, each of them in memory."""
_BLOCK_BYTES = 64 << 20
_TRIES = 2
_CONNECT_SECONDS = 10.0

_SMALL_BYTES = 1 << 22

_sessions: dict[tuple[int, float, float], Any] = {}
"""Sessions by process id, because their threads do not survive a fork, and by timeouts."""


def upload(api: HubApi, options: StoreOptions, blocks: Iterable[bytes], size: int) -> str:
    """Store a content of about ``size`` bytes and return its hash; invisible until ``HubApi.add`` names it.

    Raises hf_xet's exceptions, see ``errors.translate_hub_error``.
    """
    connection, fresh = api.connection()
    deadline = options.store_deadline
    # The timeout for the answer includes the time to send the request.
    wait = deadline / _TRIES if size <= _SMALL_BYTES else options.allowance(_BLOCK_BYTES)
    try:
        with _session(deadline, wait).new_upload_commit(**connection.arguments) as commit:
            stream = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
            for block in blocks:
                # Blocks while _UPLOADS blocks are in flight.
                stream.write(block)
                report_bytes(len(block))
            stored = stream.finish().xet_info
    except DeltaSyncError:
        raise
    except Exception as error:  # hf_xet raises many classes
        # A cached connection may have expired, or belong to a bucket that was created again since.
        api.forget()
        if fresh:
            raise
        raise StaleError(text_of(error)) from error
    return str(stored.hash)


def _session(deadline: float, wait: float) -> Any:
    """Return hf_xet's session (connections and threads), shared by all buckets and threads of this process.

    Args:
        deadline: seconds for all tries of a request. wait: seconds for one answer.
    """
    which = os.getpid(), deadline, wait
    if which not in _sessions:
        # If threads make one at once, all use the first: each session in use may have ``_UPLOADS`` blocks in memory.
        _sessions.setdefault(which, hf_xet.XetSession(_config(deadline, wait)))
    return _sessions[which]


def _config(deadline: float, wait: float) -> Any:
    """Configure few tries, short timeouts and small buffers; HF_XET_* variables take precedence."""
    ours = {
        "client.retry_max_attempts": _TRIES - 1,
        "client.retry_base_delay": timedelta(seconds=0.2),
        "client.retry_max_duration": timedelta(seconds=deadline / _TRIES),
        "client.connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, deadline / 3)),
        "client.read_timeout": timedelta(seconds=wait),
        "client.ac_max_upload_concurrency": _UPLOADS,
        "telemetry.enabled": False,
    }
    given = {name for name in ours if f"HF_XET_{name.replace('.', '_').upper()}" in os.environ}
    return hf_xet.XetConfig().with_config({name: value for name, value in ours.items() if name not in given})
