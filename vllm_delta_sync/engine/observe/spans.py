"""Spans: which version produced which output tokens, as ``delta_sync`` in completions and chat completions.

vLLM labels every engine step with a weight version and keeps the offsets per output, but its OpenAI routes drop them.
``SpanRecord`` watches each request's outputs on their way through the engine client. A finished response gets the spans
of its choices, a stream gets them in its last chunk (``add_spans``).
"""

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.compat.version_labels import split_label

_current: "ContextVar[SpanRecord | None]" = ContextVar("delta_sync_spans", default=None)


@dataclass
class SpanRecord:
    """Spans of one HTTP request, collected as its outputs finish.

    Attributes:
        adapter: name of the LoRA adapter that the request asks for, if its run is followed.
        started, finished: prompts handed to the engine, and prompts whose last output came.
    """

    adapter: str | None = None
    started: int = 0
    finished: int = 0
    spans: list[dict[str, Any]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all prompts have finished."""
        return 0 < self.started == self.finished

    def document(self, run: str | None) -> dict[str, Any]:
        """Return the member ``delta_sync`` of a response."""
        return {"run": run, "spans": sorted(self.spans, key=lambda span: (span["index"], span["start"]))}

    async def watch(self, prompt: int, choices: int, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Pass outputs through and record the spans of finished ones."""
        # Closed with this generator, not at garbage collection: the close tells the engine that the client left.
        async with aclosing(outputs):
            async for output in outputs:
                for completion in output.outputs:
                    self._record_spans(prompt * choices, completion)
                self.finished += output.finished
                yield output

    def _record_spans(self, first: int, completion: Any) -> None:
        for span in completion.weight_versions or ():
            own, adapters = split_label(span.version)
            version = own if self.adapter is None else adapters.get(self.adapter)
            index = first + completion.index
            self.spans.append({"index": index, "version": version, "start": span.start, "end": span.end})


RunOf = Callable[[], str | None]
"""Returns the run that versions in spans belong to."""


def install(engine_client: Any, state: Any, runs: Mapping[str | None, RunOf]) -> None:
    """Wrap the engine client and the two OpenAI serving objects of an API server.

    Args:
        runs: of each LoRA adapter whose run is followed, by name, and under None of the model's own weights.
    """
    patches.wrap_method(engine_client, "generate", _generate)
    for attribute, method in (
        ("openai_serving_completion", "create_completion"),
        ("openai_serving_chat", "create_chat_completion"),
    ):
        serving = getattr(state, attribute, None)
        if serving is not None:
            patches.wrap_method(serving, method, _respond(runs))


def _generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A plain function: an async generator would run in its consumer's context, not in the request's.
    outputs = original(*args, **kwargs)
    record = _current.get()
    if record is None:
        return outputs
    params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
    prompt = record.started
    record.started += 1
    return record.watch(prompt, getattr(params, "n", 1) or 1, outputs)


def _respond(runs: Mapping[str | None, RunOf]) -> Callable[..., Any]:
    async def respond(original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(request, "use_beam_search", False):
            # vLLM searches in generations of one token each, which no span could place.
            return await original(request, *args, **kwargs)
        asked = getattr(request, "model", None)
        adapter = asked if asked in runs else None
        run_of = runs.get(adapter, lambda: None)
        record = SpanRecord(adapter)
        began = run_of()

        def document() -> dict[str, Any]:
            # Versions of two runs in one response cannot be told apart, so no run is named.
            ends = run_of()
            return record.document(ends if began in (None, ends) else None)

        token = _current.set(record)
        try:
            response = await original(request, *args, **kwargs)
        finally:
            _current.reset(token)
        if isinstance(response, AsyncGenerator):
            return add_spans(response, lambda: document() if record.complete else None)
        if hasattr(response, "choices"):
            response.delta_sync = document()
        return response

    return respond


DATA = "data: "
END = "\n\n"
DONE = f"{DATA}[DONE]{END}"
COMMON = ("id", "object", "created", "model")
"""Fields that every chunk of a stream has."""


async def add_spans(
    stream: AsyncGenerator[str, None], document: Callable[[], dict[str, Any] | None]
) -> AsyncGenerator[str, None]:
    """Pass a stream's server-sent events on, and add a member ``delta_sync`` to the last one before ``[DONE]``.

    Args:
        document: returns the member's value; None while output is still to come. Once this returns a value, each chunk
            is held back until the next arrives, because it may be the last.
    """
    held = last = None
    async with aclosing(stream):
        async for chunk in stream:
            value = document()
            if chunk == DONE and value is not None:
                held = _closing(held, last, value) or held
            if held is not None:
                yield held
                held = None
            if chunk == DONE or value is None:
                yield chunk
            else:
                held = chunk
            last = chunk
    if held is not None:
        yield held


def _closing(held: str | None, last: str | None, value: dict[str, Any]) -> str | None:
    """Return the chunk held back, or an extra chunk, with the member; None if the stream has failed."""
    parsed = _parsed(held or last)
    if parsed is None:
        return None
    member = f'"delta_sync":{json.dumps(value, separators=(",", ":"))}}}{END}'
    if held is not None:
        # Inserted as text, so that the rest of the chunk stays the same byte for byte.
        return f"{held.rstrip()[:-1]},{member}"
    common = {name: parsed[name] for name in COMMON if name in parsed}
    return f"{DATA}{json.dumps({**common, 'choices': []}, separators=(',', ':'))[:-1]},{member}"


def _parsed(chunk: str | None) -> dict[str, Any] | None:
    """Return the chunk if it has choices; None otherwise, for example for an error."""
    if chunk is None or not chunk.startswith(DATA):
        return None
    try:
        parsed = json.loads(chunk.removeprefix(DATA))
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and "choices" in parsed else None
