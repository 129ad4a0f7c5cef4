"""Adapters over the wire: loaded, listed, named by requests; and which folders and names a caller may
reach."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_adapters import fake_adapters
from support.fake_engine import FakeEngine
from support.fake_model import Stop, expected_tokens
from support.identities import MAIL, OPERATOR, SEARCH, authenticator, bearer
from support.real_service import real_service
from support.service_thread import in_thread
from support.serving import serving

from pageturner.service.cli import main
from pageturner.service.client import NEVER, Credentials, SyncClient
from pageturner.service.client import Client as AsyncClient
from pageturner.service.errors import AdapterNotFound, AdaptersFull, InvalidArgument
from pageturner.service.identity import ANONYMOUS, Identity
from pageturner.service.rpc.adapters import folder_of
from pageturner.service.rpc.callers import LOCAL_ADMIN
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1 import model_pb2
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub
from pageturner.v1.model_pb2_grpc import ModelServiceStub

PROMPT = tuple(range(3, 15))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of adapters, with a link that leads out of it and one that stays inside."""
    root = tmp_path / "adapters"
    (root / "team" / "sql").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "in").symlink_to(root / "team")
    return root


@pytest.mark.parametrize("path", ["team/sql", "in/sql", "../adapters/team/sql"])
def test_folders_below_the_one_that_is_set_are_found(path: str, root: Path) -> None:
    assert folder_of(path, root, ANONYMOUS) == root / "team" / "sql"
    assert folder_of(str(root / path), root, Identity("ops", is_admin=True)) == root / "team" / "sql"


@pytest.mark.parametrize(
    "path", ["", "..", ".", "out", "out/x", "../secret", "/etc", "team/../..", "a\0b", "x" * 5000]
)
def test_no_other_folder_is_reached_or_told_of(path: str, root: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"^path: ") as caught:
        folder_of(path, root, ANONYMOUS)
    assert "secret" not in caught.value.reason


def test_without_a_folder_only_a_local_operator_loads(root: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"adapters.folder is not set"):
        folder_of(str(root), None, Identity("ops", is_admin=True))
    assert folder_of(str(root), None, LOCAL_ADMIN) == root
    assert folder_of("team", root, LOCAL_ADMIN) == root / "team"


async def test_both_clients_load_list_and_unload(root: Path) -> None:
    engine = FakeEngine()
    engine.adapter_folder = root
    async with serving(engine) as served:
        client = served.client
        info = await client.load_adapter("sql", "team/sql")
        assert (info.name, info.path, info.modules) == ("sql", str(root / "team/sql"), ("q_proj", "v_proj"))
        assert await client.adapters() == (info,)
        assert (await client.model()).adapters == ("sql",)
        with pytest.raises(InvalidArgument, match="use_dora"):
            await client.load_adapter("x", "bad-one")
        assert await client.unload_adapter("sql", 1.0) == 0
        with pytest.raises(AdapterNotFound) as caught:
            await client.unload_adapter("sql")
        assert caught.value.adapter == "sql"
        for wait in (-1.0, float("nan"), 1e9):
            with pytest.raises(InvalidArgument, match="wait_seconds"):
                await client.unload_adapter("sql", wait)

        def by_the_other() -> Any:
            with SyncClient(f"127.0.0.1:{served.port}", retry=NEVER) as other:
                return other.load_adapter("a", root / "team"), other.adapters(), other.unload_adapter("a")

        one, listed, num_requests = await asyncio.to_thread(by_the_other)
        assert listed == (one,)
        assert num_requests == 2


async def test_requests_name_their_adapters_and_share_no_blocks_across_them() -> None:
    adapters, files = fake_adapters(100)
    for name, folder in (("a", "one-10"), ("b", "two-20")):
        await adapters.load(name, Path(folder))
    async with real_service(num_blocks=12, adapters=adapters) as service:
        names: list[tuple[str, str]] = [("a", "one-10"), ("", ""), ("b", "two-20")] * 2

        async def ask(index: int, name: str) -> list[int]:
            answer = await service.client.generate(
                PROMPT, max_tokens=9, seed=index, temperature=1.0, adapter=name
            )
            return [token.token_id for token in answer.choices[0].tokens]

        found = await asyncio.gather(*(ask(index, name) for index, (name, _) in enumerate(names)))
        for index, (tokens, (_, digest)) in enumerate(zip(found, names, strict=True)):
            assert tokens == expected_tokens(PROMPT, index, 0, Stop(9), digest)
        assert [each.num_requests_total for each in await service.client.adapters()] == [2, 2]
        assert all(each.num_requests == 0 for each in await service.client.adapters())
        with pytest.raises(AdapterNotFound, match="'c' is not loaded"):
            await service.client.generate(PROMPT, max_tokens=1, adapter="c")
        with pytest.raises(InvalidArgument, match="adapter"):
            await service.client.generate(PROMPT, max_tokens=1, adapter="x" * 300)
        # Other weights under the name: the blocks of the old ones are not theirs.
        await adapters.load("a", Path("three-30"))
        assert await ask(0, "a") == expected_tokens(PROMPT, 0, 0, Stop(9), "three-30")
        await service.until_idle()
    assert files.loaded == {"two-20", "three-30"}


