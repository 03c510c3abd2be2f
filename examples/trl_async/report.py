"""What the example says at its end, beside what the demo says."""

from rich.console import Console
from rich.text import Text

from examples.demo import report as demo_report
from examples.demo.output import Output
from examples.trl_async.orchestrate import TrlRun


def report(console: Console, run: TrlRun, output: Output, failures: list[str]) -> None:
    """Print the verdict, the figures and, if there are any, the reasons for failure."""
    record, proof = run.record, run.verdict
    console.print()
    for text, holds in (
        (f"each weight sync of TRL is one version in the bucket ({record.versions})", proof.each_sync_is_a_version),
        ("the metrics of each weight sync are in TRL's own log", proof.sync_metrics_in_trls_log),
    ):
        mark = Text("✓", style="bold green") if holds else Text("✗", style="bold red")
        console.print(mark, Text(text), soft_wrap=True)
    median, longest = record.weight_sync_seconds()
    for text in (
        f"a weight sync kept training waiting for {1e3 * median:.0f} ms in the median, {1e3 * longest:.0f} ms at most",
        f"by TRL's own count batches were {record.mean_trl_lag():.2f} syncs old",
    ):
        console.print(Text(text), soft_wrap=True)
    demo_report.report(console, run, output, failures)
