"""A plan's file: it is read as it was written, and a malformed one is refused with line and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motet.shared.json_files import FileError
from motet.shared.model import Slo
from motet.shared.plan import (
    VERSION,
    Checked,
    Plan,
    PlannedAdapter,
    PlannedKind,
    PlannedObjective,
    PlannedWorker,
    read_plan,
    write_plan,
)

PLAN = Plan(
    motet_plan=VERSION,
    objective="workers",
    headroom=0.1,
    survive=1,
    objectives=(PlannedObjective(slo=Slo(slo_class="chat", ttft_slo_ms=500.0, tpot_slo_ms=50.0), share=0.95),),
    kinds=(PlannedKind(name="a10", cost=0.6, most=8),),
    workers=(
        PlannedWorker(
            kind="a10",
            adapters=(PlannedAdapter(name="sql", rank=16, rate=2.5), PlannedAdapter(name="base", rank=0, rate=0.0)),
            flags="--max-loras 64",
            s_max=128,
            kv_tokens=20_000,
            adapter_bytes=1 << 30,
            adapter_share=0.25,
            busy=0.7,
            in_use=3.2,
            limit="KV",
            attained=0.97,
        ),
    ),
    cost=0.6,
    bound=0.8,
    checked=Checked(
        seeds=3,
        seconds=1800.0,
        attained=0.97,
        worst_adapter="sql",
        worst_attained=0.96,
        valid=True,
        holds_to=1.2,
        breaks_first=1,
    ),
)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", PLAN)
    assert read_plan(tmp_path / "plan.json") == PLAN


def test_a_file_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", PLAN)
    (worker,) = json.loads((tmp_path / "plan.json").read_text())["workers"]
    assert "a_max" not in worker and "ttft_p99_ms" not in worker


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_plan(path, PLAN)
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree, indent=2))

    return write


def line_with(path: Path, text: str) -> int:
    return next(at for at, line in enumerate(path.read_text().splitlines(), start=1) if text in line)


@pytest.mark.parametrize(
    ("write", "at", "field", "reason"),
    [
        (changed(lambda plan: plan.pop("motet_plan")), "{", "motet_plan", "version None; this program reads version 1"),
        (changed(lambda plan: plan.update(motet_plan=2)), '"motet_plan"', "motet_plan", "version 2"),
        (changed(lambda plan: plan.update(color="red")), "{", "", "unknown field `color`"),
        (changed(lambda plan: plan.update(headroom=-1)), '"headroom"', "headroom", ">= 0"),
        (changed(lambda plan: plan.update(survive=1.5)), '"survive"', "survive", "Expected `int`"),
        (changed(lambda plan: plan.update(workers=[])), "{", "workers", "there must be at least one"),
        (changed(lambda plan: plan.update(objectives=[])), "{", "objectives", "there must be at least one"),
        (changed(lambda plan: plan["objectives"][0].update(share=1.2)), '"share"', "objectives[0].share", "<= 1"),
        (changed(lambda plan: plan["kinds"][0].update(most=-1)), '"most"', "kinds[0].most", ">= 0"),
        (changed(lambda plan: plan["workers"][0].pop("flags")), '"workers"', "workers[0]", "required field `flags`"),
        (changed(lambda plan: plan["workers"][0].update(busy="very")), '"busy"', "workers[0].busy", "Expected `float`"),
        (changed(lambda plan: plan["workers"][0].update(attained=2)), '"attained"', "workers[0].attained", "<= 1"),
        (
            changed(lambda plan: plan["workers"][0].update(kind="h100")),
            '"workers"',
            "workers[0].kind",
            "'h100' is none of kinds",
        ),
        (changed(lambda plan: plan["workers"][0].update(adapters=[])), '"workers"', "workers[0].adapters", "at least one"),
        (
            changed(lambda plan: plan["workers"][0]["adapters"][1].update(rate=-0.1)),
            '"rate"',
            "workers[0].adapters[1].rate",
            ">= 0",
        ),
        (changed(lambda plan: plan["checked"].pop("seeds")), '"checked"', "checked", "required field `seeds`"),
    ],
)
def test_a_malformed_plan_is_refused_with_line_and_field(
    tmp_path: Path, write: Callable[[Path], None], at: str, field: str, reason: str
) -> None:
    path = tmp_path / "plan.json"
    write(path)
    with pytest.raises(FileError) as refused:
        read_plan(path)
    assert (refused.value.line, refused.value.field) == (line_with(path, at), field)
    assert reason in str(refused.value)


@pytest.mark.parametrize(("text", "line"), [("", 1), ("{", 1), ('{\n"motet_plan": 1,\n}', 3)])
def test_what_is_no_json_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(FileError, match="not JSON") as refused:
        read_plan(tmp_path / "plan.json")
    assert refused.value.line == line


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_plan(tmp_path / "nowhere.json")
