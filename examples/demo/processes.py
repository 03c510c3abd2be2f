"""Processes of the demo, each under a warden in a session of its own: none survives it, however it ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

TERM_SECONDS = 6.0
"""How long a command may take to end by itself once it is asked to."""
WARDEN_SECONDS = TERM_SECONDS + 8.0
KILL_SECONDS = 30.0
TAIL_LINES = 25


class DemoError(Exception):
    """Something ended the demo; the message says what, and what to do."""


class Child:
    """One command under a warden.

    Attributes:
        name: for messages. log: file that gets its standard error, and its output unless that is piped.
        lines: its standard output if ``talk``. process: the warden, not the command itself.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        talk: bool = False,
    ) -> None:
        """Start ``command``.

        Args:
            environment: all of it; None for this process's.
            talk: give it pipes as standard input and output.
        """
        self.name = name
        self.log = log
        self._lifeline: int | None = None
        reading, writing = os.pipe()
        warden = [sys.executable, "-m", "examples.demo.warden", str(reading), str(TERM_SECONDS)]
        try:
            with log.open("ab") as errors:
                self.process = subprocess.Popen(
                    warden + command,
                    stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if talk else errors,
                    stderr=errors,
                    env=environment,
                    pass_fds=(reading,),
                    start_new_session=True,
                    text=True,
                )
        except OSError:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        self._lifeline = writing

    @property
    def lines(self) -> IO[str]:
        """Standard output of a child made with ``talk``."""
        if self.process.stdout is None:
            raise DemoError(f"{self.name} was started without pipes")
        return self.process.stdout

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def say(self, line: str) -> None:
        """Write a line to the standard input of a child made with ``talk``; one that is gone hears nothing."""
        if self.process.stdin is None:
            raise DemoError(f"{self.name} was started without pipes")
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return

    def wait(self, seconds: float) -> None:
        """Give it time to end by itself."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def ask_to_end(self) -> None:
        """Have its warden end it and all it started; returns at once."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def kill(self) -> None:
        """End it and all it started with SIGKILL, as a machine that fails does; returns when they are gone.

        Linux only.
        """
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for process in listing.read_text().split():
            os.killpg(int(process), signal.SIGKILL)
        self.wait(KILL_SECONDS)
        self.stop()

    def stop(self) -> None:
        """End it and all it started; returns when they are gone, after some 15 s at most."""
        self.ask_to_end()
        try:
            self.process.wait(WARDEN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                _close(pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _close(pipe: IO[str]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return


@contextmanager
def free_port(wanted: int | None = None) -> Iterator[int]:
    """A TCP port on the loopback address, held until the block ends: use it to choose, then start the server.

    Raises:
        DemoError: ``wanted`` is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise DemoError(f"port {wanted} is taken ({error.strerror}); give another with --port") from error
        yield int(probe.getsockname()[1])
