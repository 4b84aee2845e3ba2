from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("version", "client")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    version: int
    client: str
    def __init__(self, version: _Optional[int] = ..., client: _Optional[str] = ...) -> None: ...

class ViewMessage(_message.Message):
    __slots__ = ("version", "term", "sent_s", "age_s", "generation", "whole", "delta", "policy")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    version: int
    term: str
    sent_s: float
    age_s: float
    generation: int
    whole: bytes
    delta: bytes
    policy: bytes
    def __init__(self, version: _Optional[int] = ..., term: _Optional[str] = ..., sent_s: _Optional[float] = ..., age_s: _Optional[float] = ..., generation: _Optional[int] = ..., whole: _Optional[bytes] = ..., delta: _Optional[bytes] = ..., policy: _Optional[bytes] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("uid", "namespace", "name", "kube_node", "cause", "term")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KUBE_NODE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    uid: str
    namespace: str
    name: str
    kube_node: str
    cause: str
    term: str
    def __init__(self, uid: _Optional[str] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ..., kube_node: _Optional[str] = ..., cause: _Optional[str] = ..., term: _Optional[str] = ...) -> None: ...

class ClaimReply(_message.Message):
    __slots__ = ("job_id", "gpus", "generation")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    gpus: str
    generation: int
    def __init__(self, job_id: _Optional[int] = ..., gpus: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class ReleaseUnboundRequest(_message.Message):
    __slots__ = ("uid", "namespace", "name", "job_id", "cause")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    uid: str
    namespace: str
    name: str
    job_id: int
    cause: str
    def __init__(self, uid: _Optional[str] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ..., job_id: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class ReleaseUnboundReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("name", "args")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    args: bytes
    def __init__(self, name: _Optional[str] = ..., args: _Optional[bytes] = ...) -> None: ...

class QueryReply(_message.Message):
    __slots__ = ("answer",)
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    answer: bytes
    def __init__(self, answer: _Optional[bytes] = ...) -> None: ...

class NodeReportMessage(_message.Message):
    __slots__ = ("version", "node", "run", "sequence", "age_s", "report", "after")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    version: int
    node: str
    run: str
    sequence: int
    age_s: float
    report: bytes
    after: int
    def __init__(self, version: _Optional[int] = ..., node: _Optional[str] = ..., run: _Optional[str] = ..., sequence: _Optional[int] = ..., age_s: _Optional[float] = ..., report: _Optional[bytes] = ..., after: _Optional[int] = ...) -> None: ...

class NodeAck(_message.Message):
    __slots__ = ("sequence", "orders")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    orders: bytes
    def __init__(self, sequence: _Optional[int] = ..., orders: _Optional[bytes] = ...) -> None: ...
