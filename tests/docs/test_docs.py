"""The documentation is true: its code runs, and what it names exists."""

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_side
from tests.support import running
from tests.support.modules import FusedModel, ModulePort, checkpoint_tensors, save_base
from tests.support.tiny import make_model, save_checkpoint
from trainer_side import DeltaSyncCallback, Publisher
from trainer_side.integrations.peft import adapter_publisher
from trainer_side.result import Seconds
from vllm_delta_sync import cli, errors, follow, open_run
from vllm_delta_sync.engine.api.access import REFUSED_DATA, answer_error
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.errors import NotFoundError, error_kinds
from vllm_delta_sync.settings import NO_SETTINGS, ClientSettings, Settings, environment_name
from vllm_delta_sync.trust.keys import generate

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SHARED = "/mnt/shared"
"""Where the documents put their run."""
FOREIGN_FLAGS = {
    # Of vLLM.
    *("--api-key", "--api-server-count", "--compilation-config", "--config", "--data-parallel-size"),
    *("--distributed-executor-backend", "--ec-transfer-config", "--enable-elastic-ep", "--enable-eplb"),
    *("--enable-expert-parallel", "--enable-lora", "--enforce-eager", "--headless", "--host"),
    *("--kv-transfer-config", "--load-format", "--master-addr", "--max-cpu-loras", "--max-lora-rank", "--model"),
    *("--max-loras", "--max-model-len", "--nnodes", "--node-rank", "--pipeline-parallel-size", "--pooler-config"),
    *("--port", "--served-model-name", "--speculative-config", "--tensor-parallel-size"),
    *("--trust-remote-code", "--weight-transfer-config", "--worker-extension-cls"),
    # Of slime.
    *("--custom-update-weight-post-write-path", "--hf-checkpoint", "--model-path"),
    *("--rollout-function-path", "--update-weight-disk-dir", "--update-weight-mode"),
    *("--update-weight-transfer-mode", "--update-weight-transport"),
    # Of pip, hf and torchrun.
    *("--include", "--local-dir", "--no-deps", "--nproc-per-node"),
    # Of our scripts.
    *("--ahead", "--check", "--checkpoint", "--environment", "--folder", "--games", "--lr"),
    *("--max-staleness", "--network", "--out", "--part", "--quick", "--reader", "--real", "--signed"),
    *("--size", "--slow-start", "--steps", "--versions", "--write"),
}
ABOUT_TESTS = {"DESIGN.md", "releasing.md", "architecture.md", "attacks.md", "guarantees.md", "support.md"}
"""Pages for contributors, and records of what was tested."""
FOR_COMMANDS = {"DELTA_SYNC_FOLDER", "DELTA_SYNC_VERSION", "DELTA_SYNC_STEP"}
"""Variables that ``delta-sync follow`` sets for the command of ``--on-update``."""
SERVERS = {"role", "server", "servers", "servers[].server", "servers[].pid", "servers[].role"}
"""Members of the status that an API server adds; tests/receiver/test_api_servers.py sees them."""


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code_of(text: str) -> str:
    """Everything that is set as code: inline, and in blocks."""
    without = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", without)
    return "\n".join([*re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL), *inline])


