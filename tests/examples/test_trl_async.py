"""The parts of ``examples/trl_async.py`` that need no server: task, attention, rollout loop, verdict."""

import json
import pickle
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from transformers import AttentionInterface, AutoTokenizer
from trl.chat_template_utils import parse_response
from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention

from examples import trl_async
from examples.trl_async import EOS, IDS, SERVED_VERSION, WEIGHT_SYNC, encode, exact_reversal
from tests.support.tiny import VOCABULARY, make_model

SECONDS = 60.0
GROUPS, SAMPLES = 3, 2


def test_a_conversation_is_a_prompt_and_survives_saving(tmp_path: Path) -> None:
    trl_async.make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (row,) = trl_async.make_dataset(1, seed=3)
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    assert prompt == encode(row["word"] + ">")
    message = parse_response(tokenizer, [*encode(row["word"][::-1]), IDS[EOS]], prefix=prompt)
    assert message == {"role": "assistant", "content": row["word"][::-1]}


def test_the_reward_is_for_the_finished_reversal_alone_and_goes_to_another_process() -> None:
    right = [*encode("atled"), IDS[EOS]]
    answers = [right, right[:-1], encode("delta"), [*right, IDS[EOS]]]
    reward = pickle.loads(pickle.dumps(exact_reversal))  # noqa: S301  as TRL hands it to its rollout process
    assert reward(completion_ids=answers, word=["delta"] * 4, prompts=[], completions=[]) == [1.0, 0.0, 0.0, 0.0]


def samples() -> list[np.ndarray]:
    """Token ids: three that share a prompt, two of them some words more, and two others."""
    generator = np.random.default_rng(5)
    prompt, words = generator.integers(3, VOCABULARY, 7), generator.integers(3, VOCABULARY, 4)
    ends = [generator.integers(3, VOCABULARY, length) for length in (6, 2, 9)]
    apart = [generator.integers(3, VOCABULARY, length) for length in (3, 12)]
    shared = [np.concatenate([prompt, words, ends[0]]), np.concatenate([prompt, words, ends[1]])]
    return [*shared, np.concatenate([prompt, ends[2]]), *apart]


