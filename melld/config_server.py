"""The API's part of the configuration: where it listens, who may call it, and its limits."""

from typing import Annotated

import msgspec

from melld.config_values import DIGEST, MIB, SECRET, Port, Positive, PositiveSeconds, Priority, Seconds, Table


class ClientConfig(Table, frozen=True, kw_only=True):
    """`[[server.clients]]`: a key with a name, and how urgent its requests are."""

    key: Annotated[str, msgspec.Meta(examples=[DIGEST], extra=SECRET)]
    """Its digest."""
    name: str
    """For the status and the decision log.  Keys with one name are one client."""
    priority: Priority | None = None
    """Of requests that ask for none.  Default: 0, or the most urgent that they may ask for."""
    min_priority: Priority | None = None
    """The most urgent that they may ask for.  Default: `[server] min_priority`, or `priority` if that is lower."""


class ServerConfig(Table, frozen=True, kw_only=True):
    """The HTTP API with its limits, and the control socket."""

    host: str = "127.0.0.1"
    """Where the API listens.  Beyond loopback it needs a key.  A socket unit overrides it and `port`."""
    port: Port = 8000
    """TCP port; 0 takes a free one."""
    api_key_file: Annotated[str | None, msgspec.Meta(examples=["/etc/melld/api-keys"], extra=SECRET)] = None
    """A file with a key per line, plain or as `sha256:` and its hex digest."""
    api_keys: Annotated[tuple[str, ...], msgspec.Meta(examples=[[DIGEST]], extra=SECRET)] = ()
    """Such digests; plain keys belong in `api_key_file`."""
    clients: Annotated[
        tuple[ClientConfig, ...],
        msgspec.Meta(examples=[[{"key": DIGEST, "name": "chat", "priority": -1}]], extra=SECRET),
    ] = ()
    """Keys with names, as `[[server.clients]]`: `key` (such a digest), `name`, `priority` of requests that ask for
    none, `min_priority`."""
    allowed_origins: Annotated[tuple[str, ...], msgspec.Meta(examples=[["https://chat.example.org"]])] = ()
    """Origins whose web pages may call the API (CORS), or `["*"]` for all.  The page at `/` needs none."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that they may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that they may send, beside `Content-Type`."""
    allow_credentials: bool = False
    """Let them send cookies, which a proxy before melld may ask for."""
    allow_remote_without_key: bool = False
    """Listen beyond loopback even without a key."""
    runtime_directory: Annotated[str | None, msgspec.Meta(examples=["/run/melld"])] = None
    """Directory of the control socket, mode 0700.  Default: `$RUNTIME_DIRECTORY`, else `$XDG_RUNTIME_DIR/melld`, else
    `/tmp/melld-<uid>`."""
    max_body_bytes: Positive = 8 * MIB
    """Largest body (413)."""
    max_audio_bytes: Positive = 25 * MIB
    """Largest body of `/v1/audio/*` (413)."""
    max_header_bytes: Positive = 8 << 10
    """Largest header (431)."""
    max_headers: Positive = 128
    """Most headers (431)."""
    header_timeout_s: PositiveSeconds = 10.0
    """How long a client may take to send the headers (408)."""
    body_timeout_s: PositiveSeconds = 30.0
    """How long it may take to send the body (408)."""
    max_concurrent_requests: Positive = 1024
    """Most calls that run or wait at a time (429)."""
    max_queued_requests: Positive = 1024
    """Most requests that wait (429)."""
    queue_deadline_s: PositiveSeconds = 300.0
    """How long a request may wait for room before it begins (503)."""
    min_priority: Annotated[int | None, msgspec.Meta(examples=[0])] = None
    """The most urgent `priority` that clients may ask for; lower goes first.  Default: 0 with several keys."""
    max_stored_responses: Annotated[int, msgspec.Meta(ge=0)] = 256
    """Most answers of `/v1/responses` that are kept for a key; 0 stores none."""
    max_stored_response_bytes: Positive = 16 * MIB
    """Most bytes of them, with their prompts."""
    max_prompts_per_call: Positive = 256
    """Most prompts in one call."""
    max_texts_per_call: Positive = 2048
    """Most texts in one call that embeds, scores, classifies or pools them."""
    max_choices: Positive = 128
    """Largest `n`."""
    max_prompt_logprobs: Positive = 10_000
    """Most prompt tokens times (logprobs + 1) of a call."""
    max_repeated_prompt_tokens: Positive = 1_000_000
    """Most prompt tokens times `n`."""
    max_message_parts: Positive = 3000
    """Most messages, parts and tool calls of a call."""
    max_tool_arguments: Positive = 1 << 19
    """Most characters in the arguments of a conversation's tool calls."""
    max_stop_strings: Positive = 64
    """Most stop strings in one call."""
    max_json_depth: Positive = 64
    """Deepest nesting in a body."""
    max_constraint_bytes: Positive = 128 << 10
    """Largest constraint on an output, such as a JSON schema."""
    constraint_cpu_s: PositiveSeconds = 2.0
    """CPU time to compile a constraint (400)."""
    slow_reader_s: PositiveSeconds = 30.0
    """How long a client may leave its stream unread before it ends."""
    keep_alive_comment_s: PositiveSeconds = 15.0
    """Silence after which a stream gets a comment line, so that no proxy cuts it."""
    keep_alive_s: PositiveSeconds = 75.0
    """How long an idle connection stays open."""
    extra_roles: Annotated[tuple[str, ...], msgspec.Meta(examples=[["critic"]])] = ()
    """Roles that the chat template knows beside OpenAI's."""
    allow_internal_media_urls: bool = False
    """Fetch images named by URL from addresses that are not public, too."""
    drain_s: Seconds = 30.0
    """How long requests may continue after SIGTERM."""
