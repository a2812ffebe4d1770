"""Domain types: what a request, an adapter and a worker are. Data only; policies import this module and no other."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers an adapter may target, in the order in which a layer runs them."""

ADAPTER_NAME = re.compile(r"(?!.*/(?:pin|quarantine)\Z)[A-Za-z0-9][A-Za-z0-9_-]*(?:[./][A-Za-z0-9_-]+)*")
"""The pattern of adapter names. `/v1/adapters/<name>/pin` is the pin of an adapter and `.../quarantine` its quarantine, so no
name ends like that."""
ADAPTER_NAME_CHARS = 128
ADAPTER_NAME_RULE = (
    f"letters, digits, '_' and '-', single '.' and '/' between them, at most {ADAPTER_NAME_CHARS} characters, and no '/pin'"
    " or '/quarantine' at the end"
)
"""The pattern in words, for error messages."""

Tier = Literal["device", "host", "disk"]
Phase = Literal["loading", "waiting", "running"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
Capability = Literal["structured", "resumes_structured", "prompt_logprobs", "embeddings", "images", "draws"]
"""What only some engines can do: constrain the output to a grammar; tell the log-probabilities of the prompt's tokens; make
embeddings of texts; read the images of a prompt; make pictures. A worker announces the capabilities of its engine. A request
lists the capabilities that it needs, and goes to a worker that announces them all. A worker with "embeddings" has a pooling
model, which makes embeddings and nothing else; a worker with "draws" makes pictures and nothing else."""
EXCLUSIVE_CAPABILITIES: tuple[Capability, ...] = ("embeddings", "draws")
"""A worker with one of these takes only requests that need it."""

TOKEN_BYTES = 4
"""Bytes of a token id in messages and in hashes."""
IMAGES_MAX = 16
"""Images of one request."""
ADAPTERS_MAX = 8
"""Adapters of one request."""
PREVIEWS_MAX = 3
"""Previews of one picture."""
PICTURE_PIXELS_MAX, PICTURE_STEPS_MAX = 4 << 20, 1000
"""What any worker draws; a gateway may be told to let less through."""

ImageKind = Literal["text", "image", "inpaint"]
Sampler = Literal["ddim", "euler", "euler_a", "dpmpp_2m"]
PictureFormat = Literal["png", "jpeg", "webp"]


def is_adapter_name(name: str) -> bool:
    """Whether an adapter can have this name."""
    return len(name) <= ADAPTER_NAME_CHARS and ADAPTER_NAME.fullmatch(name) is not None


SLO_MAX_MS = 3_600_000
"""The longest objective; one that long is none."""


class Slo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's latency objective, in milliseconds: time to first token, time per output token, time of the whole answer."""

    slo_class: str = "standard"
    ttft_slo_ms: float = 2000.0
    tpot_slo_ms: float = 200.0
    e2e_slo_ms: float = 0.0  # the whole answer, 0: none
    e2e_is_timeout: bool = False  # nobody asked for `e2e_slo_ms`: after it the answer is in vain, before it no sooner is better


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must look like, for engines with the capability "structured". The options are vLLM's.

    `value`: JSON text of a schema ("json"), of a list of strings ("choice") or of vLLM's structural tags ("structural_tag"),
    a regular expression, or a grammar in EBNF; empty for "json_object".
    """

    kind: Literal["json_object", "json", "regex", "choice", "grammar", "structural_tag"]
    value: str = ""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str = ""  # "": the engine's own


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters. Validated by the gateway; the worker trusts them.

    `seed` is always set (by the gateway if the client gave none): noise is a function of (seed, position), so a resumed
    request gets the same tokens. `logprobs`: None for none, k >= 0 for the drawn token and the k most likely tokens;
    `prompt_logprobs`: the same for the prompt's tokens.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()  # nothing else is drawn; empty: no such limit
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    structured: StructuredOutput | None = None  # needs "structured"
    prompt_logprobs: int | None = None  # needs "prompt_logprobs"


class EmbeddingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of an embedding. `dimensions`: its length, where the model can shorten it; None for the model's own."""

    dimensions: int | None = None


class ImageParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of a picture. The gateway validates them and so does the worker's admission.

    `kind`: from the prompt alone ("text"), from a source picture ("image"), or from a source picture and a mask ("inpaint");
    they travel in `Work.images`, the source first. Of a base with two text encoders the second one reads `prompt_2` and
    `negative_2`; empty means the same token ids as the first.
    """

    width: int  # pixels, as `height`
    height: int
    steps: int
    guidance: float = 7.5  # 1 or less: no guidance, one row per step instead of two
    negative: bytes = b""  # pack_tokens, as the other token ids here
    prompt_2: bytes = b""
    negative_2: bytes = b""
    sampler: Sampler = "ddim"
    strength: float = 1.0  # the share of the steps that change a source picture
    kind: ImageKind = "text"
    previews: int = 0  # 0 to PREVIEWS_MAX
    format: PictureFormat = "png"
    quality: int = 90  # 1 to 100, of "jpeg" and "webp"
    index: int = 0  # which of the request's n pictures; `SamplingParams.seed` is this picture's own
    pictures: int = 1  # n
    metadata: bool = False  # prompt, seed and adapters are written into the file
    state: bytes = b""  # a checkpoint to continue from (`StreamItem.state`)
    state_step: int = 0  # steps that `state` has behind it

    @property
    def steps_run(self) -> int:
        """The denoising steps that are run: with a source picture a share `strength` of `steps`, as diffusers counts them."""
        return self.steps if self.kind == "text" else min(int(self.steps * self.strength), self.steps)

    @property
    def guided(self) -> bool:
        """Whether each step computes it with and without the prompt."""
        return self.guidance > 1.0

    @property
    def rows(self) -> float:
        """What the picture adds to a step, in rows of 512 x 512 pixels without guidance."""
        return (2 if self.guided else 1) * self.area

    @property
    def area(self) -> float:
        """The picture's, in those of 512 x 512 pixels."""
        return self.width * self.height / (512 * 512)


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An immutable adapter version, as a request carries it. Workers and caches use `digest`, never the name."""

    name: str
    digest: str
    rank: int  # the largest over its modules
    size_bytes: int
    version: int = 0  # the name's number of this content, for people; 0: unknown
    targets: tuple[str, ...] = ()  # as in `AdapterVersion`: its worker must be able to change these layers


class Weighted(msgspec.Struct, frozen=True, array_like=True):
    """An adapter of a request with the weight of its update; 1 leaves the update as it was trained."""

    ref: AdapterRef
    weight: float = 1.0


class KvOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Names a worker from which the next worker of a request may fetch KV blocks.

    Those of a moved request are held under `token`, with which they may be read once. Without a token, they are those of the
    request's first `to_tokens` tokens in that worker's prefix cache; the next worker is expected to have `from_tokens` of them.
    """

    worker_id: str
    token: str = ""
    from_tokens: int = 0
    to_tokens: int = 0

    @property
    def cached(self) -> bool:
        """Whether the blocks are cached ones."""
        return self.to_tokens > 0


class AdapterVersion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The registry's record of one content digest (KV `motet_adapters`, key `version.<digest>`, JSON)."""

    digest: str
    base_model: str
    rank: int
    modules: tuple[str, ...]  # of an image adapter the roles of its sites
    layers: int  # how many layers it touches; 0 for an image adapter
    dtype: str  # safetensors name: F32, F16, BF16
    size_bytes: int  # of the blob
    source: str  # where it came from, for people
    created_unix_ms: int
    chat: str = ""  # the digest of what it brings for chats (`shared.adapter_chat`); "" for nothing
    family: str = ""  # of an image adapter's base: sd15, sd2, sdxl, ...; "" for a language model's
    sites: int = 0  # how many layers of an image model it changes (`shared.image_shapes`)
    targets: tuple[str, ...] = ()
    """Of an adapter that is kept as PEFT's files (`shared.peft_blob`): the patterns of its layers. Its workers
    announce them all in `WorkerLimits.lora_targets`. () for one of the seven layers, or of an image model."""


EVERY_WORKER = "*"
"""In a pin: all workers, also those that come later. No worker has this id."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that keep an adapter loaded: their ids, or EVERY_WORKER alone. If memory is short, older pins come first."""

    workers: tuple[str, ...]
    since_unix_ms: int

    def covers(self, worker_id: str) -> bool:
        """Whether the pin applies to this worker."""
        return worker_id in self.workers or EVERY_WORKER in self.workers


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """Why a version must not answer (KV `motet_adapters`, key `quarantine.<digest>`, JSON). `policies.worker.probe` decides."""

    digest: str
    verdict: str
    reason: str  # for people
    worker_id: str  # that found it
    since_unix_ms: int


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A name and the version it points at (KV `motet_adapters`, JSON). Aliases are entries too.

    The key is `name.<name>` for an adapter that all tenants share, `private.<tenant>.<name>` for one of a single tenant.
    """

    name: str
    digest: str
    version: int  # 1, 2, ...: each content that is registered under this name gets the next number
    alias_of: str | None = None
    follows: bool = False  # of an alias: whether it goes on to the target's next versions
    updated_unix_ms: int
    hold: str = ""  # the registry's own: this entry's claim on the version's blob
    tenant: str = ""  # the only tenant that may see and use it; "" is shared by all
    source: str = ""  # where this name's content came from; a version's is where its content was first seen, by whomever
    pin: Pin | None = None  # of the name: it goes on to the name's next version
    left_out: tuple[str, ...] = ()  # modules of its file that have no effect, as PEFT leaves them out too; for people
    older: tuple[AdapterEntry, ...] = ()  # this name's kept earlier versions as they were, the one that was current last first

    @property
    def claims(self) -> dict[str, str]:
        """This entry's claims on blobs: {hold: digest}."""
        return {one.hold: one.digest for one in (self, *self.older)}


class PictureBrief(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What schedulers need of a request for a picture besides what every request has."""

    rows: float  # what it adds to a step
    more: tuple[str, ...] = ()  # digests of its adapters after the first
    area: float = 0.0  # of the picture, in those of 512 x 512 pixels; 0 for unknown


class RequestBrief(msgspec.Struct, array_like=True, gc=False):
    """A request on a worker, as schedulers need it. Counts are tokens; `rank` 0 and `adapter_digest` "" mean the base model.

    With several adapters `rank` is the sum of their ranks.
    """

    request_id: str
    epoch: int
    adapter_digest: str
    rank: int
    prompt_tokens: int
    output_tokens: int
    predicted_tokens: int
    phase: Phase
    tpot_slo_ms: float = 0.0
    ttft_slo_ms: float = 0.0  # 0 for unknown
    tenant: str = ""
    tenant_weight: float = 1.0  # the tenant's share relative to others'
    cached_tokens: int = 0  # of its prompt, that are expected in the worker's prefix cache
    picture: PictureBrief | None = None  # of a request for one

    @property
    def rows(self) -> float:
        """What it adds to a step."""
        return 1.0 if self.picture is None else self.picture.rows

    @property
    def more(self) -> tuple[str, ...]:
        """The digests of its adapters after the first."""
        return () if self.picture is None else self.picture.more

    @property
    def adapter_digests(self) -> tuple[str, ...]:
        """All its adapters; empty for the base model."""
        return (self.adapter_digest, *self.more) if self.adapter_digest else ()


MechanismState = Literal["on", "waiting", "off"]


class Mechanism(msgspec.Struct, frozen=True):
    """Whether a mechanism is in use, and the reason, for people. `waiting`: it is, as soon as it pays."""

    state: MechanismState
    why: str


class Residency(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An adapter version held by a worker and the fastest tier it is in."""

    digest: str
    rank: int
    size_bytes: int
    tier: Tier


class PerfModel(msgspec.Struct, frozen=True, kw_only=True):
    """Linear step-time models of one worker (CaraServe section 5), all in milliseconds.

    prefill(T, load) = prefill_base_ms + prefill_token_ms * T + prefill_lora_ms * load
    decode(B, load)  = decode_base_ms + decode_row_ms * B + decode_lora_ms * load
    where load is `rows * max rank` (kernel "bgmv") or `sum of ranks` (kernel "mbgmv").
    A fetch into host memory takes fetch_base_ms + fetch_ms_per_mib * MiB; only the adapter's requests wait for it.
    A copy to the device takes load_base_ms + load_ms_per_mib * MiB; no step runs meanwhile, unless the worker copies
    beside its steps.
    KV blocks from another worker take kv_base_ms + kv_ms_per_mib * MiB, beside its steps; 0 for unknown.
    After its last step a picture is decoded, in finish_ms for each 512 x 512 pixels; no denoising step runs meanwhile.
    """

    kernel: Literal["bgmv", "mbgmv"] = "mbgmv"
    prefill_base_ms: float
    prefill_token_ms: float
    prefill_lora_ms: float
    decode_base_ms: float
    decode_row_ms: float
    decode_lora_ms: float
    load_base_ms: float
    load_ms_per_mib: float
    fetch_base_ms: float = 0.0
    fetch_ms_per_mib: float = 0.0
    kv_base_ms: float = 0.0
    kv_ms_per_mib: float = 0.0
    finish_ms: float = 0.0


_Ms = Annotated[float, Meta(ge=0)]
_Rows = Annotated[int, Meta(ge=1)]


class EngineSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a step, in milliseconds, from what the step reads and computes (`policies.times.step_fit`)."""

    rows: Annotated[tuple[_Rows, ...], Meta(min_length=2)]  # ascending
    pass_ms: Annotated[tuple[_Ms, ...], Meta(min_length=2)]  # all rows of a step through the weights, at each of `rows`
    sampled_ms: _Ms  # per sequence that draws a token
    prefill_ms: _Ms  # per prefill chunk
    adapter_mib_ms: _Ms  # per MiB of the step's distinct adapters
    row_rank_ms: _Ms  # per row and rank
    context_token_ms: _Ms  # per token in the KV cache of the step's sequences
    longest_token_ms: _Ms = 0.0  # and of the longest of them
    pair_ms: _Ms  # per token that a prefill row attends to
    prefill_spread: tuple[_Ms, ...] = ()  # quantiles, in even steps, of actual to expected time of steps with prefills; none: 1
    r2: float  # coefficient of determination


class ImageSizeSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of an image engine's steps for pictures of one size, in milliseconds, without adapters."""

    height: _Rows  # of the latents, as `width`
    width: _Rows
    text_tokens: _Rows
    rows: Annotated[tuple[_Rows, ...], Meta(min_length=1)]  # of a denoising step, ascending
    step_ms: Annotated[tuple[_Ms, ...], Meta(min_length=1)]  # at each of `rows`
    decode_ms: _Ms  # of a decoding step
    decode_picture_ms: _Ms  # and for each of its pictures


class ImageSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of an image engine's steps, in milliseconds (`policies.times.image_fit`), and the rows that memory allows."""

    sizes: Annotated[tuple[ImageSizeSteps, ...], Meta(min_length=1)]
    encode_ms: _Ms  # of an encoding step
    encode_request_ms: _Ms  # and for each of its requests
    rank_ms: _Ms = 0.0  # of a denoising step: for each row of 512 x 512 pixels and rank of its adapters
    adapter_ms: _Ms = 0.0  # and for each different adapter
    latent_px: _Rows = 8  # pixels for each position of the latents, in each direction
    rows_max: _Rows = 64  # of a denoising step
    area_max: _Rows = 8 * 64 * 64  # of a denoising step, in positions of the latents of all rows
    r2: float = 1.0  # coefficient of determination of denoising steps

    def rows_most(self, area: int) -> int:
        """The most rows of a denoising step whose latents have `area` positions."""
        return max(1, min(self.rows_max, self.area_max // area))


class TensorDigest(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the base's checkpoint: its safetensors type, its shape and the SHA-256 of its bytes there."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can hold; fixed for one incarnation."""

    base_model: str
    engine: str = "native"
    device: str = "cpu"
    quantization: str = "none"
    """Quantization of the base's weights in memory, as the engine's option names it."""
    kv_cache_dtype: str = "auto"
    """Type of keys and values in memory, as the engine's option names it; "auto" is that of the weights."""
    max_model_len: int
    max_running: int
    max_waiting: int
    block_size: Annotated[int, Meta(ge=1)]  # schedulers divide by it
    kv_blocks_total: int
    adapter_bytes_total: int
    max_lora_rank: int
    kv_block_bytes: int = 0
    """Bytes of one KV block, where KV blocks and adapters share the memory of both totals; 0 where each has a fixed region."""
    copies: Literal["stall", "wait", "bridged"] = "stall"
    """Requests that a copy to the device delays: all; those on the adapter; none, since CPU processes compute meanwhile."""
    adapter_slots: int = 0
    """Adapters on the device at once, where that binds before their bytes, as with vLLM; else 0."""
    pin_slots: int = 0
    """Adapters that may be pinned here."""
    pin_bytes: int = 0
    """The bytes that pinned adapters may have together."""
    capabilities: tuple[str, ...] = ()
    """The words of `Capability` that its engine has. Receivers ignore words that they do not know."""
    kv_format: str = ""
    """A digest of what the bytes of KV blocks depend on besides their content. Workers with the same digest can exchange KV
    blocks; "" for an engine that cannot."""
    kv_token_bytes: int = 0
    """KV bytes of one token, where blocks can be taken over."""
    lora_targets: tuple[str, ...] = ()
    """Patterns of the base's layers (`shared.base_layers`) that adapters kept as PEFT's files may change here; () for an engine
    that takes none of those."""
    base_digest: str = ""
    """Tells checkpoints apart (`shared.checkpoint_digest`)."""
    base_tensors: dict[str, TensorDigest] = {}
    """The base's `embed_tokens` and `lm_head`, for registries that have no checkpoint."""
    prefix_cache: Literal["", "tenant", "base"] = ""
    """Whose prompts share KV blocks, which it reports then: nobody's; a tenant's; for the base model all tenants'."""
    kernels: str = ""
    """What computes in the native engine: the instruction set of compiled kernels, "triton" or "reference"."""
    kernels_note: str = ""
    """Why it is the reference where compiled kernels were expected, and what to do."""

    @property
    def kv_blocks_most(self) -> int:
        """The number of KV blocks while no adapter is on the device."""
        return self.kv_blocks_total + (self.adapter_bytes_total // self.kv_block_bytes if self.kv_block_bytes else 0)

    @property
    def adapter_bytes_most(self) -> int:
        """Bytes for adapters while there are no KV blocks."""
        return self.adapter_bytes_total + self.kv_blocks_total * self.kv_block_bytes
