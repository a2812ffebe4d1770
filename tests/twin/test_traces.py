from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from motet.shared.json_files import FileError
from motet.shared.model import Slo
from motet.twin.traces import Trace, read_lengths, read_popularity, read_trace, write_trace
from motet.twin.workload import Lengths, Workload, zipf
from tests.twin.support import workload

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:47.7500000,396,109\n"
MOONCAKE = (
    '{"timestamp":500,"input_length":700,"output_length":5,"hash_ids":[0,1]}\n'
    '{"timestamp":3500,"input_length":1000,"output_length":6,"hash_ids":[0,2]}\n'
)
MAF2021 = "app,func,end_timestamp,duration\na,f,10.5,0.5\na,g,9.25,0.25\nb,f,12.0,1.0\n"
GENTD26 = "row,gmt_create,lora_ids,lora_scales\n0,,aa,1\n1,2024-11-15 16:57:50,aa;bb,1;1\n2,2024-11-15 16:57:53,,\n"
MAF2019 = "function,minute_1,minute_2\nf,30,60\ng,30,0\n"
OWN = (
    '{"motet_trace": 1, "adapters": [{"rank": 8, "size_bytes": 100}], "slos": [{"tpot_slo_ms": 50}]}\n'
    '{"arrival_s": 0.5, "adapter": 0, "prompt_tokens": 3, "output_tokens": 4, "slo": 0}\n'
    '{"arrival_s": 0.75, "adapter": -1, "prompt_tokens": 5, "output_tokens": 6, "slo": 0}\n'
)


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str | bytes, name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def trace(path: Path) -> Trace:
    read = read_trace(path)
    assert isinstance(read, Trace)
    return read


def test_azure_traces_have_times_and_lengths(write) -> None:
    read = trace(write(AZURE))
    assert read.arrival_s.tolist() == pytest.approx([0.0, 1.25], abs=1e-6)
    assert read.prompt_tokens.tolist() == [374, 396] and read.output_tokens.tolist() == [44, 109]
    assert read.adapter is None


def test_mooncake_traces_share_prefixes(write) -> None:
    read = trace(write(MOONCAKE))
    assert read.arrival_s.tolist() == [0.0, 3.0]
    load = read.workload(np.random.default_rng(0), ranks=np.zeros(0, int), adapter_bytes=np.zeros(0, int))
    assert [request.prefix for request in load] == [(0, 1), (0, 2)] and load.request(0).prefix_tokens == 512


def test_maf_2021_functions_are_adapters_in_the_order_of_their_calls(write) -> None:
    read = trace(write(MAF2021))
    assert read.arrival_s.tolist() == [0.0, 1.0, 2.0] and read.adapter.tolist() == [0, 1, 1] and read.adapters == 2


def test_gentd26_rows_without_a_time_are_left_out_and_the_first_lora_counts(write) -> None:
    read = trace(write(GENTD26))
    assert read.arrival_s.tolist() == [0.0, 3.0] and read.adapter.tolist() == [0, -1] and read.adapters == 1


def test_maf_2019_counts_are_shares_and_a_rate_over_time(write) -> None:
    read = read_popularity(write(MAF2019))
    assert read.shares.tolist() == [0.75, 0.25]
    assert read.intensity.rates.tolist() == [1.0, 1.0] and read.scaled(5.0).rates.tolist() == [5.0, 5.0]


def test_length_files_of_both_kinds_are_read(write) -> None:
    csv = read_lengths(write("num_prefill_tokens,num_decode_tokens\n74,918\n"))
    alpaca = read_lengths(write('{"id":0,"prompt_tokens_est":39,"output_tokens_est":2}\n'))
    assert (csv.prompt_tokens.tolist(), csv.output_tokens.tolist()) == ([74], [918])
    assert (alpaca.prompt_tokens.tolist(), alpaca.output_tokens.tolist()) == ([39], [2])


def test_packed_files_are_read_like_plain_ones(write) -> None:
    assert trace(write(gzip.compress(AZURE.encode()))).prompt_tokens.tolist() == [374, 396]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    load = workload(1)
    write_trace(tmp_path / "own.jsonl", load)
    read = read_trace(tmp_path / "own.jsonl")
    assert isinstance(read, Workload) and list(read) == list(load)


