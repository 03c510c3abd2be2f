"""Which version made which token: spans in streams that vLLM's own generators make, and in answers across two runs."""

import asyncio
import gc
import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.utils.async_utils import merge_async_iterators

from vllm_delta_sync.engine.observe import spans
from vllm_delta_sync.engine.observe.spans import add_spans

DONE = "data: [DONE]\n\n"
Step = tuple[int, str, list[tuple[str, int, int]] | None] | tuple[int, str, list[tuple[str, int, int]] | None, str]
"""Choice, text (a token per letter), spans if it is its last (None: more to come), and why it ended."""


def output_of(step: Step, *, finished: bool, prompt: list[int] | None) -> RequestOutput:
    index, text, found = step[:3]
    completion = CompletionOutput(
        index=index,
        text=text,
        token_ids=[ord(letter) for letter in text],
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=None if found is None else step[3] if len(step) > 3 else "length",
        weight_versions=None if found is None else [WeightVersionSpan(*span) for span in found],
    )
    return RequestOutput("r", "p", prompt, None, [completion], finished=finished)


class Engine:
    """An engine client that hands out what each prompt's script says.

    Attributes:
        open: requests under way. stopped: whether scripts wait before their last step.
    """

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self._scripts = scripts
        self.open = 0
        self.stopped = False

    async def generate(self, prompt: int, sampling_params: Any, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        self.open += 1
        script = self._scripts[prompt]
        try:
            for number, step in enumerate(script):
                if self.stopped and number == len(script) - 1:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                yield output_of(step, finished=number == len(script) - 1, prompt=None if number else [7])
        finally:
            self.open -= 1


class Api:
    """vLLM's two serving objects without a model, and spans installed in them, or not."""

    def __init__(self, engine: Engine, installed: bool = True) -> None:
        completion, chat = object.__new__(OpenAIServingCompletion), object.__new__(OpenAIServingChat)
        for made in (completion, chat):
            for name in ("enable_force_include_usage", "enable_prompt_tokens_details", "enable_per_request_metrics"):
                setattr(made, name, False)
            for name in ("system_fingerprint", "parser_cls", "request_logger"):
                setattr(made, name, None)
            made.enable_log_outputs = made.log_error_stack = made._include_reasoning_tokens_details = False
            made.enable_auto_tools = False
            made.response_role = "assistant"

        async def create_completion(request: Any) -> Any:
            prompts = range(len(request.prompt))
            outputs = [engine.generate(prompt, SimpleNamespace(n=request.n), f"r-{prompt}") for prompt in prompts]
            return completion.completion_stream_generator(
                request,
                list(prompts),
                merge_async_iterators(*outputs),
                "cmpl-1",
                5,
                "tiny",
                num_prompts=len(prompts),
                tokenizer=None,
                request_metadata=RequestResponseMetadata(request_id="1"),
            )

        async def create_chat_completion(request: Any) -> Any:
            outputs = engine.generate(0, SimpleNamespace(n=request.n), "r")
            metadata = RequestResponseMetadata(request_id="1")
            return chat.chat_completion_stream_generator(request, outputs, "chat-1", "tiny", [], None, metadata)

        completion.create_completion = create_completion
        chat.create_chat_completion = create_chat_completion
        self.completion, self.chat = completion, chat
        if installed:
            state = SimpleNamespace(openai_serving_completion=completion, openai_serving_chat=chat)
            spans.install(engine, state, {None: lambda: "r1"})

    async def complete(self, prompts: int, **fields: Any) -> Any:
        request = CompletionRequest(model="tiny", prompt=["p"] * prompts, stream=True, max_tokens=9, **fields)
        return await self.completion.create_completion(request)

    async def on_chat(self) -> Any:
        message = {"role": "user", "content": "p"}
        request = ChatCompletionRequest(model="tiny", messages=[message], stream=True, n=2)
        return await self.chat.create_chat_completion(request)


def read(make: Callable[[], Any]) -> list[str]:
    """All chunks of a stream."""

    async def collect() -> list[str]:
        return [chunk async for chunk in await make()]

    return asyncio.run(collect())


def documents(chunks: list[str]) -> list[dict[str, Any]]:
    assert chunks[-1] == DONE
    assert DONE not in chunks[:-1]
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-1]]


