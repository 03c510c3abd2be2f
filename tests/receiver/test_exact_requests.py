"""Requests for exactly one version, at vLLM's own client and output processor, where weights change at any step."""

import asyncio
import functools
import itertools
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, ParamSpec

import pytest
import torch
from vllm.exceptions import GenerationError
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.async_utils import merge_async_iterators
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from vllm_delta_sync.engine.api.exact_requests import ExactRequest, ExactRequests, VersionError
from vllm_delta_sync.engine.compat.version_labels import (
    hide_serials,
    label_of,
    plain_label,
    relabel,
    split_label,
    version_label,
)
from vllm_delta_sync.errors import EngineError, UsageError

P = ParamSpec("P")
STREAM = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False)
WHOLE = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)


class Core:
    """The client's side of engines that do what a test says."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        self.answers = True
        self.core_engines = [bytes([index]) for index in range(len(labels))]
        self.aborted: list[str] = []

    async def _call_utility_async(self, method: str, *, engine: bytes) -> str:
        assert method == "get_weight_version"
        if not self.labels[engine[0]]:
            raise RuntimeError("the engine is dead")
        if not self.answers:
            await asyncio.Event().wait()
        return self.labels[engine[0]]

    async def abort_requests_async(self, ids: list[str]) -> None:
        self.aborted += ids


class Client:
    """vLLM's client in front of such engines; only what it makes of a prompt is left out.

    Attributes:
        exact: ours, installed. own: the label of its first engine.
        added: requests to the engine by the name that the test gave them; of several choices, with their index.
    """

    generate, encode, abort = AsyncLLM.generate, AsyncLLM.encode, AsyncLLM.abort
    log_requests = errored = False

    def __init__(self, *labels: str, follows_model: bool = True, adapters: tuple[str, ...] = ()) -> None:
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.engine_core = Core(list(labels) or [version_label(5)])
        self.own = self.engine_core.labels[0]
        self.added: dict[str, str] = {}
        self.exact = ExactRequests(self, adapters, follows_model, "reset")
        self.exact.install(SimpleNamespace())
        self._numbers = itertools.count()

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, lora_request: Any = None, **_: Any
    ) -> RequestOutputCollector:
        pooling = isinstance(params, PoolingParams)
        made = EngineCoreRequest(
            request_id=f"{request_id}-{next(self._numbers)}",
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=None if pooling else params,
            pooling_params=params if pooling else None,
            arrival_time=0.0,
            lora_request=lora_request,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=request_id,
        )
        queue = RequestOutputCollector(params.output_kind, made.request_id)
        if pooling or params.n == 1:
            self.added[request_id] = made.request_id
            self.output_processor.add_request(made, None, None, 0, queue)
            return queue
        parent = ParentRequest(made)
        for index in range(params.n):
            child = EngineCoreRequest(**{name: getattr(made, name) for name in made.__struct_fields__})
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self.added[f"{request_id}/{index}"] = child.request_id
            self.output_processor.add_request(child, None, parent, index, queue)
        return queue

    def step(self, label: str | None, *names: str, last: bool = False, pooled: bool = False) -> None:
        """A step of the engine, which makes a token for each of these requests, or what is pooled."""
        outputs = [
            EngineCoreOutput(
                self.added[name],
                [] if pooled else [7],
                pooling_output=torch.ones(2) if pooled else None,
                finish_reason=FinishReason.LENGTH if last else None,
            )
            for name in names
        ]
        self.output_processor.process_outputs(outputs, weight_version=label)


class Reader:
    """Reads what a client's request gets, as a route does.

    Attributes:
        tokens: of all that was passed on. error: what ended it.
    """

    def __init__(self, outputs: AsyncGenerator[Any, None]) -> None:
        self.tokens: list[int] = []
        self.pooled = 0
        self.error: BaseException | None = None
        self._task = asyncio.create_task(self._read(outputs))

    async def _read(self, outputs: AsyncGenerator[Any, None]) -> None:
        try:
            async for output in outputs:
                found = output[1] if isinstance(output, tuple) else output
                if isinstance(found.outputs, list):
                    self.tokens += [token for completion in found.outputs for token in completion.token_ids]
                else:
                    self.pooled += len(found.outputs.data) > 0
        except GenerationError as error:
            self.error = error

    async def ended(self) -> None:
        await asyncio.wait_for(self._task, 60)


async def settle() -> None:
    """Let all that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def scenario(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 60))

    return run


