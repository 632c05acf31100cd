import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pacing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PACING_UNSPECIFIED: _ClassVar[Pacing]
    PACING_GAP: _ClassVar[Pacing]
    PACING_PACED: _ClassVar[Pacing]

class WhenInfeasible(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHEN_INFEASIBLE_UNSPECIFIED: _ClassVar[WhenInfeasible]
    WHEN_INFEASIBLE_REFUSE: _ClassVar[WhenInfeasible]
    WHEN_INFEASIBLE_DEGRADE: _ClassVar[WhenInfeasible]
    WHEN_INFEASIBLE_WAIT: _ClassVar[WhenInfeasible]

class CancelReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_REASON_UNSPECIFIED: _ClassVar[CancelReason]
    CANCEL_REASON_CLIENT: _ClassVar[CancelReason]
    CANCEL_REASON_STOP_TEXT: _ClassVar[CancelReason]
    CANCEL_REASON_DEADLINE: _ClassVar[CancelReason]
    CANCEL_REASON_STALLED: _ClassVar[CancelReason]

class CompletionReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPLETION_REASON_UNSPECIFIED: _ClassVar[CompletionReason]
    COMPLETION_REASON_END_TOKEN: _ClassVar[CompletionReason]
    COMPLETION_REASON_STOP_TOKEN: _ClassVar[CompletionReason]
    COMPLETION_REASON_MAX_TOKENS: _ClassVar[CompletionReason]
    COMPLETION_REASON_CONTEXT_FULL: _ClassVar[CompletionReason]
    COMPLETION_REASON_CANCELLED: _ClassVar[CompletionReason]
    COMPLETION_REASON_DEADLINE: _ClassVar[CompletionReason]
    COMPLETION_REASON_ENGINE_ERROR: _ClassVar[CompletionReason]
    COMPLETION_REASON_TIME_BUDGET: _ClassVar[CompletionReason]
    COMPLETION_REASON_INFEASIBLE: _ClassVar[CompletionReason]

class RejectionReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECTION_REASON_UNSPECIFIED: _ClassVar[RejectionReason]
    REJECTION_REASON_QUEUE_FULL: _ClassVar[RejectionReason]
    REJECTION_REASON_TOO_LONG: _ClassVar[RejectionReason]
    REJECTION_REASON_DRAINING: _ClassVar[RejectionReason]
    REJECTION_REASON_INVALID: _ClassVar[RejectionReason]
    REJECTION_REASON_NO_ADAPTER: _ClassVar[RejectionReason]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_LOADING: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_FAILED: _ClassVar[EngineState]
PACING_UNSPECIFIED: Pacing
PACING_GAP: Pacing
PACING_PACED: Pacing
WHEN_INFEASIBLE_UNSPECIFIED: WhenInfeasible
WHEN_INFEASIBLE_REFUSE: WhenInfeasible
WHEN_INFEASIBLE_DEGRADE: WhenInfeasible
WHEN_INFEASIBLE_WAIT: WhenInfeasible
CANCEL_REASON_UNSPECIFIED: CancelReason
CANCEL_REASON_CLIENT: CancelReason
CANCEL_REASON_STOP_TEXT: CancelReason
CANCEL_REASON_DEADLINE: CancelReason
CANCEL_REASON_STALLED: CancelReason
COMPLETION_REASON_UNSPECIFIED: CompletionReason
COMPLETION_REASON_END_TOKEN: CompletionReason
COMPLETION_REASON_STOP_TOKEN: CompletionReason
COMPLETION_REASON_MAX_TOKENS: CompletionReason
COMPLETION_REASON_CONTEXT_FULL: CompletionReason
COMPLETION_REASON_CANCELLED: CompletionReason
COMPLETION_REASON_DEADLINE: CompletionReason
COMPLETION_REASON_ENGINE_ERROR: CompletionReason
COMPLETION_REASON_TIME_BUDGET: CompletionReason
COMPLETION_REASON_INFEASIBLE: CompletionReason
REJECTION_REASON_UNSPECIFIED: RejectionReason
REJECTION_REASON_QUEUE_FULL: RejectionReason
REJECTION_REASON_TOO_LONG: RejectionReason
REJECTION_REASON_DRAINING: RejectionReason
REJECTION_REASON_INVALID: RejectionReason
REJECTION_REASON_NO_ADAPTER: RejectionReason
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_LOADING: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_FAILED: EngineState

class AttachRequest(_message.Message):
    __slots__ = ("command_seq", "hello", "submit", "cancel", "credit", "ack")
    COMMAND_SEQ_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    command_seq: int
    hello: Hello
    submit: SubmitBatch
    cancel: CancelBatch
    credit: CreditGrant
    ack: StepAck
    def __init__(self, command_seq: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[SubmitBatch, _Mapping]] = ..., cancel: _Optional[_Union[CancelBatch, _Mapping]] = ..., credit: _Optional[_Union[CreditGrant, _Mapping]] = ..., ack: _Optional[_Union[StepAck, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "step", "admission", "status", "drain")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: StepResult
    admission: AdmissionResult
    status: EngineStatus
    drain: DrainNotice
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[StepResult, _Mapping]] = ..., admission: _Optional[_Union[AdmissionResult, _Mapping]] = ..., status: _Optional[_Union[EngineStatus, _Mapping]] = ..., drain: _Optional[_Union[DrainNotice, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "frontend_id", "frontend_version", "tokenizer_sha256")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    frontend_id: str
    frontend_version: str
    tokenizer_sha256: bytes
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., frontend_id: _Optional[str] = ..., frontend_version: _Optional[str] = ..., tokenizer_sha256: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_minor", "engine_instance_id", "session_id", "info", "step_window", "status")
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    ENGINE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    STEP_WINDOW_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    protocol_minor: int
    engine_instance_id: str
    session_id: str
    info: EngineInfo
    step_window: int
    status: EngineStatus
    def __init__(self, protocol_minor: _Optional[int] = ..., engine_instance_id: _Optional[str] = ..., session_id: _Optional[str] = ..., info: _Optional[_Union[EngineInfo, _Mapping]] = ..., step_window: _Optional[int] = ..., status: _Optional[_Union[EngineStatus, _Mapping]] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("model", "weights_revision", "tokenizer_sha256", "max_model_len", "block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "vocab_size", "end_token_ids", "max_logprobs", "engine_version", "adapters", "aliases")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights_revision: str
    tokenizer_sha256: bytes
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_logprobs: int
    engine_version: str
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., weights_revision: _Optional[str] = ..., tokenizer_sha256: _Optional[bytes] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., max_logprobs: _Optional[int] = ..., engine_version: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., aliases: _Optional[_Iterable[str]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "sha256", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: bytes
    path: str
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[bytes] = ..., path: _Optional[str] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("revision", "adapters")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, revision: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replace", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replace: bool
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replace: bool = ..., sha256: _Optional[bytes] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapters", "sha256", "is_new", "has_replaced")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    HAS_REPLACED_FIELD_NUMBER: _ClassVar[int]
    adapters: AdapterList
    sha256: bytes
    is_new: bool
    has_replaced: bool
    def __init__(self, adapters: _Optional[_Union[AdapterList, _Mapping]] = ..., sha256: _Optional[bytes] = ..., is_new: bool = ..., has_replaced: bool = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: AdapterList
    def __init__(self, adapters: _Optional[_Union[AdapterList, _Mapping]] = ...) -> None: ...

class SubmitBatch(_message.Message):
    __slots__ = ("submissions",)
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    submissions: _containers.RepeatedCompositeFieldContainer[Submission]
    def __init__(self, submissions: _Optional[_Iterable[_Union[Submission, _Mapping]]] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("handle", "prompt_ids", "output_ids", "epoch", "start_index", "sampling", "stops", "remaining_ms", "priority", "cache_salt", "token_credit", "top_logprobs", "request_id", "prompt_logprobs", "grammar", "waited_ms", "adapter", "adapter_sha256", "ttft_remaining_ms", "inter_token_us", "tenant", "service_class", "value", "pacing", "when_infeasible")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_CREDIT_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SHA256_FIELD_NUMBER: _ClassVar[int]
    TTFT_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PACING_FIELD_NUMBER: _ClassVar[int]
    WHEN_INFEASIBLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    prompt_ids: bytes
    output_ids: bytes
    epoch: int
    start_index: int
    sampling: Sampling
    stops: TokenStops
    remaining_ms: int
    priority: int
    cache_salt: bytes
    token_credit: int
    top_logprobs: int
    request_id: str
    prompt_logprobs: int
    grammar: str
    waited_ms: int
    adapter: str
    adapter_sha256: bytes
    ttft_remaining_ms: int
    inter_token_us: int
    tenant: str
    service_class: str
    value: float
    pacing: Pacing
    when_infeasible: WhenInfeasible
    def __init__(self, handle: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., output_ids: _Optional[bytes] = ..., epoch: _Optional[int] = ..., start_index: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stops: _Optional[_Union[TokenStops, _Mapping]] = ..., remaining_ms: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., token_credit: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., waited_ms: _Optional[int] = ..., adapter: _Optional[str] = ..., adapter_sha256: _Optional[bytes] = ..., ttft_remaining_ms: _Optional[int] = ..., inter_token_us: _Optional[int] = ..., tenant: _Optional[str] = ..., service_class: _Optional[str] = ..., value: _Optional[float] = ..., pacing: _Optional[_Union[Pacing, str]] = ..., when_infeasible: _Optional[_Union[WhenInfeasible, str]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "bias_ids", "bias_values", "allowed_token_ids", "bad_sequences")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenStops(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_end_token", "time_budget_ms")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_end_token: bool
    time_budget_ms: int
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_end_token: bool = ..., time_budget_ms: _Optional[int] = ...) -> None: ...

class CancelBatch(_message.Message):
    __slots__ = ("handles", "reason")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    reason: CancelReason
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[CancelReason, str]] = ...) -> None: ...

class CreditGrant(_message.Message):
    __slots__ = ("handles", "tokens")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class StepAck(_message.Message):
    __slots__ = ("step_seq",)
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    step_seq: int
    def __init__(self, step_seq: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_seq", "handles", "token_counts", "token_ids", "start_indices", "epochs", "completions", "logprobs", "engine_step", "load", "sampled_at_ns", "first_tokens", "prompt_logprobs", "time_accounts", "num_steps")
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_INDICES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_AT_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIME_ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    step_seq: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    start_indices: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    logprobs: LogprobColumns
    engine_step: int
    load: LoadStats
    sampled_at_ns: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    time_accounts: _containers.RepeatedCompositeFieldContainer[TimeAccount]
    num_steps: int
    def __init__(self, step_seq: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., start_indices: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., engine_step: _Optional[int] = ..., load: _Optional[_Union[LoadStats, _Mapping]] = ..., sampled_at_ns: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., time_accounts: _Optional[_Iterable[_Union[TimeAccount, _Mapping]]] = ..., num_steps: _Optional[int] = ...) -> None: ...

class TimeAccount(_message.Message):
    __slots__ = ("handle", "epoch", "queued_us", "prefill_us", "parked_us", "preempted_us", "num_preemptions")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    QUEUED_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    PARKED_US_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_US_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    epoch: int
    queued_us: int
    prefill_us: int
    parked_us: int
    preempted_us: int
    num_preemptions: int
    def __init__(self, handle: _Optional[int] = ..., epoch: _Optional[int] = ..., queued_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., parked_us: _Optional[int] = ..., preempted_us: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("handle", "epoch", "start_index", "chosen", "top_width", "top_ids", "top_values")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_WIDTH_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_VALUES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    epoch: int
    start_index: int
    chosen: _containers.RepeatedScalarFieldContainer[float]
    top_width: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, handle: _Optional[int] = ..., epoch: _Optional[int] = ..., start_index: _Optional[int] = ..., chosen: _Optional[_Iterable[float]] = ..., top_width: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_values: _Optional[_Iterable[float]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("handle", "epoch", "num_cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    epoch: int
    num_cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., epoch: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class LogprobColumns(_message.Message):
    __slots__ = ("rows", "chosen", "top_widths", "top_ids", "top_values")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_VALUES_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    top_widths: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., chosen: _Optional[_Iterable[float]] = ..., top_widths: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_values: _Optional[_Iterable[float]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("handle", "epoch", "reason", "stop_token_id", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "queued_us", "prefill_us", "num_preemptions", "detail", "decode_us", "parked_us", "preempted_us")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    PARKED_US_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_US_FIELD_NUMBER: _ClassVar[int]
    handle: int
    epoch: int
    reason: CompletionReason
    stop_token_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queued_us: int
    prefill_us: int
    num_preemptions: int
    detail: str
    decode_us: int
    parked_us: int
    preempted_us: int
    def __init__(self, handle: _Optional[int] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[CompletionReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., queued_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., detail: _Optional[str] = ..., decode_us: _Optional[int] = ..., parked_us: _Optional[int] = ..., preempted_us: _Optional[int] = ...) -> None: ...

class AdmissionResult(_message.Message):
    __slots__ = ("accepted_handles", "rejections")
    ACCEPTED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    accepted_handles: _containers.RepeatedScalarFieldContainer[int]
    rejections: _containers.RepeatedCompositeFieldContainer[Rejection]
    def __init__(self, accepted_handles: _Optional[_Iterable[int]] = ..., rejections: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("handle", "epoch", "reason", "retry_after", "detail")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    handle: int
    epoch: int
    reason: RejectionReason
    retry_after: _duration_pb2.Duration
    detail: str
    def __init__(self, handle: _Optional[int] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[RejectionReason, str]] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., detail: _Optional[str] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("state", "engine_step", "loop_turns", "load", "detail", "is_stalled", "adapters", "latency")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STEP_FIELD_NUMBER: _ClassVar[int]
    LOOP_TURNS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    IS_STALLED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    state: EngineState
    engine_step: int
    loop_turns: int
    load: LoadStats
    detail: str
    is_stalled: bool
    adapters: AdapterList
    latency: LatencyStats
    def __init__(self, state: _Optional[_Union[EngineState, str]] = ..., engine_step: _Optional[int] = ..., loop_turns: _Optional[int] = ..., load: _Optional[_Union[LoadStats, _Mapping]] = ..., detail: _Optional[str] = ..., is_stalled: bool = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ..., latency: _Optional[_Union[LatencyStats, _Mapping]] = ...) -> None: ...

class LatencyStats(_message.Message):
    __slots__ = ("error_bounds", "decode_errors", "prompt_errors", "decode_error_sum", "prompt_error_sum", "num_stalls_total", "num_infeasible_total", "num_degraded_total", "num_itl_infeasible_total")
    ERROR_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ERRORS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ERROR_SUM_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ERROR_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_STALLS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_INFEASIBLE_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_DEGRADED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_ITL_INFEASIBLE_TOTAL_FIELD_NUMBER: _ClassVar[int]
    error_bounds: _containers.RepeatedScalarFieldContainer[float]
    decode_errors: _containers.RepeatedScalarFieldContainer[int]
    prompt_errors: _containers.RepeatedScalarFieldContainer[int]
    decode_error_sum: float
    prompt_error_sum: float
    num_stalls_total: int
    num_infeasible_total: int
    num_degraded_total: int
    num_itl_infeasible_total: int
    def __init__(self, error_bounds: _Optional[_Iterable[float]] = ..., decode_errors: _Optional[_Iterable[int]] = ..., prompt_errors: _Optional[_Iterable[int]] = ..., decode_error_sum: _Optional[float] = ..., prompt_error_sum: _Optional[float] = ..., num_stalls_total: _Optional[int] = ..., num_infeasible_total: _Optional[int] = ..., num_degraded_total: _Optional[int] = ..., num_itl_infeasible_total: _Optional[int] = ...) -> None: ...

class LoadStats(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_waiting_prefill_tokens", "num_free_blocks", "num_preemptions_total", "num_recomputed_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "step_us", "execute_us", "num_batched_tokens", "num_generated_tokens_total", "jit_compiles_after_ready_total", "integrity_checks_total", "integrity_failures_total", "prompt_tokens_per_second", "model_coefficients", "lane_tokens", "min_slack_us", "num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_US_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    JIT_COMPILES_AFTER_READY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_CHECKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FAILURES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MODEL_COEFFICIENTS_FIELD_NUMBER: _ClassVar[int]
    LANE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_SLACK_US_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_waiting_prefill_tokens: int
    num_free_blocks: int
    num_preemptions_total: int
    num_recomputed_tokens_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    step_us: int
    execute_us: int
    num_batched_tokens: int
    num_generated_tokens_total: int
    jit_compiles_after_ready_total: int
    integrity_checks_total: int
    integrity_failures_total: int
    prompt_tokens_per_second: float
    model_coefficients: _containers.RepeatedScalarFieldContainer[float]
    lane_tokens: _containers.RepeatedScalarFieldContainer[int]
    min_slack_us: int
    num_drafts_total: int
    num_draft_tokens_total: int
    num_accepted_tokens_total: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_prefill_tokens: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_preemptions_total: _Optional[int] = ..., num_recomputed_tokens_total: _Optional[int] = ..., prefix_cache_queries_total: _Optional[int] = ..., prefix_cache_hits_total: _Optional[int] = ..., step_us: _Optional[int] = ..., execute_us: _Optional[int] = ..., num_batched_tokens: _Optional[int] = ..., num_generated_tokens_total: _Optional[int] = ..., jit_compiles_after_ready_total: _Optional[int] = ..., integrity_checks_total: _Optional[int] = ..., integrity_failures_total: _Optional[int] = ..., prompt_tokens_per_second: _Optional[float] = ..., model_coefficients: _Optional[_Iterable[float]] = ..., lane_tokens: _Optional[_Iterable[int]] = ..., min_slack_us: _Optional[int] = ..., num_drafts_total: _Optional[int] = ..., num_draft_tokens_total: _Optional[int] = ..., num_accepted_tokens_total: _Optional[int] = ...) -> None: ...

class DrainNotice(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetEngineStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineStatusResponse(_message.Message):
    __slots__ = ("status", "info", "engine_instance_id")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    ENGINE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    status: EngineStatus
    info: EngineInfo
    engine_instance_id: str
    def __init__(self, status: _Optional[_Union[EngineStatus, _Mapping]] = ..., info: _Optional[_Union[EngineInfo, _Mapping]] = ..., engine_instance_id: _Optional[str] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("file_name", "data")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    data: bytes
    def __init__(self, file_name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...
