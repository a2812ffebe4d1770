"""The options of `motet up`: those of every service but the ones that each process needs for itself, and its own.

    flag  >  variable  >  --config  >  default

Each service gets the options that it declares. An option that nobody gave stays with the service, which reads its variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import click
from msgspec import Meta

from motet.cli.config_file import read_options
from motet.cli.gpus import gpus_of_workers
from motet.cli.options import SERVICES, ConfigOption, HelpAll, config_of, option_for
from motet.cli.preflight import preflight
from motet.cli.stack import StackOptions
from motet.examples.demo import BASE, DEMO, PARSER
from motet.examples.demo_images import BASE as IMAGES_BASE
from motet.examples.demo_images import DEMO_IMAGES
from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.openai.image_base import ImageBase
from motet.services.registry.config import RegistryConfig
from motet.services.scheduler.config import SchedulerConfig
from motet.services.worker.config import WorkerConfig
from motet.shared.chat_templates import served_templates
from motet.shared.config import COMMON, PLUGINS, Config, ConfigError, Field, ServiceConfig, fields, load
from motet.shared.hub import resolve_model
from motet.shared.image_shapes import INDEX, is_image_base

DEMO_PIXELS = 256 * 256
"""The largest picture of the image demo: a step at 512x512 takes 8 s of a core, since attention grows with the square."""
WORKERS_MAX = 64
TEXTS = {
    "model": "Base model: a local directory in Hugging Face format, or a Hugging Face id",
    "port": "Port of the first gateway; 0 for any  [default: 8000]",
    "threads": "CPU threads per worker; 0: all cores, shared by the workers  [default: 0]",
    "nats_url": "URL of an existing NATS server or cluster, used instead of the embedded one",
}
"""Help where an option means more to the whole mesh than to one service."""


class StackConfig(Config, frozen=True, kw_only=True):
    """The processes on this machine, and where their data lies."""

    demo: Annotated[bool, Meta(description="serve the small model and the 17 adapters that come with Motet", extra=COMMON)] = (
        False
    )
    demo_images: Annotated[
        bool,
        Meta(description="serve the small image model and the 16 style adapters that come with Motet", extra=COMMON),
    ] = False
    workers: Annotated[
        str,
        Meta(
            pattern=r"^(\d\d?\.\.)?[1-9]\d?$",
            description="number of workers; they share the cores. 1..4 with --scale act: as many as the load needs; 0..4: none"
            " while nobody asks",
            extra=COMMON,
        ),
    ] = "1"
    gateways: Annotated[int, Meta(ge=1, le=64, description="number of gateways, on --port, --port + 1, ...", extra=COMMON)] = 1
    schedulers: Annotated[int, Meta(ge=1, le=16, description="number of schedulers")] = 1
    data_dir: Annotated[
        str,
        Meta(
            min_length=1,
            description="directory for adapters, durable requests, credentials and logs; kept between runs",
            extra=COMMON,
        ),
    ] = ".motet"
    nats_port: Annotated[int, Meta(ge=0, le=65535, description="port of the embedded NATS server; 0 for any")] = 0
    credentials: Annotated[
        str, Meta(description="for --nats-url: directory with one password file per service, from `motet nats-config`")
    ] = ""

    @property
    def worker_range(self) -> tuple[int, int]:
        """The fewest and the most workers. Raises ConfigError."""
        least, _, most = self.workers.partition("..")
        found = int(least), int(most or least)
        if found[0] > found[1] or found[1] > WORKERS_MAX:
            raise ConfigError(f"--workers {self.workers}: at most {WORKERS_MAX}, and a range begins with the smaller number")
        return found


def declared() -> dict[str, Field]:
    """Every option by name: the stack's own, then the services'."""
    shared = {option.name: option for option in fields(ServiceConfig)}
    services = [option for kind in SERVICES for option in fields(config_of(kind)) if option.name not in shared]
    options = {option.name: option for option in [*fields(StackConfig), *services, *shared.values()]}
    return {name: option for name, option in options.items() if not option.per_process}


class UpCommand(HelpAll):
    """A command whose help lists the common options by group; with --help-all it lists every option."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.params = [option_for(option, TEXTS.get(name, "")) for name, option in declared().items()] + self.params
        self.offer_help_all("Show every option and exit.")

    def listed(self, options: list[click.Parameter], *, everything: bool) -> Iterator[tuple[str, list[click.Parameter]]]:
        sections: dict[str, list[click.Parameter]] = {}  # by the group that declares them
        for option in options:
            title = _title(option.declared) if isinstance(option, ConfigOption) else "This command"
            if everything or not isinstance(option, ConfigOption) or option.declared.common:
                sections.setdefault(title, []).append(option)
        yield from sections.items()


