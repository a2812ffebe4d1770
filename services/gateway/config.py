"""The gateway's configuration."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta

from motet.shared.config import COMMON, EXPERT, PER_PROCESS, BaseModelConfig, Config, ServiceConfig
from motet.shared.model import PICTURE_PIXELS_MAX, PICTURE_STEPS_MAX, Slo

ToolParser = Literal["", "hermes", "llama3_json", "mistral"]
ReasoningParser = Literal["", "deepseek_r1", "qwen3"]
"""`openai.output_parsers` has a parser for each."""
MIB = 1 << 20
MAX_BODY_BYTES = 4 * MIB
"""Of a generating request's body; uploads have their own limit."""
SOURCE_PIXELS_MAX = 64_000_000
"""The most that --image-source-max-pixels can be."""
ADMIN_BODY_BYTES = MIB // 4
"""Of a body that changes adapters or keys."""


class HttpConfig(Config, frozen=True, kw_only=True):
    """The HTTP API's address, certificate and callers."""

    host: Annotated[str, Meta(description="address of the HTTP API", extra=COMMON)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP API; 0 for any", extra=COMMON)] = 8000
    listen_fd: Annotated[
        int,
        Meta(
            ge=-1,
            description="file descriptor of an inherited listening socket, used instead of --host and --port; -1: none",
            extra=PER_PROCESS,
        ),
    ] = -1
    tls_cert_file: Annotated[
        str,
        Meta(description="TLS certificate (chain) of the HTTP API; enables https together with --tls-key-file", extra=COMMON),
    ] = ""
    tls_key_file: Annotated[str, Meta(description="private key of --tls-cert-file", extra=COMMON)] = ""
    allowed_hosts: Annotated[
        str,
        Meta(
            description="host names accepted in the Host header, besides loopback names and --host; comma-separated, * for any."
            " Checked if given, and always when --host is a loopback address and no API key is needed"
        ),
    ] = ""
    allowed_origins: Annotated[
        str,
        Meta(
            description="browser origins that may use the API, comma-separated, * for any; enables CORS headers", extra=COMMON
        ),
    ] = ""
    max_connections: Annotated[int, Meta(ge=1, description="maximum open connections; further ones get 429")] = 16_384


class KeysConfig(Config, frozen=True, kw_only=True):
    """API keys."""

    api_keys: Annotated[
        Literal["auto", "required", "off"],
        Meta(
            description="whether clients need `Authorization: Bearer <key>`: auto (needed unless --host is a loopback address"
            " and there is no --api-keys-file), required, or off (every client is an administrator)",
            extra=COMMON,
        ),
    ] = "auto"
    api_keys_file: Annotated[
        str,
        Meta(
            description="file with lines `key tenant [role]`; roles: use (default), adapters, admin. See `motet keys`",
            extra=COMMON,
        ),
    ] = ""


class RequestsConfig(Config, frozen=True, kw_only=True):
    """Limits of one gateway over all tenants."""

    max_inflight: Annotated[
        int, Meta(ge=1, description="maximum sequences in progress at this gateway; further ones get 429")
    ] = 4096
    request_timeout_s: Annotated[float, Meta(gt=0, description="maximum duration of a request in seconds")] = 600.0
    park_s: Annotated[
        float,
        Meta(
            ge=0, description="how long a request waits while the first worker of its base model starts; 0: it gets 503 at once"
        ),
    ] = 300.0
    max_parked: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum requests that wait for a first worker; further ones get 503. A tenant alone has at most half",
            extra=EXPERT,
        ),
    ] = 1024
    stream_buffer_tokens: Annotated[
        int,
        Meta(
            ge=16,
            description="maximum tokens buffered for a slow client, and at most 4 MiB; then its stream is ended",
            extra=EXPERT,
        ),
    ] = 4096
    intake_concurrency: Annotated[
        int,
        Meta(
            ge=1,
            le=8192,
            description="maximum durable requests from NATS in progress",
            extra=EXPERT,
        ),
    ] = 64
    send_prompts: Annotated[
        bool,
        Meta(
            description="send an excerpt of each prompt's text to the predictor, for a model that reads text (`motet predictor"
            " train`); otherwise it gets hashed features only"
        ),
    ] = False
    max_upload_bytes: Annotated[
        int, Meta(ge=1024, description="largest adapter archive in bytes; see also the registry's --max-adapter-bytes")
    ] = 1024 * MIB
    max_uploads: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum concurrent adapter uploads; further ones get 429. A tenant may begin one while it has fewer"
            " than are free, so one tenant alone has at most half",
            extra=EXPERT,
        ),
    ] = 8


class AnswersConfig(Config, frozen=True, kw_only=True):
    """The text of a chat to the model and back: template, tool calls, reasoning."""

    chat_template: Annotated[
        str,
        Meta(
            description="chat template used instead of the model's own: the name of one that the model brings, chatml or"
            " llama3 (shipped), a file, or the Jinja text itself; empty: the model's `default`, and `tool_use` for requests"
            " with tools",
            extra=COMMON,
        ),
    ] = ""
    adapter_chats: Annotated[
        bool,
        Meta(
            description="use the chat templates, special tokens and generation defaults that adapters bring; otherwise all"
            " chats use the base model's"
        ),
    ] = True
    tool_call_parser: Annotated[
        ToolParser,
        Meta(
            description="format in which the model writes tool calls, as vLLM names it; empty: none, so tools are refused",
            extra=COMMON,
        ),
    ] = ""
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(
            description="format of the reasoning in the model's text, by vLLM's name for it; empty: reasoning stays in the"
            " text",
            extra=COMMON,
        ),
    ] = ""


