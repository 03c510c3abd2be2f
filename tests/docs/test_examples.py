"""Every ``delta-sync`` line in the examples of ``--help``, and in the shell blocks of README and docs, runs.

Lines run as they are, on local runs that have the versions, tags, keys and files that they name; ``PLACES`` says what
stands for a URL or path. ``ENDED`` are lines that would run until Ctrl-C, ``PARSED`` those that are only parsed.
"""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest

from tests.docs.test_docs import DOCUMENTS, FOREIGN_FLAGS
from tests.support.checkpoints import weights, write_checkpoint
from tests.support.commands import delta_sync
from tests.support.signed_runs import Signed
from tests.support.web import Site, listening
from tests.support.written import SMALL, Written
from vllm_delta_sync import cli
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.cli.main import parse
from vllm_delta_sync.fleet.heartbeats import write_heartbeat
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate

PARSER = cli.build_parser()
SERVER_COMMANDS = ("status", "sync", "rollback", "hold", "release", "wait")
"""Those that call a server, by default one on this machine."""
VERSIONS = 42
"""Examples name versions up to 420 and 100, for which 40 stands, and step 400, which is version 40."""
SHELL = ("bash", "sh", "")
"""Languages of the blocks of a document that have command lines."""
SITE_VERSIONS = 20
"""The newest version that an example asks of a server."""
RECEIVERS = 8

PLACES = (
    (r"(s3|hf|file)://(/|[a-z]+/)*runs/(a|first)\b", "run"),
    (r"/data/(runs|archive)/a\b|/mnt/shared/(first-run|trl|math|base)\b", "run"),
    (r"/mnt/(copy/runs/a|mirror/first-run)\b", "mirror"),
    (r"(file://)?(/data/runs/b|s3://[a-z]+/runs/b|/mnt/shared/second-run)\b", "other"),
    (r"(/models/(qwen3|base)|Qwen/Qwen3-0\.6B(@main)?|Qwen3-0\.6B|MODEL)$", "checkpoint"),
    (r"/models/a\b", "models"),
    (r"out/checkpoint-100\b", "out/checkpoint-100"),
    (r"/mnt/shared/", ""),
    (r"/var/lib/delta-sync\b", "state"),
    (r"^URL$", "run"),
    (r"\./reload\.sh", "true"),
    (r"\./objects/\S+\.safetensors", "object.safetensors"),
    (r"http://[a-z0-9.-]+:8000", "SERVER"),
    # A gigabyte takes a disk too long, and hundreds of versions each command.
    (r"^1GB$", "1MB"),
    (r"^(420|100)$", "40"),
)
"""What an example names → what stands for it, in the folder in which it runs."""
ENDED = {
    "serve": ("--dry-run",),  # would start vLLM
    "publish --watch": ("--once", "--poll", "0.1"),  # would wait for the next checkpoint, and between polls
    "follow": ("--once",),  # would wait for the next version
}
"""Beginning of an example → the flags that end it, of which it may have the first."""
PARSED = {
    "broker": "serves until Ctrl-C",
    "dashboard": "serves until Ctrl-C",
    "mirror": "serves until Ctrl-C",
    "serve .*ADDRESS": "ADDRESS is a node of the reader",
}
"""Pattern of an example that is only parsed → why."""


@dataclass(frozen=True)
class Example:
    """A line of a help text or document."""

    source: str
    line: str

    @property
    def words(self) -> list[str]:
        """Without ``delta-sync``, comments, variables before it, and remarks in parentheses or ``> FILE`` after it."""
        words = shlex.split(re.sub(r"\s+(\([^()]*\)|>>? \S+)$", "", self.line), comments=True)
        return words[words.index("delta-sync") + 1 :]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def command(self) -> str:
        """Its whole name: ``log``, ``tag set``."""
        return next((name for name in PARSER.commands if f"{self.text} ".startswith(f"{name} ")), self.words[0])


def examples_in(source: str, text: str) -> list[Example]:
    """The command lines of a shell text; a backslash joins lines."""
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [Example(source, line.strip()) for line in lines if re.match(r"\s*([A-Z_]+=\S+ )*delta-sync \S", line)]


def placed(example: Example, server: str, followed: str) -> list[str]:
    """The words of an example, with the places of the test instead of those that it names."""
    words = example.words
    signed = any(word.endswith((".key", ".pub")) for word in words)
    of_server = example.command in SERVER_COMMANDS or "--server" in words
    for pattern, place in PLACES:
        if place == "SERVER":
            place = server
        elif place == "run":
            # Only a publisher's run keeps the files of a model, and a server follows the run of its own.
            place = "published" if words[0] in ("serve", "publish") else followed if of_server else place
            place = "signed" if signed and words[0] != "serve" else place
        if words[0] == "publish" and place in ("checkpoint", "models"):
            place = "out/checkpoint-1"
        words = [re.sub(pattern, place, word) for word in words]
    text = shlex.join(words)
    if example.command in SERVER_COMMANDS and "--server" not in words:
        words = [*words, "--server", server]
    for beginning, flags in ENDED.items():
        if text.startswith(beginning):
            words = [words[0], *(flags[1:] if flags[0] in words else flags), *words[1:]]
    return words