def test_what_a_trace_lacks_is_drawn(write) -> None:
    rng = np.random.default_rng(0)
    read = trace(write(MAF2021))
    with pytest.raises(ValueError, match="no lengths"):
        read.workload(rng, ranks=np.array([8, 8]), adapter_bytes=np.array([1, 1]))
    lengths = Lengths(np.array([7]), np.array([9]))
    load = read.workload(rng, ranks=np.array([8, 8]), adapter_bytes=np.array([1, 1]), lengths=lengths, slo=Slo(tpot_slo_ms=1))
    assert load.prompt_tokens.tolist() == [7, 7, 7] and load.request(2).slo.tpot_slo_ms == 1
    drawn = trace(write(AZURE)).workload(rng, ranks=np.array([8, 8]), adapter_bytes=np.array([1, 1]), shares=zipf(2))
    assert set(drawn.adapter.tolist()) <= {0, 1}


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("", 1, ""),
        ("what,is,this\n1,2,3\n", 1, ""),
        (AZURE + "2023-11-16 18:15:48,1\n", 4, ""),
        (AZURE + "yesterday,1,1\n", 4, "TIMESTAMP"),
        (AZURE + "2023-11-16 18:15:48,0,1\n", 4, "ContextTokens"),
        (AZURE + "2023-11-16 18:15:48,1,1.5\n", 4, "GeneratedTokens"),
        (AZURE + "2023-11-16 18:15:48,1,nan\n", 4, "GeneratedTokens"),
        (MOONCAKE + "{\n", 3, ""),
        (MOONCAKE + "[]\n", 3, ""),
        (MOONCAKE + '{"timestamp":1e999,"input_length":1,"output_length":1,"hash_ids":[]}\n', 3, "timestamp"),
        (MOONCAKE + '{"timestamp":1,"input_length":true,"output_length":1,"hash_ids":[]}\n', 3, "input_length"),
        (MOONCAKE + '{"timestamp":1,"input_length":1,"hash_ids":[]}\n', 3, "output_length"),
        (MOONCAKE + '{"timestamp":1,"input_length":1,"output_length":1,"hash_ids":["a"]}\n', 3, "hash_ids"),
        (MOONCAKE + '{"timestamp":1,"input_length":1,"output_length":1,"hash_ids":[4294967296]}\n', 3, "hash_ids"),
        (MAF2021 + "a,f,soon,1\n", 5, "end_timestamp"),
        (OWN.replace('"motet_trace": 1', '"motet_trace": 2'), 1, "motet_trace"),
        (OWN.replace('"rank": 8', '"rank": 0'), 1, "adapters[0]"),
        (OWN.replace('[{"tpot_slo_ms": 50}]', "[]"), 1, "slos"),
        (OWN.replace('"adapter": 0', '"adapter": 1'), 2, "adapter"),
        (OWN.replace('"arrival_s": 0.75', '"arrival_s": 0.25'), 3, "arrival_s"),
        (OWN.replace('"arrival_s": 0.75', '"arrival_s": NaN'), 3, "arrival_s"),
        (OWN.replace('"slo": 0', '"slo": 7'), 2, "slo"),
    ],
)
def test_a_bad_file_is_refused_with_the_line_and_the_field(write, text: str, line: int, field: str) -> None:
    with pytest.raises(FileError) as caught:
        read_trace(write(text))
    assert (caught.value.line, caught.value.field) == (line, field)
    assert str(caught.value).startswith(f"trace:{line}: {field}")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"\x1f\x8bnonsense", gzip.compress(AZURE.encode(), mtime=0)[:-9], b"x" * (1 << 21)]
)
def test_bytes_that_are_no_text_are_refused(write, content: bytes) -> None:
    with pytest.raises(FileError):
        read_trace(write(content))


def test_counts_and_lengths_are_checked_as_well(write) -> None:
    for read, text, field in (
        (read_popularity, MAF2019 + "h,1,-1\n", "minute_2"),
        (read_popularity, "function,minute_1\nf,0\n", ""),
        (read_popularity, AZURE, ""),
        (read_lengths, "num_prefill_tokens,num_decode_tokens\n1,inf\n", "num_decode_tokens"),
        (read_lengths, "num_prefill_tokens,num_decode_tokens\n", ""),
        (read_lengths, json.dumps({"prompt_tokens_est": 1}) + "\n", "output_tokens_est"),
    ):
        with pytest.raises(FileError) as caught:
            read(write(text))
        assert caught.value.field == field


def test_a_file_that_is_not_there_is_an_error_of_the_same_kind(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_trace(tmp_path / "nothing")
