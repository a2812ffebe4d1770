"""NATS users and permissions: one table of subject permissions, and the server configuration generated from it.

    user        may
    gateway     submit, watch workers, control them, ask the registry, own streams, leases `gateway.*`, intake and results,
                API keys, audit log
    scheduler   answer submit, ask the predictor, assign to workers, watch worker state, move requests, lease `planner.*`,
                placements of adapters
    predictor   answer predictions, receive outcomes, keep what it has learned in its object store
    registry    provision streams and buckets; the only writer of adapters and blobs
    worker      take assignments, stream tokens, leases `worker.*`, KV blocks of other workers; reads adapters and blobs
    upstream    publish requests of one tenant, read and purge its results, read its tokens and dead letters; nothing else
    operator    everything: for people with the `nats` command

Every user receives replies on its own inbox `_INBOX_<user>.>` only. An upstream may not create consumers, because the
creator of a consumer chooses its delivery subject and could choose one that permissions forbid. An upstream subscribes to its
results, or fetches a stored one with `$JS.API.DIRECT.GET.<stream>.<subject>`: the default tenant's stream is MOTET_RESULTS,
that of `acme` is MOTET_RESULTS_acme.

    account MOTET            the services and the operator, with JetStream
    account TENANT_<tenant>  that tenant's upstream; imports its own subjects from MOTET, one by one

Tenants have accounts of their own because the server does not check the *reply* subject of a published message: JetStream would
answer a tenant's request on any subject of its account, with content that the tenant chooses. Among the services, permissions
protect against mistakes, not against an attacker who has a service's password.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from motet.shared import subjects
from motet.shared.tenancy import DEFAULT_TENANT, TENANT

OPERATOR = "operator"
ACCOUNT = "MOTET"


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """The subjects one user may publish and subscribe to.

    `answers`: the users whose requests it answers, also after it has reconnected, when the server no longer knows that it was
    asked. Any other client that asks (`nats micro ls`) is answered on the connection that was asked, or not at all.
    """

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


def _read(stream: str) -> tuple[str, ...]:
    """Permissions to inspect and consume a stream."""
    return (
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.INFO.{stream}.*",
        f"$JS.API.CONSUMER.DELETE.{stream}.*",
        f"$JS.FC.{stream}.>",
    )


def _intake(tenant: str) -> tuple[str, ...]:
    """Permissions to pull a tenant's requests through the registry's consumer, and to look up results."""
    requests, results, consumer = subjects.requests_stream(tenant), subjects.results_stream(tenant), subjects.CONSUMER_INTAKE
    return (
        f"$JS.API.CONSUMER.INFO.{requests}.{consumer}",
        f"$JS.API.CONSUMER.MSG.NEXT.{requests}.{consumer}",
        f"$JS.ACK.{requests}.{consumer}.>",
        f"$JS.API.STREAM.INFO.{results}",
        f"$JS.API.DIRECT.GET.{results}.>",
    )


def _kv_read(bucket: str) -> tuple[str, ...]:
    return _read(f"KV_{bucket}")


def _store_read(bucket: str) -> tuple[str, ...]:
    return (*_read(f"OBJ_{bucket}"), "$JS.API.STREAM.NAMES")  # the client looks the bucket's stream up by subject


def _store_write(bucket: str) -> tuple[str, ...]:
    stream = f"OBJ_{bucket}"
    return (*_store_read(bucket), f"$O.{bucket}.>", f"$JS.API.STREAM.PURGE.{stream}")


def _provision(streams: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"$JS.API.STREAM.{verb}.{stream}" for stream in streams for verb in ("INFO", "CREATE", "UPDATE"))


def _provision_tenant(tenant: str) -> tuple[str, ...]:
    requests = subjects.requests_stream(tenant)
    return (
        *_provision((requests, subjects.results_stream(tenant), subjects.dead_stream(tenant))),
        f"$JS.API.CONSUMER.DURABLE.CREATE.{requests}.{subjects.CONSUMER_INTAKE}",
    )


BUCKETS = (
    f"OBJ_{subjects.PICTURES}",
    *(f"KV_{bucket}" for bucket in (subjects.KV_ADAPTERS, subjects.KV_KEYS, subjects.KV_LEASES, subjects.KV_INTAKE)),
    *(f"KV_{bucket}" for bucket in (subjects.KV_PLACEMENT, subjects.KV_PROBES)),
    *(f"OBJ_{bucket}" for bucket in (subjects.BLOBS, subjects.UPLOADS, subjects.PREDICTOR)),
    *(f"OBJ_{bucket}" for bucket in (subjects.PICTURE_FILES, subjects.RESULT_PICTURES)),
)


SERVICES: dict[str, Permissions] = {
    "gateway": Permissions(
        publish=(
            subjects.SUBMIT,
            subjects.SCHEDULER_STATUS,
            subjects.OUTCOME,
            subjects.WAKE,
            subjects.HOMES,
            subjects.registry("*"),
            subjects.control("*"),
            subjects.ping("*"),
            subjects.results("*", "*"),
            subjects.tokens("*", "*"),
            subjects.dead("*"),
            subjects.audit("key"),
            f"$JS.API.STREAM.INFO.{subjects.STREAM_AUDIT}",
            f"$JS.API.DIRECT.GET.{subjects.STREAM_AUDIT}",
            f"$KV.{subjects.KV_KEYS}.*",
            *_kv_read(subjects.KV_KEYS),
            f"$KV.{subjects.KV_LEASES}.gateway.*",
            *_kv_read(subjects.KV_LEASES),
            *_kv_read(subjects.KV_ADAPTERS),
            *_kv_read(subjects.KV_PLACEMENT),
            *_store_write(subjects.UPLOADS),
            *_store_write(subjects.PICTURE_FILES),
            *_store_write(subjects.RESULT_PICTURES),
            f"$KV.{subjects.KV_INTAKE}.>",
            *_kv_read(subjects.KV_INTAKE),
            *_store_write(subjects.PICTURES),  # a picture that was read is deleted
            "$JS.API.STREAM.NAMES",  # tenants' request streams are found by their subjects
        ),
        subscribe=(subjects.STREAMS, subjects.WORKER_STATES, subjects.WORKER_NOTICES, subjects.MOVE, subjects.SCALE),
    ),
    "scheduler": Permissions(
        publish=(
            subjects.PREDICT,
            subjects.assign("*"),
            subjects.control("*"),
            subjects.MOVE,
            subjects.DEMAND,
            subjects.SCALE,
            f"$KV.{subjects.KV_LEASES}.planner.*",
            f"$KV.{subjects.KV_PLACEMENT}.*",
            *_kv_read(subjects.KV_PLACEMENT),
            *_kv_read(subjects.KV_LEASES),
        ),
        subscribe=(
            subjects.SUBMIT,
            subjects.SCHEDULER_STATUS,
            subjects.OUTCOME,
            subjects.WORKER_STATES,
            subjects.WORKER_NOTICES,
            subjects.DEMAND,
            subjects.SCALE,
            subjects.WAKE,
            subjects.HOMES,
            "$SRV.>",
        ),
        answers=("gateway",),
    ),
    "predictor": Permissions(
        publish=_store_write(subjects.PREDICTOR),
        subscribe=(subjects.PREDICT, subjects.OUTCOME, "$SRV.>"),
        answers=("scheduler",),
    ),
    "registry": Permissions(
        publish=(
            "$JS.API.INFO",
            *_provision((*BUCKETS, subjects.STREAM_AUDIT)),
            subjects.control("*"),
            subjects.audit("adapter"),
            f"$KV.{subjects.KV_ADAPTERS}.>",
            *_kv_read(subjects.KV_ADAPTERS),
            *_kv_read(subjects.KV_LEASES),
            f"$KV.{subjects.KV_PROBES}.*",  # it deletes what no version needs
            *_kv_read(subjects.KV_PROBES),
            *_store_write(subjects.BLOBS),
            *_store_write(subjects.UPLOADS),
        ),
        subscribe=(subjects.registry("*"), subjects.WORKER_STATES, "$SRV.>"),
        answers=("gateway", "worker"),
    ),
    "worker": Permissions(
        publish=(
            subjects.STREAMS,
            subjects.WORKER_STATES,
            subjects.WORKER_NOTICES,
            subjects.kv("*"),
            subjects.registry("quarantine"),
            f"$KV.{subjects.KV_PROBES}.*",
            *_kv_read(subjects.KV_PROBES),
            f"$KV.{subjects.KV_LEASES}.worker.*",
            *_kv_read(subjects.KV_LEASES),
            *_kv_read(subjects.KV_ADAPTERS),
            *_kv_read(subjects.KV_PLACEMENT),
            *_store_read(subjects.BLOBS),
            *_store_write(subjects.PICTURES),
        ),
        subscribe=(subjects.assign("*"), subjects.control("*"), subjects.ping("*"), subjects.kv("*"), "$SRV.>"),
        answers=("gateway", "scheduler", "registry", "worker"),
    ),
}


def _upstream(tenant: str) -> Permissions:
    results, dead = subjects.results(tenant, "*"), subjects.dead(tenant)
    stream = subjects.results_stream(tenant)
    return Permissions(
        publish=(
            subjects.requests(tenant),
            f"$JS.API.DIRECT.GET.{stream}.{results}",
            f"{subjects.TENANT_API}.STREAM.PURGE.{stream}",  # what was read makes room for more
            f"$JS.API.DIRECT.GET.{subjects.dead_stream(tenant)}.{dead}",
        ),
        subscribe=(results, subjects.tokens(tenant, "*"), dead),
    )


def upstream_user(tenant: str) -> str:
    """The bus user that publishes for `tenant`: `upstream` for the default one, `upstream-<tenant>` for others."""
    return "upstream" if tenant == DEFAULT_TENANT else f"upstream-{tenant}"


def grants(tenants: Iterable[str] = (DEFAULT_TENANT,)) -> dict[str, Permissions]:
    """All users with their permissions. Raises ValueError for a tenant name that is no single subject token."""
    tenants, users = tuple(tenants), dict(SERVICES)
    for tenant in tenants:
        if not TENANT.fullmatch(tenant):
            raise ValueError(f"tenant {tenant!r}: letters, digits, '_' and '-' only, at most 64")
        users[upstream_user(tenant)] = _upstream(tenant)
    for user, more in (("gateway", _intake), ("registry", _provision_tenant)):
        # the default tenant's streams always exist: an older version's carry their names
        named = [subject for tenant in dict.fromkeys((DEFAULT_TENANT, *tenants)) for subject in more(tenant)]
        users[user] = msgspec.structs.replace(users[user], publish=(*users[user].publish, *named))
    users[OPERATOR] = Permissions(publish=(">",), subscribe=(">",))
    return users


def password_file(directory: Path, user: str) -> Path:
    """The path of the password file of `user`."""
    return directory / f"{user}.password"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as sink:
        sink.write(text)
    fresh.replace(path)


def authorization(directory: Path, tenants: Iterable[str] = (DEFAULT_TENANT,)) -> str:
    """The accounts and users of the server's configuration.

    Passwords are stored one per file (mode 0600) in `directory`. Existing ones are kept, so that publishers keep working
    after a restart; missing ones are generated.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    tenants = tuple(tenants)
    users = {}
    for user, grant in grants(tenants).items():
        secret = password_file(directory, user)
        if not secret.exists():
            write_private(secret, secrets.token_urlsafe(32) + "\n")
        users[user] = _entry(user, secret.read_text().strip(), grant)
    exports, accounts = [], []
    for tenant in tenants:
        account, grant = f"TENANT_{tenant}", _upstream(tenant)
        shared = [("service", subject) for subject in grant.publish] + [("stream", subject) for subject in grant.subscribe]
        exports += [
            f"{{ {kind}: {json.dumps(_in_our_account(subject))}, accounts: [{json.dumps(account)}] }}"
            for kind, subject in shared
        ]
        imports = [_import(kind, subject) for kind, subject in shared]
        accounts.append(_account(json.dumps(account), users=[users.pop(upstream_user(tenant))], imports=imports))
    ours = _account(ACCOUNT, "jetstream: enabled", users=[*users.values()], exports=exports)
    return "accounts {\n" + ours + "".join(accounts) + "}\n"