class ImagesConfig(Config, frozen=True, kw_only=True):
    """Pictures of an image base: limits of one request, and what a request gets that does not say."""

    image_max_pixels: Annotated[
        int,
        Meta(
            ge=1024, le=PICTURE_PIXELS_MAX, description="largest picture to draw, in pixels (width times height)", extra=COMMON
        ),
    ] = 1 << 20
    image_max_steps: Annotated[
        int, Meta(ge=1, le=PICTURE_STEPS_MAX, description="maximum denoising steps of a picture", extra=COMMON)
    ] = 100
    image_steps: Annotated[
        int, Meta(ge=1, le=PICTURE_STEPS_MAX, description="denoising steps of a request that does not say")
    ] = 30
    image_guidance: Annotated[
        float,
        Meta(
            ge=0,
            le=50,
            description="guidance scale of a request that does not say; 1: none; 0: what is usual for the base (5 for"
            " Stable Diffusion XL, 7.5 for others)",
        ),
    ] = 0.0
    image_source_max_pixels: Annotated[
        int, Meta(ge=1024, le=SOURCE_PIXELS_MAX, description="largest source picture or mask of an edit, in pixels")
    ] = 20_000_000
    image_source_max_bytes: Annotated[
        int,
        Meta(ge=1024, le=45_000_000, description="maximum bytes of the files of an edit: source picture and mask together"),
    ] = 25_000_000
    image_metadata: Annotated[
        bool, Meta(description="write the prompt, the seed and the adapters into the files of pictures")
    ] = False

    @property
    def edit_bytes_max(self) -> int:
        """Of the body of an edit: the files in base64, and the other fields."""
        return self.image_source_max_bytes * 4 // 3 + MIB


class TenantsConfig(Config, frozen=True, kw_only=True):
    """Limits of each tenant."""

    tenant_requests_per_s: Annotated[
        float, Meta(ge=0, le=1e9, description="maximum requests per second of one tenant at this gateway; 0: no limit")
    ] = 0.0
    tenant_tokens_per_min: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="maximum prompt and output tokens per minute of one tenant at this gateway; 0: no limit",
        ),
    ] = 0
    tenant_concurrent_requests: Annotated[
        int, Meta(ge=0, le=1 << 40, description="maximum concurrent requests of one tenant at this gateway; 0: no limit")
    ] = 0
    tenant_limits_file: Annotated[
        str,
        Meta(
            description="JSON file with limits of single tenants: {tenant: {requests_per_s, tokens_per_min,"
            " concurrent_requests, weight}}; weight (default 1) is the tenant's share while workers are saturated"
        ),
    ] = ""


class SloConfig(Config, frozen=True, kw_only=True, dict=True):
    """Latency objectives of the classes that requests name with `x-slo-class`."""

    slo_interactive_ttft_ms: Annotated[
        float, Meta(gt=0, description="class interactive: objective for the time to first token, in ms")
    ] = 500.0
    slo_interactive_tpot_ms: Annotated[
        float, Meta(gt=0, description="class interactive: objective for the time per output token, in ms")
    ] = 50.0
    slo_standard_ttft_ms: Annotated[
        float, Meta(gt=0, description="class standard (the default): objective for the time to first token, in ms")
    ] = 2000.0
    slo_standard_tpot_ms: Annotated[
        float, Meta(gt=0, description="class standard (the default): objective for the time per output token, in ms")
    ] = 200.0
    slo_batch_ttft_ms: Annotated[float, Meta(gt=0, description="class batch: objective for the time to first token, in ms")] = (
        60_000.0
    )
    slo_batch_tpot_ms: Annotated[
        float, Meta(gt=0, description="class batch: objective for the time per output token, in ms")
    ] = 2000.0

    @cached_property
    def classes(self) -> dict[str, Slo]:
        """The objectives by class."""
        return {
            name: Slo(
                slo_class=name,
                ttft_slo_ms=getattr(self, f"slo_{name}_ttft_ms"),
                tpot_slo_ms=getattr(self, f"slo_{name}_tpot_ms"),
            )
            for name in ("interactive", "standard", "batch")
        }


class GatewayConfig(ServiceConfig, frozen=True, kw_only=True):
    """It takes OpenAI's API and durable requests from NATS. Several gateways can run side by side."""

    base: BaseModelConfig
    http: HttpConfig = HttpConfig()
    keys: KeysConfig = KeysConfig()
    requests: RequestsConfig = RequestsConfig()
    answers: AnswersConfig = AnswersConfig()
    images: ImagesConfig = ImagesConfig()
    tenants: TenantsConfig = TenantsConfig()
    slo: SloConfig = SloConfig()
