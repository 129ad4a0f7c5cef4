"""The engine in this process: the answers of the service, without one."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.model_folders import TEMPLATE, save_chat_model

from pageturner.policies.spec import PolicySpec
from pageturner.service.client import AcceptedEvent, ChatMessage, FinishedEvent, TokenEvent, Turn
from pageturner.service.config import OPENMP_SPINS
from pageturner.service.core.outputs import FinishReason
from pageturner.service.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    InvalidArgument,
    ModelError,
    ModelNotFound,
    QueueFull,
)
from pageturner.service.llm import LLM

PROMPTS = ["The quick brown fox", "Grüße aus", "日本語", "def f(x):", "jumps over"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def make(folder: Path) -> Callable[..., LLM]:
    def make(**sections: Any) -> LLM:
        cache = {"num_blocks": 512, "swap_space": 0} | sections.pop("cache", {})
        return LLM({"source": str(folder), "device": "cpu", "num_threads": 1}, cache=cache, **sections)

    return make


@pytest.fixture(scope="module")
def llm(make: Callable[..., LLM]) -> Iterator[LLM]:
    with make() as llm:
        yield llm


def text_of(events: Any) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenEvent))


def until_idle(llm: LLM) -> None:
    """Until all is free by the last step's figures; what is never freed fails by the test's time limit."""
    while llm.load().num_running or llm.load().num_blocks_used:
        time.sleep(0)


def test_the_environment_of_the_process_stays_as_it_is(make: Callable[..., LLM]) -> None:
    """Serving tells OpenMP how long to spin; a program's own choice that is, where the engine is a guest."""
    before = dict(os.environ)
    make()
    assert dict(os.environ) == before
    assert f"GOMP_SPINCOUNT={OPENMP_SPINS}" in str(LLM.__doc__)


def test_answers_come_in_the_order_of_the_prompts_as_if_each_were_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, max_tokens=12, temperature=0.0)
    alone = [llm.generate(prompt, max_tokens=12, temperature=0.0)[0] for prompt in PROMPTS]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert all(0 < len(answer.choices[0].tokens) <= 12 for answer in together)


def test_the_prompts_of_a_list_are_computed_in_common_steps(make: Callable[..., LLM]) -> None:
    with make() as llm:
        before = llm.load().num_steps_total
        llm.generate(PROMPTS, max_tokens=16, ignore_eos=True)
        assert llm.load().num_steps_total - before < 2 * 16


def test_texts_ids_and_conversations_may_be_mixed(llm: LLM) -> None:
    turns: list[Turn] = [{"role": "user", "content": "hi"}, ChatMessage("assistant", "yes")]
    rendered = "user: hi\nassistant: yes\nassistant:"
    assert TEMPLATE.endswith("assistant:")
    ids = llm.tokenize("fox")
    assert llm.detokenize(ids) == "fox"
    assert llm.tokenize(turns) == llm.tokenize(rendered)
    options: Any = {"max_tokens": 5, "temperature": 0.0}
    by_ids, by_turns = llm.generate([ids, turns], **options)
    assert by_ids.choices == llm.generate("fox", **options)[0].choices
    assert (
        by_turns.choices == llm.chat(turns, **options).choices == llm.generate(rendered, **options)[0].choices
    )


def test_a_stream_gives_what_generate_gives(llm: LLM) -> None:
    events = list(llm.stream("fox", max_tokens=8, temperature=0.0, n=2, seed=7, request_id="mine"))
    assert isinstance(events[0], AcceptedEvent)
    assert (events[0].request_id, events[0].seed) == ("mine", 7)
    assert isinstance(events[-1], FinishedEvent)
    (whole,) = llm.generate("fox", max_tokens=8, temperature=0.0, n=2, seed=7)
    for choice in whole.choices:
        assert choice.text == text_of(
            event for event in events if isinstance(event, TokenEvent) and event.index == choice.index
        )
        assert choice.reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert whole.usage == events[-1].usage


def test_a_stream_that_is_left_frees_what_it_held(llm: LLM) -> None:
    with closing(llm.stream("fox", max_tokens=2000, ignore_eos=True)) as events:
        next(events)
    for _ in llm.stream("fox", max_tokens=2000, ignore_eos=True):
        break
    until_idle(llm)


