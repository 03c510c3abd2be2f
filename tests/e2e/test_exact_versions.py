"""Answers of at least a version, or of exactly one, from every route of a real vLLM whose weights change meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.exacting import ASKED, CHAT, EXACT, INTERRUPTED, LONG, TOKENS, Answer, Mover, client_of, race, shortened
from tests.e2e.servers import Server
from tests.e2e.world import Follower

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("follower")]
MINIMUM = "X-Delta-Sync-Min-Version"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**LONG, "prompt": ["the quick", "fox"], "n": 2},
    "/v1/chat/completions": {**LONG, "messages": CHAT, "n": 2},
    "/v1/chat/completions/batch": {**LONG, "messages": [CHAT, CHAT]},
    "/v1/responses": {"model": "tiny", "input": "lazy dog", "max_output_tokens": TOKENS, "ignore_eos": True},
    "/v1/messages": {"model": "tiny", "messages": CHAT, "max_tokens": TOKENS},
    "/inference/v1/generate": {
        "model": "tiny",
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": TOKENS, "ignore_eos": True},
    },
    "/generative_scoring": {"model": "tiny", "query": "is it", "items": ["fox", "dog"], "label_token_ids": [5, 6]},
    "/invocations": {**LONG, "prompt": "lazy dog"},
}
WITHOUT_STREAMS = ("/v1/chat/completions/batch", "/generative_scoring")
BEAMS = {**LONG, "prompt": "fox", "use_beam_search": True, "n": 2, "max_tokens": 40}
LONG_ANSWERS = [
    *((path, body, False) for path, body in ROUTES.items() if path != "/generative_scoring"),
    *((path, {**body, "stream": True}, True) for path, body in ROUTES.items() if path not in WITHOUT_STREAMS),
    ("/v1/completions", BEAMS, False),
]
"""Those that take more than one step of the engine, and whether they are streamed."""
NAMED_EVENTS = ("/v1/responses", "/v1/messages")
TRIES = 40
RACE_SECONDS = 4


def test_every_route_waits_for_its_version_and_names_it(follower: Follower) -> None:
    world, server = follower.world, follower.server
    version = world.version
    routes = {path: shortened(body, 8) for path, body in ROUTES.items()}
    for path, body in routes.items():
        plain = server.post(path, body)
        assert (path, plain.status_code, plain.headers.get(EXACT)) == (path, 200, str(version)), plain.text
        exactly = server.post(path, body, headers={EXACT: str(version), MINIMUM: str(version)})
        assert (path, exactly.status_code, exactly.headers[EXACT]) == (path, 200, str(version)), exactly.text
        other = server.post(path, body, headers={EXACT: str(version + 1)})
        assert (path, other.status_code, other.headers[EXACT]) == (path, 409, str(version))
        assert other.json()["error"]["kind"] == "version"
        assert f"version {version + 1} is asked for ({EXACT}), and {version} is served" in other.text
    counted = admissions(server)
    with ThreadPoolExecutor(len(routes)) as pool:
        wanted = {MINIMUM: str(version + 1), EXACT: str(version + 1)}
        waiting = {path: pool.submit(server.post, path, body, headers=wanted) for path, body in routes.items()}
        assert world.publish() == version + 1
        for path, future in waiting.items():
            answer = future.result()
            if answer.status_code == 503:
                # As a client does after an answer that asks it to retry.
                answer = server.post(path, routes[path], headers=wanted)
            assert (path, answer.status_code, answer.headers[EXACT]) == (path, 200, str(version + 1)), answer.text
    assert admissions(server)["served"] >= counted["served"] + len(routes)
    assert counted["version"] >= len(routes)


def test_clients_of_openai_and_anthropic_read_spans_and_do_not_repeat_a_request_in_vain(follower: Follower) -> None:
    server, version = follower.server, follower.world.version
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the quick", "max_tokens": 8}
    this, other = {MINIMUM: str(version), EXACT: str(version)}, {EXACT: str(version + 1)}
    sent: list[object] = []
    hooks = {"request": [sent.append]}
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", http_client=openai.DefaultHttpxClient(event_hooks=hooks)
    ) as client:
        whole = client.completions.with_raw_response.create(**asked, extra_headers=this)
        *_, last = client.completions.create(**asked, extra_headers=this, stream=True)
        usage = whole.parse().usage
        assert usage is not None
        spans = [{"index": 0, "version": version, "start": 0, "end": usage.completion_tokens}]
        assert whole.headers[EXACT] == str(version)
        assert all(each.model_dump()["delta_sync"]["spans"] == spans for each in (whole.parse(), last))
        sent.clear()
        with pytest.raises(openai.ConflictError, match=f"and {version} is served") as refused:
            client.completions.create(**asked, extra_headers=other)
        assert (refused.value.response.json()["error"]["kind"], len(sent)) == ("version", 1)
    sent.clear()
    with (
        anthropic.Anthropic(
            base_url=server.url, api_key="none", http_client=anthropic.DefaultHttpxClient(event_hooks=hooks)
        ) as messages,
        pytest.raises(anthropic.ConflictError, match=f"and {version} is served"),
    ):
        messages.messages.create(
            model="tiny", messages=[{"role": "user", "content": "fox"}], max_tokens=8, extra_headers=other
        )
    assert len(sent) == 1


def admissions(server: Server) -> dict[str, float]:
    found = server.metrics()
    return {name: found[f'delta_sync_admission_seconds_count{{outcome="{name}"}}'] for name in ("served", "version")}


def mover_of(follower: Follower) -> Mover:
    if follower.world.version < 1:
        follower.server.wait_served(follower.world.publish())
    return Mover(follower.server, follower.world.version - 1, follower.world.version)


@pytest.mark.parametrize(
    ("path", "body", "stream"),
    [pytest.param(*each, id=f"{each[0]}{' beams' * (each[1] is BEAMS)}{' stream' * each[2]}") for each in LONG_ANSWERS],
)
def test_commit_inside_an_answer_makes_it_an_error(
    follower: Follower, path: str, body: dict[str, Any], stream: bool
) -> None:
    mover = mover_of(follower)
    with client_of(follower.server) as client:
        for _ in range(TRIES):
            asked, begun = mover.served, threading.Event()
            with ThreadPoolExecutor(1) as pool:
                future = pool.submit(Answer, client, path, body, asked, begun.set)
                # In the middle of a stream, or before the answer.
                begun.wait(0.1)
                mover.move()
                answer = future.result()
            if answer.error is not None:
                answer.expect_error(asked)
            assert answer.status == 409 or answer.named == asked
            if (answer.status == 200) is stream and INTERRUPTED in str(answer.error):
                # vLLM ends its streams so.
                assert answer.done is (stream and path not in NAMED_EVENTS)
                return
    raise AssertionError(f"of {TRIES} answers none met a commit")


def test_every_answer_is_of_one_version_while_they_change(follower: Follower) -> None:
    asked = {**ASKED, "tokens": ("/inference/v1/generate", ROUTES["/inference/v1/generate"])}
    with ExitStack() as stack:
        clients = {name: stack.enter_context(client_of(follower.server)) for name in asked}
        race(mover_of(follower), {name: (clients[name], *each) for name, each in asked.items()}, RACE_SECONDS)
    assert follower.server.metrics()["delta_sync_interrupted_total"] > 0
