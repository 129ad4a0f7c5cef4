"""The Python client: what a platform team imports to talk to a server. Nothing but grpc stands behind it."""

from pageturner.service.client.async_client import CHANNEL_OPTIONS, DEFAULT_TARGET, Client
from pageturner.service.client.values import (
    Accepted,
    Choice,
    ChoiceFinished,
    Completion,
    Delta,
    Finished,
    Options,
    Sampling,
    StreamItem,
)
from pageturner.service.engine.api import ChatMessage, ChatPrompt, TextPrompt

__all__ = [
    "CHANNEL_OPTIONS",
    "DEFAULT_TARGET",
    "Accepted",
    "ChatMessage",
    "ChatPrompt",
    "Choice",
    "ChoiceFinished",
    "Client",
    "Completion",
    "Delta",
    "Finished",
    "Options",
    "Sampling",
    "StreamItem",
    "TextPrompt",
]
