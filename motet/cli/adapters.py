"""`motet adapters`: add, list, show, alias, roll back, pin and remove adapters of a running mesh."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import click

from motet.cli.client import Client
from motet.cli.status import refused_lines
from motet.cli.terminal import as_json_option, ask, connection, print_json, table, terminal
from motet.services.registry.files import CONFIG, IMAGE, LORA_FILE, WEIGHTS, is_lora_file
from motet.shared.errors import InvalidAdapter
from motet.shared.text_files import TEMPLATES_DIR, is_text_file

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
SOURCE = re.compile(r"[a-z][a-z0-9_+.-]*:.")  # a kind of places, and one of them
REFUSED_LISTED = 1000
PEFT_FILES = (CONFIG, WEIGHTS)


@click.group()
def adapters() -> None:
    """Add, list, show, pin and remove adapters of a running mesh.

    An adapter's name is the `model` of a request. Each version is identified by the digest of its content. Requests that run
    on a replaced or removed version finish on it.
    """


def _of_tenant(text: str) -> Callable[..., Any]:
    """`--tenant`, for administrators."""
    return click.option("--tenant", help=f"{text} For administrators.")


@adapters.command("list")
@connection
@as_json_option
@_of_tenant("Also list adapters of this tenant; `*`: of all tenants.")
def list_(tenant: str | None, url: str, as_json: bool) -> None:
    """List the adapters that you may use: your tenant's and the shared ones.

    \b
      motet adapters list
      motet adapters list --json | jq -r .data[].id
    """
    params = _params(tenant)
    answer = ask(url, "GET", "/v1/adapters", params=params)
    if as_json:
        return print_json(answer)
    titles = ("name", "tenant", "rank", "size", "version", "digest", "modules", "resident", "pinned")
    listed = table(*titles, right=("rank", "size", "version"))
    for card in answer["data"]:
        listed.add_row(*_row(card))
    terminal().print(listed)
    for line in refused_lines(answer.get("refused") or {}, most=REFUSED_LISTED):
        click.echo(line)


@adapters.command()
@connection
@as_json_option
@click.argument("name")
def show(name: str, url: str, as_json: bool) -> None:
    """Show one adapter: rank, kind and modules, workers that can run it, size, digest, versions and where it is resident."""
    card = ask(url, "GET", _path(name))
    if as_json:
        return print_json(card)
    older = card.get("older_versions") or []
    card["older_versions"] = [f"{one['version']} ({one['digest'][:12]})" for one in older]
    if card.get("alias_of"):
        card["alias_of"] = f"{card['alias_of']} ({_follows(card)})"
    card.pop("follows", None)
    for key in ("family", "sites"):  # of image adapters only
        if card.get(key) is None:
            card.pop(key, None)
    chat = card.pop("chat") or {}
    for name, source in chat.pop("templates", {}).items():
        chat[f"chat_template {name}"] = f"{len(source)} characters"
    for key, value in (card | chat).items():
        many = value if isinstance(value, list) else [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else None
        shown = ", ".join(map(str, many)) if many is not None else value
        click.echo(f"{key:<14} {'' if shown is None else shown}")


@adapters.command()
@connection
@as_json_option
@click.option("--replace", is_flag=True, help="If the name exists, add this as its new version.")
@click.option("--on-server", is_flag=True, help="SOURCE is a path on the registry's machine, below one of its --adapter-roots.")
@click.option("--chat/--no-chat", default=True, help="Also take the chat template, special tokens and generation defaults.")
@_of_tenant("Tenant that the adapter will belong to; empty: shared by all.")
@click.argument("name")
@click.argument("source")
def add(name: str, source: str, url: str, as_json: bool, **how: Any) -> None:
    """Add the adapter SOURCE under NAME.

    SOURCE is a PEFT directory, an archive of one (.zip, .tar, .tar.gz), a Hugging Face id, or KIND:LOCATION, a place of another
    kind that the registry knows. For an image model it is a LoRA file (.safetensors), or a directory or an archive with one.
    Local files are uploaded. The registry checks the weights before it registers them, and names what is wrong.

    \b
      motet adapters add summaries ./out/checkpoint-900
      motet adapters add sql someone/llama-sql-lora
      motet adapters add summaries ./out/checkpoint-1200 --replace
      motet adapters add watercolor ./watercolor.safetensors
    """

    path, replace, tenant, chat = Path(source).expanduser(), how["replace"], how["tenant"], how["chat"]

    async def send() -> Any:
        async with Client(url) as client:
            return await upload(client, name, path, replace=replace, tenant=tenant, chat=chat)

    if not how["on_server"] and path.exists():
        card = asyncio.run(send())
    else:
        field = "path" if how["on_server"] else "hub_id" if HUB_ID.fullmatch(source) else "source"
        if field == "source" and not SOURCE.match(source):
            raise click.UsageError(f"{source} is neither a file or directory here nor a Hugging Face id")
        body = {"name": name, field: source, "replace": replace, "tenant": tenant, "chat": chat}
        card = ask(url, "POST", "/v1/adapters", json=body)
    if as_json:
        return print_json(card)
    click.echo(f"added {card['name']} version {card['version']} ({card['digest'][:12]})")
    if card["left_out"]:
        click.echo(f"left out, as its configuration says: {', '.join(card['left_out'])}")


@adapters.command()
@connection
@as_json_option
@click.option("--pin-version", is_flag=True, help="Keep the version that TARGET has now.")
@click.argument("name")
@click.argument("target")
def alias(name: str, target: str, pin_version: bool, url: str, as_json: bool) -> None:
    """Make NAME an alias of the adapter TARGET.

    When TARGET gets another version, NAME follows it, unless --pin-version was given.

    \b
      motet adapters alias summaries-latest summaries
      motet adapters alias summaries-stable summaries --pin-version
    """
    body = {"name": name, "alias_of": target, "pin_version": pin_version}
    card = ask(url, "POST", "/v1/adapters", json=body)
    print_json(card) if as_json else click.echo(f"{name} is {target} ({card['digest'][:12]}; {_follows(card)})")


@adapters.command()
@connection
@as_json_option
@_of_tenant("Tenant that the adapter belongs to; empty: shared by all.")
@click.argument("name")
@click.argument("version", type=click.IntRange(min=1), required=False)
def rollback(name: str, version: int | None, tenant: str | None, url: str, as_json: bool) -> None:
    """Make an earlier version of an adapter current again.

    Without VERSION it is the one before the present version; `motet adapters show NAME` lists those that are kept. Running
    requests finish on their version. Aliases that follow NAME go back with it.

    \b
      motet adapters rollback summaries
      motet adapters rollback summaries 3
    """
    body = {"version": version or 0}
    card = ask(url, "PATCH", _path(name), params=_params(tenant), json=body)
    print_json(card) if as_json else click.echo(f"{name} is version {card['version']} again ({card['digest'][:12]})")


@adapters.command()
@connection
@click.option("--force", is_flag=True, help="Remove it even if requests run on it; they finish.")
@click.option("--forget", is_flag=True, help="Do not register it again from --adapters-dir at the next start.")
@_of_tenant("Tenant that the adapter belongs to; empty: shared by all.")
@click.argument("name")
def rm(name: str, force: bool, forget: bool, tenant: str | None, url: str) -> None:
    """Remove an adapter's name, and its weights if no other name uses them."""
    flags = {"force": force, "forget": forget}
    params = {flag: "true" for flag, given in flags.items() if given} | _params(tenant)
    answer = ask(url, "DELETE", _path(name), params=params)
    click.echo(f"removed {name}" + ("; it will not return from --adapters-dir" if forget else ""))
    if answer.get("returns_at_start"):
        click.echo(
            f"{name} lies in --adapters-dir and returns at the next start; prevent that: motet adapters rm {name} --forget"
        )


