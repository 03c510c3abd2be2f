"""Faults on order, and a record of what was asked: the outermost layer of the loopback Hub."""

import asyncio
import re
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTROL = "/_"
"""Paths that steer the server: never at fault, never recorded."""

KINDS = ("status", "stall", "cut", "flip", "drop", "lose")
RECORDED = 100_000
STALL_STEP_SECONDS = 0.05


@dataclass
class Rule:
    """One fault.

    Attributes:
        kind: ``status``: answer with ``code`` and do nothing. ``stall``: wait ``seconds`` before the request is
            served. ``cut``: close the connection within the body.
            ``flip``: change one byte of the body. ``drop``: close the connection, the request is not served.
            ``lose``: serve the request, then close the connection without the answer.
        path: pattern that a part of the path must match. method: pattern that the whole method must match.
        times: how often; None: for ever. after: requests that match and are let through first.
        at: place in the body, in bytes; None: its middle.
    """

    kind: str
    path: str = ""
    method: str = ".*"
    times: int | None = 1
    after: int = 0
    code: int = 503
    seconds: float = 0.0
    at: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault kind {self.kind!r} is not one of {', '.join(KINDS)}")


class CutError(Exception):
    """The connection was closed on purpose."""


class Faults:
    """ASGI layer around the server's routes, which keeps all requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.rules: list[Rule] = []
        self.record: deque[dict[str, Any]] = deque(maxlen=RECORDED)

    def add(self, **rule: Any) -> None:
        self.rules.append(Rule(**rule))

    def clear(self, path: str | None = None) -> None:
        """No faults any more, or none by this pattern; stalls end."""
        self.rules = [rule for rule in self.rules if path is not None and rule.path != path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(CONTROL):
            await self._app(scope, receive, send)
            return
        rule, entry = self._begin(scope)
        exchange = _Exchange(scope, receive, send, rule, entry, self)
        try:
            await exchange.run(self._app)
        except Exception:
            # The closed connection surfaces as whatever the layers between make of it.
            if not exchange.closed:
                raise

    def _begin(self, scope: Scope) -> tuple[Rule | None, dict[str, Any]]:
        headers = dict(scope["headers"])
        entry = {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode(),
            "range": headers.get(b"range", b"").decode() or None,
            "status": None,
            "sent": 0,
            "fault": None,
        }
        self.record.append(entry)
        for rule in self.rules:
            if not (re.search(rule.path, scope["path"]) and re.fullmatch(rule.method, scope["method"])):
                continue
            if rule.times == 0:
                continue
            if rule.after:
                rule.after -= 1
                continue
            if rule.times is not None:
                rule.times -= 1
            entry["fault"] = rule.kind
            return rule, entry
        return None, entry


class _Exchange:
    """One request and its answer, perhaps with a fault."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, rule: Rule | None, entry: dict[str, Any], faults: Faults
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._rule, self._entry, self._faults = rule, entry, faults
        self._sent = 0
        self._turn: int | None = None
        self.closed = False

    async def run(self, app: ASGIApp) -> None:
        rule = self._rule
        if rule is not None and rule.kind == "status":
            await self._answer(rule)
        elif rule is not None and rule.kind == "drop":
            self._close()
        else:
            if rule is not None and rule.kind == "stall":
                await self._wait(rule)
            await app(self._scope, self._receive, self.send)

    async def send(self, message: Message) -> None:
        rule = self._rule
        if self.closed or (rule is not None and rule.kind == "lose"):
            self._close()
        if message["type"] == "http.response.start":
            self._entry["status"] = message["status"]
            if rule is not None and rule.kind in ("cut", "flip"):
                middle = int(dict(message["headers"]).get(b"content-length", b"0")) // 2
                self._turn = middle if rule.at is None else rule.at
        elif rule is not None and self._turn is not None:
            message = await self._spoil(rule, message, self._turn - self._sent)
        size = len(message.get("body", b""))
        self._sent += size
        self._entry["sent"] = self._sent
        await self._send(message)

    async def _spoil(self, rule: Rule, message: Message, here: int) -> Message:
        body = bytes(message.get("body", b""))
        if not 0 <= here < len(body):
            return message
        if rule.kind == "flip":
            return {**message, "body": body[:here] + bytes([body[here] ^ 0x01]) + body[here + 1 :]}
        if here:
            await self._send({"type": "http.response.body", "body": body[:here], "more_body": True})
        self._close(after_flush=True)
        return message

    async def _answer(self, rule: Rule) -> None:
        body = b'{"error":"fault on order"}'
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self._entry["status"] = rule.code
        await self._send({"type": "http.response.start", "status": rule.code, "headers": raw})
        await self._send({"type": "http.response.body", "body": body if self._scope["method"] != "HEAD" else b""})

    async def _wait(self, rule: Rule) -> None:
        until = time.monotonic() + rule.seconds
        while time.monotonic() < until and rule in self._faults.rules:
            await asyncio.sleep(STALL_STEP_SECONDS)

    def _close(self, after_flush: bool = False) -> None:
        # uvicorn hands out the bound method of the object that owns the connection; ASGI itself cannot close one.
        exchange = self._send.__self__  # type: ignore[attr-defined]
        if after_flush:
            exchange.transport.close()
        else:
            exchange.transport.abort()
        exchange.disconnected = self.closed = True
        raise CutError
