"""Names and texts from the bucket that would be code in a page, or commands in a terminal."""

import json
import re
from pathlib import Path

import pytest

from tests.support.web import Site
from vllm_delta_sync.errors import TensorMismatchError

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "a&lt;b&#x27;\"'`",
    "\x1b[2J\x1b]0;owned\x07",
    "line\r\nSet-Cookie: a=b\r\n\r\n<html>",
    "\x00\x01\x7f\x80\x9b31m",
    "\u2028\u2029\u202egpj.exe\ufeff",
    "\ud800",
    "javascript:alert(1)",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_tensor_name_in_status_and_errors(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    board = site.service.receiver.board
    board.set(ranks=[{"rank": 0, "tensors": 1, "unloaded": [name], "ms": {}}])
    board.show_error(TensorMismatchError(f"tensor {name} is not in the run's table"))
    client = site.client()
    shown = client.get("/delta_sync/status")
    assert shown.json()["ranks"][0]["unloaded"] == [name]
    assert name in shown.json()["last_error"]["message"]

    def refuse() -> None:
        raise TensorMismatchError(f"tensor {name} is not in the run's table")

    monkeypatch.setattr(site.service.receiver, "status", refuse)
    refused = client.get("/delta_sync/status")
    assert refused.status_code == 422
    assert name in refused.json()["error"]["message"]
    for answer in (shown, refused):
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in answer.headers
        assert re.fullmatch(rb"[ -;=?-~]*", answer.content.replace(b"&", b"<")), "control characters, < > or &"
        json.loads(answer.content)
    site.end()


def test_hostile_text_in_a_request_does_not_come_back(tmp_path: Path) -> None:
    site = Site(tmp_path)
    client = site.client()
    for text in HOSTILE[:4]:
        answers = [
            client.post("/delta_sync/sync", json={"version": text}),
            client.post("/delta_sync/sync", json={text: 1}),
            client.get("/delta_sync/wait", params={"version": text}),
        ]
        for answer in answers:
            assert answer.status_code == 400
            assert answer.headers["content-type"] == "application/json"
            assert not re.search(rb"[<>&\x00-\x1f\x7f]", answer.content)
    site.end()