async def begun(client: Client, version: int, *names: str, params: Any = STREAM, **named: Any) -> tuple[Any, Reader]:
    """A client's request for that version, with requests to the engine of these names."""
    request = await client.exact.admit(version)
    ask: Any = client.encode if isinstance(params, PoolingParams) else client.generate
    with request.current():
        reader = Reader(merge_async_iterators(*(ask("p", params, name, **named) for name in names)))
        await settle()
    return request, reader


def expect_refused(request: ExactRequest, reader: Reader, *words: str) -> None:
    assert isinstance(reader.error, GenerationError)
    assert reader.error.status_code == 409
    assert isinstance(request.error, VersionError)
    assert request.interrupted is ("a commit changed" in request.error.message or "aborted" in request.error.message)
    for word in ("version 5 is asked for (X-Delta-Sync-Version)", *words):
        assert word in request.error.message
    assert str(reader.error) == f"version: {request.error.message}"


# Steps


NEXT, SAME = version_label(6), version_label(5)
"""Of a newer version; and of the same number again: rolled back to, or in another run. Even if no step of a request ran
in between, keys and values may be of the weights in between."""


@pytest.mark.parametrize("params", [STREAM, WHOLE], ids=["stream", "whole"])
@scenario
async def test_answer_of_one_version_is_passed_on(params: SamplingParams) -> None:
    client = Client()
    request, reader = await begun(client, 5, "a", params=params)
    for last in (False, False, True):
        client.step(client.own, "a", last=last)
        await settle()
    # Its version is not served any more, and its answer is complete.
    client.step(NEXT)
    await reader.ended()
    assert (reader.tokens, reader.error, request.error, client.engine_core.aborted) == ([7, 7, 7], None, None, [])


