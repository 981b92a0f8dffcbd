"""The demo's face in a terminal: text per request as it arrives, and a table at the end."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpupack.demo.prompts import PROMPTS
from gpupack.demo.receiver_process import ReceiverProcess
from gpupack.demo.run import DemoReport


class LiveTexts:
    """A table of all requests that fills as text arrives; without a terminal, a line per finished request."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(console=console, auto_refresh=False, vertical_overflow="crop") if console.is_terminal else None
        )
        self._told: set[str] = set()

    def __enter__(self) -> LiveTexts:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, receiver: ReceiverProcess) -> None:
        """Show what has arrived since the last call."""
        if not receiver.events() and self._live is not None:
            return
        if self._live is not None:
            self._live.update(self._table(receiver), refresh=True)
            return
        for rid, reason in receiver.finish_reasons.items():
            if rid not in self._told:
                self._told.add(rid)
                self._console.print(f"[bold]{rid}[/bold] ({reason['type']}):", Text(receiver.texts[rid]))

    def _table(self, receiver: ReceiverProcess) -> Table:
        done = len(receiver.finish_reasons)
        table = Table(title=f"{done} of {len(PROMPTS)} requests done", expand=True, show_lines=False)
        table.add_column("request", no_wrap=True)
        table.add_column("text")
        table.add_column("end", no_wrap=True)
        for prompt in PROMPTS:
            text = receiver.texts.get(prompt.rid, "")
            reason = receiver.finish_reasons.get(prompt.rid)
            table.add_row(prompt.rid, Text(text.replace("\n", " ")[-160:]), reason["type"] if reason else "")
        return table


def print_report(console: Console, report: DemoReport) -> None:
    """The closing table."""
    table = Table(title="gpupack demo", show_header=False)
    share = report.pack_us_median / report.step_us_median
    for name, value in (
        ("model, device, backend", f"{report.model}, {report.device}, {report.backend}"),
        ("requests", str(report.requests)),
        ("output tokens", str(report.output_tokens)),
        ("rows sent", str(report.rows)),
        ("bytes per token on the wire", f"{report.bytes_per_token}"),
        ("median time for output", f"{report.pack_us_median:.0f} us"),
        ("share of the step", f"{share:.2%}"),
        ("verified", str(report.verified).lower()),
    ):
        table.add_row(name, value)
    console.print(table)