def span(index: int, version: int | None, start: int, end: int) -> dict[str, int | None]:
    return {"index": index, "version": version, "start": start, "end": end}


TWO_PROMPTS = (
    [(0, "ab", None), (1, "x", None), (0, "c", [("3", 0, 2), ("4", 2, 3)]), (1, "y", [("4", 0, 2)])],
    [(1, "k", [("default", 0, 1)]), (0, "lm", None), (0, "n", [("3", 0, 3)])],
)
EXPECTED = [span(0, 3, 0, 2), span(0, 4, 2, 3), span(1, 4, 0, 2), span(2, 3, 0, 3), span(3, None, 0, 1)]


@pytest.mark.parametrize("usage", [False, True])
def test_last_chunk_of_a_stream_has_the_spans_of_all_choices(usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    found = documents(read(lambda: Api(Engine(*TWO_PROMPTS)).complete(2, n=2, **options)))
    assert found[-1].pop("delta_sync") == {"run": "r1", "spans": EXPECTED}
    assert not any("delta_sync" in chunk for chunk in found)
    assert ("usage" in found[-1] and found[-1]["choices"] == []) == usage
    texts = ["", "", "", ""]
    for choice in (choice for chunk in found for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == ["abc", "xy", "lmn", "k"]


def test_chat_streams_too_and_all_else_stays_as_it_is() -> None:
    script = [(0, "a", None), (1, "é", [("1", 0, 1)]), (0, "b", [("1", 0, 1), ("2", 1, 2)])]
    chunks, plain = ([without_time(chunk) for chunk in read(Api(Engine(script), on).on_chat)] for on in (True, False))
    member = documents(chunks)[-1]["delta_sync"]
    assert member["spans"] == [span(0, 1, 0, 1), span(0, 2, 1, 2), span(1, 1, 0, 1)]
    added = f',"delta_sync":{json.dumps(member, separators=(",", ":"))}'
    assert [*chunks[:-2], chunks[-2].replace(added, ""), DONE] == plain


def without_time(chunk: str) -> str:
    return re.sub(r'"created":[0-9]+', '"created":0', chunk)


def test_chunks_are_not_held_back_while_output_is_still_to_come() -> None:
    async def first() -> str:
        engine = Engine([(0, "a", None), (0, "b", [("1", 0, 2)])])
        engine.stopped = True
        stream = await Api(engine).complete(1)
        chunk: str = await asyncio.wait_for(anext(stream), 60)
        await stream.aclose()
        return chunk

    assert json.loads(asyncio.run(first()).removeprefix("data: "))["choices"][0]["text"] == "a"


def test_last_output_that_brings_no_chunk() -> None:
    """For a choice that was aborted before its first token vLLM 0.32 sends none, 0.33 does."""
    found = documents(read(lambda: Api(Engine([(0, "a", [("1", 0, 1)]), (1, "", [], "abort")])).complete(1, n=2)))
    assert [chunk.get("delta_sync") for chunk in found] == [None, {"run": "r1", "spans": [span(0, 1, 0, 1)]}]
    assert [choice["finish_reason"] for choice in found[-1]["choices"]] in ([], ["abort"])
    assert {name: found[-1][name] for name in ("id", "object", "created", "model")} == {
        name: found[0][name] for name in ("id", "object", "created", "model")
    }


def test_aborted_request_says_what_made_the_tokens_it_has() -> None:
    found = documents(read(lambda: Api(Engine([(0, "ab", None), (0, "", [("1", 0, 2)], "abort")])).complete(1)))
    assert found[-1]["choices"][0]["finish_reason"] == "abort"
    assert found[-1]["delta_sync"]["spans"] == [span(0, 1, 0, 2)]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_error_in_the_middle_is_told_as_vllm_tells_it(kind: str) -> None:
    api = Api(Engine([(0, "a", None), (0, "b", [("1", 0, 2)], "error")]))
    chunks = documents(read((lambda: api.complete(1)) if kind == "completion" else api.on_chat))
    assert "error" in chunks[-1]
    assert not any("delta_sync" in chunk for chunk in chunks)


@pytest.mark.parametrize(("prompts", "closed"), [(1, False), (2, True), (2, False)])
def test_client_that_goes_away_ends_its_requests(prompts: int, closed: bool) -> None:
    async def leave() -> int:
        engine = Engine(*[[(0, "a", None), (0, "b", [("1", 0, 2)])]] * prompts)
        engine.stopped = True
        stream = await Api(engine).complete(prompts)
        await anext(stream)
        assert engine.open == prompts
        if closed:
            await stream.aclose()
        else:
            reading = asyncio.ensure_future(consume(stream))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading})
            del reading
        # vLLM's own generators do not close each other; asyncio does, a moment after they are collected.
        del stream
        gc.collect()
        async with asyncio.timeout(60):
            while engine.open:
                await asyncio.sleep(0)
        return engine.open

    assert asyncio.run(leave()) == 0


