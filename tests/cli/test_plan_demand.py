"""What `motet plan --from` reads of a running mesh: two scrapes of its metrics and its list of adapters."""

from __future__ import annotations

import pytest

from motet.cli.plan_demand import counts, seen
from motet.shared.model import Slo
from motet.twin.planning.loads import Objective

STANDARD = {"standard": Objective(slo=Slo())}
KNOWN = [{"name": name, "rank": rank, "size_bytes": rank * 1000} for name, rank in (("sql", 16), ("law", 8), ("new", 4))]


def metrics(**requests: tuple[int, int, int]) -> str:
    """A scrape: requests, prompt and output tokens by adapter."""
    lines = ["# TYPE motet_requests counter"]
    lines += [
        f'motet_requests_total{{adapter="{name}",outcome="stop",slo_class="standard"}} {count}'
        for name, (count, _, _) in requests.items()
    ]
    lines.append("# TYPE motet_tokens counter")
    for name, (_, prompt, output) in requests.items():
        for kind, tokens in (("prompt", prompt), ("cached", 7), ("output", output)):
            lines.append(f'motet_tokens_total{{adapter="{name}",kind="{kind}",slo_class="standard"}} {tokens}')
    return "\n".join(lines) + "\n"


def test_the_rates_are_what_the_counters_grew_by() -> None:
    before = counts(metrics(sql=(100, 5000, 9000), base=(10, 100, 100)))
    after = counts(metrics(sql=(160, 11_000, 15_000), base=(10, 100, 100), law=(30, 600, 900)))
    found = seen(before, after, KNOWN, 60.0, STANDARD)
    assert found.names == ("sql", "law")
    assert found.rate.tolist() == [1.0, 0.5]
    assert found.rank.tolist() == [16, 8]
    assert found.size_bytes.tolist() == [16_000, 8000]
    assert found.demand.prompt_tokens == pytest.approx([100, 20], rel=0.05)
    assert found.demand.output_tokens == pytest.approx([100, 30], rel=0.05)


def test_the_base_model_has_no_rank() -> None:
    found = seen(counts(""), counts(metrics(base=(60, 600, 600))), KNOWN, 60.0, STANDARD)
    assert (found.names, found.rank.tolist(), found.size_bytes.tolist()) == (("base",), [0], [0])


def test_what_the_gateway_does_not_tell_apart_is_spread_over_the_other_adapters() -> None:
    found = seen(counts(""), counts(metrics(sql=(60, 600, 600), other=(12, 120, 120))), KNOWN, 60.0, STANDARD)
    assert dict(zip(found.names, found.rate.tolist(), strict=True)) == {"sql": 1.0, "law": 0.1, "new": 0.1}


def test_a_class_without_a_given_objective_has_the_usual_one() -> None:
    text = metrics(sql=(60, 600, 600)).replace('slo_class="standard"', 'slo_class="chat"')
    found = seen(counts(""), counts(text), KNOWN, 60.0, STANDARD)
    assert found.objectives[found.objective[0]].slo == Slo(slo_class="chat")


def test_a_mesh_without_requests_cannot_be_planned_for() -> None:
    same = metrics(sql=(60, 600, 600))
    with pytest.raises(ValueError, match="no request ended in 60 s; watch for longer"):
        seen(counts(same), counts(same), KNOWN, 60.0, STANDARD)
