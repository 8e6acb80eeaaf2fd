"""API configuration: where it listens, who may call it, and its limits."""

from typing import Annotated

import msgspec

from melld.config_values import DIGEST, MIB, SECRET, Port, Positive, PositiveSeconds, Priority, Seconds, Table


class ClientConfig(Table, frozen=True, kw_only=True):
    """`[[server.clients]]`: a named key and the priority of its requests."""

    key: Annotated[str, msgspec.Meta(examples=[DIGEST], extra=SECRET)]
    """Digest of the key."""
    name: str
    """Name in the status and the decision log.  Keys that share a name count as one client."""
    priority: Priority | None = None
    """Priority of requests that set none.  Default: 0, or the most urgent one allowed."""
    min_priority: Priority | None = None
    """Most urgent priority allowed.  Default: `[server] min_priority`, or `priority` if that is lower."""


class ServerConfig(Table, frozen=True, kw_only=True):
    """The HTTP API, its limits, and the control socket."""

    host: str = "127.0.0.1"
    """Address to listen on.  Anything beyond loopback requires a key.  A socket unit overrides this and `port`."""
    port: Port = 8000
    """TCP port; 0: any free port."""
    api_key_file: Annotated[str | None, msgspec.Meta(examples=["/etc/melld/api-keys"], extra=SECRET)] = None
    """File with one key per line, plain or as `sha256:` plus its hex digest."""
    api_keys: Annotated[tuple[str, ...], msgspec.Meta(examples=[[DIGEST]], extra=SECRET)] = ()
    """Digests of keys; plain keys belong in `api_key_file`."""
    clients: Annotated[
        tuple[ClientConfig, ...],
        msgspec.Meta(examples=[[{"key": DIGEST, "name": "chat", "priority": -1}]], extra=SECRET),
    ] = ()
    """Named keys, as `[[server.clients]]`: `key` (a digest), `name`, `priority` (of requests that set none),
    `min_priority`."""
    allowed_origins: Annotated[tuple[str, ...], msgspec.Meta(examples=[["https://chat.example.org"]])] = ()
    """Origins whose web pages may call the API (CORS), or `["*"]` for all.  The dashboard at `/` needs none."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods allowed for those origins."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Request headers allowed for those origins, besides `Content-Type`."""
    allow_credentials: bool = False
    """Let those origins send cookies, which a proxy in front of melld may require."""
    allow_remote_without_key: bool = False
    """Allow listening beyond loopback without a key."""
    runtime_directory: Annotated[str | None, msgspec.Meta(examples=["/run/melld"])] = None
    """Directory for the control socket, mode 0700.  Default: `$RUNTIME_DIRECTORY`, then `$XDG_RUNTIME_DIR/melld`, then
    `/tmp/melld-<uid>`."""
    max_body_bytes: Positive = 8 * MIB
    """Maximum body size (413)."""
    max_audio_bytes: Positive = 25 * MIB
    """Maximum body size for `/v1/audio/*` (413)."""
    max_header_bytes: Positive = 8 << 10
    """Maximum header size (431)."""
    max_headers: Positive = 128
    """Maximum number of headers (431)."""
    header_timeout_s: PositiveSeconds = 10.0
    """Time limit for receiving the headers (408)."""
    body_timeout_s: PositiveSeconds = 30.0
    """Time limit for receiving the body (408)."""
    max_concurrent_requests: Positive = 1024
    """Maximum calls running or waiting at once (429)."""
    max_queued_requests: Positive = 1024
    """Maximum requests waiting in the queue (429)."""
    queue_deadline_s: PositiveSeconds = 300.0
    """Maximum time in the queue before a request starts (503)."""
    min_priority: Annotated[int | None, msgspec.Meta(examples=[0])] = None
    """Most urgent `priority` that clients may set; lower goes first.  Default: 0 with several keys."""
    max_stored_responses: Annotated[int, msgspec.Meta(ge=0)] = 256
    """Maximum `/v1/responses` results stored per key; 0: store none."""
    max_stored_response_bytes: Positive = 16 * MIB
    """Maximum bytes of stored responses per key, prompts included."""
    max_prompts_per_call: Positive = 256
    """Maximum prompts per call."""
    max_texts_per_call: Positive = 2048
    """Maximum texts per embedding, scoring, classification or pooling call."""
    max_choices: Positive = 128
    """Maximum `n`."""
    max_prompt_logprobs: Positive = 10_000
    """Maximum prompt tokens times (logprobs + 1) per call."""
    max_repeated_prompt_tokens: Positive = 1_000_000
    """Maximum prompt tokens times `n`."""
    max_message_parts: Positive = 3000
    """Maximum messages, content parts and tool calls per call."""
    max_tool_arguments: Positive = 1 << 19
    """Maximum characters in the arguments of a conversation's tool calls."""
    max_stop_strings: Positive = 64
    """Maximum stop strings per call."""
    max_json_depth: Positive = 64
    """Maximum nesting depth of a body."""
    max_constraint_bytes: Positive = 128 << 10
    """Maximum size of an output constraint, such as a JSON schema."""
    constraint_cpu_s: PositiveSeconds = 2.0
    """CPU time limit for compiling a constraint (400)."""
    slow_reader_s: PositiveSeconds = 30.0
    """Time a client may leave its stream unread before melld ends it."""
    keep_alive_comment_s: PositiveSeconds = 15.0
    """A stream silent for this long gets a comment line, so that proxies do not cut it."""
    keep_alive_s: PositiveSeconds = 75.0
    """Time an idle connection stays open."""
    extra_roles: Annotated[tuple[str, ...], msgspec.Meta(examples=[["critic"]])] = ()
    """Roles that the chat template supports besides OpenAI's."""
    allow_internal_media_urls: bool = False
    """Also fetch media from URLs with non-public addresses."""
    drain_s: Seconds = 30.0
    """Time running requests may take to finish after SIGTERM."""
