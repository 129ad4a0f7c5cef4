from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("token_ids", "fingerprint", "layout", "first_block", "tenant", "cache_salt", "priority", "request_id")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: str
    layout: str
    first_block: int
    tenant: str
    cache_salt: str
    priority: int
    request_id: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[str] = ..., layout: _Optional[str] = ..., first_block: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("begun", "block")
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    begun: PrefillBegun
    block: KvBlock
    def __init__(self, begun: _Optional[_Union[PrefillBegun, _Mapping]] = ..., block: _Optional[_Union[KvBlock, _Mapping]] = ...) -> None: ...

class PrefillBegun(_message.Message):
    __slots__ = ("num_blocks", "block_bytes")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_bytes: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class KvBlock(_message.Message):
    __slots__ = ("index", "content", "checksum")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    index: int
    content: bytes
    checksum: int
    def __init__(self, index: _Optional[int] = ..., content: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...
