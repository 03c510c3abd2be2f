"""Byte ranges of requests and answers."""

import re
from collections.abc import Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

BLOCK_BYTES = 1024 * 1024


def wanted(request: Request, size: int) -> tuple[int, int] | None:
    """Bytes asked for, end exclusive; all without a Range header; None: not within ``size``."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if not found or found[0] == "bytes=-":
        return 0, size
    if not found[1]:
        start, end = max(0, size - int(found[2])), size
    else:
        start, end = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
    return (start, end) if start < end else None


def answer(request: Request, size: int, span: tuple[int, int], body: Iterator[bytes], **headers: str) -> Response:
    """200 or 206 with a body that is made while it is sent."""
    start, end = span
    head = {"Accept-Ranges": "bytes", "Content-Length": str(end - start), **_dashed(headers)}
    status = 200
    if "range" in request.headers:
        status, head["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size}"
    if request.method == "HEAD":
        return Response(status_code=status, headers=head)
    return StreamingResponse(body, status, head)


def beyond(size: int, **headers: str) -> Response:
    return Response(status_code=416, headers={"Content-Range": f"bytes */{size}", **_dashed(headers)})


def blocks(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Part of a file."""
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            block = file.read(min(BLOCK_BYTES, end - start))
            if not block:
                return
            start += len(block)
            yield block


async def save(request: Request, path: Path) -> int:
    """Write a request's body to a file as it comes; its length. What is there of it is gone when the client leaves."""
    size = 0
    try:
        with path.open("wb") as file:
            async for block in request.stream():
                file.write(block)
                size += len(block)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return size


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
