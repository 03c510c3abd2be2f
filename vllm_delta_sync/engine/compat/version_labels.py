"""Labels of an engine's weights: the version of the model's own weights, and of each adapter: ``7;sql=3``.

vLLM attaches the label of each step to its outputs.
"""

import re
import time
from collections.abc import Callable
from typing import Any

from vllm_delta_sync.engine.compat.patches import wrap_method

SERIAL = "~"
"""Stands between a version in a label and its serial number."""
NO_VERSION = "default"
"""vLLM's own label."""


def version_label(version: int | None, *, serial: bool = True) -> str:
    """Return a new label for vLLM's weights: the version and a serial number; vLLM's own label for no version.

    No label comes twice, even if its version does, after a rollback or in another run. So a step of the engine with the
    label of an earlier one ran on the same weights, and no other weights were in place between the two. The serial
    numbers do not leave the server (``plain_label``).

    Args:
        serial: False for an ``LLM``, whose users see labels as they are.
    """
    if version is None:
        return NO_VERSION
    return f"{version}{SERIAL}{time.time_ns():x}" if serial else str(version)


def relabel(label: str, adapter: str | None, part: str) -> str:
    """Return a label with another ``version_label`` for one adapter, or (None) for the model's own weights."""
    own, adapters = _parts(label)
    if adapter is None:
        own = part
    elif part == NO_VERSION:
        adapters.pop(adapter, None)
    else:
        adapters[adapter] = part
    return own + "".join(f";{name}={held}" for name, held in adapters.items())


def split_label(label: str) -> tuple[int | None, dict[str, int | None]]:
    """Return the version of the model's own weights, and those of adapters by name."""
    own, adapters = _parts(plain_label(label))
    versions = {name: int(held) if held.isdecimal() else None for name, held in adapters.items()}
    return int(own) if own.isdecimal() else None, versions


def label_of(label: str, adapter: str | None) -> tuple[str, str | None]:
    """Return the parts of a label that answers with an adapter depend on; None: those with the model's own weights."""
    own, adapters = _parts(label)
    return own, None if adapter is None else adapters.get(adapter)


def plain_label(label: str) -> str:
    """Return a label without serial numbers, as users of vLLM's interfaces see it."""
    return re.sub(f"{SERIAL}[0-9a-f]+(?=;|$)", "", label)


def hide_serials(client: Any) -> None:
    """Show the users of an ``AsyncLLM`` labels without serial numbers.

    Cause: vLLM passes an engine's label on as it is: with outputs, and to who asks for it. Symptom: labels that are no
    versions. Remove when: vLLM tells two uses of one label apart.
    """
    # An engine may be attached to again and again.
    if hasattr(client, "delta_sync_serials_hidden"):
        return
    client.delta_sync_serials_hidden = True

    def process(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        label = kwargs.get("weight_version")
        if label is not None:
            kwargs["weight_version"] = plain_label(label)
        return original(*args, **kwargs)

    async def get(original: Callable[..., Any]) -> str:
        return plain_label(await original())

    wrap_method(client.output_processor, "process_outputs", process)
    wrap_method(client, "get_weight_version", get)


def _parts(label: str) -> tuple[str, dict[str, str]]:
    own, *parts = label.split(";")
    return own, {name: held for name, _, held in (part.rpartition("=") for part in parts)}
