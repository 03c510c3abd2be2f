"""The member ``delta_sync`` in the last chunk of a stream of server-sent events."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

DATA = "data: "
END = "\n\n"
DONE = f"{DATA}[DONE]{END}"
COMMON = ("id", "object", "created", "model")
"""What every chunk of a stream says."""


async def amended(
    stream: AsyncGenerator[str, None], document: Callable[[], dict[str, Any] | None]
) -> AsyncGenerator[str, None]:
    """Pass a stream's chunks on; the last before ``[DONE]`` gets a member ``delta_sync``.

    Args:
        document: its value; None while output is still to come. Only then may a chunk be the last, so that no other is
            held back until the next one is there.
    """
    held = last = None
    async with aclosing(stream):
        async for chunk in stream:
            value = document()
            if chunk == DONE:
                if value is not None and (closing := _closing(held, last, value)) is not None:
                    yield closing
                elif held is not None:
                    yield held
                held = None
                yield chunk
                continue
            if held is not None:
                yield held
                held = None
            if value is None:
                yield chunk
            else:
                held = chunk
            last = chunk
    if held is not None:
        yield held


def _closing(held: str | None, last: str | None, value: dict[str, Any]) -> str | None:
    """The chunk held back with the member; one more, if the last output brought none. None: the stream has failed."""
    parsed = _parsed(held or last)
    if parsed is None:
        return None
    member = f'"delta_sync":{json.dumps(value, separators=(",", ":"))}}}{END}'
    if held is not None:
        # Into the text: whatever else is in the chunk stays as it is, byte for byte.
        return f"{held.rstrip()[:-1]},{member}"
    common = {name: parsed[name] for name in COMMON if name in parsed}
    return f"{DATA}{json.dumps({**common, 'choices': []}, separators=(',', ':'))[:-1]},{member}"


def _parsed(chunk: str | None) -> dict[str, Any] | None:
    """A chunk with choices; None if it is something else, such as an error."""
    if chunk is None or not chunk.startswith(DATA):
        return None
    try:
        parsed = json.loads(chunk.removeprefix(DATA))
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and "choices" in parsed else None
