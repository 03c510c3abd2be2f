"""What leads where: the way of each machine to the store and to the others, and the programs that use them."""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.demo import serving
from examples.demo.processes import free_port
from examples.demo.settings import Cores
from examples.fleet import store
from examples.fleet.links import Links
from examples.fleet.replicas import script
from examples.fleet.shaping import HOST
from examples.three_machines.machines import Site
from examples.three_machines.programs import Program
from examples.three_machines.settings import (
    ENVIRONMENT,
    LINKS,
    MODEL_NAME,
    ROLLOUT,
    SERVER,
    TRAINER,
    WITNESS,
    WORKER,
    Options,
)
from examples.three_machines.sockets import End, Rules, Watch
from tests.support.s3_store import S3Server

SERVER_PORT, ENVIRONMENT_PORT = 8000, 7000
"""On machines with networks of their own; elsewhere any free ones."""
POLL_SECONDS = "0.2"
MODULE = "examples.three_machines."
ANY = "0.0.0.0"
URL_END = re.compile(r"\w://(?:[^/\s@]*@)?([\w.-]+|\[[\da-f:]+\]):(\d+)")
SERVE_ARGUMENTS = (
    *("--served-model-name", MODEL_NAME),
    *("--dtype", "bfloat16"),
    *("--max-model-len", "64"),
    *("--max-num-seqs", "128"),
    *("--generation-config", "vllm"),
    *("--uvicorn-log-level", "warning"),
    "--enforce-eager",
)