def all_examples() -> list[Example]:
    """Of all help texts and documents; those that come to the same once."""
    found: list[Example] = []
    for name, command in [("", PARSER), *PARSER.children.items(), *PARSER.commands.items()]:
        text = command.epilog or ""
        found += examples_in(f"delta-sync {name} --help", text.partition("examples:")[2].partition("\n\n")[0])
    for path in DOCUMENTS:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            found += examples_in(path.name, block) if language in SHELL else []
    return list({shlex.join(placed(example, "SERVER", "run")): example for example in found}.values())


EXAMPLES = all_examples()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that examples name, except for a server."""
    folder = tmp_path_factory.mktemp("examples")
    run = Written(folder / "run", VERSIONS - 3, table=SMALL, start="checkpoint")
    with mock.patch("tests.support.samples.CREATED", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:05Z")):
        for _ in range(3):  # in the last hour
            run.publish()
    run.merged_deltas()
    for name, version in (("best", 18), ("release-1", 20), ("old", 7)):
        run.tag(name, version)
    for number in range(RECEIVERS):
        write_heartbeat(run.run, f"rollout-{number}", run.head)
    shutil.copytree(folder / "run", folder / "mirror")
    shutil.copytree(folder / "run", folder / "other")
    shutil.copy(next((folder / "run" / "objects").iterdir()), folder / "object.safetensors")
    sign(folder)
    for step in (1, 100):
        write_checkpoint(folder / "out" / f"checkpoint-{step}", weights(step))
    assert delta_sync("publish", "--from", folder / "out/checkpoint-1", "--bucket", folder / "published").code == 0
    for name in ("publisher.curve", "server.curve"):
        assert delta_sync("keygen", folder / name, "--notice").code == 0
    (folder / "token").write_text("correct-horse-battery-staple\n")
    return folder


def sign(folder: Path) -> None:
    """A signed run, and keys: root, which is also the trainer's and ``signer``."""
    generate(folder / "root.key")
    for name in ("trainer.key", "signer"):
        for suffix in ("", ".pub"):
            shutil.copy(folder / f"root.key{suffix}", folder / f"{name}{suffix}")
    keyring = Keyring.load(str(folder / "root.key.pub"), folder / "root.key")
    signed = Signed(keyring, open_bucket(str(folder / "signed")))
    for _ in range(VERSIONS):
        signed.publish()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL of a server, and of the run that it follows."""
    root = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        site = Site(root, state_dir=root / "state")
        stack.callback(site.end)
        # As vLLM answers; `doctor` asks for both.
        site.app.add_api_route("/health", lambda: None)
        site.app.add_api_route("/v1/models", lambda: {"data": [{"id": "tiny"}]})
        site.serve()
        for step in range(1, SITE_VERSIONS + 1):
            site.publish(step)
        assert delta_sync("tag", "set", "best", "--bucket", root / "run", "--version", 7).code == 0
        yield f"http://127.0.0.1:{stack.enter_context(listening(site.app))}", str(root / "run")


def check(example: Example, template: Path, folder: Path, site: tuple[str, str]) -> None:
    """Run an example in a folder of its own; fails if it does not end with 0."""
    words = placed(example, *site)
    if words[0] == "serve":
        flags = {word.partition("=")[0] for word in parse(words).rest if word.startswith("--")}
        assert flags <= FOREIGN_FLAGS, f"{example.line}: neither a flag of serve nor a known one of vLLM"
    if any(re.match(pattern, example.text) for pattern in PARSED):
        parse(words)
        return
    folder.mkdir()
    for item in template.iterdir():
        if item.is_file():
            shutil.copy(item, folder)
        elif any(item.name in word for word in words):
            # Stores replace files, so those of the template stay as they are.
            shutil.copytree(item, folder / item.name, copy_function=os.link)
    if words[0] == "branch":
        shutil.rmtree(folder / "other", ignore_errors=True)
    if example.command in SERVER_COMMANDS:
        # All share the server, and another example may have rolled it back; then it holds.
        assert delta_sync("release", "--server", site[0]).code == delta_sync("sync", "--server", site[0]).code == 0
    if words[0] == "keygen":
        for name in (words[1], f"{words[1]}.pub"):
            (folder / name).unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # Exported by a line before the example.
        token = {"DELTA_SYNC_ADMIN_TOKEN": "correct-horse-battery-staple"} if "--peer" in words else {}
        done = delta_sync(*words, HOME=str(folder), XDG_STATE_HOME=str(folder / "state"), **token)
    assert done.code == 0, f"{shlex.join(words)}\n{done.out}{done.err}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.text)
def test_it_runs(example: Example, template: Path, tmp_path: Path, site: tuple[str, str]) -> None:
    check(example, template, tmp_path / "here", site)


def test_every_command_has_examples_and_no_exception_is_idle() -> None:
    assert {example.command for example in EXAMPLES} == set(PARSER.commands)
    for pattern in PARSED:
        assert any(re.match(pattern, example.text) for example in EXAMPLES), pattern
