"""The files in docker/: linters, and that they agree with each other and with the rest of the project."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import Answer, answering
from tests.support.compose import FOLDER, documents, services
from vllm_delta_sync import cli, open_run
from vllm_delta_sync.admin_token import AdminToken
from vllm_delta_sync.cli.main import parse
from vllm_delta_sync.errors import SettingsError
from vllm_delta_sync.settings import NO_SETTINGS, ClientSettings, Settings, environment_name, load_settings

ROOT = FOLDER.parent
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))
COMPOSE = sorted(FOLDER.glob("compose*.yaml"))
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
TEXTS = sorted(path for path in FOLDER.rglob("*") if path.is_file() and path.suffix in (".yaml", ".Dockerfile", ".md"))
SERVERS = [path for path in DOCKERFILES if path.name.startswith("server")]
PLACEHOLDER = "FILL-IN"
UNPRIVILEGED = 2000
DEAD = "http://127.0.0.1:9"
INSTRUCTIONS = {"ARG", "FROM", "USER", "WORKDIR", "COPY", "RUN", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
# Private keys, and the keys of AWS, Hugging Face, GitHub and OpenAI.
SECRETS = re.compile(
    r"-----BEGIN|\bAKIA[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_\w{20,}|\bsk-\w{20,}|\b[0-9a-fA-F]{32,}\b"
)


def linted(program: str, *arguments: str) -> None:
    """Run a linter of this environment; fails with what it printed."""
    done = subprocess.run(
        [Path(sys.executable).parent / program, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_hadolint_finds_nothing() -> None:
    linted("hadolint", *map(str, DOCKERFILES))


def test_compose_files_fit_their_schema() -> None:
    linted("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *map(str, COMPOSE))


def test_manifests_are_kubernetes_ones() -> None:
    linted("kubernetes-validate", "--strict", *map(str, MANIFESTS))


@pytest.mark.parametrize("path", TEXTS, ids=names(TEXTS))
def test_variables_are_settings_and_nothing_looks_like_a_secret(path: Path) -> None:
    known = {environment_name(field) for field in ClientSettings.model_fields} | set(NO_SETTINGS)
    assert set(re.findall(r"\bDELTA_SYNC_[A-Z0-9_]+", path.read_text())) <= known
    assert SECRETS.findall(path.read_text()) == []


def test_secrets_of_the_cluster_are_to_be_filled_in() -> None:
    secrets = [document for path in MANIFESTS for document in documents(path) if document["kind"] == "Secret"]
    assert {value for secret in secrets for value in secret["stringData"].values()} == {PLACEHOLDER}
    with pytest.raises(SettingsError):
        AdminToken.of(PLACEHOLDER, "the example")


# Dockerfiles.


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """(instruction, rest) of each, on one line."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        yield word, rest


def build_arguments(path: Path) -> dict[str, str]:
    return dict(rest.partition("=")[::2] for word, rest in instructions(path) if word == "ARG")


@pytest.mark.parametrize("path", DOCKERFILES, ids=names(DOCKERFILES))
def test_images_run_as_no_root_and_keep_nothing_of_pip(path: Path) -> None:
    found = list(instructions(path))
    users = [rest for word, rest in found if word == "USER"]
    assert users[-1] == f"{UNPRIVILEGED}:0"
    runs = [rest for word, rest in found if word == "RUN"]
    assert all(rest.startswith("--mount=type=secret,id=pip_conf,") for rest in runs)
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert "index" not in "".join(runs)


@pytest.mark.parametrize("path", SERVERS, ids=names(SERVERS))
def test_servers_are_healthy_when_ready(path: Path) -> None:
    """Also where variables name a proxy, as for a bucket that is reached through one."""
    found = dict(instructions(path))
    assert json.loads(found["ENTRYPOINT"]) == ["delta-sync", "serve"]
    _, _, command = found["HEALTHCHECK"].partition("CMD ")
    with answering() as server:
        words = [word.replace("http://127.0.0.1:8000", server.url) for word in json.loads(command)]
        for status in (200, 503):
            server.reply = lambda asked, status=status: Answer(status)  # type: ignore[misc]
            done = subprocess.run(
                words, env={"PATH": os.environ["PATH"], "http_proxy": DEAD}, capture_output=True, timeout=60
            )
            assert (done.returncode == 0) == (status == 200), done.stderr
        assert {asked.path for asked in server.asked} == {"/delta_sync/ready"}


