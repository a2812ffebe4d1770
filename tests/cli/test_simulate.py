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
from msgspec.structs import replace

from motet.cli.main import cli
from motet.shared.model import ImageSizeSteps, ImageSteps, WorkerLimits
from motet.shared.profile import LinkFacts, Profile, write_profile
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


def image_profile(path: Path) -> Path:
    """A worker that draws pictures of 512 x 512."""
    size = ImageSizeSteps(
        height=64, width=64, text_tokens=77, rows=(2, 16), step_ms=(38.0, 94.0), decode_ms=5.0, decode_picture_ms=8.0
    )
    limits = WorkerLimits(
        base_model="sd",
        engine="images",
        max_model_len=1077,
        max_running=32,
        max_waiting=200,
        block_size=1,
        kv_blocks_total=232 * 1077,
        adapter_bytes_total=1 << 33,
        max_lora_rank=64,
        capabilities=("draws",),
        copies="wait",
    )
    perf = replace(a10_llama2_7b().perf, finish_ms=13.0)
    images = ImageSteps(sizes=(size,), encode_ms=5.0, encode_request_ms=1.0, rows_max=16, area_max=16 * 4096)
    write_profile(
        path, Profile(motet_profile=1, limits=limits, perf=perf, images=images, link=LinkFacts(gb_per_s=20.0, layers=1))
    )
    return path


def test_an_image_worker_draws_generated_requests_and_those_of_a_trace(tmp_path: Path) -> None:
    profile = image_profile(tmp_path / "images.json")
    words = ("--profile", profile, "--rate", "1", "--duration-s", "30", "--workers", "2", "--slo-e2e-ms", "60000")
    run = figures(*words, "--picture-steps", "20")["runs"]["motet"]
    assert run["finished"] == run["requests"] > 10 and run["slo_attainment"] == 1.0
    assert run["e2e_ms"]["p50"] >= 6.0 + 20 * 38.0 + 13.0
    trace = tmp_path / "trace.csv"
    rows = [f"2024-11-15 16:57:{second:02d},{2 if second % 3 else 1},30,{'a' if second % 2 else 'b;c'}" for second in range(20)]
    trace.write_text("\n".join(["gmt_create,num_images_per_prompt,num_inference_steps,lora_ids", *rows, ""]))
    run = figures("--profile", profile, "--trace", trace, "--slo-e2e-ms", "60000")["runs"]["motet"]
    assert run["finished"] == run["requests"] == 20 + 13 and run["adapters"]["device_loads"] == 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--picture-size", "500"), "is not WIDTHxHEIGHT"),
        (("--picture-size", "500x512"), "--picture-size 500x512: both sides must be multiples of 8"),
        (("--save-trace", "t.jsonl"), "--save-trace: the format has no pictures"),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    result = simulate("--profile", image_profile(tmp_path / "images.json"), "--rate", "1", "--duration-s", "5", *words)
    assert result.exit_code != 0 and reason in result.output


def test_an_image_worker_is_not_planned(tmp_path: Path) -> None:
    profile = image_profile(tmp_path / "images.json")
    result = CliRunner().invoke(cli, ["plan", "--adapters", "4", "--worker", str(profile)])
    assert result.exit_code != 0 and "it draws pictures; only workers that generate text are planned" in result.output