def packed(rows: list[np.ndarray]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Arguments of a model for TRL's tree of some samples, and where in it each sample's tokens are."""
    row = TreeRow()
    for group, ids in enumerate(rows):
        ones = np.ones(len(ids))
        row.add({"input_ids": ids, "completion_mask": ones, "old_log_probs": ones, "advantage": 1.0, "group_id": group})
    tree = row.pack()
    longest_q, longest_k = tree["tree_max_seqlens"].tolist()
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    arguments = {name: tree[name][None] for name in ("input_ids", "position_ids")} | {
        name: tree[name] for name in names
    }
    # Each node is marked with a number of its own.
    row.tokens = list(range(len(row.tokens)))
    position = {node: place for place, node in enumerate(row.pack()["input_ids"].tolist())}
    places = [torch.tensor([position[node] for node in nodes]) for nodes in row.sample_nodes]
    return {**arguments, "tree_max_seqlen_q": longest_q, "tree_max_seqlen_k": longest_k}, places


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {}), ("gemma3", {"sliding_window": 4})])
def test_tree_attention_computes_each_sample_as_by_itself(family: str, sizes: dict[str, int]) -> None:
    model, rows = make_model(family, **sizes), samples()
    alone = [model(input_ids=torch.tensor(ids)[None]).logits[0] for ids in rows]
    sum(logits.square().sum() for logits in alone).backward()  # type: ignore[union-attr]
    expected = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    register_tree_attention()
    AttentionInterface.register(TREE_ATTENTION, trl_async.tree_attention)
    model.set_attn_implementation(TREE_ATTENTION)
    tree, places = packed(rows)
    assert tree["input_ids"].numel() < sum(map(len, rows))
    logits = model(**tree).logits[0]
    picked = [logits[place] for place in places]
    for own, of_tree in zip(alone, picked, strict=True):
        torch.testing.assert_close(of_tree, own, rtol=1e-4, atol=1e-5)
    sum(one.square().sum() for one in picked).backward()  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4)


def completion(prompt: list[int]) -> dict[str, Any]:
    """An answer of the server: the reversed word, whose first token an older version has sampled than the others."""
    tokens, version = [*prompt[-2::-1], IDS[EOS]], len(prompt)
    choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": "stop"}
    choice["logprobs"] = {"token_logprobs": [-0.5] * len(tokens)}
    spans = [(version - 1, 0, 1), (version, 1, len(tokens))]
    listed = [{"index": 0, "version": number, "start": start, "end": end} for number, start, end in spans]
    return {"choices": [choice], "delta_sync": {"run": "r", "spans": listed}}


class _Completions(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(completion(body["prompt"])).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *values: object) -> None:
        return


@pytest.fixture
def server_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_each_sample_of_trls_loop_carries_the_version_that_sampled_it(server_url: str) -> None:
    PartialState()
    context = get_context("spawn")
    made: queue.Queue[Any] = queue.Queue()
    loop = trl_async.VersionedRolloutLoop(
        model_name="policy",
        dataset=trl_async.make_dataset(GROUPS, seed=5),
        reward_funcs=[exact_reversal],
        processing_class=trl_async.make_tokenizer(),
        eos_token_ids=[IDS[EOS]],
        rollout_buffer=made,
        model_version_value=context.Value("i", 0),
        heartbeat_value=context.Value("d", 0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        num_generations=SAMPLES,
        max_inflight_tasks=4,
        vllm_server_url=server_url,
        max_tokens=trl_async.MAX_ANSWER_TOKENS,
    )
    running = threading.Thread(target=loop.run, daemon=True)
    running.start()
    for sample in [made.get(timeout=SECONDS) for _ in range(GROUPS * SAMPLES)]:
        (message,) = sample.prompt
        letters = len(message["content"])
        assert sample.metrics["reward"] == 1.0
        assert sample.metrics[SERVED_VERSION] == pytest.approx(letters + 1 - 1 / (letters + 1))
    loop._loop.call_soon_threadsafe(loop._stop_event.set)
    running.join(SECONDS)
    assert not running.is_alive()


def test_what_was_not_proven_yet_was_sampled_by_the_base() -> None:
    answer = completion(encode("delta>"))
    assert trl_async.versions_of(answer) == [5, 6, 6, 6, 6, 6]
    answer["delta_sync"]["spans"][0]["version"] = None
    assert trl_async.versions_of(answer) == [0, 6, 6, 6, 6, 6]
    del answer["delta_sync"]
    assert trl_async.versions_of(answer) == [0] * 6


def logged(steps: int) -> list[dict[str, Any]]:
    """TRL's log of a run."""
    syncs = [{"delta_sync/version": version, "step": version - 1} for version in range(1, steps + 2)]
    learnt = [{"reward": 0.5, "step": step, SERVED_VERSION: 0.5, WEIGHT_SYNC: 0.1} for step in range(1, steps + 1)]
    return [syncs[0], *(line for pair in zip(learnt, syncs[1:], strict=True) for line in pair)]


@pytest.mark.parametrize(
    ("removed", "versions", "claims"),
    [([], 4, (True, True)), ([-1], 4, (False, True)), ([1], 4, (True, False)), ([], 3, (False, True))],
)
def test_the_claims_about_trl_need_every_version_and_every_step(
    removed: list[int], versions: int, claims: tuple[bool, bool]
) -> None:
    history = logged(3)
    for index in removed:
        del history[index]
    assert tuple(trl_async.claims_about_trl(history, 3, versions).values()) == claims


def test_wrong_usage_and_a_directory_of_somebody_else_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as usage:
        trl_async.main(["--steps", "0"])
    assert usage.value.code == 2
    (tmp_path / "mine").touch()
    assert trl_async.main(["--out", str(tmp_path)]) == 1
    assert "--out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
