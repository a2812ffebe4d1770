"""`motet plan` from end to end: its output, its files, its exit status and its errors."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from motet.cli.main import cli
from motet.shared.plan import read_plan
from motet.shared.profile import write_profile
from motet.twin.profile import a10_llama2_7b
from motet.twin.surrogate.rules import rules

LLAMA = "vllm:llama-3.1-8b@h100"
SLO = "standard:ttft=2000,tpot=100"
QUICK = ("--seeds", "1", "--minutes", "2")
ADAPTERS = "name,rank,rate\nsql,16,1.5\nlaw,8,0.5\nmail,8,0.25\n"


def plan(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, words)])


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    path = tmp_path / "adapters.csv"
    path.write_text(ADAPTERS)
    return path


@pytest.fixture
def question(adapters: Path) -> tuple[str | Path, ...]:
    """A load that one worker serves easily."""
    return ("--adapters", adapters, "--worker", LLAMA, "--slo", SLO)


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


def one_line(result: Result) -> str:
    """The output without the line breaks of a narrow terminal."""
    return " ".join(result.output.split())


# ---- what is printed


def test_a_plan_says_what_was_asked_what_is_needed_what_was_found_and_how_to_start(question: tuple[str | Path, ...]) -> None:
    result = plan(*question, *QUICK)
    text = one_line(result)
    assert result.exit_code == 0, result.output
    assert text.startswith("3 adapters (ranks 8, 16), 2.25 requests/s, 25")
    assert "standard: TTFT 2000 ms, TPOT 100 ms, 99%" in text
    assert f"1 worker ({LLAMA}), cost 1 per hour" in text
    assert "No plan can need fewer than 1.00 workers under the same law." in text
    assert "Checked in the twin: 1 seed x 2 min, attained 100.00%" in text
    assert "holds up to 1.50 x this load and beyond" in text
    flags = text.split(f"start worker 1 ({LLAMA}) with: ")[1]
    assert re.fullmatch(r"--enable-lora --max-loras (\d+) --max-lora-rank 16 --max-cpu-loras \1 --max-num-seqs 256", flags)


def test_without_a_check_nothing_is_simulated_and_the_plan_says_so(question: tuple[str | Path, ...]) -> None:
    text = one_line(plan(*question, "--no-check"))
    assert "Not simulated (--no-check)" in text and "Checked in the twin" not in text


def test_seats_of_vllm_reach_the_flags(adapters: Path) -> None:
    result = plan("--adapters", adapters, "--worker", f"{LLAMA},seats=32", "--slo", SLO, "--no-check")
    assert "--max-num-seqs 32" in one_line(result)


def test_native_workers_are_planned_from_their_profile(tmp_path: Path, adapters: Path) -> None:
    write_profile(tmp_path / "a10.json", a10_llama2_7b())
    result = plan(
        "--adapters", adapters, "--worker", f"{tmp_path / 'a10.json'},cost=0.6", "--slo", SLO, "--rate", "0.4", *QUICK
    )
    assert result.exit_code == 0, result.output
    assert "start worker 1 (a10) with: --max-running 64 --max-loras 64 --max-lora-rank 128" in one_line(result)
    assert "cost 0.6 per hour" in one_line(result)


def test_a_plan_that_survives_a_loss_says_what_is_attained_after_it(question: tuple[str | Path, ...], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = plan(*question, *QUICK, "--survive", "1", "--json", file)
    assert result.exit_code == 0, result.output
    assert "2 workers" in one_line(result) and "without the most loaded workers 100.00%" in one_line(result)
    assert "fewer than 2.00 workers" in one_line(result), "one for the load and one to lose"
    checked = read_plan(file).checked
    assert checked is not None and checked.after_loss == 1.0


def test_changes_have_a_row_each(question: tuple[str | Path, ...]) -> None:
    changes = ("rate=2", "rate=60", "lose=1", f"worker={LLAMA},seats=16", "slo=standard:tpot=200", "slo=standard:tpot=1")
    result = plan(*question, "--no-check", *(word for change in changes for word in ("--what-if", change)))
    found = lines(result)
    rows = {change: next(line for line in found if line.strip().startswith(change)) for change in changes}
    assert rows["rate=2"].split()[1] == "1" and int(rows["rate=60"].split()[1]) > 1
    assert "the plan has only 1 workers" in one_line(result)
    assert "an idle worker needs" in one_line(result), "no worker has a time per token of 1 ms"


def test_an_adapter_is_explained(question: tuple[str | Path, ...]) -> None:
    text = one_line(plan(*question, "--no-check", "--explain", "law"))
    assert "law: rank 8, 0.5 requests/s of 25" in text
    assert f"On worker 1 ({LLAMA}): " in text


def test_a_recorded_load_is_planned_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    saved = CliRunner().invoke(
        cli,
        [
            "simulate",
            "--duration-s",
            "60",
            "--rate",
            "3",
            "--adapters",
            "5",
            "--ranks",
            "8,16",
            "--save-trace",
            str(trace),
            "--json",
        ],
    )
    assert saved.exit_code == 0, saved.output
    result = plan("--trace", trace, "--worker", LLAMA, "--slo", SLO, "--no-check")
    assert result.exit_code == 0, result.output
    requests = len(trace.read_text().splitlines())
    asked = float(one_line(result).split(" requests/s")[0].rsplit(" ", 1)[1])
    assert one_line(result).startswith("5 adapters") and asked == pytest.approx(requests / 60, rel=0.3)


# ---- what is written


def test_a_plan_is_written_and_checked_on_another_load(question: tuple[str | Path, ...], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    lines(plan(*question, "--no-check", "--json", file))
    found = read_plan(file)
    assert [adapter.name for adapter in found.workers[0].adapters] == ["sql", "law", "mail"]
    assert json.loads(file.read_text())["motet_plan"] == 1

    today = tmp_path / "today.csv"
    today.write_text(ADAPTERS + "new,8,0.75\n")
    result = plan("--check", file, "--adapters", today, "--worker", LLAMA, "--slo", SLO, *QUICK)
    assert result.exit_code == 0, result.output
    assert "25.0% of the requests are on adapters that the plan does not have." in one_line(result)
    assert "attained 100.00%" in one_line(result)


def test_a_plan_that_does_not_hold_on_a_load_ends_with_status_1(question: tuple[str | Path, ...], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    lines(plan(*question, "--no-check", "--json", file))
    result = plan("--check", file, *question, "--rate", "40", *QUICK)
    assert result.exit_code == 1
    assert "NOT within the objectives" in one_line(result)
    assert "Error: the plan does not hold on this load" in one_line(result)


class Page(HTMLParser):
    """The tags and the addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("data:")
        ]


