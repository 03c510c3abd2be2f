"""Which weights produced which output tokens: ``delta_sync`` in the bodies of completions and chat completions.

vLLM labels every engine step with a weight version and keeps the offsets per output, but its OpenAI routes drop
them. Each request's outputs are watched on their way through the engine client, and the finished response gets the
spans of its choices.
"""

from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm_delta_sync.engine import compat

_current: "ContextVar[SpanRecord | None]" = ContextVar("delta_sync_spans", default=None)


@dataclass
class SpanRecord:
    """Spans of one HTTP request, collected as its outputs finish."""

    prompts: int = 0
    spans: list[dict[str, int | None]] = field(default_factory=list)

    async def watch(self, prompt: int, choices: int, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Pass outputs through and note the spans of those that have them (finished ones)."""
        async for output in outputs:
            for completion in output.outputs:
                for label, start, end in compat.version_spans(completion):
                    index = prompt * choices + completion.index
                    version = int(label) if label.isdecimal() else None
                    self.spans.append({"index": index, "version": version, "start": start, "end": end})
            yield output


def install(engine_client: Any, state: Any, run_id: Callable[[], str | None]) -> None:
    """Wrap the shared engine client and the two OpenAI serving objects of an API server.

    Args:
        run_id: the run that versions belong to.
    """
    compat.wrap_method(engine_client, "generate", _generate)
    for attribute, method in (
        ("openai_serving_completion", "create_completion"),
        ("openai_serving_chat", "create_chat_completion"),
    ):
        serving = getattr(state, attribute, None)
        if serving is not None:
            compat.wrap_method(serving, method, _respond(run_id))


def _generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A plain function: an async generator would run in its consumer's context, not in the request's.
    outputs = original(*args, **kwargs)
    record = _current.get()
    if record is None:
        return outputs
    params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
    prompt = record.prompts
    record.prompts += 1
    return record.watch(prompt, getattr(params, "n", 1) or 1, outputs)


def _respond(run_id: Callable[[], str | None]) -> Callable[..., Any]:
    async def respond(original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(request, "stream", False) or getattr(request, "use_beam_search", False):
            return await original(request, *args, **kwargs)
        record = SpanRecord()
        token = _current.set(record)
        try:
            response = await original(request, *args, **kwargs)
        finally:
            _current.reset(token)
        if hasattr(response, "choices"):
            spans = sorted(record.spans, key=lambda span: (span["index"], span["start"]))
            response.delta_sync = {"run": run_id(), "spans": spans}
        return response

    return respond
