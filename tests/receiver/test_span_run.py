"""The run that an answer's spans count in, where a server goes over to another run meanwhile."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_delta_sync.engine import spans


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
    spans.install(Client(), SimpleNamespace(openai_serving_completion=serving), lambda: next(followed))
    response = asyncio.run(serving.create_completion(SimpleNamespace()))
    assert response.delta_sync == {"run": named, "spans": []}