def test_the_page_has_the_plan_and_its_pictures_and_fetches_nothing(question: tuple[str | Path, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "plan.html"
    lines(plan(*question, "--no-check", "--html", page))
    found = Page(page.read_text())
    assert found.fetched == [] and "script" not in found.tags
    assert found.tags.count("table") == 1 and found.tags.count("figure") + found.tags.count("img") >= 2
    assert f"start worker 1 ({LLAMA}) with" in page.read_text()


def test_a_page_without_matplotlib_is_refused_before_anything_is_planned(
    question: tuple[str | Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("motet.twin.planning.page", "motet.twin.plots", "motet.twin.report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = plan(*question, "--html", tmp_path / "plan.html")
    assert result.exit_code == 1
    assert "--html needs matplotlib: pip install 'motet[plots]'" in result.output
    assert "workers" not in result.stdout


# ---- where there is no plan


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--slo", "standard:tpot=1"), "ms per token; the objective is 1"),
        (("--slo", SLO, "--rate", "5000", "--worker", "vllm:qwen2.5-7b@h100,most=2"), "the 2 workers that are allowed serve"),
        (("--slo", SLO, "--survive", "1", "--worker", "vllm:qwen2.5-7b@h100,most=1"), "1 workers are allowed"),
    ],
)
def test_where_there_is_no_plan_the_status_is_1_and_the_reason_is_one_sentence(
    adapters: Path, words: tuple[str, ...], reason: str
) -> None:
    worker = () if "--worker" in words else ("--worker", LLAMA)
    result = plan("--adapters", adapters, *worker, *words, "--no-check")
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("Error: ") and reason in line


def test_a_rank_that_no_worker_takes_is_named_with_its_adapter(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("name,rank,rate\nsmall,8,1\nlarge,128,1\n")
    result = plan("--adapters", path, "--worker", LLAMA, "--no-check")
    assert result.exit_code == 1
    assert "Error: the adapter large has rank 128; the largest that a worker takes is 32" in one_line(result)


# ---- errors of the user

ANY = ("--adapters", "3", "--worker", LLAMA)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--worker", LLAMA), "what is to be served? Give --adapters, --trace, --popularity or --from"),
        (("--adapters", "3"), "give a --worker: a profile, or vllm:llama-3.1-8b@h100"),
        (("--adapters", "nowhere.csv", "--worker", LLAMA), "--adapters nowhere.csv: neither a number nor a file"),
        (("--adapters", "0", "--worker", LLAMA), "--adapters 0: not a number from 1"),
        ((*ANY, "--worker", LLAMA), "two kinds have one name"),
        ((*ANY, "--slo", "chat"), "--slo chat: not CLASS:ttft=MS"),
        ((*ANY, "--slo", "a:tpot=5", "--slo", "a:ttft=5"), "the class a is there twice"),
        ((*ANY, "--objective", "best"), "'best' is not one of 'workers', 'cost', 'latency'"),
        ((*ANY, "--survive", "-1"), "Invalid value for '--survive'"),
        ((*ANY, "--headroom", "nan"), "'nan' is not a finite number"),
        ((*ANY, "--what-if", "color=red"), "--what-if color=red: it is none of rate=, lose=, worker=, slo="),
        ((*ANY, "--what-if", "rate=3..1"), "--what-if rate=3..1: 3 is not below 1"),
        ((*ANY, "--explain", "sql"), "--explain sql: there is no such adapter"),
        ((*ANY, "--seeds", "0"), "Invalid value for '--seeds'"),
        ((*ANY, "--minutes", "0.5"), "Invalid value for '--minutes'"),
        ((*ANY, "--check", "nowhere.json"), "'nowhere.json' does not exist"),
        ((*ANY, "--trace", "nowhere.jsonl"), "'nowhere.jsonl' does not exist"),
        ((*ANY, "--percentile", "101"), "Invalid value for '--percentile'"),
        ((*ANY, "--ranks", "x"), "is not rank:weight"),
    ],
)
def test_a_wrong_option_is_named_with_the_reason(words: tuple[str, ...], reason: str) -> None:
    result = plan(*words)
    assert result.exit_code == 2, result.output
    assert reason in one_line(result).replace("│ ", "")


def test_a_file_of_adapters_and_a_trace_are_too_much(adapters: Path) -> None:
    result = plan("--adapters", adapters, "--trace", adapters, "--worker", LLAMA)
    assert result.exit_code == 2 and "--adapters with a file and a trace: give one of them" in one_line(result)


def test_a_malformed_file_is_refused_with_its_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("name,rank,rate\nsql,eight,1\n")
    result = plan("--adapters", path, "--worker", LLAMA)
    assert result.exit_code == 1 and "Error: a.csv:2: rank:" in one_line(result)


def test_a_plan_of_kinds_that_are_not_given_is_refused(question: tuple[str | Path, ...], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    lines(plan(*question, "--no-check", "--json", file))
    result = plan("--check", file, "--adapters", "3", "--worker", "vllm:qwen2.5-7b@h100", *QUICK)
    assert result.exit_code == 1
    assert f"Error: the plan has workers of {LLAMA}; give them with --worker" in one_line(result)


def test_a_mesh_that_does_not_answer_is_named() -> None:
    result = plan("--from", "http://127.0.0.1:9", "--worker", LLAMA)
    assert result.exit_code == 1 and "http://127.0.0.1:9" in one_line(result)


# ---- rules


def test_rules_are_printed_without_a_load_and_say_how_good_they_are() -> None:
    result = plan("--rules", "--worker", LLAMA, "--worker", "vllm:qwen2.5-7b@h100,cost=2")
    text = one_line(result)
    assert result.exit_code == 0, result.output
    shipped = rules("llama-3.1-8b@h100")
    assert f"{LLAMA}: learned from {shipped.simulated_runs:,} simulated runs" in text
    assert f"SMAPE of throughput is {shipped.smape_percent:.1f}% and F1 of starvation {shipped.f1:.3f}" in text
    assert "docs/planning.md" in text and "vllm:qwen2.5-7b@h100: learned from" in text
    assert "workers (" not in text
    rows = [line.split(maxsplit=1) for line in lines(result)]
    conditions, tok_s = next(iter(shipped.throughput.rules()))
    assert [f"{tok_s:,.0f}", " and ".join(conditions)] in rows
    assert any(row[0] == "starve" for row in rows if row)


def test_rules_are_written_as_json(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    lines(plan("--rules", "--worker", LLAMA, "--json", file))
    (found,) = json.loads(file.read_text()).values()
    tree = rules("llama-3.1-8b@h100").starvation
    assert [(tuple(rule["if"]), rule["probability"]) for rule in found["starvation"]] == list(tree.rules())
    assert all(rule["starve"] == (rule["probability"] > 0.5) for rule in found["starvation"])
    assert len(found["throughput"]) <= 32


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("a10.json", "--rules: a10.json has no rules; only published calibrations have some, vllm:NAME@GPU"),
        ("vllm:gpt@h100", "--rules: there are no rules of 'gpt@h100'; there are those of llama-3.1-8b@h100, qwen2.5-7b@h100"),
        ("", "--rules: give a --worker: vllm:llama-3.1-8b@h100"),
    ],
)
def test_a_worker_without_rules_is_refused(worker: str, reason: str) -> None:
    result = plan("--rules", *(("--worker", worker) if worker else ()))
    assert result.exit_code == 2, result.output
    assert reason in one_line(result).replace("│ ", "")
