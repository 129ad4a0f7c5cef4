"""The Python client: what a program imports to talk to a server. Nothing but grpc stands behind it.

Owns the connection to one server, and the way of a caller's values to the wire and back. Any program may
call it; it has neither torch nor a tokenizer behind it. What a caller gives is sent as it was meant, or is
refused by its name before anything is sent; every failure of a call is a `PageturnerError`.
"""

from pageturner.policies.spec import PolicySpec
from pageturner.service.client.answer_streams import AnswerStream, AsyncAnswerStream
from pageturner.service.client.async_client import Client
from pageturner.service.client.credentials import Credentials
from pageturner.service.client.forks import ForkedProcess
from pageturner.service.client.retry import NEVER, Retried, Retry
from pageturner.service.client.sync_client import SyncClient
from pageturner.service.client.targets import DEFAULT_TARGET
from pageturner.service.client.values import (
    BlockOwner,
    BlockPoolMap,
    Choice,
    Completion,
    Options,
    PromptLike,
    RequestPage,
    Sampling,
    ScoreOptions,
    Turn,
)
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    FinishReason,
    ScoredTokensEvent,
    TokenEvent,
)
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.engine.api import (
    AcceptedEvent,
    Activity,
    AdapterInfo,
    BlockUse,
    ChatMessage,
    ChatPrompt,
    ContinuationScore,
    RequestInfo,
    RequestState,
    ScoreAnswer,
    StreamEvent,
    TextPrompt,
    ToolCall,
)
from pageturner.service.errors import PageturnerError
from pageturner.service.rpc.status import UnknownStatus

__all__ = [
    "DEFAULT_TARGET",
    "NEVER",
    "AcceptedEvent",
    "Activity",
    "AdapterInfo",
    "AnswerStream",
    "AsyncAnswerStream",
    "BeamSearch",
    "BlockOwner",
    "BlockPoolMap",
    "BlockUse",
    "ChatMessage",
    "ChatPrompt",
    "Choice",
    "ChoiceFinishedEvent",
    "Client",
    "Completion",
    "ContinuationScore",
    "Credentials",
    "EarlyStopping",
    "FinishReason",
    "FinishedEvent",
    "ForkedProcess",
    "Options",
    "OutputForm",
    "PageturnerError",
    "PolicySpec",
    "PromptLike",
    "RequestInfo",
    "RequestPage",
    "RequestState",
    "Retried",
    "Retry",
    "Sampling",
    "ScoreAnswer",
    "ScoreOptions",
    "ScoredTokensEvent",
    "StreamEvent",
    "StructuredOutput",
    "SyncClient",
    "TextPrompt",
    "TokenEvent",
    "ToolCall",
    "Turn",
    "UnknownStatus",
]