@adapters.command()
@connection
@as_json_option
@click.option("--workers", help="Ids of the workers, comma-separated (see `motet status`); by default all, also later ones.")
@_of_tenant("Tenant that the adapter belongs to; empty: shared by all.")
@click.argument("name")
def pin(name: str, workers: str | None, tenant: str | None, url: str, as_json: bool) -> None:
    """Keep an adapter loaded on workers, whether it is used or not.

    Workers load it now and give up all other idle adapters before it. The pin belongs to the name: it goes on to new versions,
    and ends when the name is removed. Pinning again changes the workers.

    \b
      motet adapters pin summaries
      motet adapters pin sql --workers worker-0,worker-1
    """
    body = {} if workers is None else {"workers": [one.strip() for one in workers.split(",") if one.strip()]}
    card = ask(url, "POST", _path(name, "/pin"), params=_params(tenant), json=body)
    print_json(card) if as_json else click.echo(f"pinned {name} to {_workers(card)}")


@adapters.command()
@connection
@_of_tenant("Tenant that the adapter belongs to; empty: shared by all.")
@click.argument("name")
def unpin(name: str, tenant: str | None, url: str) -> None:
    """Let workers give up an adapter like any other."""
    ask(url, "DELETE", _path(name, "/pin"), params=_params(tenant))
    click.echo(f"unpinned {name}")


