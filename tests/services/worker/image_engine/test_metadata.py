"""Promise: what a picture's file tells of its request can be read."""

from __future__ import annotations

import pytest

from motet.services.worker.image_engine.metadata import describe
from motet.shared.clip_tokenizer import ClipTokenizer
from tests.services.worker.image_engine.conftest import Oracles
from tests.services.worker.image_engine.support_engine import Driven

pytestmark = pytest.mark.filterwarnings("ignore")


def test_prompt_seed_and_adapters_are_told_in_words(oracles: Oracles) -> None:
    oracle = oracles("sd15")
    driven = Driven(oracle.model_dir, oracle)
    adapters = {"small": 0.5, "words": 1.0}
    request = driven.request("a", "A red Circle on sky, schön!", adapters=adapters, negative="gray", seed=12, sampler="euler")
    tokenizer = ClipTokenizer(oracle.model_dir / "tokenizer")
    told = describe(request, tokenizer)
    assert told["prompt"] == "a red circle on sky , schön !" and told["negative_prompt"] == "gray"
    assert (told["seed"], told["steps"], told["sampler"], told["guidance_scale"]) == ("12", "4", "euler", "7.5")
    first, second = (one.host.digest for one in (oracle.adapters[0], oracle.adapters[3]))
    assert told["adapters"] == f"small {first} 0.5, words {second} 1"
    assert {"prompt", "adapters"}.isdisjoint(describe(driven.request("b", ""), tokenizer))
