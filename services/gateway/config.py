"""The gateway's configuration."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from msgspec import Meta

from shared.config import ServiceConfig
from shared.model import Slo

MIB = 1 << 20


class GatewayConfig(ServiceConfig, frozen=True, kw_only=True, dict=True):
    """One HTTP front. `model` must be the workers' model: the tokenizer comes from it."""

    model: Annotated[str, Meta(min_length=1, description="base model: a local directory or a Hugging Face id")]
    served_model_name: Annotated[str, Meta(description="the base model's name in requests; empty: last part of --model")] = ""
    host: Annotated[str, Meta(description="address of the HTTP API")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP API; 0 for any")] = 8000
    allowed_hosts: Annotated[
        str,
        Meta(
            description="host names in requests that are served besides loopback ones and --host, comma-separated, * for any;"
            " checked when given, and always where no key is needed and --host is a loopback address"
        ),
    ] = ""
    allowed_origins: Annotated[
        str, Meta(description="origins of browser pages that may use the API, comma-separated, * for any; sends CORS headers")
    ] = ""
    max_connections: Annotated[int, Meta(ge=1, description="open connections; beyond that they are refused with 429")] = 16_384
    listen_fd: Annotated[
        int, Meta(ge=-1, description="file descriptor of an inherited listening socket, instead of --host and --port; -1: none")
    ] = -1
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body; uploads have their own limit")] = 4 * MIB
    max_upload_bytes: Annotated[int, Meta(ge=1024, description="largest adapter archive")] = 1024 * MIB
    max_uploads: Annotated[int, Meta(ge=1, description="adapter uploads at once; beyond that clients get 429")] = 4
    max_inflight: Annotated[int, Meta(ge=1, description="sequences owned at once; beyond that clients get 429")] = 4096
    stream_buffer_tokens: Annotated[
        int, Meta(ge=16, description="tokens kept for a client that does not read; beyond that it is cut off")
    ] = 4096
    intake_concurrency: Annotated[int, Meta(ge=1, le=8192, description="durable requests from NATS that run at once")] = 64
    request_timeout_s: Annotated[float, Meta(gt=0, description="longest life of a request")] = 600.0
    tls_cert_file: Annotated[
        str, Meta(description="certificate (chain) of the HTTP API; with it and its key it speaks https")
    ] = ""
    tls_key_file: Annotated[str, Meta(description="private key of --tls-cert-file")] = ""
    api_keys: Annotated[
        str,
        Meta(
            pattern="^(auto|required|off)$",
            description="whether clients need `Authorization: Bearer <key>`: auto (unless --host is a loopback address and"
            " there is no --api-keys-file), required, off (everybody is an administrator)",
        ),
    ] = "auto"
    api_keys_file: Annotated[
        str,
        Meta(
            description="file with lines `key tenant [role]`, the role being use (default), adapters or admin; see `motet keys`"
        ),
    ] = ""
    tenant_requests_per_s: Annotated[
        float, Meta(ge=0, le=1e9, description="requests per second of one tenant at this gateway; 0 for no limit")
    ] = 0.0
    tenant_tokens_per_min: Annotated[
        int,
        Meta(ge=0, le=1 << 40, description="prompt and output tokens per minute of one tenant at this gateway; 0: no limit"),
    ] = 0
    tenant_concurrent_requests: Annotated[
        int, Meta(ge=0, le=1 << 40, description="requests of one tenant at once at this gateway; 0 for no limit")
    ] = 0
    tenant_limits_file: Annotated[
        str,
        Meta(
            description="JSON file with other limits for some tenants: {tenant: {requests_per_s, tokens_per_min,"
            " concurrent_requests, weight}}; weight (1) is a tenant's share while workers are saturated"
        ),
    ] = ""
    slo_interactive_ttft_ms: Annotated[float, Meta(gt=0, description="class interactive: time to first token")] = 500.0
    slo_interactive_tpot_ms: Annotated[float, Meta(gt=0, description="class interactive: time per output token")] = 50.0
    slo_standard_ttft_ms: Annotated[float, Meta(gt=0, description="class standard: time to first token")] = 2000.0
    slo_standard_tpot_ms: Annotated[float, Meta(gt=0, description="class standard: time per output token")] = 200.0
    slo_batch_ttft_ms: Annotated[float, Meta(gt=0, description="class batch: time to first token")] = 60_000.0
    slo_batch_tpot_ms: Annotated[float, Meta(gt=0, description="class batch: time per output token")] = 2000.0

    @property
    def base_model(self) -> str:
        """The name under which requests ask for the base model."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @cached_property
    def slo_classes(self) -> dict[str, Slo]:
        """The named latency objectives."""
        return {
            name: Slo(
                slo_class=name,
                ttft_slo_ms=getattr(self, f"slo_{name}_ttft_ms"),
                tpot_slo_ms=getattr(self, f"slo_{name}_tpot_ms"),
            )
            for name in ("interactive", "standard", "batch")
        }