def test_bases_are_pinned_and_supported() -> None:
    tag = build_arguments(FOLDER / "server.Dockerfile")["BASE"]
    release = re.fullmatch(r"docker\.io/vllm/vllm-openai:v([0-9]+\.[0-9]+\.[0-9]+)", tag)
    assert release is not None
    assert f"| vLLM {release[1]} |" in (ROOT / "docs/support.md").read_text()
    (least,) = project()["optional-dependencies"]["vllm"]
    assert tuple(map(int, release[1].split("."))) >= tuple(map(int, least.removeprefix("vllm>=").split(".")))


def test_pins_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for path in (FOLDER / "server-cpu.Dockerfile", FOLDER / "trainer.Dockerfile"):
        for name, value in build_arguments(path).items():
            if name in ("TORCH", "SETUPTOOLS"):
                assert re.search(rf"^{name} [?:]= {re.escape(value)}$", makefile, re.MULTILINE), name


def test_context_has_what_is_copied_and_no_more() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert patterns[1] == "*"
    kept = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    packages = {pattern.rstrip("*") for pattern in project_file()["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert {"pyproject.toml", "requirements", "README.md", "LICENSE", "docker/train.py"} | packages == set(kept)


def project_file() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def project() -> dict[str, Any]:
    found: dict[str, Any] = project_file()["project"]
    return found


# Compose.


def test_images_of_compose_are_built_somewhere() -> None:
    for path in COMPOSE:
        found = services(path, {}).values()
        built = {service.image: service.dockerfile for service in found if service.dockerfile}
        assert all((ROOT / dockerfile).is_file() for dockerfile in built.values())
        for service in found:
            assert service.image in built or re.fullmatch(r"docker\.io/.+:v?[0-9.]+", service.image), service.name


def test_services_that_a_page_starts_by_name_include_the_trainer() -> None:
    """Servers wait for a run, and depend on no trainer."""
    texts = [path.read_text() for path in TEXTS]
    started = [names.split() for text in texts for names in re.findall(r"up --build((?: [\w-]+)+)", text)]
    assert started
    for found in started:
        assert {"trainer"} < set(found) <= services(FOLDER / "compose.yaml", {}).keys()


def test_store_is_published_to_nobody() -> None:
    found = services(FOLDER / "compose.yaml", {}).values()
    assert all(port.startswith("127.0.0.1:") for service in found for port in service.ports)
    assert [service.name for service in found if service.ports] == ["server-1", "server-2", "prometheus", "grafana"]


def run_of(folder: Path, steps: int) -> None:
    """Run the trainer of the images until its run in a folder has so many versions."""
    variables = {"BUCKET": str(folder), "STEPS": str(steps), "PAUSE": "0"}
    service = services(FOLDER / "compose.yaml", variables)["trainer"]
    assert service.command is not None
    script, *arguments = service.command[1:]
    subprocess.run(
        [sys.executable, ROOT / Path(script).relative_to("/opt/vllm-delta-sync"), *arguments],
        env=clean() | service.environment,
        check=True,
        timeout=300,
    )


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("DELTA_SYNC_", "AWS_"))}


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trainer_trains_and_goes_on_and_servers_find_their_run(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = tmp_path / "demo"
    for number in range(1, steps + 1):
        run_of(bucket, number)
    with open_run(str(bucket)) as run:
        assert run.head().version == steps
        assert {"config.json", "tokenizer.json"} <= {file.name for file in run.info.files}
        assert {tensor.dtype for tensor in run.table} == {"BF16"}
    monkeypatch.setenv("DELTA_SYNC_BUCKET", str(bucket))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = [(name, service) for path in COMPOSE for name, service in services(path, {}).items()]
    commands = [service.command or [] for name, service in found if name.startswith("server")]
    assert len(commands) == 4
    for arguments in commands:
        assert cli.run(["serve", *arguments, "--dry-run", "--json"]) == 0
        command = json.loads(capsys.readouterr().out)["data"]["command"]
        assert command[-len(arguments) :] == arguments
        assert command[command.index("--served-model-name") + 1] == "demo"


def test_commands_of_services_and_pods_exist() -> None:
    commands = [service.command or [] for path in COMPOSE for service in services(path, {}).values()]
    commands += [
        each.get("command", []) for pod in pods() for each in pod["containers"] + pod.get("initContainers", [])
    ]
    texts = [command[2] if command[:2] == ["sh", "-c"] else shlex.join(command) for command in commands]
    lines = [line for text in texts for line in re.findall(r"(?:^|\s)delta-sync ([^;|&]+)", text)]
    assert {line.split()[0] for line in lines} == {"log", "fleet", "broker"}
    for line in lines:
        parse(shlex.split(line))


# Kubernetes.


def pods() -> list[dict[str, Any]]:
    return [
        document["spec"]["template"]["spec"]
        for path in MANIFESTS
        for document in documents(path)
        if document["kind"] in ("Deployment", "Job")
    ]


def test_pods_run_as_no_root_with_no_rights() -> None:
    assert len(pods()) == 2
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == UNPRIVILEGED
        for container in pod["containers"] + pod.get("initContainers", []):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_what_pods_refer_to_is_defined() -> None:
    defined = {
        (document["kind"], document["metadata"]["name"]): document for path in MANIFESTS for document in documents(path)
    }
    for pod in pods():
        for container in pod["containers"] + pod.get("initContainers", []):
            for source in container["envFrom"]:
                assert all((KINDS[key], value["name"]) in defined for key, value in source.items())
            for variable in container.get("env", []):
                key = variable.get("valueFrom", {}).get("secretKeyRef")
                assert key is None or key["key"] in defined["Secret", key["name"]]["stringData"]
    labels = defined["Deployment", "delta-sync-server"]["spec"]["template"]["metadata"]["labels"]
    assert defined["Service", "delta-sync-server"]["spec"]["selector"].items() <= labels.items()


KINDS = {"configMapRef": "ConfigMap", "secretRef": "Secret"}


def test_a_pod_is_ready_when_its_server_is() -> None:
    (server,) = pods()[0]["containers"]
    assert server["readinessProbe"]["httpGet"]["path"] == "/delta_sync/ready"
    assert {server[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} == {"/health"}
    assert "command" not in server


def test_pods_that_nodes_lose_do_not_use_up_the_tries_of_the_trainer() -> None:
    (job,) = (document["spec"] for path in MANIFESTS for document in documents(path) if document["kind"] == "Job")
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert job["template"]["spec"]["restartPolicy"] == "Never", "what such a policy requires"


def test_environment_of_a_pod_is_read() -> None:
    """What Kubernetes would set, as a server reads it."""
    (config,) = documents(FOLDER / "kubernetes/config.yaml")
    environment: Mapping[str, str] = config["data"] | {
        entry["name"]: entry.get("value", "a-pods-name")
        for entry in pods()[0]["containers"][0]["env"]
        if entry["name"] not in NO_SETTINGS
    }
    fields = {name.removeprefix("DELTA_SYNC_").lower(): value for name, value in environment.items() if "SYNC" in name}
    assert Settings(**fields).receiver_id == "a-pods-name"  # type: ignore[arg-type]


def test_what_kubernetes_says_of_services_is_not_taken_for_settings() -> None:
    """A pod gets variables named after each Service of its namespace, unless it declines them."""
    named = [
        document["metadata"]["name"].upper().replace("-", "_")
        for path in MANIFESTS
        for document in documents(path)
        if document["kind"] == "Service"
    ]
    assert named
    for pod in pods():
        links = {} if pod.get("enableServiceLinks") is False else {f"{name}_SERVICE_HOST": "10.0.0.1" for name in named}
        load_settings({"bucket": "/run"}, links)