def test_threads_share_one_engine(llm: LLM) -> None:
    wanted = [answer.text for answer in llm.generate(PROMPTS, max_tokens=6, temperature=0.0)]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streamed = threads.map(
            lambda prompt: text_of(llm.stream(prompt, max_tokens=6, temperature=0.0)), PROMPTS
        )
        assert list(streamed) == wanted


def test_progress_is_told_for_each_prompt(llm: LLM) -> None:
    told: list[tuple[int, int]] = []
    llm.generate(PROMPTS, on_progress=lambda done, total: told.append((done, total)), max_tokens=2)
    assert told == [(done, len(PROMPTS)) for done in range(1, len(PROMPTS) + 1)]
    assert llm.generate([], max_tokens=2) == []


def test_more_prompts_than_may_wait_are_asked_as_there_is_room(make: Callable[..., LLM]) -> None:
    with make(scheduler={"max_waiting": 2, "max_num_seqs": 2, "max_queued_tokens": 24}) as llm:
        answers = llm.generate(["a b c d e f g"] * 12, max_tokens=3, ignore_eos=True, temperature=0.0)
        assert len({answer.text for answer in answers}) == 1
        assert len(answers) == 12


def test_threads_with_more_prompts_than_may_wait_make_room_for_each_other(make: Callable[..., LLM]) -> None:
    prompts = ["a b c d e f g"] * 12
    with (
        make(scheduler={"max_waiting": 2, "max_num_seqs": 2}) as llm,
        ThreadPoolExecutor(4) as threads,
    ):
        lists = list(threads.map(lambda _: llm.generate(prompts, max_tokens=3, ignore_eos=True), range(4)))
    assert [len(answers) for answers in lists] == [12] * 4


def test_progress_may_use_the_llm_itself(llm: LLM) -> None:
    inner: list[str] = []
    wanted = llm.generate("fox", max_tokens=3, temperature=0.0)[0].text

    def ask(done: int, total: int) -> None:
        inner.append(llm.generate("fox", max_tokens=3, temperature=0.0)[0].text)

    assert len(llm.generate(PROMPTS, on_progress=ask, max_tokens=2)) == len(PROMPTS)
    assert inner == [wanted] * len(PROMPTS)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_of_progress_is_raised_and_the_llm_lives(llm: LLM, error: BaseException) -> None:
    def fail(done: int, total: int) -> None:
        raise error

    with pytest.raises(type(error)):
        llm.generate(PROMPTS, on_progress=fail, max_tokens=2)
    until_idle(llm)
    assert llm.generate("x", max_tokens=1)


def test_a_stream_keeps_its_llm_alive(make: Callable[..., LLM]) -> None:
    events = make().stream("fox", max_tokens=50, ignore_eos=True)
    gc.collect()
    assert isinstance(list(events)[-1], FinishedEvent)


@pytest.mark.fault("3")
@pytest.mark.parametrize("prompts", [{"role": "user", "content": "hi"}, b"hi"])
def test_what_is_no_list_of_prompts_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="not a text or a list of prompts"):
        llm.generate(prompts)


def test_a_queue_that_others_keep_full_is_told(make: Callable[..., LLM]) -> None:
    options: Any = {"max_tokens": 2000, "ignore_eos": True}
    with make(scheduler={"max_waiting": 1, "max_num_seqs": 1}) as llm:
        running = llm.stream("x", **options)
        next(running)
        next(running)  # a token: it does not wait any more
        waiting = llm.stream("x", **options)
        next(waiting)
        with pytest.raises(QueueFull):
            llm.generate(["x"], max_tokens=3)