@pytest.mark.parametrize("label", [NEXT, SAME, None], ids=["newer", "back again", "no label"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
@pytest.mark.parametrize("params", [STREAM, WHOLE], ids=["stream", "whole"])
@scenario
async def test_no_token_of_other_weights_is_passed_on(
    label: str | None, before: int, late: bool, params: SamplingParams
) -> None:
    client = Client()
    request, reader = await begun(client, 5, "a", params=params)
    for _ in range(before):
        client.step(client.own, "a")
        await settle()
    if late:
        # vLLM then hands both outputs over as one.
        client.step(client.own, "a")
    client.step(label, "a")
    await reader.ended()
    why = (
        "does not say which weights" if label is None else "a commit changed the weights before its answer was complete"
    )
    expect_refused(request, reader, why)
    assert reader.tokens == ([7] * before if params is STREAM else [])
    # At once, although the engine had more to say.
    assert client.engine_core.aborted == [client.added["a"]]
    assert client.output_processor.request_states == {}


@pytest.mark.parametrize("params", [STREAM, WHOLE], ids=["stream", "whole"])
@scenario
async def test_one_choice_of_other_weights_ends_all(params: SamplingParams) -> None:
    client = Client()
    several = SamplingParams(output_kind=params.output_kind, detokenize=False, n=2)
    request, reader = await begun(client, 5, "a", params=several)
    client.step(client.own, "a/0", "a/1")
    client.step(client.own, "a/0", last=True)
    await settle()
    client.step(NEXT, "a/1", last=True)
    await reader.ended()
    expect_refused(request, reader)
    assert reader.tokens == ([7] * 3 if params is STREAM else [])


@scenario
async def test_next_turn_of_a_conversation_is_not_begun_with_other_weights() -> None:
    """As ``/v1/responses`` does, which calls tools between two generations."""
    client = Client()
    request = await client.exact.admit(5)
    with request.current():
        first = Reader(client.generate("p", STREAM, "a"))
        await settle()
        client.step(client.own, "a", last=True)
        await first.ended()
        second = Reader(client.generate("p", STREAM, "b"))
        await settle()
        client.step(NEXT, "b")
        await second.ended()
        expect_refused(request, second)
        with pytest.raises(GenerationError):
            client.generate("p", STREAM, "c")
    assert (first.tokens, second.tokens) == ([7], [])


@scenario
async def test_what_waits_behind_others_is_ended_by_their_step() -> None:
    """One engine's steps come in order, so its first output would be of those weights too."""
    client = Client()
    request, reader = await begun(client, 5, "queued", params=WHOLE)
    other = Reader(client.generate("p", STREAM, "other"))
    await settle()
    client.step(NEXT, "other", last=True)
    await reader.ended()
    await other.ended()
    expect_refused(request, reader, "version 6 is served now")
    assert (other.tokens, other.error) == ([7], None)
    assert client.engine_core.aborted == [client.added["queued"]]


@pytest.mark.parametrize("name", ["other", "slow"], ids=["another name", "the same name"])
@scenario
async def test_one_of_several_engines_says_nothing_of_the_others(name: str) -> None:
    """Engines give themselves labels, and clients choose names, by X-Request-Id."""
    labels = [version_label(5) for _ in range(2)]
    client = Client(*labels)
    request, reader = await begun(client, 5, "slow")
    mine = client.added["slow"]
    other = Reader(client.generate("p", STREAM, name))
    await settle()
    client.step(NEXT, name, last=True)
    await other.ended()
    client.added["slow"] = mine
    client.step(labels[0], "slow")
    await settle()
    client.step(labels[1], "slow", last=True)
    await reader.ended()
    assert (reader.tokens, reader.error, request.error) == ([7, 7], None, None)
    assert (other.tokens, other.error, client.engine_core.aborted) == ([7], None, [])


@scenario
async def test_abort_by_the_engine_is_an_error() -> None:
    client = Client()
    request, reader = await begun(client, 5, "a")
    client.step(client.own, "a")
    await settle()
    aborted = EngineCoreOutput(client.added["a"], [], finish_reason=FinishReason.ABORT)
    client.output_processor.process_outputs([aborted])
    await reader.ended()
    expect_refused(request, reader, "the engine aborted it, as pause_mode abort does")
    assert reader.tokens == [7]


@scenario
async def test_client_that_leaves_ends_its_request() -> None:
    client = Client()
    request = await client.exact.admit(5)
    with request.current():
        outputs = client.generate("p", STREAM, "a")
        reading = asyncio.ensure_future(anext(outputs))
        await settle()
        reading.cancel()
        await asyncio.wait({reading})
    assert client.engine_core.aborted == [client.added["a"]]
    assert request.error is None
    client.step(NEXT, "a")
    assert request.error is None


@pytest.mark.parametrize("changed", [False, True])
@scenario
async def test_pooling(changed: bool) -> None:
    client = Client()
    request, reader = await begun(client, 5, "a", "b", params=PoolingParams(task="embed"))
    client.step(client.own, "a", last=True, pooled=True)
    client.step(NEXT if changed else client.own, "b", last=True, pooled=True)
    await reader.ended()
    if changed:
        expect_refused(request, reader)
    else:
        assert (reader.pooled, reader.error) == (2, None)


# Adapters


def adapted(version: int | None, sql: int | None, code: int | None = None) -> str:
    label = version_label(version)
    for name, held in (("sql", sql), ("code", code)):
        label = relabel(label, name, version_label(held))
    return label


@pytest.mark.parametrize(
    ("served", "name", "fits"),
    [
        ((2, 5, None), "sql", True),
        ((2, 5, None), None, False),
        ((5, 2, None), None, True),
        ((5, 2, None), "sql", False),
        ((5, 2, None), "own", True),
        ((None, 5, None), "sql", True),
        ((None, 5, None), None, False),
        ((None, 5, 3), "code", False),
    ],
)
@scenario
async def test_version_is_that_of_the_model_asked_for(
    served: tuple[int | None, int, int | None], name: str | None, fits: bool
) -> None:
    """Args: served: versions of the model, of sql, and of code. name: of the adapter asked for."""
    label, follows_model = adapted(*served), served[0] is not None
    lora = None if name is None else LoRARequest(name, 1, "/nowhere")
    client = Client(label, follows_model=follows_model, adapters=("sql", "code"))
    request = await client.exact.admit(5)
    with request.current():
        if fits:
            reader = Reader(client.generate("p", STREAM, "a", lora_request=lora))
            await settle()
            client.step(label, "a", last=True)
            await reader.ended()
            assert (reader.tokens, reader.error) == ([7], None)
        else:
            # When the route asks, not when it reads: the head of the answer is not sent yet.
            with pytest.raises(GenerationError):
                client.generate("p", STREAM, "a", lora_request=lora)
            assert request.error is not None
            known = "is served; ask for that one" if follows_model or lora else "this model is of no run"
            assert known in request.error.message


@pytest.mark.parametrize(
    ("name", "changed", "fits"),
    [("sql", None, False), ("sql", "sql", False), ("sql", "code", True), (None, "sql", True), (None, None, False)],
)
@scenario
async def test_commits_of_other_adapters_do_not_matter(name: str | None, changed: str | None, fits: bool) -> None:
    lora = None if name is None else LoRARequest(name, 1, "/nowhere")
    label = adapted(5, 5, 5)
    client = Client(label, adapters=("sql", "code"))
    request, reader = await begun(client, 5, "a", lora_request=lora)
    client.step(relabel(label, changed, version_label(6)), "a", last=True)
    await reader.ended()
    assert (request.error is None) is fits


# Admission


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ([(6, None)], "and 6 is served; ask for that one, roll this server back to 5"),
        ([(4, None)], "and 4 is served; ask for that one, send X-Delta-Sync-Min-Version: 5 too"),
        ([(None, None)], "and none is served"),
        ([(6, 3)], "and 3 and 6 is served"),
        ([(5, None), (6, None)], "a commit is under way; retry"),
    ],
)
def test_admission_asks_the_engines(served: list[tuple[int | None, int | None]], words: str) -> None:
    """Args: served: by engine, versions of the model and of sql."""
    client = Client(*(adapted(*versions) for versions in served), adapters=("sql",))
    with pytest.raises(VersionError, match=words):
        asyncio.run(client.exact.admit(5))
    with pytest.raises(EngineError, match="does not say which version it serves: the engine is dead"):
        asyncio.run(Client("").exact.admit(5))


