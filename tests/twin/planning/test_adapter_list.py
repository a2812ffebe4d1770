"""A file of adapters: what it may hold, and that everything else is refused with file, line and field."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from motet.shared.json_files import FileError
from motet.shared.model import Slo
from motet.twin.planning.adapter_list import read_adapters
from motet.twin.planning.loads import Loads, Objective
from motet.twin.workload import Lengths

FAST = Objective(slo=Slo(slo_class="fast", ttft_slo_ms=300.0, tpot_slo_ms=40.0), share=0.95)
STANDARD = Objective(slo=Slo())


def read(path: Path, text: str, **more: object) -> Loads:
    path.write_text(text)
    options = {"rank_bytes": 1000.0, "prompt_tokens": 100.0, "output_tokens": 50.0} | more
    return read_adapters(path, objectives={"standard": STANDARD, "fast": FAST}, **options)  # type: ignore[arg-type]


def test_a_csv_and_json_lines_say_the_same(tmp_path: Path) -> None:
    table = read(tmp_path / "a.csv", "name,rank,rate,class\nbase,0,2,\nsql,16,0.5,fast\n")
    lines = read(
        tmp_path / "a.jsonl",
        '{"name": "base", "rank": 0, "rate": 2}\n{"name": "sql", "rank": 16, "rate": 0.5, "class": "fast"}\n',
    )
    for one in (table, lines):
        assert one.names == ("base", "sql")
        assert one.rate.tolist() == [2.0, 0.5]
        assert one.rank.tolist() == [0, 16]
        assert one.size_bytes.tolist() == [0, 16_000]
        assert [one.objectives[index].slo.slo_class for index in one.objective.tolist()] == ["standard", "fast"]


def test_a_packed_file_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"name,rank,rate\na,8,1\n"))
    loads = read_adapters(path, objectives={"standard": STANDARD}, rank_bytes=1.0, prompt_tokens=10, output_tokens=10)
    assert loads.names == ("a",)


def test_lengths_and_bytes_of_an_adapter_are_its_own(tmp_path: Path) -> None:
    text = "name,rank,rate,bytes,prompt_tokens,output_tokens,output_deviation\na,8,1,777,400,200,0.0001\nb,8,1,,,,\n"
    demand = read(tmp_path / "a.csv", text).demand
    assert demand.size_bytes.tolist() == [777, 8000]
    assert demand.prompt_tokens == pytest.approx([400, 100], rel=0.05)
    assert demand.output_tokens == pytest.approx([200, 50], rel=0.05)
    assert demand.output_square[0] == pytest.approx(200**2, rel=0.01)
    assert demand.output_square[1] > 1.8 * 50**2


def test_all_requests_draw_from_given_lengths(tmp_path: Path) -> None:
    pool = Lengths(np.array([7, 9]), np.array([3, 5]))
    loads = read(tmp_path / "a.csv", "name,rank,rate\na,8,1\nb,8,1\n", lengths=pool)
    assert loads.lengths == (pool,)
    assert loads.demand.prompt_tokens.tolist() == [8.0, 8.0]


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("", "a:1:", "empty"),
        ("name,rank\na,8\n", "a:1: rate:", "missing"),
        ("name,rank,rate\n", "a:2:", "no adapters"),
        ("name,rank,rate,color\na,8,1,red\n", "a:1: color:", "not known"),
        ("name,rank,rate,rate\na,8,1,2\n", "a:1: rate:", "twice"),
        ("name,rank,rate\na,8\n", "a:2:", "2 columns"),
        ("name,rank,rate\na,8,1\na,16,1\n", "a:3: name:", "'a' is in line 2 too"),
        ("name,rank,rate\n../x,8,1\n", "a:2: name:", "not a name"),
        ("name,rank,rate\na,8.5,1\n", "a:2: rank:", "not a whole number"),
        ("name,rank,rate\na,-1,1\n", "a:2: rank:", "not a whole number"),
        ("name,rank,rate\na,8,0\n", "a:2: rate:", "not above 0"),
        ("name,rank,rate\na,8,nan\n", "a:2: rate:", "not a finite number"),
        ("name,rank,rate\na,8,often\n", "a:2: rate:", "not a finite number"),
        ("name,rank,rate,bytes\na,8,1,0\n", "a:2: bytes:", "not a whole number"),
        ("name,rank,rate,class\na,8,1,slow\n", "a:2: class:", "give --slo slow:"),
        ("name,rank,rate,prompt_tokens\na,8,1,-4\n", "a:2: prompt_tokens:", "not above 0"),
        ("name,rank,rate,output_deviation\na,8,1,1e9\n", "a:2: output_deviation:", "not above"),
        ('{"name": "a", "rank": 8, "rate": 1}\n[1]\n', "a:2:", "not a JSON object"),
        ('{"name": "a", "rank": 8, "rate": 1}\n{"name": "b", "rank": 8}\n', "a:2: rate:", "missing"),
        ('{"name": 3, "rank": 8, "rate": 1}\n', "a:1: name:", "missing"),
        ('{"name": "a", "rank": true, "rate": 1}\n', "a:1: rank:", "not a finite number"),
    ],
)
def test_a_malformed_file_is_refused_with_line_and_field(tmp_path: Path, text: str, where: str, reason: str) -> None:
    with pytest.raises(FileError) as refused:
        read(tmp_path / "a", text)
    assert str(refused.value).startswith(where)
    assert reason in str(refused.value)


def test_lengths_given_twice_are_refused(tmp_path: Path) -> None:
    pool = Lengths(np.array([7]), np.array([3]))
    with pytest.raises(FileError, match="a:2: prompt_tokens: lengths are in --lengths already"):
        read(tmp_path / "a", "name,rank,rate,prompt_tokens\na,8,1,50\n", lengths=pool)