def _title(option: Field) -> str:
    """What a group of options is about, from the first sentence of its docstring."""
    if not option.groups:
        owner = next((kind for kind in SERVICES if option in fields(config_of(kind))), "")
        return f"The {owner}" if owner else "The stack"
    return re.split("[.:]", (option.groups[-1][1].__doc__ or "").strip())[0]


def stack_options(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> StackOptions:
    """The options of a stack from the flags of `motet up`, None where not given, variables, and the file `config`.

    Downloads a model that is given by its hub id, and checks its files. Raises ConfigError.
    """
    taken = _taken(given, environ)
    own = load(StackConfig, {name: value for name, value in taken.items() if name in StackConfig.__struct_fields__}, environ)
    taken = {name: value for name, value in taken.items() if name not in StackConfig.__struct_fields__}
    taken = _with_model(own, taken, environ)
    gateway = _config("gateway", taken, environ)
    assert isinstance(gateway, GatewayConfig)
    model = Path(resolve_model(gateway.base.model)).resolve()
    draws, taken = _with_engine(model, taken, environ)
    worker, registry = (_config(kind, taken, environ) for kind in ("worker", "registry"))
    assert isinstance(worker, WorkerConfig) and isinstance(registry, RegistryConfig)
    taken = _with_scale(own, taken, environ)
    for kind in ("scheduler", "predictor"):
        _config(kind, taken, environ)
    least, most = own.worker_range
    elsewhere = "nats_url" in taken or declared()["nats_url"].variable in environ
    if not elsewhere and (own.credentials or any(name.startswith("nats_") for name in taken)):
        raise ConfigError("--nats-user, --nats-tls-... and --credentials need --nats-url")
    adapters_dir = registry.sources.adapters_dir
    for flag, directory in (("--credentials", own.credentials), ("--adapters-dir", adapters_dir)):
        if directory and not Path(directory).is_dir():
            raise ConfigError(f"{flag}: there is no directory {directory}")
    notes, chats_missing = _checked(model, draws, gateway, worker)
    return StackOptions(
        model=str(model),
        draws=draws,
        chats_missing=chats_missing,
        notes=tuple(notes),
        served_model_name=gateway.base.name,
        data_dir=Path(own.data_dir),
        workers=max(1, least),
        workers_least=least,
        workers_most=most,
        gateways=own.gateways,
        schedulers=own.schedulers,
        nats_port=own.nats_port,
        credentials_dir=Path(own.credentials) if own.credentials else None,
        adapters_dir=str(Path(adapters_dir).resolve()) if adapters_dir else "",
        adapter_roots=registry.sources.roots,
        tenants=registry.publishers.names,
        bus=gateway.bus if elsewhere else None,
        threads=worker.engine.threads,
        gpus=gpus_of_workers(worker, most, environ),
        host=gateway.http.host,
        port=gateway.http.port,
        tls_cert_file=gateway.http.tls_cert_file,
        tls_key_file=gateway.http.tls_key_file,
        api_keys=gateway.keys.api_keys,
        api_keys_file=gateway.keys.api_keys_file,
        drain_s=gateway.process.drain_s,
        given=taken,
    )


def _taken(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The options that flags or the file `config` give. A flag comes before a variable, a variable before the file."""
    options = declared()
    taken = {name: value for name, value in given.items() if value is not None and name in options}
    if not given.get("config"):
        return taken
    if PLUGINS in taken:  # the file may name what they add
        options[PLUGINS].read(taken[PLUGINS])
    elif options[PLUGINS].variable in environ:
        options[PLUGINS].read(environ[options[PLUGINS].variable])
    read = read_options(Path(given["config"]), options)
    return {name: value for name, value in read.items() if options[name].variable not in environ} | taken


def _with_model(own: StackConfig, taken: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The options with those of `--demo` or `--demo-images`. Raises ConfigError unless one of them or `--model` is given."""
    if own.demo and own.demo_images:
        raise ConfigError("--demo and --demo-images: each says what to serve, give one of them")
    if own.demo:
        if "model" in taken:
            raise ConfigError("--model and --demo: each says what to serve, give one of them")
        demo = {"model": str(DEMO / "model"), "served_model_name": BASE, "adapters_dir": str(DEMO / "adapters")}
        return demo | {"tool_call_parser": PARSER} | taken
    if own.demo_images:
        if "model" in taken:
            raise ConfigError("--model and --demo-images: each says what to serve, give one of them")
        return _demo_images() | taken
    if "model" not in taken and declared()["model"].variable not in environ:
        raise ConfigError("--model, --demo or --demo-images: one of them says what to serve")
    return taken


def _with_scale(own: StackConfig, taken: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The options with the range of `--workers` as the schedulers' bounds. Raises ConfigError for one that nobody acts upon."""
    least, most = own.worker_range
    scheduler = _config("scheduler", taken, environ)
    assert isinstance(scheduler, SchedulerConfig)
    if least < most and scheduler.scale != "act":
        raise ConfigError(f"--workers {own.workers}: a range needs --scale act, which starts and stops workers within it")
    return {"scale_min": least, "scale_max": most} | taken if least < most else taken


def _with_engine(model: Path, taken: dict[str, Any], environ: Mapping[str, str]) -> tuple[bool, dict[str, Any]]:
    """Whether the model is an image base, and the options: one is run by the image engine, unless another is named."""
    draws = is_image_base(model)
    if draws and declared()["engine"].variable not in environ:
        taken = {"engine": "images"} | taken
    return draws, taken


def _checked(model: Path, draws: bool, gateway: GatewayConfig, worker: WorkerConfig) -> tuple[list[str], str]:
    """Notes on the model's files, and why chats cannot be served, if they cannot. Raises ConfigError for an unusable file."""
    if draws:
        ImageBase(model)
        return [], ""
    engine = worker.engine
    notes = preflight(model, engine=engine.engine, load_format=engine.load_format, quantization=engine.quantization)
    return notes, served_templates(model, gateway.answers.chat_template).missing


def _demo_images() -> dict[str, Any]:
    """The options of `--demo-images`. Raises ConfigError naming what is missing of the model and its adapters."""
    model, adapters = DEMO_IMAGES / "model", DEMO_IMAGES / "adapters"
    missing = next((path for path in (model / INDEX, adapters) if not path.exists()), None)
    if missing is not None:
        raise ConfigError(
            f"--demo-images: {missing} is missing; `python -m motet.examples.demo_images.train --publish` makes the model and"
            " its adapters"
        )
    served = {"model": str(model), "served_model_name": IMAGES_BASE, "adapters_dir": str(adapters)}
    # one thread: layers of this size are faster on one core than divided among several beside a gateway
    asked = {"image_steps": 20, "image_guidance": 2.0, "image_max_pixels": DEMO_PIXELS}
    return served | asked | {"engine": "images", "threads": 1}


def _config(kind: str, taken: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """The configuration that the services of this kind will have, so that a value that does not fit is found here."""
    cls = config_of(kind)
    names = {option.name for option in fields(cls)}
    return load(cls, {name: value for name, value in taken.items() if name in names}, environ)