@scenario
async def test_admission_ends_with_an_engine_that_dies_before_it_answers() -> None:
    client = Client()
    client.engine_core.answers = False
    admitting = asyncio.create_task(client.exact.admit(5))
    assert not (await asyncio.wait({admitting}, timeout=0.1))[0]
    client.errored = True
    with pytest.raises(EngineError, match="does not say which version it serves: it died before it answered"):
        await asyncio.wait_for(admitting, 10)


def test_what_a_server_cannot_do_it_says() -> None:
    assert Client().exact.objection is None
    kept: Any = ExactRequests(Client(), (), True, "keep").objection
    assert "prefix_cache is 'keep'" in kept
    assert "set prefix_cache to reset" in kept
    connected: Any = Client()
    connected.vllm_config = SimpleNamespace(kv_transfer_config=object())
    assert "and --kv-transfer-config is set" in str(connected.exact.objection)


@scenario
async def test_answer_that_is_made_later_is_refused() -> None:
    class Responses:
        async def create_responses(self, asked: Any) -> str:
            return "queued"

    responses, client = Responses(), Client()
    client.exact.install(SimpleNamespace(openai_serving_responses=responses))
    later, now = SimpleNamespace(background=True), SimpleNamespace(background=False)
    assert await responses.create_responses(later) == "queued"
    request = await client.exact.admit(5)
    with request.current():
        assert await responses.create_responses(now) == "queued"
        with pytest.raises(GenerationError, match="background is true; leave one of them out") as found:
            await responses.create_responses(later)
    assert found.value.status_code == 400
    assert isinstance(request.error, UsageError)


# Labels


def test_no_label_comes_twice_and_users_see_versions() -> None:
    labels = [version_label(5) for _ in range(100)]
    assert len(set(labels)) == len(labels)
    assert set(map(plain_label, labels)) == {"5"}
    assert version_label(None) == "default"
    label = relabel(relabel("default", "sql", version_label(3)), None, version_label(7))
    assert plain_label(label) == "7;sql=3"
    assert split_label(label) == (7, {"sql": 3})
    later = relabel(label, "sql", version_label(3))
    assert later != label
    assert label_of(later, None) == label_of(label, None)
    assert label_of(later, "sql") != label_of(label, "sql")
    assert relabel(label, "sql", version_label(None)) == label.partition(";")[0]
    assert relabel("7;sql=3", "sql", version_label(4, serial=False)) == "7;sql=4"
    assert plain_label("7~1f;my~a=3~2e;b~c=4") == "7;my~a=3;b~c=4"


@scenario
async def test_outputs_show_labels_without_serials() -> None:
    client: Any = Client()

    async def get_weight_version() -> str:
        return "5~1f"

    client.get_weight_version = get_weight_version
    # As often as an engine is attached to.
    for _ in range(sys.getrecursionlimit()):
        hide_serials(client)
    assert await client.get_weight_version() == "5"
    outputs = client.generate("p", STREAM, "a")
    reading = asyncio.ensure_future(anext(outputs))
    await settle()
    client.step("5~1f", "a", last=True)
    [completion] = (await reading).outputs
    assert [span.version for span in completion.weight_versions] == ["5"]
    await outputs.aclose()