@adapters.command()
@connection
@_of_tenant("Tenant that the adapter belongs to; empty: shared by all.")
@click.argument("name")
def release(name: str, tenant: str | None, url: str) -> None:
    """Let a quarantined adapter answer again.

    It was quarantined because a worker's probe after a load found that it was partly ignored, had no effect or was another one.
    Its next load is probed again, and its answers then are the new reference.
    """
    ask(url, "DELETE", _path(name, "/quarantine"), params=_params(tenant))
    click.echo(f"released {name}")


async def upload(
    client: Client, name: str, path: Path, *, replace: bool = False, tenant: str | None = None, chat: bool = True
) -> Any:
    """Upload an adapter: a directory, an archive of one, or a LoRA file; the registered adapter's card. Raises ApiError."""
    form = {"name": name, "replace": str(replace).lower(), "chat": str(chat).lower()} | _params(tenant)
    with contextlib.ExitStack() as opened:
        source: IO[bytes]
        if path.is_dir() and not is_lora_directory(path):
            file_name, source, kind = f"{path.name}.tar", pack(path), "application/x-tar"
        else:
            file = _lora_file(path) if path.is_dir() else path
            file_name, source, kind = file.name, opened.enter_context(file.open("rb")), "application/octet-stream"
        return await client.call("POST", "/v1/adapters", data=form, files={"file": (file_name, source, kind)})


def is_lora_directory(directory: Path) -> bool:
    """Whether a directory holds an image adapter rather than one of PEFT's."""
    names = {path.name for path in directory.iterdir()}
    return CONFIG not in names and (LORA_FILE in names or any(map(is_lora_file, names - {WEIGHTS})))


def _lora_file(directory: Path) -> Path:
    """The LoRA file of an image adapter's directory. Raises click.UsageError when there are several."""
    try:
        return directory / IMAGE.weights(str(directory), [path.name for path in directory.iterdir()])
    except InvalidAdapter as error:
        raise click.UsageError(error.message) from None


def pack(directory: Path) -> io.BytesIO:
    """The PEFT files of `directory` as an uncompressed tar archive. Raises click.UsageError when one is missing."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in PEFT_FILES:
            if not (directory / name).is_file():
                raise click.UsageError(f"{directory} has no {name}, so it is not a PEFT adapter")
            archive.add(directory / name, arcname=name)
        for path in sorted([*directory.iterdir(), *directory.glob(f"{TEMPLATES_DIR}/*.jinja")]):
            name = path.relative_to(directory).as_posix()
            if is_text_file(name) and path.is_file():
                archive.add(path, arcname=name)
    packed.seek(0)
    return packed


def _path(name: str, rest: str = "") -> str:
    return f"/v1/adapters/{quote(name, safe='')}{rest}"


def _params(tenant: str | None) -> dict[str, str]:
    """The parameter that names another tenant, if one is named."""
    return {} if tenant is None else {"tenant": tenant}


def _modules(card: dict[str, Any]) -> str:
    """What an adapter changes, in short."""
    modules = " ".join(str(module).removesuffix("_proj") for module in card["modules"])
    if card.get("family"):
        return f"{card['family']}, {card['sites']} sites: {modules}"
    if card.get("kind") == "peft":
        return f"peft: {modules}" + ("" if card["workers"] else " (no worker here can run it)")
    return modules


def _workers(card: dict[str, Any]) -> str:
    """Where an adapter is pinned, in words."""
    pinned = card.get("pinned_to") or []
    return "all workers" if pinned == ["*"] else ", ".join(pinned)


def _follows(card: dict[str, Any]) -> str:
    """What an alias does when its target gets another version, in words."""
    return "follows its versions" if card.get("follows") else f"keeps version {card['digest'][:12]}"


def _row(card: dict[str, Any]) -> tuple[str, ...]:
    resident = card.get("resident") or {}
    return (
        str(card["name"])
        + (f" -> {card['alias_of']}{'' if card.get('follows') else ' (one version)'}" if card.get("alias_of") else ""),
        str(card.get("tenant") or "(all)"),
        str(card["rank"]),
        f"{card['size_bytes'] / 1e6:.2f} MB",
        str(card["version"]),
        str(card["digest"])[:12],
        _modules(card),
        ", ".join(f"{worker}: {tier}" for worker, tier in sorted(resident.items())),
        _workers(card),
    )
