"""The whole of it on a real Ray: clients end with the right text, whatever becomes of replicas.

One application serves all steps of a test, since a Ray takes many seconds to start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.model_folders import save_chat_model
from support.ray_application import RayApplication, ray_application
from support.ray_clients import (
    ANSWER,
    CACHE,
    MODEL,
    SCHEDULER,
    Load,
    Streams,
    arguments,
    chats_return_to_where_their_prefix_is,
    client_of,
    expected,
    until,
)

from pageturner.service.client import Client, Retry
from pageturner.service.errors import InvalidArgument, PageturnerError, QueueFull, StaleRevision
from pageturner.service.llm import LLM
from pageturner.service.policy_host.reports import PoliciesInfo

pytest.importorskip("ray", reason="the extra [ray] is not installed")

SCALED: dict[str, Any] = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_queued_tokens": 100,
    "metrics_seconds": 2.0,
    "upscale_delay_seconds": 0.0,
    "downscale_delay_seconds": 3.0,
}
BOTH: dict[str, Any] = {"min_replicas": 2, "max_replicas": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(folder: Path) -> Iterator[LLM]:
    """The same model in one process, without a server."""
    with LLM(MODEL | {"source": str(folder)}, cache=CACHE) as llm:
        yield llm


async def more_replicas_come_with_the_load(application: RayApplication, client: Client, load: Load) -> None:
    await until(lambda: len(application.replicas()) == 3, "three replicas", 180)

    async def serve() -> bool:
        return (await client.load()).num_blocks == 3 * CACHE["num_blocks"]

    await until(serve, "three replicas that serve", 180)
    num_right = load.num_right
    await until(lambda: load.num_right > num_right + 8, "answers", 120)


async def a_killed_replica_is_not_seen_by_clients(
    application: RayApplication, client: Client, truth: LLM
) -> None:
    prompts = [f"The quick brown fox {number}" for number in range(12)]
    streams = Streams(client, prompts, ANSWER)
    await until(lambda: min(streams.num_tokens) >= 8, "every stream has begun", 60)
    application.kill_replica()
    assert await streams.texts() == expected(truth, prompts, ANSWER)
    assert streams.num_resumes == 0, "it was the ingress that went on, not the client"


async def policies_are_set_under_one_revision(client: Client) -> PoliciesInfo:
    before = (await client.policies()).revision
    with pytest.raises(InvalidArgument):
        await client.set_policies(preset="no such preset")
    changed = await client.set_policies(preset="vllm-v1", expected_revision=before)
    assert changed.revision == before + 1
    with pytest.raises(StaleRevision):
        await client.set_policies(preset="vllm-v1", expected_revision=before)
    return changed


def told(info: PoliciesInfo) -> tuple[int, dict[str, str]]:
    return info.revision, {axis.axis: axis.name for axis in info.axes}


async def all_replicas_agree(client: Client, changed: PoliciesInfo) -> None:
    """Of two replicas eight answers are of both, but for one time in 128."""

    async def agree() -> bool:
        return all(told(info) == told(changed) for info in [await client.policies() for _ in range(8)])

    await until(agree, "all replicas agree", 180)


async def errors_are_those_of_one_server(client: Client) -> None:
    for call in (client.generate("x", top_p=3.0), anext(client.stream("x", top_p=3.0))):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert (caught.value.field, caught.value.reason) == ("sampling.top_p", "3.0 is not in [0, 1]")
    with pytest.raises(PageturnerError, match="GetBlocks is not offered here"):
        await client.blocks()
    assert (await client.abort("nobody"))["nobody"].value == "not_found"
    assert await client.detokenize(await client.tokenize("The quick")) == "The quick"
    score = await client.score("The quick", [" brown fox"])
    assert score.scores[0].logprob < 0
    assert (await client.server_info()).exact_resume


async def the_bounds_are_those_of_all_replicas_together(application: RayApplication) -> None:
    """What one replica refuses another takes; what all refuse comes back with a time to wait."""
    both = 2 * (SCHEDULER["max_num_seqs"] + SCHEDULER["max_waiting"])
    async with client_of(application) as client, client_of(application, Retry(max_attempts=1)) as hasty:
        # They try again: a burst fills the queues before the schedulers have taken any of it up.
        held = [
            client.stream(f"Hold {number}", max_tokens=1500, ignore_eos=True, request_id=f"hold-{number}")
            for number in range(both)
        ]
        begun = [asyncio.ensure_future(anext(stream)) for stream in held]

        async def are_full() -> bool:
            load = await client.load()
            return load.num_running + load.num_waiting >= both

        await until(are_full, "both replicas are full", 60)
        with pytest.raises(QueueFull) as caught:
            await hasty.generate("One too many", max_tokens=4)
        assert caught.value.retry_after_seconds > 0
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        await client.abort(*[f"hold-{number}" for number in range(both)])
        for stream in held:
            await stream.aclose()


@pytest.mark.timeout(900)
def test_an_application_grows_outlives_a_replica_shrinks_and_is_replaced(folder: Path, truth: LLM) -> None:
    """From one replica to three and back, of which one is killed, then to two of another version, with
    clients that ask all the while."""

    async def check(application: RayApplication) -> None:
        async with client_of(application) as client:
            await errors_are_those_of_one_server(client)
            load = Load(client, truth, 32)
            await more_replicas_come_with_the_load(application, client, load)
            changed = await policies_are_set_under_one_revision(client)
            await a_killed_replica_is_not_seen_by_clients(application, client, truth)
            await all_replicas_agree(client, changed)
            await load.end()
            trickle = Load(client, truth, 1)
            await until(lambda: len(application.replicas()) == 1, "one replica again", 180)
            await asyncio.to_thread(application.deploy, arguments(folder, BOTH))
            await trickle.end()
        # Of 160 all did on an idle machine; beside others one may be too busy for what the prefix saves.
        assert await chats_return_to_where_their_prefix_is(application, num_chats=40) >= 0.9
        await the_bounds_are_those_of_all_replicas_together(application)

    with (
        TemporaryDirectory(prefix="ray-") as room,
        ray_application(Path(room), arguments(folder, SCALED)) as application,
    ):
        asyncio.run(check(application))


async def a_killed_ingress_is_made_up_for_by_the_client(application: RayApplication, truth: LLM) -> None:
    prompts = ["The lazy dog", "The brown fox"]
    async with client_of(application) as client:
        streams = Streams(client, prompts, ANSWER)
        await until(lambda: min(streams.num_tokens) >= 8, "every stream has begun", 60)
        application.kill_replica("Ingress")
        assert await streams.texts() == expected(truth, prompts, ANSWER)
        assert streams.num_resumes >= len(prompts)


async def a_new_version_takes_over_without_a_lost_stream(
    application: RayApplication, folder: Path, truth: LLM
) -> None:
    async with client_of(application) as client:
        before = set(application.replicas())
        load = Load(client, truth, 4)
        changed = arguments(folder, BOTH, num_blocks=480, block_size=32)
        await asyncio.to_thread(application.deploy, changed)
        num_right = load.num_right
        await until(lambda: load.num_right > num_right + 8, "answers of the new version", 60)
        await load.end()
        assert not before & set(application.replicas()), "a replica of the old version is left"
        assert (await client.server_info()).num_blocks == 480
    assert await chats_return_to_where_their_prefix_is(application, block_size=32) >= 0.9, (
        "the ingress reads prompts as the new replicas do"
    )


async def a_version_that_can_not_start_takes_nothing_away(
    application: RayApplication, folder: Path, truth: LLM
) -> None:
    async with client_of(application) as client:
        before = set(application.replicas())
        load = Load(client, truth, 4)
        broken = arguments(folder, BOTH)
        broken["model"] = broken["model"] | {"source": "/nowhere/model"}
        with pytest.raises(AssertionError, match="RuntimeError"):
            await asyncio.to_thread(application.deploy, broken)
        num_right = load.num_right
        await until(lambda: load.num_right > num_right + 8, "answers of the old version", 60)
        await load.end()
        assert before <= set(application.replicas())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_fails_or_is_replaced_under_load_is_not_seen(folder: Path, truth: LLM) -> None:
    async def check(application: RayApplication) -> None:
        await a_killed_ingress_is_made_up_for_by_the_client(application, truth)
        await a_version_that_can_not_start_takes_nothing_away(application, folder, truth)
        await a_new_version_takes_over_without_a_lost_stream(application, folder, truth)
        application.deploy(arguments(folder, BOTH | {"routing": "round-robin"}))
        assert await chats_return_to_where_their_prefix_is(application) < 0.9, (
            "it is routing that returns them"
        )
        application.deploy(arguments(folder, BOTH | {"num_ingresses": 2}))
        # Loads they don't tell: of 160 second turns 157 were found where their prefix is.
        assert await chats_return_to_where_their_prefix_is(application, num_chats=40) >= 0.9, (
            "two ingresses tell one another"
        )

    with (
        TemporaryDirectory(prefix="ray-") as room,
        ray_application(Path(room), arguments(folder, BOTH)) as application,
    ):
        asyncio.run(check(application))
