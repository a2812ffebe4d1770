"""API keys: maps each key to a caller with a tenant and a role.

    use         generate, see the models and adapters of its tenant and the shared ones
    adapters    also add, replace, pin and delete its tenant's adapters
    admin       everything: shared and other tenants' adapters, keys, status, metrics, the audit log

Keys come from the key store, which `motet keys` changes at run time, and from `--api-keys-file`. Without keys every client is
an administrator of the tenant "default", which is meant for a gateway on a loopback address.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from motet.services.gateway.config import GatewayConfig
from motet.shared.bus import Bus
from motet.shared.config import ConfigError, is_loopback
from motet.shared.errors import Forbidden, Unauthorized
from motet.shared.keys import ROLES, ApiKey, KeyStore, Role, digest_of, read_key_file
from motet.shared.telemetry import logger
from motet.shared.tenancy import DEFAULT_TENANT

log = logger("motet.gateway.auth")
KEY_CHARS = 512


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request. `key_id` is "" when no keys are used."""

    tenant: str = DEFAULT_TENANT
    role: Role = "admin"
    key_id: str = ""

    def may(self, role: Role) -> bool:
        """Whether the caller has the rights of `role`."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def check(self, role: Role, what: str = "this") -> None:
        """Raises Forbidden unless the caller has the rights of `role`."""
        if not self.may(role):
            raise Forbidden(f"{what} needs an API key with the role {role}; this one has the role {self.role}")


class Keys:
    """Admits requests. Keys are looked up by digest, so timing reveals nothing about a key."""

    def __init__(self, config: GatewayConfig) -> None:
        mode, path = config.keys.api_keys, config.keys.api_keys_file
        if mode == "off" and path:
            raise ConfigError("--api-keys: off, but there is an --api-keys-file")
        self._config = config
        self._file = {key.digest: key for key in read_key_file(path)} if path else {}
        self._exposed = not is_loopback(config.http.host)
        self.required = bool(self._file) or mode == "required" or (mode == "auto" and self._exposed)
        self.store: KeyStore

    async def start(self, bus: Bus) -> None:
        """Follow the key store. Raises ConfigError for a gateway on a public address without any key, or Unavailable."""
        self.store = KeyStore(bus)
        if not self.required:
            bus.spawn(self.store.start())  # only `motet keys` looks at it
            log.warning(
                "no API keys: everybody who can reach this address is an administrator", extra={"host": self._config.http.host}
            )
            return
        await self.store.start()
        if self._config.keys.api_keys == "auto" and not self.all():
            raise ConfigError(
                f"--host: {self._config.http.host} can be reached from elsewhere and there are no API keys. Make one with"
                " `motet keys create --role admin --file FILE` and give --api-keys-file FILE; or say --api-keys off to let"
                " everybody do everything"
            )

    async def stop(self) -> None:
        """Stop following the key store."""
        await self.store.stop()

    def trouble(self) -> str:
        """Why keys that clients have may be missing; "" if they are not."""
        return self.store.trouble() if self.required else ""

    def all(self) -> list[ApiKey]:
        """Every key that this gateway knows, those of its file first."""
        return [*self._file.values(), *self.store.all()]

    async def admit(self, request: Request) -> Caller:
        """Set `request.state.caller` and `.tenant`. Raises Unauthorized when keys are in use and the request has none."""
        caller = self._caller(request) if self.required else Caller()
        request.state.caller, request.state.tenant = caller, caller.tenant
        return caller

    def _caller(self, request: Request) -> Caller:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        text = given.strip()
        if scheme.lower() != "bearer" or not text:
            raise Unauthorized("no API key: send the header `Authorization: Bearer <key>`")
        key = None
        if len(text) <= KEY_CHARS:
            key = self._file.get(digest_of(text)) or self.store.find(text)
        if key is None:
            raise Unauthorized("this API key is not known, or is no longer valid")
        return Caller(key.tenant, key.role, key.id)


def caller_of(request: Request) -> Caller:
    """Who sent an admitted request."""
    caller: Caller = request.state.caller
    return caller