@pytest.mark.fault("3", "D")
@pytest.mark.parametrize(
    ("prompts", "options", "kind", "field"),
    [
        (["ok", "\ud800"], {}, InvalidArgument, "prompt.text"),
        (["ok", ""], {}, InvalidArgument, "prompt.text"),
        (["ok", [10**6]], {}, InvalidArgument, "prompt.token_ids.ids[0]"),
        (["ok", [-1]], {}, InvalidArgument, "prompt.token_ids.ids[0]"),
        (["ok", [{"role": "", "content": ""}]], {}, InvalidArgument, "prompt.chat.messages[0].role"),
        (["ok", b"x"], {}, TypeError, None),
        ([1, 2], {}, TypeError, None),
        ([{"role": "user", "content": "hi"}], {}, TypeError, None),
        (["ok"], {"max_tokens": 2.0}, InvalidArgument, "sampling.max_tokens"),
        (["ok"], {"max_tokens": 0}, InvalidArgument, "sampling.max_tokens"),
        (["ok"], {"top_p": 3.0}, InvalidArgument, "sampling.top_p"),
        (["ok"], {"timeout_seconds": -1}, InvalidArgument, "timeout_seconds"),
        (["ok"], {"timeout_seconds": 0}, DeadlineExceeded, None),
        (["ok"], {"model": "gpt"}, ModelNotFound, None),
        (["a", "b"], {"request_id": "r"}, InvalidArgument, "request_id"),
        (["ok"], {"max_token": 1}, TypeError, None),
    ],
)
def test_what_a_server_would_refuse_is_refused_with_the_same_error(
    llm: LLM, prompts: Any, options: dict[str, Any], kind: type[Exception], field: str | None
) -> None:
    with pytest.raises(kind) as caught:
        llm.generate(prompts, **options)
    assert getattr(caught.value, "field", None) == field
    until_idle(llm)


def test_an_error_notes_the_position_of_its_prompt_and_the_others_are_aborted(llm: LLM) -> None:
    too_long = [5] * 3000
    with pytest.raises(InvalidArgument, match="leave room for an answer") as caught:
        llm.generate(["ok", too_long], max_tokens=2000, ignore_eos=True)
    assert caught.value.__notes__ == ["prompts[1]"]
    until_idle(llm)


def test_a_stream_raises_its_error_where_it_is_read(llm: LLM) -> None:
    events = llm.stream("x", request_id="twin", max_tokens=2000, ignore_eos=True)
    next(events)
    with pytest.raises(DuplicateRequest):
        list(llm.stream("x", request_id="twin"))
    events.close()


@pytest.mark.fault("33")
def test_an_infinite_timeout_is_no_limit(llm: LLM) -> None:
    assert llm.generate("x", max_tokens=1, timeout_seconds=float("inf"))


def test_policies_are_shown_and_changed_while_it_runs(make: Callable[..., LLM]) -> None:
    with make(policies={"victim": "last-arrived"}) as llm:
        in_force = {axis.axis: axis.name for axis in llm.policies().axes}
        assert in_force["victim"] == "last-arrived"
        llm.set_policies({"queue": PolicySpec("priority", {"aging_seconds": 5.0})})
        (answer,) = llm.generate("x", max_tokens=1)
        assert (answer.policies["queue"], answer.policies["victim"]) == ("priority", "last-arrived")
        with pytest.raises(InvalidArgument):
            llm.set_policies({"queue": PolicySpec("nonsense")})


def test_the_model_and_the_configuration_can_be_asked_for(llm: LLM, folder: Path) -> None:
    assert llm.model.source == str(folder)
    assert (llm.info().num_blocks, llm.info().config["cache.num_blocks"]) == (512, "512")


