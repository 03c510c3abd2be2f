"""Machines and sockets of the three-machines example, without vLLM: real namespaces where root may make them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from examples.demo.processes import Child, DemoError
from examples.fleet.links import Links
from examples.fleet.probe import far_end
from examples.three_machines import machines as machines_module
from examples.three_machines import sockets
from examples.three_machines.__main__ import parse_options
from examples.three_machines.machines import PREFIX, Machine, Site, machines, sweep, why_not
from examples.three_machines.reach import attempt
from examples.three_machines.settings import ENVIRONMENT, MACHINES, ROLLOUT, TRAINER
from examples.three_machines.sockets import End, Rules, Socket, Watch, descendants, given, read_table
from examples.three_machines.wiring import Wiring, without_proxy
from tests.support.running import mentioning
from tests.support.s3_store import S3Server

SECONDS = 60
NETWORKS = ("loopback",) if why_not() else ("loopback", "namespaces")
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connections = [server.accept()]
sys.stdin.read()
"""
CONNECT = """
import socket, sys
try:
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    print("connected", flush=True)
except OSError as error:
    print(error.strerror, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=NETWORKS)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with machines(MACHINES, request.param) as made:
        assert made.isolated is (request.param == "namespaces")
        yield made


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[Child, str]]]:
    """Starts a program on a machine; gives it and the first line that it says."""
    with ExitStack() as stack:

        def run(machine: Machine, program: str, *arguments: str) -> tuple[Child, str]:
            command = machine.command(sys.executable, "-c", program, *arguments)
            child = stack.enter_context(Child(machine.name, command, tmp_path / f"{machine.name}.log", talk=True))
            return child, child.lines.readline().strip()

        yield run


@contextmanager
def watching(site: Site, rules: dict[str, Rules] | None = None) -> Iterator[Watch]:
    watch = Watch(site.machines, {name: Rules() for name in MACHINES} | (rules or {}))
    yield watch
    watch.look()


def leftovers(pid: int) -> list[str]:
    """Namespaces and interfaces that a process has made and not removed."""
    said = [
        subprocess.run(["ip", *words], capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        for words in (["netns", "list"], ["-o", "link"])
    ]
    return [line for text in said for line in text.splitlines() if f"{PREFIX}-{pid}-" in line]


def test_a_machine_with_its_own_network_has_one_way_out(start: Callable[..., tuple[Child, str]]) -> None:
    for network in NETWORKS[1:]:
        with machines(MACHINES, network) as site:
            trainer, rollout = site[TRAINER], site[ROLLOUT]
            with socket.create_server(("0.0.0.0", 0)) as outside:
                port = outside.getsockname()[1]
                ways = [
                    start(trainer, CONNECT, address, str(port))[1]
                    for address in (trainer.gateway, rollout.gateway, rollout.address, "127.0.0.1", "8.8.8.8")
                ]
            assert ways == [
                "connected",
                *["Network is unreachable"] * 2,
                "Connection refused",
                "Network is unreachable",
            ]
        assert leftovers(os.getpid()) == []


def test_attempts_tell_a_way_from_none(site: Site, start: Callable[..., tuple[Child, str]]) -> None:
    _, port = start(site[ROLLOUT], LISTEN, site[ROLLOUT].address)
    there = attempt(site[TRAINER], site[ROLLOUT], int(port))
    assert there.reached is not site.isolated
    assert there.reason == ("Network is unreachable" if site.isolated else "it answers")
    assert attempt(site[ROLLOUT], site[ROLLOUT], int(port)).reached


def test_who_may_not_make_namespaces_shares_loopback_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with machines(MACHINES) as site:
        assert (site.isolated, site.shared) == (False, why_not())
        assert {machine.address for machine in site.machines.values()} == {"127.0.0.1"}
    with pytest.raises(DemoError, match=f"namespaces is not possible: {why_not()}; use auto"):
        with machines(MACHINES, "namespaces"):
            pass
    monkeypatch.setenv("PATH", "")
    assert why_not() == "there is no ip command (iproute2)"


MAKE = f"""
import sys
from examples.three_machines.machines import machines
with machines({MACHINES!r}, "namespaces"):
    print("made", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("network", NETWORKS[1:])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_namespaces_go_with_whoever_made_them(network: str, number: signal.Signals) -> None:
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)" + MAKE
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        assert len(leftovers(process.pid)) == 2 * len(MACHINES)
        process.send_signal(number)
        process.wait(SECONDS)
    if number == signal.SIGKILL:
        sweep()
    assert leftovers(process.pid) == []


def test_sweeping_leaves_those_alone_whose_maker_lives() -> None:
    for network in NETWORKS[1:]:
        with machines(MACHINES, network) as site:
            sweep()
            assert len(leftovers(os.getpid())) == 2 * len(MACHINES)
            assert attempt(site[TRAINER], site[TRAINER], 1).reason == "Connection refused"