async def consume(stream: Any) -> None:
    async for _ in stream:
        pass


# Streams as text


MEMBER = '"delta_sync":{"run":"r","spans":[]}'
CHUNK = 'data: {"choices":[1]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"n":1.0}}\n\n'
ODD = 'data: {"choices": [ {"text":"}\\n\\u00e9é \\"delta_sync\\"", "x": 1e400, "y":-0.0} ] }\n\n'
FULL = 'data: {"id":"a","object":"o","created":3,"model":"m","choices":[1],"usage":{}}\n\n'
OWN = f'data: {{"id":"a","object":"o","created":3,"model":"m","choices":[],{MEMBER}}}\n\n'
NO_CHUNKS = ['data: {"error":{"code":500}}\n\n', ": keep-alive\n\n", "data: {\n\n", "data: [1]\n\n", "data: 5\n\n"]


@pytest.mark.parametrize(
    ("chunks", "ends_at", "last"),
    [
        pytest.param([CHUNK, USAGE, DONE], 0, [USAGE.replace("}}", f"}},{MEMBER}}}"), DONE], id="ends before the last"),
        pytest.param([CHUNK, USAGE, DONE], 1, [USAGE.replace("}}", f"}},{MEMBER}}}"), DONE], id="ends with the last"),
        pytest.param([ODD, DONE], 0, [ODD.replace(" }\n\n", f" ,{MEMBER}}}\n\n"), DONE], id="its text stays as it is"),
        pytest.param([FULL, DONE], 1, [FULL, OWN, DONE], id="output that ends without a chunk gets one"),
        *(pytest.param([CHUNK, one, DONE], 0, [one, DONE], id=f"no chunk: {one[:16]!r}") for one in NO_CHUNKS),
        pytest.param([DONE], 0, [DONE], id="no chunks"),
        pytest.param([], 0, [], id="nothing"),
        pytest.param([CHUNK, CHUNK], 0, [CHUNK], id="no end"),
        pytest.param([CHUNK, DONE], 9, [CHUNK, DONE], id="no last output"),
    ],
)
def test_only_the_last_chunk_gets_the_member(chunks: list[str], ends_at: int, last: list[str]) -> None:
    """Args: ends_at: how many chunks come before the last output. last: what the stream ends with."""
    sent = 0

    async def stream() -> AsyncGenerator[str, None]:
        nonlocal sent
        for chunk in chunks:
            sent += 1
            yield chunk

    async def collect() -> list[str]:
        spans_of = {"run": "r", "spans": []}
        return [chunk async for chunk in add_spans(stream(), lambda: spans_of if sent > ends_at else None)]

    found = asyncio.run(collect())
    unchanged = max(0, len(found) - len(last))
    assert found == chunks[:unchanged] + last
    assert len(found) >= len(chunks)


# The run that an answer counts in


@pytest.mark.parametrize(
    ("seen", "named"), [(["a", "a"], "a"), (["a", "b"], None), ([None, "a"], "a"), (["a", None], None)], ids=str
)
def test_answer_across_two_runs_names_neither(seen: list[str | None], named: str | None) -> None:
    followed = iter(seen)

    class Serving:
        async def create_completion(self, request: Any) -> Any:
            return SimpleNamespace(choices=["text"])

    class Client:
        def generate(self) -> None:
            """Not called: nothing is generated."""

    serving = Serving()
    spans.install(Client(), SimpleNamespace(openai_serving_completion=serving), {None: lambda: next(followed)})
    response = asyncio.run(serving.create_completion(SimpleNamespace()))
    assert response.delta_sync == {"run": named, "spans": []}