def test_arguments_go_over_the_environment_and_it_over_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pageturner.toml"
    file.write_text(
        "[cache]\nblock_size = 4\nnum_blocks = 64\nswap_space = 0\n[scheduler]\nmax_num_seqs = 3\n"
    )
    monkeypatch.setenv("PAGETURNER_CACHE_BLOCK_SIZE", "8")
    monkeypatch.setenv("PAGETURNER_SCHEDULER_MAX_NUM_SEQS", "5")
    model = {"source": str(folder), "device": "cpu", "num_threads": 1}
    with LLM(model, config=file, scheduler={"max_num_seqs": 7}) as llm:
        info = llm.info()
    assert (info.block_size, info.num_blocks, info.max_num_seqs) == (8, 64, 7)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cache": {"num_block": 5}}, r"cache\.num_block: unknown key; did you mean cache\.num_blocks"),
        (
            {"cache": {"num_blocks": "many"}},
            r"cache\.num_blocks: 'many' is not a whole number \(from the caller",
        ),
        ({"policies": {"victim": "nobody"}}, r"policies\.victim"),
    ],
)
def test_a_bad_argument_names_its_key(arguments: dict[str, Any], text: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM(folder, **arguments)


def test_a_model_that_is_not_there_is_a_typed_error(tmp_path: Path) -> None:
    num_threads = threading.active_count()
    with pytest.raises(ModelError):
        LLM(tmp_path / "nothing")
    assert threading.active_count() == num_threads


def test_closing_ends_what_runs_and_refuses_what_comes(make: Callable[..., LLM]) -> None:
    llm = make()
    events = llm.stream("x", max_tokens=2000, ignore_eos=True)
    next(events)
    llm.close()
    llm.close()
    with pytest.raises(Draining):
        list(events)
    with pytest.raises(Draining):
        llm.generate("x")
    with pytest.raises(Draining):
        list(llm.stream("x"))


def test_one_that_is_forgotten_ends_its_threads(make: Callable[..., LLM]) -> None:
    llm = make()
    events = llm.stream("x", max_tokens=2000, ignore_eos=True)
    next(events)
    thread, seen = llm._thread._thread, weakref.ref(llm)
    del llm, events
    gc.collect()
    thread.join()
    assert seen() is None


def test_one_that_is_collected_on_its_own_thread_ends_too(make: Callable[..., LLM]) -> None:
    llm = make()
    thread = llm._thread
    thread._loop.call_soon_threadsafe(llm.close)
    thread._thread.join()


def test_ctrl_c_ends_a_list_and_frees_what_it_held(llm: LLM) -> None:
    def interrupt_once_the_main_thread_waits() -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            frame: FrameType | None = sys._current_frames()[main]
            while frame is not None:
                if frame.f_code.co_name == "answer_all" and llm.load().num_running:
                    signal.pthread_kill(main, signal.SIGINT)
                    return
                frame = frame.f_back
            time.sleep(0)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt_once_the_main_thread_waits)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, max_tokens=2000, ignore_eos=True)
    until_idle(llm)
    assert llm.generate("x", max_tokens=1)


def test_the_next_turn_of_a_conversation_computes_from_the_answers_end(make: Callable[..., LLM]) -> None:
    """All but the answer's last token, whose KV is never made; the tokens are those without any reuse."""
    seconds = {}
    for reuses in (True, False):
        with make(cache={"reuse_partial_blocks": reuses}) as llm:
            prompt = llm.tokenize("The quick brown fox jumps over the lazy dog")
            first = llm.generate([prompt], max_tokens=13, temperature=0.0, ignore_eos=True)[0]
            until_idle(llm)
            turn = (*prompt, *(token.token_id for token in first.choices[0].tokens))
            assert (len(turn) - 1) % 16, "the answer's last block is partial"
            seconds[reuses] = llm.generate([(*turn, 5, 6)], max_tokens=8, temperature=0.0)[0]
    num_kv = len(turn) - 1
    assert seconds[True].usage.num_cached_prompt_tokens == num_kv
    assert seconds[False].usage.num_cached_prompt_tokens == num_kv // 16 * 16
    assert seconds[True].choices[0].tokens == seconds[False].choices[0].tokens


def test_a_context_beyond_the_model_is_refused_unless_its_rope_is_stretched(folder: Path) -> None:
    cache: Any = {"num_blocks": 600, "swap_space": 0}
    model: Any = {"source": str(folder), "device": "cpu", "num_threads": 1}
    scheduler: Any = {"max_model_len": 8192}
    with pytest.raises(ConfigError, match=r"^model\.max_position: 8192 is more than the 4096 positions"):
        LLM(model | {"max_position": 8192}, cache=cache)
    with pytest.raises(ConfigError, match=r"^scheduler\.max_model_len: 8192 is more .*model\.rope_scaling"):
        LLM(model, cache=cache, scheduler=scheduler)
    scaling = {"rope_type": "yarn", "factor": 2.0}
    with LLM(model | {"rope_scaling": scaling}, cache=cache, scheduler=scheduler) as llm:
        assert llm.model.max_model_len == 8192
        (completion,) = llm.generate([[5] * 5000], max_tokens=2, ignore_eos=True)
        assert completion.usage.num_output_tokens == 2