def test_addresses_in_use_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = machines_module.NETWORK.network_address + 256 * (os.getpid() % 256)
    monkeypatch.setattr(machines_module, "_do", lambda *words: f"inet {first}/24 brd x\ndefault via 10.0.0.1")
    assert str(machines_module._free_network().network_address) != str(first)
    monkeypatch.setattr(machines_module, "_do", lambda *words: f"{machines_module.NETWORK} dev eth0")
    with pytest.raises(DemoError, match=r"no free addresses in 10\.77\.0\.0/16"):
        machines_module._free_network()


def test_links_lead_out_of_a_machine(tmp_path: Path, start: Callable[..., tuple[Child, str]], site: Site) -> None:
    """From a machine through its link to another's address, and to who listens on loopback of where links begin."""
    with Links(100e6, 0.01, tmp_path / "links.log") as links, far_end() as far:
        _, port = start(site[ENVIRONMENT], LISTEN, site[ENVIRONMENT].address)
        rollout = site[ROLLOUT]
        entry = links.forward(ROLLOUT, int(port), host=rollout.gateway, target=site[ENVIRONMENT].address)
        assert start(rollout, CONNECT, rollout.gateway, str(entry))[1] == "connected"
        store = links.forward(TRAINER, far, host=site[TRAINER].gateway)
        command = [sys.executable, "-m", "examples.fleet.probe", site[TRAINER].gateway, str(store), "100e6"]
        done = subprocess.run(
            site[TRAINER].command(*command), capture_output=True, text=True, timeout=SECONDS, check=True
        )
        assert '"round_trip_ms": 1' in done.stdout
        assert links.passed()[TRAINER]["down"] > 100e6 / 8 / 2


