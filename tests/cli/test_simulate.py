"""`motet simulate`: its output, its files, and its errors."""

from __future__ import annotations

import json
import re
import sys
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from motet.cli.main import cli
from motet.shared.profile import write_profile
from motet.twin.profile import a10_llama2_7b

SHORT = ("--duration-s", "20", "--rate", "3", "--adapters", "10")
RIVALS = ("--plugins", "bench.rivals")


def simulate(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, words)])


def figures(*words: str | Path) -> dict:
    result = simulate("--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_table_shows_every_policy_beside_the_others() -> None:
    result = simulate(*SHORT, *RIVALS, "--workers", "3", "--policy", "motet", "--policy", "random")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["motet", "random"]
    assert any(line.startswith("SLO attainment") and line.count("%") == 2 for line in lines)


def test_the_same_seed_gives_the_same_json_to_the_byte() -> None:
    first, again, other = (simulate(*SHORT, "--json", "--seed", seed) for seed in ("1", "1", "2"))
    assert first.stdout == again.stdout != other.stdout


def test_options_of_the_worker_can_be_changed_and_matter() -> None:
    busy = ("--duration-s", "60", "--rate", "8", "--adapters", "40", *RIVALS)
    plain, shortest, forgetful = (
        figures(*busy, *changed)["runs"]["motet"] for changed in ((), ("--set", "queues=sjf"), ("--set", "eviction=none"))
    )
    assert shortest != plain
    assert forgetful["adapters"]["device_loads"] > plain["adapters"]["device_loads"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("queue=sjf", "there is no such option; one of max_step_tokens, "),
        ("queues=shortest", "not one of fcfs, auto, motet"),
        ("max_loras=0", ">= 1"),
        ("max_loras=many", "Expected `int`"),
        ("prefix_cache", "one of on, off"),
    ],
)
def test_a_wrong_option_of_the_worker_is_named_with_the_reason(change: str, reason: str) -> None:
    result = simulate(*SHORT, "--set", change)
    assert result.exit_code == 2 and f"--set {change.partition('=')[0]}" in result.output and reason in result.output


def test_a_profile_that_names_what_no_plugin_has_added_is_refused_by_field(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    write_profile(path, a10_llama2_7b())
    path.write_text(path.read_text().replace('"next-use"', '"by-colour"'))
    result = simulate(*SHORT, "--profile", path)
    assert result.exit_code == 2 and "--profile: engine.eviction: 'by-colour' is not one of next-use, gdsf" in result.output


def test_a_saved_workload_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = figures(*SHORT, "--save-trace", path)
    assert figures("--trace", path) == first
    faster = figures("--trace", path, "--rate", "30")["runs"]["motet"]
    assert faster["requests"] == first["runs"]["motet"]["requests"]
    assert faster["duration_s"] < first["runs"]["motet"]["duration_s"]


def test_the_report_is_one_page_that_fetches_nothing(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert (
        simulate(*SHORT, *RIVALS, "--policy", "motet", "--policy", "most-idle", "--workers", "2", "--html", page).exit_code == 0
    )
    text = page.read_text()

    class Checked(HTMLParser):
        open_tags: list[str] = []
        plots: list[str] = []

        def handle_starttag(self, tag: str, attrs: list) -> None:
            assert tag not in ("script", "link", "iframe") and "href" not in dict(attrs)
            if tag == "img":
                kind, _, image = dict(attrs)["src"].partition(";base64,")
                assert kind == "data:image/svg+xml"
                self.plots.append(b64decode(image).decode())
            elif tag != "meta":
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    from motet.twin.plots import COLORS  # matplotlib, which takes long to import

    checked = Checked()
    checked.feed(text)
    assert checked.open_tags == [] and len(checked.plots) == 6
    for plot in checked.plots:
        assert all(plot.count(f"stroke: {color}; stroke-width: 1.3") == 1 for color in COLORS[:2]), "a line for each policy"
        assert "nan" not in plot
    assert "nan" not in re.sub('base64,[^"]*', "", text) and "http" not in text


def test_a_report_without_matplotlib_is_refused_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("motet.twin.report", "motet.twin.plots"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    result = simulate(*SHORT, "--html", tmp_path / "report.html")
    assert result.exit_code == 1 and "pip install 'motet[plots]'" in result.output


def test_a_profile_changes_what_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    write_profile(path, a10_llama2_7b())
    assert figures(*SHORT, "--profile", path) == figures(*SHORT)
    path.write_text(path.read_text().replace('"decode_base_ms": 33.5', '"decode_base_ms": 67.0'))
    slow = figures(*SHORT, "--profile", path)["runs"]["motet"]["tpot_ms"]["p50"]
    assert slow > 1.7 * figures(*SHORT)["runs"]["motet"]["tpot_ms"]["p50"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("--trace", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "bad:2: ContextTokens"),
        ("--profile", '{"motet_profile": 2}', "bad:1: motet_profile: version 2"),
        ("--popularity", "function,minute_1\nf,inf\n", "bad:2: minute_1"),
        ("--lengths", "num_prefill_tokens,num_decode_tokens\n0,1\n", "bad:2: num_prefill_tokens"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / "bad"
    path.write_text(content)
    result = simulate(name, path)
    assert result.exit_code == 1 and message in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "8:x"),
        ("--ranks", "0:1"),
        ("--ranks", "8:nan"),
        ("--rate", "nan"),
        ("--rate", "inf"),
        ("--rate", "-1"),
        ("--zipf", "nan"),
        ("--duration-s", "0"),
        ("--workers", "0"),
        ("--policy", "magic"),
        ("--trace", "nowhere.csv"),
    ],
)
def test_a_wrong_option_is_refused_by_name(words: tuple[str, str]) -> None:
    result = simulate(*words)
    assert result.exit_code == 2 and words[0] in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rank-mib", "100"), "does not fit"),
        (("--rate", "1e6", "--duration-s", "1e6"), "more than 50 million requests"),
        (("--rate", "0.001", "--duration-s", "1"), "no requests"),
    ],
)
def test_a_run_that_cannot_be_simulated_is_refused_with_the_reason(words: tuple[str, ...], message: str) -> None:
    result = simulate(*words)
    assert result.exit_code == 1 and message in result.output
