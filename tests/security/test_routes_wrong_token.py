"""A token is set, and requests come without it, with another one, or with the right one in the wrong place."""

from pathlib import Path

import pytest

from tests.support.web import BEARER, CHANGING, TOKEN, Site, code_of, exchange, listening, request_bytes

WRONG = {
    "none": None,
    "empty": "",
    "scheme alone": "Bearer",
    "scheme and space": "Bearer ",
    "without scheme": TOKEN,
    "another scheme": f"Basic {TOKEN}",
    "another": "Bearer " + "x" * len(TOKEN),
    "shorter": f"Bearer {TOKEN[:-1]}",
    "longer": f"Bearer {TOKEN}x",
    "other case": f"Bearer {TOKEN.upper()}",
    "twice": f"Bearer {TOKEN}, Bearer {TOKEN}",
    "zero byte in text": f"Bearer {TOKEN}%00",
    "not ASCII": f"Bearer {TOKEN[:-1]}\xe9",
    "huge": "Bearer " + "x" * 30000,
}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_wrong_token(tmp_path: Path, value: str | None) -> None:
    site = Site(tmp_path)
    site.set_token()
    with listening(site.app) as port:
        headers = {"Host": f"127.0.0.1:{port}", **({} if value is None else {"Authorization": value})}
        for name in CHANGING:
            answer = exchange(port, request_bytes(f"/delta_sync/{name}", **headers))
            assert code_of(answer) == 401
            assert TOKEN.encode() not in answer
    assert not site.was_changed()
    site.end()


def test_token_counts_in_its_header_alone(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.set_token()
    client = site.client()
    assert client.post(f"/delta_sync/hold?token={TOKEN}&access_token={TOKEN}").status_code == 401
    assert client.post("/delta_sync/hold", headers={"Cookie": f"token={TOKEN}"}).status_code == 401
    assert client.post("/delta_sync/hold", headers={"X-Api-Key": TOKEN}).status_code == 401
    assert not site.was_changed()
    site.end()


def test_right_token(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.set_token()
    site.serve()
    with listening(site.app) as port:
        answer = exchange(port, request_bytes("/delta_sync/hold", Host="fleet.example", **BEARER))
        assert code_of(answer) == 200
    assert site.was_changed()
    site.end()
