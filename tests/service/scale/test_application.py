"""The whole of it on a real Ray: clients end with the right text, whatever becomes of replicas.

One application serves all steps of a test, since a Ray takes many seconds to start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.model_folders import save_chat_model
from support.ray_application import RayApplication, ray_application

from pageturner.service.client import ChatMessage, Client, Retry, TokenEvent
from pageturner.service.errors import InvalidArgument, PageturnerError, QueueFull, StaleRevision
from pageturner.service.llm import LLM
from pageturner.service.policy_host.reports import PoliciesInfo

pytest.importorskip("ray", reason="the extra [ray] is not installed")

MODEL = {"deterministic": True}
CACHE = {"num_blocks": 512, "swap_space": 0}
SCHEDULER = {"max_num_seqs": 8, "max_waiting": 8}
PATIENT = Retry(max_attempts=200, longest_wait_seconds=0.5)
ANSWER: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "temperature": 0.0}
TURN: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}


def arguments(folder: Path, scale: dict[str, Any], **cache: object) -> dict[str, Any]:
    return {
        "model": MODEL | {"source": str(folder)},
        "cache": CACHE | cache,
        "scheduler": SCHEDULER,
        "scale": {"num_cpus": 1, "report_seconds": 0.2, "drain_seconds": 30.0} | scale,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(folder: Path) -> Iterator[LLM]:
    """The same model in one process, without a server."""
    with LLM(MODEL | {"source": str(folder)}, cache=CACHE) as llm:
        yield llm


@asynccontextmanager
async def client_of(application: RayApplication, retry: Retry = PATIENT) -> AsyncIterator[Client]:
    async with Client(application.target, retry=retry) as client:
        await client.wait_until_serving(60)
        yield client


async def until(holds: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str, seconds: float) -> None:
    """For what other processes do in their own time."""
    ends_at = time.monotonic() + seconds
    while True:
        found = holds()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert time.monotonic() < ends_at, f"never: {what}"
        await asyncio.sleep(0.1)


class Streams:
    """Answers that are being read, and how far each has come."""

    def __init__(self, client: Client, prompts: list[str], options: dict[str, Any]) -> None:
        self.num_tokens = [0] * len(prompts)
        self.num_resumes = 0
        self._tasks = [
            asyncio.create_task(self._read(client, position, prompt, options))
            for position, prompt in enumerate(prompts)
        ]

    async def _read(self, client: Client, position: int, prompt: str, options: dict[str, Any]) -> str:
        texts = []
        async with client.stream(prompt, **options) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    texts.append(event.text)
                    self.num_tokens[position] += len(event.tokens)
            self.num_resumes += events.num_resumes
        return "".join(texts)

    async def texts(self) -> list[str]:
        return list(await asyncio.gather(*self._tasks))


def expected(truth: LLM, prompts: list[str], options: dict[str, Any]) -> list[str]:
    return [each.text for each in truth.generate(prompts, **options)]


async def a_killed_replica_is_not_seen_by_clients(application: RayApplication, truth: LLM) -> None:
    """The one that takes its place has the policies that were set before."""
    prompts = [f"The quick brown fox {number}" for number in range(12)]
    async with client_of(application) as client:
        changed = await policies_are_set_under_one_revision(client)
        streams = Streams(client, prompts, ANSWER)
        await until(lambda: min(streams.num_tokens) >= 8, "every stream has begun", 60)
        application.kill_replica()
        assert await streams.texts() == expected(truth, prompts, ANSWER)
        assert streams.num_resumes == 0, "it was the ingress that went on, not the client"

        async def agree() -> bool:
            """Of two replicas eight answers are of both, but for one time in 128."""
            return all(told(info) == told(changed) for info in [await client.policies() for _ in range(8)])

        await until(lambda: len(application.replicas()) == 2, "another replica starts", 180)
        await until(agree, "all replicas agree", 180)


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


async def a_killed_ingress_is_made_up_for_by_the_client(application: RayApplication, truth: LLM) -> None:
    prompts = ["The lazy dog", "The brown fox"]
    async with client_of(application) as client:
        streams = Streams(client, prompts, ANSWER)
        await until(lambda: min(streams.num_tokens) >= 8, "every stream has begun", 60)
        application.kill_replica("Ingress")
        assert await streams.texts() == expected(truth, prompts, ANSWER)
        assert streams.num_resumes >= len(prompts)


async def chats_return_to_where_their_prefix_is(application: RayApplication) -> float:
    """The share of second turns that found all full blocks of the turn before."""
    num_found, num_chats, block_size = 0, 24, 16
    async with client_of(application) as client:

        async def chat(number: int) -> bool:
            turns = [ChatMessage("user", f"Chat {number}: def f(x): return x + {number} " * 24)]
            first = await client.generate(turns, request_id=f"chat-{number}", **TURN)
            turns += [ChatMessage("assistant", first.text), ChatMessage("user", "And then?")]
            second = await client.generate(turns, **TURN)
            whole = first.usage.num_prompt_tokens // block_size * block_size
            return second.usage.num_cached_prompt_tokens >= whole - block_size

        for start in range(0, num_chats, 4):  # a few at once, as they come
            num_found += sum(await asyncio.gather(*map(chat, range(start, start + 4))))
    return num_found / num_chats


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


async def errors_are_those_of_one_server(application: RayApplication) -> None:
    async with client_of(application) as client:
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


async def a_client_that_leaves_ends_its_request(application: RayApplication) -> None:
    """Three tries: Ray's proxy does not notice a client that leaves in the moment of a write."""
    async with client_of(application) as client:

        async def is_idle() -> bool:
            return not (await client.load()).num_running

        for _ in range(3):
            async with client.stream("The quick", max_tokens=1900, ignore_eos=True) as events:
                async for event in events:
                    if isinstance(event, TokenEvent):
                        break
            try:
                await until(is_idle, "the request has ended", 6)
                return
            except AssertionError:
                await until(is_idle, "the request came to its own end", 120)
        raise AssertionError("no client that left was noticed")


