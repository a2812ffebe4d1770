"""`motet plan --rules`: the rules of the small trees of published calibrations, on the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from motet.cli.plan_inputs import VLLM
from motet.cli.terminal import table
from motet.twin.surrogate.rules import Rules, rules

STARVES = 0.5
"""Adapters starve by a rule whose probability is above."""


def rules_of(workers: Sequence[str]) -> dict[str, Rules]:
    """The rules of each `--worker`, by its profile. Raises UsageError for a kind that has none."""
    if not workers:
        raise click.UsageError(f"--rules: give a --worker: {VLLM}llama-3.1-8b@h100")
    found = {}
    for text in workers:
        profile = text.partition(",")[0]
        if not profile.startswith(VLLM):
            raise click.UsageError(f"--rules: {profile} has no rules; only published calibrations have some, {VLLM}NAME@GPU")
        try:
            found[profile] = rules(profile.removeprefix(VLLM))
        except ValueError as error:
            raise click.UsageError(f"--rules: {error}") from None
    return found


def show(console: Console, profile: str, of: Rules) -> None:
    """What the rules are, how good they are, and the rules themselves."""
    console.print(f"{profile}: {about(of)}")
    for made in (throughput_table(of), starvation_table(of)):
        console.print()
        console.print(made)


def about(of: Rules) -> str:
    """In a sentence: what the rules were learned from, how good they are, and where more is said."""
    return (
        f"learned from {of.simulated_runs:,} simulated runs and a random forest's answers to {of.forest_runs:,} others, with"
        f" prompts of {of.prompt_tokens:g} and answers of {of.output_tokens:g} tokens on average and --max-num-seqs {of.seats};"
        f" on {of.measured_runs:,} measured runs SMAPE of throughput is {of.smape_percent:.1f}% and F1 of starvation"
        f" {of.f1:.3f} (docs/planning.md, Rules)."
    )


def throughput_table(of: Rules) -> Table:
    """One row per rule."""
    made = table("tokens/s", "if", right=("tokens/s",))
    for conditions, tok_s in of.throughput.rules():
        made.add_row(f"{tok_s:,.0f}", _all_of(conditions))
    return made


def starvation_table(of: Rules) -> Table:
    """One row per rule."""
    made = table("adapters", "probability", "if", right=("probability",))
    for conditions, probability in of.starvation.rules():
        made.add_row(_verdict(probability), f"{probability:.0%}", _all_of(conditions))
    return made


def _all_of(conditions: Sequence[str]) -> str:
    return " and ".join(conditions) or "always"


def _verdict(probability: float) -> str:
    return "starve" if probability > STARVES else "are served"


def write(path: Path, found: dict[str, Rules]) -> None:
    """Write the rules as JSON, by profile."""
    tree = {
        profile: {
            "about": about(of),
            "throughput": [{"if": conditions, "tok_s": tok_s} for conditions, tok_s in of.throughput.rules()],
            "starvation": [
                {"if": conditions, "probability": probability, "starve": probability > STARVES}
                for conditions, probability in of.starvation.rules()
            ],
        }
        for profile, of in found.items()
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n")