@dataclass(frozen=True)
class Wiring:
    """All ends that are known to anybody.

    Attributes:
        stores: machine → where it finds the store. environment: where the rollout machine finds the environment.
        service, server: where those two listen. store: where the store does. far: port of the far end of ``probes``,
            through which each link is measured.
        run, trajectories, full: URLs in the store.
    """

    site: Site
    stores: dict[str, End]
    probes: dict[str, End]
    environment: End
    service: End
    server: End
    store: S3Server
    far: int
    run: str
    trajectories: str
    full: str

    @classmethod
    def lay(cls, site: Site, links: Links, server: S3Server, far: int) -> "Wiring":
        """Connect the machines to what they may reach, through their links, and to nothing else."""
        gateways = {name: site[name].gateway for name in (TRAINER, ROLLOUT)}

        def entries(port: int) -> dict[str, End]:
            return {name: End(host, links.forward(name, port, host=host)) for name, host in gateways.items()}

        service = End(site[ENVIRONMENT].address, _port(site, ENVIRONMENT_PORT))
        entry = links.forward(ROLLOUT, service.port, host=gateways[ROLLOUT], target=service.host)
        runs = server.create_bucket("runs")
        return cls(
            site=site,
            stores=entries(server.port),
            probes=entries(far),
            far=far,
            environment=End(gateways[ROLLOUT], entry),
            service=service,
            server=End(site[ROLLOUT].address, _port(site, SERVER_PORT)),
            store=server,
            run=f"{runs}/run",
            trajectories=f"{runs}/games",
            full=f"{runs}/full",
        )

    def reaching_store(self, machine: str) -> dict[str, str]:
        """Variables that a program on that machine needs to use the store."""
        end = self.stores[machine]
        return store.through(self.store, end.port, end.host)

    def rules(self) -> dict[str, Rules]:
        """What each machine may be connected to; the links too, which could join any two."""
        entries = frozenset({*self.stores.values(), *self.probes.values(), self.environment})
        beyond = frozenset({End(HOST, self.store.port), End(HOST, self.far), self.service})
        return {
            TRAINER: Rules(frozenset({self.stores[TRAINER], self.probes[TRAINER]})),
            ROLLOUT: Rules(frozenset({self.stores[ROLLOUT], self.probes[ROLLOUT], self.environment})),
            ENVIRONMENT: Rules(serves=frozenset({self.service.port})),
            LINKS: Rules(beyond, frozenset(end.port for end in entries)),
        }

    def told(self, machine: str, texts: Iterable[str]) -> list[str]:
        """Places among what a machine's processes were started with that are none of its business, in words."""
        places = {one.name: {HOST, "localhost", one.address, one.gateway} for one in self.site.machines.values()}
        everywhere = set().union(*places.values())
        listening = {End(host, port) for host in everywhere for port in (self.server.port, self.service.port)}
        own = {End(host, self.server.port) for host in places[machine]} if machine == ROLLOUT else set()
        strange = (listening | {*self.stores.values(), self.environment}) - self.rules()[machine].allowed - own
        others = {one.address for one in self.site.machines.values() if one.name != machine} - {HOST}
        found = set()
        for text in texts:
            ends = {End(host, int(port)) for host, port in URL_END.findall(text)}
            found |= {f"{machine} was given {end}" for end in ends & strange}
            found |= {f"{machine} was given {host}" for host in others if re.search(rf"\b{re.escape(host)}\b", text)}
        return sorted(found)

    def programs(self, options: Options, out: Path, watch: Watch) -> dict[str, Program]:
        """All of them, none started."""
        cores = Cores.share_out()
        single = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        near = f"http://{HOST}:{self.server.port}"
        folders = {name: out / name for name in self.site.machines}
        server = {**serving.server_environment(cores.server), **self.reaching_store(ROLLOUT), "VLLM_HOST_IP": HOST}

        def program(name: str, machine: str, words: list[str], extra: dict[str, str], talks: bool = True) -> Program:
            environment = without_proxy(serving.clean_environment() | extra)
            log = folders[machine] / f"{name}.log"
            return Program(name, self.site[machine], words, environment, log, watch, talks)

        made = [
            program(TRAINER, TRAINER, self._trainer(options, folders[TRAINER]), self.reaching_store(TRAINER) | single),
            program(ENVIRONMENT, ENVIRONMENT, self._environment(options), {}),
            program(SERVER, ROLLOUT, self._server(folders[ROLLOUT]), server, talks=False),
            program(WORKER, ROLLOUT, self._worker(options, near), self.reaching_store(ROLLOUT) | single),
            program(WITNESS, ROLLOUT, [sys.executable, "-m", f"{MODULE}witness", near], {}),
        ]
        return {one.name: one for one in made}

    def _trainer(self, options: Options, folder: Path) -> list[str]:
        return [
            *(sys.executable, "-m", f"{MODULE}trainer"),
            *("--bucket", self.run, "--trajectories", self.trajectories),
            *("--checkpoint", str(folder / "policy"), "--folder", str(folder / "state")),
            *("--versions", str(options.versions), "--max-staleness", str(options.max_staleness)),
        ]

    def _environment(self, options: Options) -> list[str]:
        words = [sys.executable, "-m", f"{MODULE}environment", "--host", self.service.host]
        return [*words, "--port", str(self.service.port), "--seed", str(options.seed)]

    def _server(self, folder: Path) -> list[str]:
        """Configuration and tokenizer are on its disk; weights come from the bucket, also when it starts again."""
        return [
            *(script("delta-sync"), "serve", str(folder / "policy"), "--bucket", self.run),
            *("--load-format", "delta_sync", "--poll-seconds", POLL_SECONDS, "--cache-dir", str(folder / "cache")),
            *("--host", ANY if self.site.isolated else HOST, "--port", str(self.server.port), *SERVE_ARGUMENTS),
        ]

    def _worker(self, options: Options, server: str) -> list[str]:
        return [
            *(sys.executable, "-m", f"{MODULE}worker", "--worker", "rollout"),
            *("--server", server, "--environment", f"http://{self.environment}"),
            *("--trajectories", self.trajectories, "--ahead", str(options.ahead)),
        ]


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """The same without the variables that name a proxy: a machine with its own network could not reach it."""
    return {name: value for name, value in environment.items() if not name.upper().endswith("_PROXY")}


def _port(site: Site, wanted: int) -> int:
    if site.isolated:
        return wanted
    with free_port() as port:
        return port
