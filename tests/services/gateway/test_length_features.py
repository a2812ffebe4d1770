"""Promise: the scheduler gets hashed features of every prompt, the predictor's outcome carries the same, and no text leaves."""

from __future__ import annotations

import openai

from motet.policies.lengths.features import unpack
from motet.shared import subjects
from motet.shared.wire.prediction import Outcome
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import FakeScheduler, running_gateway, start_workers
from tests.support import eventually

STORY = "tell a story about owls"


async def asked(client: openai.AsyncOpenAI, *contents: str, **options) -> None:
    roles = ["system", "user"][-len(contents) :]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    await client.chat.completions.create(model="demo", messages=messages, max_tokens=8, **options)


async def test_the_outcome_carries_the_features_that_the_scheduler_was_given(mesh: Mesh, client, connect):
    mesh.say("owls hoot")
    heard: list[Outcome] = []
    await (await connect("predictor")).subscribe(subjects.OUTCOME, Outcome, heard.append)
    await asked(client, STORY)
    await eventually(lambda: heard)
    (request,) = mesh.scheduler.submitted
    assert heard[0].features == request.features and len(unpack(request.features)) > 20
    assert request.prompt_text == "" and b"owls" not in request.features


async def test_other_prompts_and_other_parameters_have_other_features(mesh: Mesh, client):
    mesh.say("owls hoot")
    await asked(client, STORY)
    await asked(client, "say one word about owls")
    await asked(client, STORY, temperature=0.0)
    await asked(client, "be brief", STORY)
    await asked(client, STORY)
    features = [request.features for request in mesh.scheduler.submitted]
    assert len(set(features)) == 4 and features[0] == features[4]


async def test_prompts_of_token_ids_have_the_features_of_their_text(mesh: Mesh, client):
    mesh.say("owls hoot")
    tokens = mesh.gateway.prompts.tokenizer.encode(STORY).ids
    for prompt in (STORY, tokens):
        await client.completions.create(model="demo", prompt=prompt, max_tokens=8)
    first, second = (request.features for request in mesh.scheduler.submitted)
    assert first == second


async def test_with_send_prompts_the_predictor_may_read_an_excerpt(connect, nats_url, tmp_path, bus):
    (worker,) = await start_workers(connect, "w1")
    worker.speak = lambda _: [5, 6]
    scheduler = FakeScheduler(await connect("scheduler"), ["w1"])
    await scheduler.start()
    async with running_gateway(nats_url, tmp_path, send_prompts=True) as gateway:
        await eventually(lambda: not gateway.not_ready())
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="any", max_retries=0) as client:
            await asked(client, STORY)
    assert scheduler.submitted[0].prompt_text == STORY
