"""Every domain error has a status, and comes back from it as what it was."""

from __future__ import annotations

import base64
from urllib.parse import quote

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from pageturner.service import errors
from pageturner.service.errors import PageturnerError
from pageturner.service.rpc.status import (
    CODES,
    INTERNAL_TEXT,
    MAX_TEXT,
    UnknownService,
    UnknownStatus,
    code_of,
    from_status,
    to_status,
)

SAMPLES: tuple[PageturnerError, ...] = (
    errors.InvalidArgument("sampling.top_p", "2 is not in [0, 1]"),
    errors.Unauthenticated(errors.RefusalCause.EXPIRED, "token a"),
    errors.PermissionDenied("AdminService is for admins", errors.RefusalCause.NOT_ADMIN),
    errors.ModelNotFound("gpt", "smollm2"),
    errors.AdapterNotFound("sql"),
    errors.AdapterError("use_dora: True"),
    errors.AdaptersFull("no room", 1.0),
    errors.DuplicateRequest("r1"),
    errors.TenantLimitReached("tokens_per_minute", "200 are left", 2.5),
    errors.QueueFull("64 requests wait", 2.5),
    errors.NotResumable("the answer began under other kernels", "kernels,machine"),
    errors.HandoverRefused("KV of other weights", "weights"),
    errors.MixedServers("a:1 and b:1 have other weights"),
    errors.NoReplica("all of them drain"),
    errors.DeadlineTooClose("5.0 s are left", 2.5),
    errors.DeadlineUnreachable("too much is served before"),
    errors.Loading("the model is still loading"),
    errors.Draining("shutting down"),
    errors.EngineDead("Traceback (most recent call last)"),
    errors.RankLost("rank 1: Connection closed by peer [127.0.0.1]:2"),
    errors.RequestAborted("aborted by id"),
    errors.DeadlineExceeded("2 s are over"),
    errors.SlowConsumer("not read for 30 s"),
    errors.NonFiniteLogits("NaN logits at position 7"),
    errors.StepFailed("Traceback (most recent call last)"),
    errors.TextFailed("KeyError: 7"),
    errors.StaleRevision(3, 4),
    errors.NotRecorded("nothing is recorded"),
    errors.ConfigError("cache.block_size", "3 is no power of two"),
    errors.ModelError("no such folder"),
    UnknownService("no service 'x' here"),
)
KEPT = frozenset({"served", "cause", "credential", "counted_as"})
"""What an error carries that no client is told."""

HIDDEN = (errors.EngineDead, errors.RankLost, errors.StepFailed, errors.TextFailed)


def _subclasses(kind: type[PageturnerError]) -> set[type[PageturnerError]]:
    return {kind} | {leaf for child in kind.__subclasses__() for leaf in _subclasses(child)}


def _round_trip(error: PageturnerError) -> PageturnerError:
    status = to_status(error)
    return from_status(code_of(error), status.message, status.SerializeToString())


def test_every_error_of_the_domain_is_mapped() -> None:
    domain = {kind for kind in _subclasses(PageturnerError) if kind.__module__ == errors.__name__}
    assert domain - {PageturnerError} == set(CODES) - {UnknownService}
    assert set(CODES) == {type(sample) for sample in SAMPLES}, "a sample of each is tried below"


def test_an_error_that_is_not_mapped_is_noticed() -> None:
    class Forgotten(PageturnerError):
        """Stands for a class that is added to errors.py later."""

    assert Forgotten in _subclasses(PageturnerError)
    assert Forgotten not in CODES
    assert code_of(Forgotten("x")) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_as_what_it_was(error: PageturnerError) -> None:
    back = _round_trip(error)
    assert type(back) is type(error)
    assert vars(back) == {name: value for name, value in vars(error).items() if name not in KEPT}
    if not isinstance(error, HIDDEN):
        assert str(back) == str(error)


@pytest.mark.parametrize("kind", HIDDEN)
def test_text_born_of_an_arbitrary_exception_stays_on_the_server(kind: type[PageturnerError]) -> None:
    assert b"Traceback" not in to_status(kind("Traceback (most recent call last)")).SerializeToString()


def test_a_bug_of_ours_is_internal_and_tells_nothing() -> None:
    status = to_status(RuntimeError("password=hunter2"), "r1")
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert status.message == INTERNAL_TEXT
    assert b"hunter2" not in status.SerializeToString()


def test_a_subclass_of_a_mapped_error_is_that_error() -> None:
    class Stuck(errors.QueueFull):
        """A narrower kind, as an engine may define."""

    assert code_of(Stuck("full", 1.0)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert type(_round_trip(Stuck("full", 1.0))) is errors.QueueFull


def test_details_are_those_that_google_rpc_defines() -> None:
    bad = to_status(errors.InvalidArgument("sampling.n", "0 is not in [1, 8]"), "r1")
    request, info, fields = RequestInfo(), ErrorInfo(), BadRequest()
    unpacked = [_unpacked(detail, request, info, fields) for detail in bad.details]
    assert sorted(unpacked) == ["BadRequest", "ErrorInfo", "RequestInfo"]
    assert request.request_id == "r1"
    assert (info.reason, info.domain) == ("INVALID_ARGUMENT", "pageturner")
    assert [(field.field, field.description) for field in fields.field_violations] == [
        ("sampling.n", "0 is not in [1, 8]")
    ]
    retry = RetryInfo()
    full = to_status(errors.QueueFull("full", 2.5))
    assert "RetryInfo" in [_unpacked(detail, retry, ErrorInfo()) for detail in full.details]
    assert retry.retry_delay.ToMilliseconds() == 2500


def _unpacked(detail: AnyMessage, *candidates: RequestInfo | ErrorInfo | BadRequest | RetryInfo) -> str:
    return next(type(candidate).__name__ for candidate in candidates if detail.Unpack(candidate))


def test_a_text_that_is_no_unicode_is_sent_with_replacements() -> None:
    status = to_status(errors.InvalidArgument("prompt", "not \ud800 text"))
    assert status.message == "prompt: not ? text"


def test_texts_that_quote_a_huge_input_are_clipped() -> None:
    """Trailing metadata over 8 KiB would replace the status with one of the transport."""
    for huge in ("x" * 100_000, "é" * 100_000, "😀" * 100_000):
        for error in (
            errors.ModelNotFound(huge, huge),
            errors.InvalidArgument(huge, huge),
            errors.DuplicateRequest(huge),
            errors.NonFiniteLogits(huge),
        ):
            status = to_status(error, huge)
            assert MAX_TEXT - 4 < len(status.message.encode()) <= MAX_TEXT
            assert status.message.endswith("…")
            details = base64.b64encode(status.SerializeToString())
            assert len(quote(status.message)) + len(details) < 8192


def test_statuses_of_others_are_unknown_but_for_a_deadline() -> None:
    foreign = Status(code=14, message="no")
    foreign.details.add().Pack(ErrorInfo(reason="QUEUE_FULL", domain="elsewhere.example"))
    for packed in (b"", b"\xff\xff", foreign.SerializeToString()):
        error = from_status(grpc.StatusCode.UNAVAILABLE, "no", packed)
        assert isinstance(error, UnknownStatus)
        assert (error.code, str(error)) == ("UNAVAILABLE", "UNAVAILABLE: no")
    late = from_status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", b"")
    assert type(late) is errors.DeadlineExceeded