def named(document: str, name: str) -> str:
    """Content of the one block of a document after the line ``<!-- test: name -->``."""
    text = (ROOT / document).read_text()
    (found,) = re.findall(rf"^<!-- test: {name} -->\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return found


def run_python(code: str, folder: Path) -> str:
    """Run a block as a user would, in a directory of its own."""
    script = folder / "block.py"
    script.write_text(code)
    return running.run_python(script.name, folder=folder, seconds=900).stdout


def trainer_of_the_readme(shared: Path) -> str:
    """The quick start's trainer, with its run in another folder and a free port."""
    block = named("README.md", "trainer")
    for text in (SHARED, "tcp://*:5555"):
        assert text in block
    return block.replace(SHARED, str(shared)).replace("tcp://*:5555", "tcp://127.0.0.1:*")


@pytest.mark.slow
def test_a_run_goes_on_as_the_pages_say(tmp_path: Path) -> None:
    """They go on where a training of their own has ended. Commands that look after it: tests/docs/test_examples.py."""
    save_checkpoint(make_model("qwen3"), tmp_path / "Qwen3-0.6B")
    shared = tmp_path / "again"
    first = re.sub(r"range\(1, \d+\)", "range(1, 19)", trainer_of_the_readme(shared), count=1)
    gate, budget = (named("docs/gates-and-budgets.md", name) for name in ("gate", "budget"))
    run_python(f"{first}\n{named('docs/runs.md', 'go on')}", tmp_path)
    run = open_run(str(shared / "first-run"))
    assert [manifest.base_version for manifest in run.log()][-2:] == [18, 18]
    assert [tag.version for tag in run.tags().values()] == [19]
    gated = first.replace(str(shared), str(tmp_path / "gated")).replace("base=", "gate=gate, base=")
    assert "version 18" in run_python(f"{gate}\n{gated}", tmp_path)
    within = first.replace(str(shared), str(tmp_path / "within")).replace("base=", "budget=budget, base=")
    assert "version 18" in run_python(f"{budget}\n{within}", tmp_path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_compiles_and_imports_what_exists(path: Path) -> None:
    for block in blocks(path.read_text(), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("vllm_delta_sync", "trainer_side")):
                module = importlib.import_module(str(node.module))
                assert {alias.name for alias in node.names} <= set(module.__all__)


def test_generated_pages_are_up_to_date() -> None:
    running.run_python("docs/generate_reference.py", "--check")


def test_the_reference_names_the_status_code_of_each_kind() -> None:
    table = (ROOT / "docs" / "REFERENCE.md").read_text().split("### Status codes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| kind (`[^:|]*`) \|$", table, re.MULTILINE)
    codes = {kind: int(code) for code, kinds in rows for kind in re.findall(r"`(\w+)`", kinds)}
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.DeltaSyncError):
            assert answer_error(cls("text")).status_code == codes.get(cls.kind, REFUSED_DATA), cls.kind


def test_the_reference_has_what_a_trainer_imports() -> None:
    reference, site = ((ROOT / "docs" / name).read_text() for name in ("REFERENCE.md", "api.md"))
    for name in trainer_side.__all__:
        assert f"\nclass {name}:\n" in reference
        assert re.search(rf"^::: trainer_side\.[\w.]*\b{name}$", site, re.MULTILINE), name


@pytest.mark.parametrize("call", [DeltaSyncCallback, adapter_publisher, follow], ids=lambda call: call.__name__)
def test_the_reference_has_every_argument(call: Any) -> None:
    sections = (ROOT / "docs" / "REFERENCE.md").read_text().split("\n### ")
    section = next(text for text in sections if re.match(rf"`from .*\b{call.__name__}\b", text))
    [shown] = re.findall(rf"(?:class {call.__name__}:.*?def __init__|def {call.__name__})\((.*?)\) -> ", section, re.S)
    # Names, each after a bracket or a comma; the stars of ``*args`` and ``**options`` are no part of them.
    assert set(inspect.signature(call).parameters) <= set(re.findall(r"(?:^|[,(*])\s*(\w+)", shown))


def commands() -> dict[str, argparse.ArgumentParser]:
    """Our commands by name, and groups of commands such as ``tag``."""
    parser = cli.build_parser()
    return {**parser.children, **parser.commands}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_flags_and_variables_exist(path: Path) -> None:
    code = code_of(path.read_text())
    known = commands()
    for line in re.findall(r"delta-sync ((?!\.)[a-z].*)", code):
        words = [word.strip("`.,;)") for word in line.split()[:2]]
        name = " ".join(words) if " ".join(words) in known else words[0]
        assert name in known, line
        flags = {flag for action in known[name]._actions for flag in action.option_strings}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= flags | FOREIGN_FLAGS, line
    ours = {flag for parser in known.values() for action in parser._actions for flag in action.option_strings}
    assert set(re.findall(r"(?<![\w/-])--[a-z][a-z-]+", code)) <= ours | FOREIGN_FLAGS
    variables = {environment_name(field) for field in ClientSettings.model_fields} | set(NO_SETTINGS) | FOR_COMMANDS
    assert set(re.findall(r"\bDELTA_SYNC_[A-Z_]+[A-Z]\b", code)) <= variables
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", code)) <= targets


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not re.match(r"\w+:", link):
            file, _, anchor = link.partition("#")
            target = path.parent / file if file else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_tests_that_are_named_exist(path: Path) -> None:
    folders = "vllm_delta_sync|trainer_side|tests|docs|examples|benchmarks|docker|requirements|wire"
    for named, test in re.findall(rf"(?<![\w./])((?:{folders})/[\w./-]*)(?:::(\w+))?", code_of(path.read_text())):
        file = next((base / named for base in (ROOT, ROOT / "vllm_delta_sync") if (base / named).exists()), None)
        assert file is not None, named
        assert not test or f"def {test}(" in file.read_text(), f"{named}::{test}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_pages_for_users_name_no_test_files(path: Path) -> None:
    assert path.name in ABOUT_TESTS or re.findall(r"\btests/[\w/]+\.py|\btest_\w+", path.read_text()) == []


def paths_of(document: Any, prefix: str = "") -> Iterator[str]:
    """``a``, ``a.b`` and ``a[].b`` of a JSON document; timings stand for themselves."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield prefix + key
            if key != "timings_ms":
                yield from paths_of(value, f"{prefix}{key}.")
    elif isinstance(document, list):
        for value in document:
            yield from paths_of(value, prefix.removesuffix(".") + "[].")


def documented(title: str) -> set[str]:
    """Names in the first column of the first table after a line of REFERENCE.md."""
    text = (ROOT / "docs" / "REFERENCE.md").read_text()
    table = text[text.index(title) :].split("\n\n| ", 1)[1].split("\n\n", 1)[0]
    return set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))


@pytest.fixture
def receiver(tmp_path: Path) -> Receiver:
    """Two versions behind it."""
    tensors = checkpoint_tensors()
    url = str(tmp_path / "run")
    model = FusedModel()
    model.load_weights((name, tensor.to(torch.bfloat16)) for name, tensor in tensors.items())
    generate(tmp_path / "key")
    base = save_base(tmp_path / "base", tensors)
    with Publisher(tensors, bucket=url, base=base, signing_key=tmp_path / "key") as publisher:
        tensors["q.weight"] += 0.01
        publisher.publish(step=1)
        publisher.flush()
    settings = Settings(bucket=url, trusted_keys=str(tmp_path / "key.pub"), state_dir=tmp_path / "state")
    receiver = Receiver(ModulePort(model), settings)
    receiver.advance()
    return receiver


def test_members_of_answers(receiver: Receiver) -> None:
    verified = receiver.verify()
    assert documented("`POST /delta_sync/verify` answers with:") == set(verified)
    assert documented("## Timings") == set(receiver.status()["timings_ms"])
    (Path(receiver.settings.bucket) / "run.json").unlink()
    with pytest.raises(NotFoundError):
        receiver.advance()
    assert receiver.status()["last_error"] is not None
    found = set(paths_of(receiver.status()))
    told = documented("`GET /delta_sync/status` (and")
    assert told - SERVERS <= found
    assert told >= SERVERS
    explained_by_parent = ("head.", "ranks[].ms.", "recent[].version", "recent[].step")
    assert {name for name in found - told if not name.startswith(explained_by_parent)} == set()


def test_kinds_states_and_durations() -> None:
    assert documented("## Errors") >= set(error_kinds()) - {"error"}
    assert documented("`PublishResult.seconds` has the keys:") == set(Seconds.KEYS)
