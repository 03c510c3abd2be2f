"""Streams whose last chunk is amended, as text."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from vllm_delta_sync.engine.span_stream import DONE, amended

VALUE = {"run": "r", "spans": []}
MEMBER = '"delta_sync":{"run":"r","spans":[]}'


def read(chunks: list[str], ends_at: int = 0) -> list[str]:
    """What comes out, if output ends with the chunk of that number."""
    sent = 0

    async def stream() -> AsyncGenerator[str, None]:
        nonlocal sent
        for chunk in chunks:
            sent += 1
            yield chunk

    async def collect() -> list[str]:
        return [chunk async for chunk in amended(stream(), lambda: VALUE if sent > ends_at else None)]

    return asyncio.run(collect())


@pytest.mark.parametrize("ends_at", [0, 1])
def test_only_the_last_chunk_gets_the_member(ends_at: int) -> None:
    first, last = 'data: {"choices":[1]}\n\n', 'data: {"choices":[],"usage":{"n":1.0}}\n\n'
    assert read([first, last, DONE], ends_at) == [
        first,
        f'data: {{"choices":[],"usage":{{"n":1.0}},{MEMBER}}}\n\n',
        DONE,
    ]


def test_its_text_stays_as_it_is() -> None:
    odd = 'data: {"choices": [ {"text":"}\\n\\u00e9é \\"delta_sync\\"", "x": 1e400, "y":-0.0} ] }\n\n'
    assert read([odd, DONE]) == [odd.replace(" }\n\n", f" ,{MEMBER}}}\n\n"), DONE]


@pytest.mark.parametrize(
    "chunk", ['data: {"error":{"code":500}}\n\n', ": keep-alive\n\n", "data: {\n\n", "data: [1]\n\n", "data: 5\n\n"]
)
def test_what_is_no_chunk_is_left_alone(chunk: str) -> None:
    before = 'data: {"choices":[1]}\n\n'
    assert read([before, chunk, DONE]) == [before, chunk, DONE]


def test_output_that_ends_without_a_chunk_gets_one() -> None:
    chunk = 'data: {"id":"a","object":"o","created":3,"model":"m","choices":[1],"usage":{}}\n\n'
    own = f'data: {{"id":"a","object":"o","created":3,"model":"m","choices":[],{MEMBER}}}\n\n'
    assert read([chunk, DONE], ends_at=1) == [chunk, own, DONE]


def test_streams_without_chunks_or_end() -> None:
    assert read([DONE]) == [DONE]
    assert read([]) == []
    chunk = 'data: {"choices":[1]}\n\n'
    assert read([chunk, chunk]) == [chunk, chunk]
    assert read([chunk, DONE], ends_at=9) == [chunk, DONE]
