"""All commands of the checkout, under the names that cce_dist/needs/checkout.py lists."""

from __future__ import annotations

import typer

from benchmarks.cli.capture import capture_command
from benchmarks.cli.converge import converge_command
from benchmarks.cli.fidelity import fidelity_command
from benchmarks.cli.first_call import first_call_command
from benchmarks.cli.megatron import megatron_command
from benchmarks.cli.pipeline import pipeline_command
from benchmarks.cli.report import report

app = typer.Typer()
app.command("first-call")(first_call_command)
app.command("fidelity")(fidelity_command)
app.command("converge")(converge_command)
app.command("megatron")(megatron_command)
app.command("pipeline")(pipeline_command)
app.command("capture")(capture_command)
app.command("report")(report)