@pytest.mark.parametrize(
    "arguments", [["--versions", "0"], ["--mbit", "nan"], ["--network", "moon"], ["--max-staleness", "1.5"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2


def test_help_says_what_it_does() -> None:
    command = [sys.executable, "-m", "examples.three_machines", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert "--max-staleness" in done.stdout
    assert "Exit status" in done.stdout


@pytest.mark.parametrize("network", NETWORKS)
def test_an_interrupt_ends_every_process_and_namespace(tmp_path: Path, network: str) -> None:
    out = tmp_path / "out"
    # A background shell takes SIGINT away from what it starts.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('examples.three_machines', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, "--network", network, "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "the link of rollout" in line:
                break
        assert len(leftovers(process.pid)) == (2 * len(MACHINES) if network == "namespaces" else 0)
        assert mentioning(out) > {process.pid}
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
        assert process.wait(SECONDS) == 130, said
    assert "interrupted; all processes have ended" in said
    # What a child of theirs has started is killed with it, and is gone a moment later.
    deadline = time.monotonic() + SECONDS
    while mentioning(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mentioning(out) == set()
    assert leftovers(process.pid) == []


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000 100 0 0 10 0
   1: 02014D0A:A3E2 01014D0A:0050 02 00000000:00000000 00:00000000 00000000     0        0 4712 1 0000 100 0 0 10 0
   2: 02014D0A:A3E4 01014D0A:0050 06 00000000:00000000 00:00000000 00000000     0        0 0 1 0000 100 0 0 10 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 00000000000000000000000000000000:1F40 00000000000000000000000000000000:0000 0A 00000000:00000000 00:0 0 0 0 13 1
   1: 0000000000000000FFFF00000100007F:1F40 0000000000000000FFFF00000100007F:A3E2 01 00000000:00000000 00:0 0 0 0 14 1
"""


def test_the_kernels_tables_are_read() -> None:
    assert read_table("tcp", TCP) == [
        (Socket("tcp", End("127.0.0.1", 8000), End("0.0.0.0", 0), "listen"), 4711),
        (Socket("tcp", End("10.77.1.2", 41954), End("10.77.1.1", 80), "attempted"), 4712),
        (Socket("tcp", End("10.77.1.2", 41956), End("10.77.1.1", 80), "ending"), 0),
    ]
    (listening, _), (mapped, inode) = read_table("tcp6", TCP6)
    assert listening.local == End("::", 8000)
    assert (mapped.local, mapped.remote, inode) == (End("127.0.0.1", 8000), End("127.0.0.1", 41954), 14)


def test_a_connection_between_trainer_and_server_is_found(start: Callable[..., tuple[Child, str]]) -> None:
    with machines(MACHINES, "loopback") as site, watching(site) as watch:
        server, port = start(site[ROLLOUT], LISTEN, "0.0.0.0")
        client, said = start(site[TRAINER], CONNECT, "127.0.0.1", port)
        assert said == "connected"
        watch.runs(ROLLOUT, server)
        watch.runs(TRAINER, client)
    assert watch.looks == 1
    assert len(watch.found) == 2
    assert any(text.startswith("trainer and rollout are joined: tcp 127.0.0.1:") for text in watch.found)


def test_an_attempt_that_nobody_has_accepted_is_found_too(start: Callable[..., tuple[Child, str]]) -> None:
    with machines(MACHINES, "loopback") as site, watching(site) as watch:
        server, port = start(site[ROLLOUT], LISTEN.replace("server.accept()", "server"), "127.0.0.1")
        watch.runs(ROLLOUT, server)
        watch.runs(TRAINER, start(site[TRAINER], CONNECT, "127.0.0.1", port)[0])
    assert [text for text in watch.found if text.startswith("trainer and rollout are joined")]


def test_a_connection_to_a_place_that_no_rule_names_is_found(
    site: Site, start: Callable[..., tuple[Child, str]]
) -> None:
    trainer = site[TRAINER]
    with socket.create_server((trainer.gateway, 0)) as known, socket.create_server((trainer.gateway, 0)) as unknown:
        ends = [End(trainer.gateway, listener.getsockname()[1]) for listener in (known, unknown)]
        with watching(site, {TRAINER: Rules(frozenset(ends[:1]))}) as watch:
            watch.runs(TRAINER, start(trainer, CONNECT, trainer.gateway, str(ends[0].port))[0])
        assert (watch.looks, watch.seen[TRAINER], dict(watch.found)) == (1, 1, {})
        with watching(site, {TRAINER: Rules(frozenset(ends[:1]))}) as watch:
            watch.runs(TRAINER, start(trainer, CONNECT, trainer.gateway, str(ends[1].port))[0])
    (text,) = watch.found
    assert text.startswith("trainer is connected to what it should not know: tcp ")
    assert f"→ {ends[1]} (" in text


def test_what_a_machine_has_with_itself_is_its_own_affair(site: Site, start: Callable[..., tuple[Child, str]]) -> None:
    rollout = site[ROLLOUT]
    with watching(site) as watch:
        server, port = start(rollout, LISTEN, "0.0.0.0")
        for address in {"127.0.0.1", rollout.address}:
            watch.runs(ROLLOUT, start(rollout, CONNECT, address, port)[0])
        watch._children[ROLLOUT]["server"] = server
    assert watch.seen[ROLLOUT] >= 2
    assert dict(watch.found) == {}


def test_what_a_process_was_given_is_what_it_has(start: Callable[..., tuple[Child, str]]) -> None:
    with machines(MACHINES, "loopback") as site:
        child, _ = start(site[TRAINER], "print(1, flush=True); import sys; sys.stdin.read()", "http://10.0.0.1:8000")
        texts = given(descendants([child.process.pid]))
    assert len(texts) == 2
    assert all("http://10.0.0.1:8000" in text and f"PATH={os.environ['PATH']}" in text for text in texts.values())


def test_looks_that_failed_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(MACHINES, "loopback") as site:
        watch = Watch(site.machines, {name: Rules() for name in MACHINES})
        watch.start()
        watch.stop()
        assert watch.looks >= 1
        monkeypatch.setattr(sockets, "_rows", lambda folder: int("not a number"))
        watch = Watch(site.machines, {name: Rules() for name in MACHINES})
        watch.start()
        with pytest.raises(ValueError, match="not a number"):
            watch.stop()


def test_an_address_in_the_wrong_hands_is_named(site: Site) -> None:
    trainer, rollout, environment = (site[name] for name in MACHINES)
    wiring = Wiring(
        site=site,
        stores={TRAINER: End(trainer.gateway, 1111), ROLLOUT: End(rollout.gateway, 1112)},
        probes={TRAINER: End(trainer.gateway, 1113), ROLLOUT: End(rollout.gateway, 1114)},
        environment=End(rollout.gateway, 2222),
        service=End(environment.address, 7000),
        server=End(rollout.address, 8000),
        store=S3Server("http://127.0.0.1:3333", 1),
        far=0,
        run="s3://runs/run",
        trajectories="s3://runs/games",
        full="s3://runs/full",
    )
    innocent = [
        f"AWS_ENDPOINT_URL=http://{wiring.stores[TRAINER]}",
        "HTTP_PROXY=http://127.0.0.1:3128",
        "s3://runs/run",
    ]
    assert wiring.told(TRAINER, innocent) == []
    near = "--server http://127.0.0.1:8000 --environment http://" + str(wiring.environment)
    assert wiring.told(ROLLOUT, [near, f"http://{wiring.stores[ROLLOUT]}"]) == []
    assert wiring.told(TRAINER, [f"x\n--server\nhttp://{wiring.server}/v1"])[-1] == f"trainer was given {wiring.server}"
    assert wiring.told(TRAINER, [near]) != []
    assert wiring.told(ROLLOUT, [f"http://{wiring.stores[TRAINER]}"]) == [f"rollout was given {wiring.stores[TRAINER]}"]
    if site.isolated:
        assert wiring.told(ROLLOUT, [f"tcp {trainer.address}"]) == [f"rollout was given {trainer.address}"]


def test_programs_of_a_machine_use_no_proxy() -> None:
    given_here = {"HTTP_PROXY": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1", "PATH": "/bin"}
    assert without_proxy(given_here) == {"PATH": "/bin"}