@pytest.mark.timeout(900)
def test_an_application_outlives_its_replicas(folder: Path, truth: LLM) -> None:
    async def check(application: RayApplication) -> None:
        await errors_are_those_of_one_server(application)
        await a_killed_replica_is_not_seen_by_clients(application, truth)
        assert await chats_return_to_where_their_prefix_is(application) >= 0.95
        await the_bounds_are_those_of_all_replicas_together(application)
        await a_client_that_leaves_ends_its_request(application)
        await a_killed_ingress_is_made_up_for_by_the_client(application, truth)

    with TemporaryDirectory(prefix="ray-") as room:
        scale = {"min_replicas": 2, "max_replicas": 2}
        with ray_application(Path(room), arguments(folder, scale)) as application:
            asyncio.run(check(application))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_replicas_come_and_go_and_are_replaced_under_load(folder: Path, truth: LLM) -> None:
    async def check(application: RayApplication) -> None:
        await replicas_follow_the_load(application, truth)
        blind = {"min_replicas": 2, "max_replicas": 2, "routing": "round-robin"}
        application.deploy(arguments(folder, blind))
        assert await chats_return_to_where_their_prefix_is(application) < 0.9, (
            "it is routing that returns them"
        )
        application.deploy(arguments(folder, SCALED | {"downscale_delay_seconds": 600.0}))
        await a_new_version_takes_over_without_a_lost_stream(application, folder, truth)

    with (
        TemporaryDirectory(prefix="ray-") as room,
        ray_application(Path(room), arguments(folder, SCALED)) as application,
    ):
        asyncio.run(check(application))


SCALED: dict[str, Any] = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_queued_tokens": 100,
    "metrics_seconds": 2.0,
    "upscale_delay_seconds": 0.0,
    "downscale_delay_seconds": 3.0,
}


class Load:
    """Clients that ask one thing after another, and compare each answer with the truth."""

    def __init__(self, client: Client, truth: LLM, num_clients: int) -> None:
        self.num_right = 0
        self._prompts = [f"Load {number}: " + "The quick brown fox jumps. " * 12 for number in range(8)]
        self._texts = expected(truth, self._prompts, TURN)
        self._is_over = False
        self._tasks = [asyncio.create_task(self._ask(client, number)) for number in range(num_clients)]

    async def _ask(self, client: Client, number: int) -> None:
        while not self._is_over:
            which = number % len(self._prompts)
            (text,) = await Streams(client, [self._prompts[which]], TURN).texts()
            assert text == self._texts[which]
            self.num_right += 1
            number += 3

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def replicas_follow_the_load(application: RayApplication, truth: LLM) -> None:
    """From one to three and back, with clients that go on all the while."""
    async with client_of(application) as client:
        assert len(application.replicas()) == 1
        load = Load(client, truth, 32)
        await until(lambda: len(application.replicas()) == 3, "three replicas", 120)
        await until(lambda: load.num_right >= 100, "answers", 120)
        await load.end()
        trickle = Load(client, truth, 1)
        await until(lambda: len(application.replicas()) == 1, "one replica again", 180)
        await trickle.end()
        assert trickle.num_right


async def a_new_version_takes_over_without_a_lost_stream(
    application: RayApplication, folder: Path, truth: LLM
) -> None:
    async with client_of(application) as client:
        before = set(application.replicas())
        load = Load(client, truth, 4)
        changed = arguments(folder, SCALED | {"downscale_delay_seconds": 600.0}, num_blocks=480)
        await asyncio.to_thread(application.deploy, changed)
        num_right = load.num_right
        await until(lambda: load.num_right > num_right + 8, "answers of the new version", 60)
        await load.end()
        assert not before & set(application.replicas()), "a replica of the old version is left"
        assert (await client.server_info()).num_blocks == 480
