"""What the demo says at its end."""

from rich.console import Console
from rich.text import Text

from examples.demo.orchestrate import Demo
from examples.demo.output import Output
from examples.demo.record import Record
from examples.demo.screen import kilobytes
from examples.demo.verdict import Verdict


def report(console: Console, demo: Demo, output: Output, failures: list[str]) -> None:
    """Print the verdict, the figures and, if there are any, the reasons for failure."""
    console.print()
    for text, holds in _claims(demo.verdict):
        mark = Text("✓", style="bold green") if holds else Text("✗", style="bold red")
        console.print(mark, Text(text), soft_wrap=True)
    for text in _figures(demo.record, demo.seconds):
        console.print(Text(text), soft_wrap=True)
    console.print(Text(f"written: {output.summary} and {output.picture}"), soft_wrap=True)
    for failure in failures:
        console.print(Text(f"FAILED: {failure}", style="bold red"), soft_wrap=True)


def _claims(verdict: Verdict) -> list[tuple[str, bool]]:
    fingerprint = verdict.fingerprints.get("server", "unknown")
    tokens, difference = verdict.compared_tokens, verdict.largest_logprob_difference
    return [
        (f"served weights bit-identical to the trainer's ({fingerprint})", verdict.weights_bit_identical),
        (f"greedy tokens equal to a freshly loaded vLLM's ({tokens} tokens)", verdict.tokens_equal),
        (f"their log-probs equal (largest difference {difference:g})", verdict.logprobs_equal),
    ]


def _figures(record: Record, seconds: float) -> list[str]:
    first, last = record.first_and_last_reward()
    payload, full = record.payload_bytes, record.full_bytes
    pause = record.pause_percentiles()
    paused = "unknown" if pause is None else f"{pause[0]:.1f} ms median, {pause[1]:.1f} ms p99"
    return [
        f"reward {first:.3f} → {last:.3f} over {record.versions} weight versions in {seconds:.0f} s",
        f"sent {kilobytes(payload)} instead of {kilobytes(full)}, {full / max(1, payload):.1f} times less: "
        f"{100 * record.changed_share:.1f} % of the weights changed per step",
        "  (a toy, with the learning rate it needs to learn in minutes, changes more of its bf16 weights per step",
        "  than LLM-size reinforcement learning, where it is about 1 %)",
        f"generation paused per version: {paused}",
        f"answers were sampled by weights {record.mean_lag():.2f} versions old on average",
        *_shown(record.shown_first, record.shown_last),
    ]


def _shown(first: list[list[object]], last: list[list[object]]) -> list[str]:
    pairs = zip(first, last, strict=True)
    said = [f"{word}: {before or 'nothing'} → {after or 'nothing'}" for (word, before, _), (_, after, _) in pairs]
    return ["answers before and after: " + ", ".join(said)] if said else []
