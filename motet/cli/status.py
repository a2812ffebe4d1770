"""`motet status`: shows the gateway, and the workers with their load as a scheduler sees them."""

from __future__ import annotations

from typing import Any

import click
from rich.markup import escape

from motet.cli.terminal import as_json_option, ask, connection, print_json, table, terminal

REFUSED_SHOWN = 10
LEFT = ("worker", "state", "engine", "device")
RIGHT = ("running", "waiting", "KV used", "adapter memory used", "adapters on device / host / placed")


@click.command()
@connection
@as_json_option
def status(url: str, as_json: bool) -> None:
    """Show workers, queues and memory of a running mesh. Exits 1 when requests cannot be served.

    \b
      motet status
      motet status --json | jq '.workers[] | {worker_id, running, waiting}'
    """

    answer = ask(url, "GET", "/v1/status")
    reasons = [*answer["gateway"]["not_ready"], *([answer["error"]] if answer["error"] else [])]
    if as_json:
        print_json(answer)
    else:
        _print(answer, reasons)
    if reasons:
        raise SystemExit(1)


def _print(answer: dict[str, Any], reasons: list[str]) -> None:
    console, gateway = terminal(), answer["gateway"]
    console.print(
        f"{answer['base_model']} with {counted(answer['adapters'], 'adapter')}; "
        f"{gateway['id']} owns {counted(gateway['inflight'], 'request')}; scheduler {answer['scheduler_id'] or 'away'}"
    )
    for reason in reasons:
        console.print(f"[red]not ready:[/] {escape(reason)}", highlight=False)
    workers = table(*LEFT, *RIGHT, right=RIGHT)
    for worker in answer["workers"]:
        workers.add_row(
            worker["worker_id"],
            "draining" if worker["draining"] else "silent" if worker["stale"] else "ready",
            _engine(worker),
            worker["device"],
            f"{worker['running']} / {worker['max_running']}",
            f"{worker['waiting'] + worker['in_flight']} / {worker['max_waiting']}",
            _used(worker, "kv_blocks"),
            _used(worker, "adapter_bytes"),
            f"{worker['adapters_on_device']} / {worker['adapters_on_host']} / {worker['adapters_placed']}",
        )
    console.print(workers)
    for worker in (one for one in answer["workers"] if one.get("merged")):
        name = worker["merged_name"] or worker["merged"][:12]
        console.print(
            f"{worker['worker_id']} has {escape(name)} merged into its weights: {worker['merged_share']:.0%} of its requests",
            highlight=False,
        )
    for line in [*asleep_lines(gateway), *demand_lines(answer.get("demand") or [])]:
        console.print(escape(line), highlight=False)
    if moves := answer.get("rebalance"):
        console.print(escape(f"{answer['scheduler_id']}: rebalance {moves['state']} ({moves['why']})"), highlight=False)
    for line in mechanism_lines(answer["workers"]):
        console.print(escape(line), highlight=False)
    for line in kernel_lines(answer["workers"]):
        console.print(f"[yellow]{escape(line)}[/]", highlight=False)
    for line in refused_lines(answer.get("refused_adapters") or {}):
        console.print(f"[yellow]{escape(line)}[/]", highlight=False)
    told = " ".join(reasons)
    for absent in (one for one in answer["absent_workers"] if one["worker_id"] not in told):
        console.print(f"[yellow]not serving:[/] {escape(absent['summary'])}", highlight=False)


def counted(count: int, noun: str) -> str:
    """`count` and the noun in its number: "1 adapter", "2 adapters"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def asleep_lines(gateway: dict[str, Any]) -> list[str]:
    """Lines on a base model that has no worker since nobody asks."""
    lines = ["asleep: nobody asks, so no worker is needed; the next request has one started"] if gateway.get("asleep") else []
    if waiting := gateway.get("parked"):
        lines.append(f"waiting: {counted(waiting, 'request')} at {gateway['id']} until a first worker serves")
    return lines


def demand_lines(demand: list[dict[str, Any]]) -> list[str]:
    """A line for each base model: what is asked of all schedulers, and whose reports are missing."""
    lines = []
    for one in demand:
        line = (
            f"{one['base_model']} is asked for {one['requests_s']:.3g} requests/s of {counted(one['adapters'], 'adapter')}, "
            f"{one['prompt_tokens_s']:,.0f} + {one['output_tokens_s']:,.0f} tokens/s"
        )
        line += f", {one['refused_s']:.3g} refused/s" if one["refused_s"] else ""
        line += f"; without the reports of {', '.join(one['missing'])}" if one["missing"] else ""
        lines.append(line)
    return lines


def mechanism_lines(workers: list[dict[str, Any]]) -> list[str]:
    """A line for each worker: which mechanisms turn on by themselves, whether they are on now, and why."""
    lines = []
    for worker in workers:
        told = [f"{name} {one['state']} ({one['why']})" for name, one in sorted(worker.get("mechanisms", {}).items())]
        if told:
            lines.append(f"{worker['worker_id']}: {'; '.join(told)}")
    return lines


def kernel_lines(workers: list[dict[str, Any]]) -> list[str]:
    """A line for each worker that computes more slowly than its machine could, with the remedy."""
    noted = [worker for worker in workers if worker.get("kernels_note")]
    return [f"{worker['worker_id']} runs on kernels:{worker['kernels']}: {worker['kernels_note']}" for worker in noted]


def refused_lines(refused: dict[str, Any], most: int = REFUSED_SHOWN) -> list[str]:
    """Lines on the adapters of --adapters-dir that are not served, from the gateway's answer; none if all are."""
    total, listed = refused.get("total", 0), refused.get("adapters", [])[:most]
    if not total:
        return []
    shown = [f"  {one['name']}: {one['reason']}" for one in listed]
    if left := total - len(listed):
        shown.append(f"  and {left:,} more: see `motet adapters list` and the registry's log")
    return [f"{counted(total, 'adapter')} of --adapters-dir refused:", *shown]


def _engine(worker: dict[str, Any]) -> str:
    """The engine's name, the quantization of its base, the type of its KV cache, its kernels, and the worker's capabilities."""
    quantization, kv = worker.get("quantization", "none"), worker.get("kv_cache_dtype", "auto")
    bits = ([] if quantization == "none" else [quantization]) + ([] if kv == "auto" else [f"kv:{kv}"])
    if kernels := worker.get("kernels"):
        bits.append(f"kernels:{kernels}")
    return " ".join([worker["engine"], *bits, *(f"+{word}" for word in worker.get("capabilities", ()))])


def _used(worker: dict[str, Any], what: str) -> str:
    if what == "kv_blocks" and "draws" in worker.get("capabilities", ()):
        return "-"  # pictures need no KV blocks; its number only says that there is always room
    total = worker[f"{what}_total"]
    return f"{1 - worker[f'{what}_free'] / total:.0%}" if total else "-"