def adopt_streams(store_dir: Path) -> None:
    """Move JetStream's data in `store_dir` from the server's global account to the account MOTET. The server must not run."""
    before, after = (store_dir / "jetstream" / name for name in ("$G", ACCOUNT))
    if before.is_dir() and not after.exists():
        before.rename(after)


def _in_our_account(subject: str) -> str:
    """The name of a tenant's subject in the account MOTET."""
    return subject.replace(subjects.TENANT_API, "$JS.API", 1) if subject.startswith(subjects.TENANT_API + ".") else subject


def _import(kind: str, subject: str) -> str:
    to = "" if _in_our_account(subject) == subject else f", to: {json.dumps(subject)}"
    return f"{{ {kind}: {{ account: {ACCOUNT}, subject: {json.dumps(_in_our_account(subject))} }}{to} }}"


def _account(name: str, *lines: str, **lists: list[str]) -> str:
    parts = [*lines, *(f"{key}: [\n" + "\n".join(items) + "\n    ]" for key, items in lists.items() if items)]
    return f"  {name} {{\n" + "".join(f"    {part}\n" for part in parts) + "  }\n"


def _entry(user: str, password: str, grant: Permissions) -> str:
    publish = [json.dumps(subject) for subject in (*grant.publish, *map(_inbox, grant.answers))]
    subscribe = [json.dumps(subject) for subject in (*grant.subscribe, _inbox(user))]
    # An answer may take as long as the registry's download of an adapter.
    responses = ', allow_responses: { max: 1, expires: "15m" }' if grant.answers else ""
    return (
        f"    {{ user: {json.dumps(user)}, password: {json.dumps(password)}, permissions: {{\n"
        f"      publish: {{ allow: [{', '.join(publish)}] }}\n"
        f"      subscribe: {{ allow: [{', '.join(subscribe)}] }}{responses}\n    }} }}"
    )


def _inbox(user: str) -> str:
    return f"_INBOX_{user}.>"


def write_server_config(
    out: Path,
    *,
    tenants: Iterable[str] = (DEFAULT_TENANT,),
    store_dir: str,
    listen: str,
    monitor: str,
    tls_files: str = "",
) -> Path:
    """Write a complete `nats.conf` for a server that runs elsewhere (a container), and the password files beside it.

    `listen` and `monitor` are host:port of the client and health endpoints. `tls_files` is the directory of nats.crt and
    nats.key on that server (motet.cli.certificates); "": no TLS. Returns the configuration's path.
    """
    text = authorization(out, tenants)
    if tls_files:
        cert, key = (json.dumps(f"{tls_files.rstrip('/')}/nats.{end}") for end in ("crt", "key"))
        text += f'tls {{ cert_file: {cert}, key_file: {key}, min_version: "1.2" }}\n'
    config = out / "nats.conf"
    write_private(
        config,
        f"listen: {json.dumps(listen)}\nhttp: {json.dumps(monitor)}\n"
        f"jetstream {{ store_dir: {json.dumps(store_dir)} }}\n"
        f"max_payload: 8MB\nmax_pending: 256MB\nwrite_deadline: 10s\n{text}",
    )
    return config