async def test_every_way_to_end_lets_go_of_the_adapter() -> None:
    adapters, files = fake_adapters(100)
    await adapters.load("a", Path("one-10"))
    async with real_service(adapters=adapters, max_num_seqs=1, max_waiting=2) as service:
        client = service.client
        service.hold_steps()
        running = asyncio.ensure_future(client.generate(PROMPT, max_tokens=9, adapter="a", request_id="r"))
        left = asyncio.ensure_future(client.generate(PROMPT, max_tokens=9, adapter="a", request_id="l"))
        await service.until(lambda: adapters.report()[0].num_requests == 2)
        with pytest.raises(InvalidArgument):
            await client.generate((100_000,), adapter="a")
        assert adapters.report()[0].num_requests == 2
        left.cancel()
        await client.abort("r")
        service.release_steps()
        await asyncio.gather(running, left, return_exceptions=True)
        await service.until(lambda: adapters.report()[0].num_requests == 0)
        service.hold_steps()
        async with client.stream(PROMPT, max_tokens=30, adapter="a") as events:
            await anext(aiter(events))
            assert await client.unload_adapter("a") == 1
            assert files.loaded == {"one-10"}
        service.release_steps()
        await service.until(lambda: not files.loaded)


async def test_an_adapter_that_finds_no_room_is_refused_with_a_time_to_wait() -> None:
    adapters, _ = fake_adapters(60)
    for folder in ("one-50", "two-50"):
        await adapters.load(folder[:3], Path(folder))
    async with real_service(adapters=adapters) as service:
        service.hold_steps()
        holding = asyncio.ensure_future(service.client.generate(PROMPT, max_tokens=2, adapter="two"))
        await service.until(lambda: adapters.report()[1].num_requests == 1)
        with pytest.raises(AdaptersFull) as caught:
            await service.client.generate(PROMPT, max_tokens=2, adapter="one")
        assert caught.value.retry_after_seconds > 0
        service.release_steps()
        await holding
        await service.client.generate(PROMPT, max_tokens=2, adapter="one")


async def test_an_answer_goes_on_with_its_adapter_alone() -> None:
    adapters, _ = fake_adapters(100)
    for name, folder in (("a", "one-10"), ("b", "two-20")):
        await adapters.load(name, Path(folder))
    async with real_service(adapters=adapters) as service:
        stub = GenerationServiceStub(service.channel)

        def request(name: str) -> pb.GenerateStreamRequest:
            return pb.GenerateStreamRequest(
                prompt=pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT)),
                sampling=pb.SamplingParams(max_tokens=6, seed=5),
                adapter=name,
            )

        accepted = None
        tokens: list[int] = []
        async for message in stub.GenerateStream(request("a")):
            accepted = message.accepted if message.HasField("accepted") else accepted
            tokens += message.delta.token_ids
        assert accepted is not None
        assert "adapter=one-10" in accepted.fingerprint

        async def resumed(name: str, *, allow_inexact: bool = False) -> list[int]:
            again = request(name)
            again.resume.seed, again.resume.fingerprint = accepted.seed, accepted.fingerprint
            again.resume.allow_inexact = allow_inexact
            again.resume.choices.add(token_ids=tokens[:2])
            return [
                token async for message in stub.GenerateStream(again) for token in message.delta.token_ids
            ]

        assert await resumed("a") == tokens[2:]
        for name in ("b", ""):
            with pytest.raises(grpc.aio.AioRpcError, match="adapter") as caught:
                await resumed(name, allow_inexact=True)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_tenant_meets_the_adapters_that_it_may_use_alone() -> None:
    adapters, _ = fake_adapters(100)
    for name in ("a", "c"):
        await adapters.load(name, Path(f"{name}-10"))
    async with real_service(adapters=adapters, server_options={"authenticator": authenticator()}) as service:
        stub, models = GenerationServiceStub(service.channel), ModelServiceStub(service.channel)
        request = pb.GenerateRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT)), sampling=pb.SamplingParams(max_tokens=1)
        )
        for caller, name, code in (
            (SEARCH, "a", None),
            (SEARCH, "c", grpc.StatusCode.NOT_FOUND),
            (SEARCH, "b", grpc.StatusCode.NOT_FOUND),
            (MAIL, "c", None),
        ):
            request.adapter = name
            try:
                await stub.Generate(request, metadata=bearer(caller))
                found = None
            except grpc.aio.AioRpcError as error:
                found = error.code()
            assert found is code, (caller, name)
        for caller, names in ((SEARCH, ["a"]), (MAIL, ["a", "c"])):
            listed = await models.ListModels(model_pb2.ListModelsRequest(), metadata=bearer(caller))
            assert list(listed.models[0].adapters) == names
        operator = Credentials(token=OPERATOR.text)
        async with AsyncClient(service.target, credentials=operator, retry=NEVER) as client:
            assert len(await client.adapters()) == 2
            with pytest.raises(InvalidArgument, match=r"adapters.folder is not set"):
                await client.load_adapter("d", "/etc")


def test_the_command_lists_loads_and_unloads(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.adapter_folder = root
    with in_thread(lambda: serving(engine)) as served:
        target = f"127.0.0.1:{served.service.port}"

        def said(*words: str) -> tuple[int, str, str]:
            code = main(["adapters", *words, "--target", target])
            return code, *capsys.readouterr()

        assert said() == (0, "no adapter is loaded\n", "")
        code, out, _ = said("load", "sql", "team/sql")
        assert (code, "in memory" in out) == (0, True)
        assert '"name": "sql"' in said("list", "--json")[1]
        assert "2 still have it" in said("unload", "sql")[1]
        code, _, error = said("unload", "sql")
        assert (code, "'sql' is not loaded" in error) == (2, True)
        assert said("drop", "sql")[0] == 2
