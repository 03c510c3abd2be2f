"""What a person sees: a live picture where standard output is a terminal, plain lines elsewhere."""

import time
from collections import deque
from typing import Any, Protocol

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from examples.demo.record import SMOOTH_STEPS, Record

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 60
PLAIN_EVERY = 10
SAMPLES_SHOWN = 5


class Screen(Protocol):
    """Where the demo reports to."""

    def phase(self, text: str) -> None:
        """A new phase begins."""

    def warm_up(self, step: int, chance: float, target: float) -> None:
        """One supervised step; ``chance`` is the probability of the right answer."""

    def step(self, event: dict[str, Any], record: Record) -> None:
        """One step of reinforcement learning, already in ``record``."""

    def close(self) -> None:
        """Nothing comes any more."""


def make_screen(console: Console, steps: int) -> Screen:
    """A live screen on a terminal, plain lines otherwise."""
    return LiveScreen(console, steps) if console.is_terminal else PlainScreen(console, steps)


def kilobytes(count: float) -> str:
    """``count`` bytes for people."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


class PlainScreen:
    """One line per event that matters."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._start = time.monotonic()

    def phase(self, text: str) -> None:
        self._say(text)

    def warm_up(self, step: int, chance: float, target: float) -> None:
        if step % PLAIN_EVERY == 0:
            self._say(f"warm-up {step:3d}  p(right) {chance:.3f} of {target}")

    def step(self, event: dict[str, Any], record: Record) -> None:
        number = event["step"]
        if self._steps > 5 * PLAIN_EVERY and number % PLAIN_EVERY != 0 and number > 1:
            return
        pause = f"{event['pauses_ms'][-1][1]:.1f} ms" if event["pauses_ms"] else "not seen"
        self._say(
            f"step {number:3d}  reward {np.mean(record.rewards()[-SMOOTH_STEPS:]):.3f}  "
            f"version {event['version']}  served {event['served']}  "
            f"changed {100 * event['changed'] / event['total']:.2f} %  "
            f"payload {kilobytes(event['payload_bytes'])} of {kilobytes(event['full_bytes'])}  "
            f"pause {pause}  lag {event['lag']:.2f}"
        )

    def close(self) -> None:
        return

    def _say(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._start:5.1f} s] {text}", highlight=False, markup=False)


class LiveScreen:
    """One panel that is redrawn in place."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._start = time.monotonic()
        self._phase = ""
        self._warm: tuple[int, float, float] | None = None
        self._event: dict[str, Any] | None = None
        self._record: Record | None = None
        self._samples: deque[list[Any]] = deque(maxlen=SAMPLES_SHOWN)
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def phase(self, text: str) -> None:
        self._phase = text

    def warm_up(self, step: int, chance: float, target: float) -> None:
        self._warm = (step, chance, target)

    def step(self, event: dict[str, Any], record: Record) -> None:
        self._event, self._record = event, record
        self._samples.append(event["sample"])

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = [self._headline()]
        if self._event is None and self._warm is not None:
            step, chance, target = self._warm
            row = Table.grid(padding=(0, 1))
            row.add_row("warm-up", ProgressBar(target, chance, 40), f"p(right) {chance:.3f} of {target}, step {step}")
            parts.append(row)
        if self._event is not None and self._record is not None:
            parts += [
                Text(),
                self._reward(),
                Text(),
                self._numbers(self._event, self._record),
                Text(),
                self._answers(),
            ]
        return Panel(Group(*parts), title="vllm-delta-sync: a trainer and a vLLM server, joined by a directory")

    def _headline(self) -> RenderableType:
        self._spinner.update(text=Text(f"{self._phase}   {time.monotonic() - self._start:.0f} s", style="bold"))
        return self._spinner

    def _reward(self) -> RenderableType:
        record = self._record
        rewards = record.rewards() if record else []
        means = [float(np.mean(rewards[max(0, i + 1 - SMOOTH_STEPS) : i + 1])) for i in range(len(rewards))]
        # More steps than columns: show every k-th, the newest always.
        stride = -(-len(means) // SPARK_WIDTH)
        shown = means[::-1][::stride][::-1]
        line = "".join(BARS[min(len(BARS) - 1, int(value * len(BARS)))] for value in shown)
        grid = Table.grid(padding=(0, 1))
        grid.add_row("reward", Text(line, style="green"), Text(f"{means[-1]:.3f}", style="bold green"))
        done = self._event["step"] if self._event else 0
        grid.add_row("steps", ProgressBar(self._steps, done, SPARK_WIDTH), f"{done} of {self._steps}")
        return grid

    def _numbers(self, event: dict[str, Any], record: Record) -> RenderableType:
        pauses = list(record.pauses_ms.values())
        pause = f"{pauses[-1]:.1f} ms (median {np.median(pauses):.1f})" if pauses else "none yet"
        ratio = event["full_bytes"] / max(1, event["payload_bytes"])
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            "trained",
            f"version {event['version']}",
            "changed",
            f"{100 * event['changed'] / event['total']:.2f} %",
        )
        grid.add_row(
            "served",
            f"version {event['served']}",
            "payload",
            f"{kilobytes(event['payload_bytes'])} of {kilobytes(event['full_bytes'])}, {ratio:.0f} times less",
        )
        grid.add_row("lag", f"{event['lag']:.2f} versions", "generation paused", pause)
        grid.add_row(
            "rollouts",
            f"{event['rollout_s']:.2f} s",
            "training, publishing",
            f"{event['train_s']:.2f} s, {event['publish_s']:.3f} s",
        )
        return grid

    def _answers(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        for word, text, reward in self._samples:
            mark = Text("✓", style="bold green") if reward else Text("✗", style="red")
            grid.add_row(Text(f"{word}>", style="dim"), Text(text[:12].ljust(12)), mark)
        return grid
