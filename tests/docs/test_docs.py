"""Promise: links, paths, tables and generated pages of the documentation are right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from motet.cli.up import up
from motet.services.gateway.config import GatewayConfig
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.protocol import DRAWS, NATIVE
from motet.services.worker.vllm_engine.engine import POOLING, VLLM
from motet.shared import subjects
from motet.shared.config import fields
from tests.docs.support_pages import MIGRATION, table

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(page for folder in ("docs", "examples", "bench/results") for page in (ROOT / folder).rglob("*.md")),
    ]
)


def test_generated_pages_say_what_the_code_says() -> None:
    script = (
        "import runpy, json; pages = runpy.run_path('docs/generate.py')['PAGES'];"
        "print(json.dumps({name: write() for name, write in pages.items()}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    for name, text in json.loads(done.stdout.splitlines()[-1]).items():
        assert (ROOT / "docs" / name).read_text() == text, f"run `python docs/generate.py`: docs/{name} is out of date"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_local_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_path_named_in_the_readme_and_the_architecture_exists() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "architecture.md"):
        for path in re.findall(
            r"`((?:services|policies|kernels|shared|motet|bench|examples|docs)/[\w./-]+)`", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_nats_documents_are_valid_and_name_the_subjects_in_use() -> None:
    for name in ("request", "result"):
        schema = json.loads((ROOT / "docs" / "nats" / f"{name}.schema.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
    document = yaml.safe_load((ROOT / "docs" / "nats" / "asyncapi.yaml").read_text())
    addresses = {channel["address"] for channel in document["channels"].values()}
    tenant, request_id = "{tenant}", "{request_id}"
    assert addresses == {
        subjects.requests(tenant),
        subjects.results(tenant, request_id),
        subjects.tokens(tenant, request_id),
        subjects.dead(tenant),
    }


def test_the_engines_page_says_what_the_engines_declare() -> None:
    page = {row[0]: row[1:] for row in table(ROOT / "docs" / "engines.md", "# Engines")}
    yes = {True: "yes", False: "no"}
    for column, serves in enumerate((NATIVE, VLLM, DRAWS)):
        said = {name: cells[column] for name, cells in page.items()}
        assert said["structured outputs"].startswith(yes["structured" in serves])
        assert said["structured outputs go on after the loss of their worker"].startswith(yes["resumes_structured" in serves])
        assert said["log-probabilities of prompts"] == yes["prompt_logprobs" in serves]
        assert said["images in chats"] == ("yes, where the model takes them" if serves is VLLM else "no")
        assert said["embeddings (`/v1/embeddings`)"] == ("yes, with a pooling model" if serves is VLLM else "no")
        assert said["pictures (`/v1/images/generations`, `/v1/images/edits`)"].startswith(yes["draws" in serves])
        assert "embeddings" not in serves and "embeddings" in POOLING


def test_the_flags_of_the_migration_page_are_options_of_motet() -> None:
    ours = {f"--{one.name.replace('_', '-')}" for config in (WorkerConfig, GatewayConfig) for one in fields(config)}
    ours |= {option for parameter in up.params for option in parameter.opts}
    rows = table(MIGRATION, "## Flags")
    assert rows and {flag for _, flag, _ in rows if flag} <= {f"`{flag}`" for flag in ours}
