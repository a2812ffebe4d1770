"""Promise: a key has the tenant, role and expiry of its current record. Nothing that is stored can be used as a key."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from motet.cli.nats_server import NatsServer
from motet.services.gateway.service import GatewayService
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.config import ConfigError, is_loopback
from motet.shared.errors import NotFound
from motet.shared.keys import ApiKey, KeyStore, digest_of, read_key_file
from motet.shared.kv import Bucket
from motet.shared.wire.worker_state import WorkerNotice
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import running_gateway
from tests.support import eventually

ADMIN = "mtt_admin-of-the-test"


class Door:
    """One gateway that requires keys."""

    def __init__(self, gateway: GatewayService, http: aiohttp.ClientSession) -> None:
        self.gateway, self._http = gateway, http

    async def ask(self, method: str, path: str, key: str = ADMIN, **body: Any) -> tuple[int, Any]:
        url, headers = f"http://127.0.0.1:{self.gateway.port}{path}", {"authorization": f"Bearer {key}"}
        async with self._http.request(method, url, headers=headers, **body) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else await answer.text()

    async def key(self, **asked: Any) -> str:
        """The text of a new key."""
        status, body = await self.ask("POST", "/v1/keys", json=asked)
        assert status == 201, body
        return body["key"]

    async def lets_in(self, key: str) -> bool:
        return (await self.ask("GET", "/v1/models", key))[0] == 200


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{ADMIN} ops admin\n")
    return path


@pytest.fixture
async def door(mesh: Mesh, http: aiohttp.ClientSession, nats_url: str, tmp_path: Path, key_file: Path) -> AsyncIterator[Door]:
    mesh.say("x")
    async with running_gateway(nats_url, tmp_path, instance_id="g2", api_keys_file=str(key_file)) as gateway:
        await eventually(lambda: not gateway.not_ready())
        yield Door(gateway, http)


async def test_a_new_key_works_at_once_and_a_revoked_one_no_more(door: Door) -> None:
    status, made = await door.ask("POST", "/v1/keys", json={"tenant": "acme", "role": "use", "name": "web shop"})
    assert (status, made["tenant"], made["role"], made["name"]) == (201, "acme", "use", "web shop")
    assert made["key"].startswith("mtt_") and len(made["key"]) == 47
    assert await door.lets_in(made["key"])
    assert (await door.ask("DELETE", f"/v1/keys/{made['id']}"))[0] == 200
    assert not await door.lets_in(made["key"])
    assert (await door.ask("DELETE", f"/v1/keys/{made['id']}"))[0] == 404


async def test_every_gateway_learns_of_a_change(
    door: Door, mesh: Mesh, nats_url: str, tmp_path: Path, key_file: Path, http
) -> None:
    async with running_gateway(nats_url, tmp_path, instance_id="g3", api_keys_file=str(key_file)) as gateway:
        other = Door(gateway, http)
        key = await door.key(tenant="acme")
        await eventually(lambda: other.lets_in(key))
        [stored] = [one for one in (await door.ask("GET", "/v1/keys"))[1]["data"] if one["tenant"] == "acme"]
        await other.ask("DELETE", f"/v1/keys/{stored['id']}")

        async def shut() -> bool:
            return not await door.lets_in(key)

        await eventually(shut)


async def test_keys_outlive_their_gateway(door: Door, nats_url: str, tmp_path: Path, http) -> None:
    key = await door.key(tenant="acme")
    async with running_gateway(nats_url, tmp_path, instance_id="g3", api_keys="required") as gateway:
        assert await Door(gateway, http).lets_in(key)
        assert not await Door(gateway, http).lets_in(ADMIN), "that one is in the other gateway's file"


async def test_what_is_stored_is_a_digest(door: Door, mesh: Mesh) -> None:
    key = await door.key(tenant="acme")
    stream = f"KV_{subjects.KV_KEYS}"
    state = (await mesh.bus.js.stream_info(stream)).state
    stored = [(await mesh.bus.js.get_msg(stream, seq)).data for seq in range(state.first_seq, state.last_seq + 1)]
    assert stored and not any(key.encode() in data or key.removeprefix("mtt_").encode() in data for data in stored)
    listed = (await door.ask("GET", "/v1/keys"))[1]
    assert "digest" not in str(listed) and key not in str(listed)
    assert {one["id"].split(":")[0] for one in listed["data"]} >= {"file"}


async def test_a_rotated_key_continues_working_for_the_overlap(door: Door) -> None:
    _, made = await door.ask("POST", "/v1/keys", json={"tenant": "acme", "role": "adapters", "name": "ci"})
    status, fresh = await door.ask("POST", f"/v1/keys/{made['id']}/rotate", json={"overlap_s": 3600})
    assert (status, fresh["tenant"], fresh["role"], fresh["name"]) == (201, "acme", "adapters", "ci")
    assert await door.lets_in(made["key"]) and await door.lets_in(fresh["key"])
    expires = {one["id"]: one["expires"] for one in (await door.ask("GET", "/v1/keys"))[1]["data"]}
    assert expires[made["id"]] is not None and expires[fresh["id"]] is None
    await door.ask("POST", f"/v1/keys/{made['id']}/rotate", json={"overlap_s": 0})

    async def old_is_out() -> bool:
        return not await door.lets_in(made["key"])

    await eventually(old_is_out)
    assert await door.lets_in(fresh["key"])


@pytest.mark.parametrize("expires_in_s", [0, 3600])
async def test_a_key_that_is_rotated_twice_gets_successors_that_last_as_long_as_it_was_made_for(
    door: Door, expires_in_s: int
) -> None:
    """The first answer was lost, so the administrator rotates again."""
    _, made = await door.ask("POST", "/v1/keys", json={"tenant": "acme", "expires_in_s": expires_in_s})
    for _ in range(3):
        _, fresh = await door.ask("POST", f"/v1/keys/{made['id']}/rotate", json={"overlap_s": 60})
        lasts_s = fresh["expires"] - fresh["created"] if fresh["expires"] else 0
        assert abs(lasts_s - expires_in_s) <= 1
        assert await door.lets_in(fresh["key"]) and await door.lets_in(made["key"])


async def test_a_revocation_that_meets_a_rotation_wins_at_every_moment(
    door: Door, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways: the one rotates a key while the other revokes it, before and after the successor is made."""
    here, there = KeyStore(bus), KeyStore(bus)
    await here.start()
    await there.start()
    for moment in ("get", "replace"):
        key, text = await there.create(tenant="acme")
        await eventually(lambda text=text: here.find(text))
        ordinary, revoked = getattr(Bucket, moment), set[str]()

        async def revoked_first(*args: Any, key: ApiKey = key, ordinary: Any = ordinary, revoked: set[str] = revoked) -> Any:
            answer = await ordinary(*args)
            if not revoked:
                revoked.add(key.id)
                await there.revoke(key.id)
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(Bucket, moment, revoked_first)
            with pytest.raises(NotFound):
                await here.rotate(key.id, overlap_s=600)
        await eventually(lambda: not there.all() and not here.all())
        assert here.find(text) is None and there.find(text) is None, "the revoked key has come back"
    await here.stop()
    await there.stop()


async def test_a_change_that_is_overtaken_while_its_answer_is_under_way_does_not_come_back(
    door: Door, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyStore(bus)
    await store.start()
    key, text = await store.create(tenant="acme")
    replace = Bucket.replace

    async def slow(bucket: Bucket, key_id: str, value: bytes, revision: int) -> int | None:
        """The answer arrives after the watch has reported the next change too."""
        made = await replace(bucket, key_id, value, revision)
        if key_id == key.id:
            assert made is not None
            await bucket.delete(key_id)
            await eventually(lambda: store.find(text) is None)
        return made

    monkeypatch.setattr(Bucket, "replace", slow)
    await store.rotate(key.id, overlap_s=600)
    assert store.find(text) is None, "the deleted key has come back"
    await store.stop()


async def test_the_id_of_a_key_is_no_pattern_and_an_unreadable_record_can_be_revoked(door: Door, mesh: Mesh) -> None:
    for id_ in ("key_unknown", "*", "%3E", "a.b", "ü", "a b", "x" * 300):
        for method, path in (("DELETE", f"/v1/keys/{id_}"), ("POST", f"/v1/keys/{id_}/rotate")):
            assert (await door.ask(method, path, json={} if method == "POST" else None))[0] == 404, path
    bucket = await mesh.bus.key_value(subjects.KV_KEYS)
    await bucket.put("key_damaged", b"garbage")
    assert (await door.ask("POST", "/v1/keys/key_damaged/rotate", json={}))[0] == 404
    assert (await door.ask("DELETE", "/v1/keys/key_damaged"))[0] == 200
    assert (await door.ask("DELETE", "/v1/keys/key_damaged"))[0] == 404


async def test_a_key_with_an_end_ends(door: Door) -> None:
    key = await door.key(tenant="acme", expires_in_s=0.05)

    async def is_out() -> bool:
        return not await door.lets_in(key)

    await eventually(is_out)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tenant": "a.b"}, "tenant"),
        ({"role": "root"}, "role"),
        ({"expires_in_s": -1}, "expires_in_s"),
        ({"name": "a\nb"}, "name"),
    ],
)
async def test_a_bad_key_request_names_its_field(door: Door, body: dict[str, Any], param: str) -> None:
    status, answer = await door.ask("POST", "/v1/keys", json={"tenant": "acme"} | body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("role", ["use", "adapters"])
async def test_only_administrators_see_and_change_keys_status_metrics_and_audit(door: Door, role: str) -> None:
    key = await door.key(tenant="acme", role=role)
    for method, path in [
        ("GET", "/v1/keys"),
        ("POST", "/v1/keys"),
        ("DELETE", "/v1/keys/key_1"),
        ("POST", "/v1/keys/key_1/rotate"),
        ("GET", "/v1/audit"),
        ("GET", "/v1/status"),
        ("GET", "/metrics"),
    ]:
        status, body = await door.ask(method, path, key)
        assert (status, body["error"]["code"]) == (403, "permission_denied"), path
        assert (await door.ask(method, path, "wrong"))[0] == 401
    for path in ("/v1/keys", "/v1/audit", "/v1/status", "/metrics"):
        assert (await door.ask("GET", path))[0] == 200


async def test_a_probe_without_a_key_learns_whether_it_is_ready_and_an_administrator_why(
    bus: Bus, nats_url: str, tmp_path: Path, key_file: Path, http: aiohttp.ClientSession
) -> None:
    async with running_gateway(nats_url, tmp_path, instance_id="g2", api_keys_file=str(key_file)) as gateway:
        words = WorkerNotice(
            worker_id="w9", incarnation="1", base_model="demo", event="failed", reason="no file /srv/secret/model"
        )
        await bus.publish(subjects.notice("w9"), words)
        await eventually(lambda: gateway.fleet.lost.all(0.0))
        door = Door(gateway, http)
        status, body = await door.ask("GET", "/ready")
        assert (status, body["ready"]) == (503, False) and "/srv/secret/model" in str(body["reasons"])
        for key in ("", "wrong", await door.key(tenant="acme", role="use"), await door.key(tenant="acme", role="adapters")):
            status, body = await door.ask("GET", "/ready", key)
            assert (status, body["ready"]) == (503, False)
            assert body["reasons"] == ["the reasons are shown to an API key with the role admin"]


async def test_the_audit_log_says_who_made_and_revoked_which_key(door: Door) -> None:
    _, made = await door.ask("POST", "/v1/keys", json={"tenant": "acme"})
    _, fresh = await door.ask("POST", f"/v1/keys/{made['id']}/rotate", json={"overlap_s": 60})
    await door.ask("DELETE", f"/v1/keys/{fresh['id']}")
    status, body = await door.ask("GET", "/v1/audit?limit=3")
    assert status == 200
    assert [(event["action"], event["object"], event["actor"], event["tenant"]) for event in body["data"]] == [
        ("key.revoked", fresh["id"], "file:1", "acme"),
        ("key.rotated", fresh["id"], "file:1", "acme"),
        ("key.created", made["id"], "file:1", "acme"),
    ]
    assert made["key"] not in str(body) and fresh["key"] not in str(body)


def test_a_key_file_line_without_a_role_may_only_use(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# people\nk1 acme\n\nk2 acme adapters\nk3 ops admin\n")
    assert [(key.id, key.tenant, key.role) for key in read_key_file(str(path))] == [
        ("file:2", "acme", "use"),
        ("file:4", "acme", "adapters"),
        ("file:5", "ops", "admin"),
    ]
    for line, says in [("k", "not `key tenant"), ("k a.b", "tenant"), ("k acme root", "role"), ("# none", "has no keys")]:
        path.write_text(line)
        with pytest.raises(ConfigError, match=says):
            read_key_file(str(path))


async def test_keys_that_vanish_without_a_revocation_are_no_longer_taken_and_said_in_ready(
    door: Door, nats_server: NatsServer, mesh: Mesh
) -> None:
    """As after damage of NATS's files, which nats-server mends by leaving records out."""
    kept, lost, revoked = [await door.key(tenant="acme") for _ in range(3)]
    ids = [one["id"] for one in (await door.ask("GET", "/v1/keys"))[1]["data"] if one["tenant"] == "acme"]
    await eventually(lambda: door.lets_in(lost))
    store = door.gateway.keys.store
    vanished = next(key.id for key in store.all() if key.digest == digest_of(lost))
    gone = next(key.id for key in store.all() if key.digest == digest_of(revoked))
    assert {vanished, gone} <= set(ids)
    reconnects = door.gateway.bus.reconnects
    await mesh.bus.js.purge_stream(f"KV_{subjects.KV_KEYS}", subject=f"$KV.{subjects.KV_KEYS}.{vanished}")
    await (await mesh.bus.key_value(subjects.KV_KEYS)).delete(gone)
    nats_server.stop()
    await nats_server.start()
    await eventually(lambda: door.gateway.bus.reconnects > reconnects and store.trouble(), within_s=20)
    assert store.trouble().startswith("1 API keys have vanished from the bucket motet_keys and were not revoked")
    assert store.trouble() in door.gateway.not_ready()
    assert await door.lets_in(kept) and not await door.lets_in(lost) and not await door.lets_in(revoked)


@pytest.mark.parametrize("garbage", [b"garbage", b'{"id": "\xff"}', b"[" * 60_000])
async def test_a_record_that_cannot_be_read_gives_no_access(door: Door, mesh: Mesh, garbage: bytes) -> None:
    key = "mtt_of-a-newer-version"
    record = {"id": "key_new", "digest": digest_of(key), "tenant": "acme", "role": "auditor"}
    bucket = await mesh.bus.key_value(subjects.KV_KEYS)
    await bucket.put("key_new", json.dumps(record).encode())
    await bucket.put(
        "key_known", json.dumps(record | {"id": "key_known", "digest": digest_of("mtt_k"), "role": "use"}).encode()
    )
    await eventually(lambda: door.lets_in("mtt_k"))
    assert not await door.lets_in(key)
    await bucket.put("key_known", garbage)

    async def shut() -> bool:
        return not await door.lets_in("mtt_k")

    await eventually(shut)


# ---- without keys


async def test_an_exposed_gateway_without_keys_does_not_start(mesh: Mesh, nats_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host.*no API keys.*--api-keys off"):
        async with running_gateway(nats_url, tmp_path, instance_id="g2", host="0.0.0.0"):
            pass


async def test_an_exposed_gateway_starts_without_keys_when_that_is_said(
    mesh: Mesh, nats_url: str, tmp_path: Path, http, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_gateway(nats_url, tmp_path, instance_id="g2", host="0.0.0.0", api_keys="off") as gateway:
        assert (await Door(gateway, http).ask("GET", "/v1/keys", ""))[0] == 200
    assert any("no API keys" in record.message and record.host == "0.0.0.0" for record in caplog.records)


async def test_an_exposed_gateway_starts_with_stored_keys_alone(door: Door, nats_url: str, tmp_path: Path, http) -> None:
    key = await door.key(tenant="acme")
    async with running_gateway(nats_url, tmp_path, instance_id="g3", host="0.0.0.0") as gateway:
        assert await Door(gateway, http).lets_in(key)
        assert not await Door(gateway, http).lets_in("")


async def test_on_loopback_keys_can_be_prepared_before_they_are_asked_for(
    mesh: Mesh, nats_url: str, tmp_path: Path, http
) -> None:
    key = await Door(mesh.gateway, http).key(tenant="acme", role="admin")
    async with running_gateway(nats_url, tmp_path, instance_id="g2", api_keys="required") as gateway:
        assert await Door(gateway, http).lets_in(key)


def test_loopback_is_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_key_file_contradicts_keys_being_off(tmp_path: Path, key_file: Path) -> None:
    from motet.services.gateway.config import GatewayConfig
    from motet.services.gateway.tenants.auth import Keys

    with pytest.raises(ConfigError, match="--api-keys"):
        Keys(GatewayConfig.of(model="m", api_keys="off", api_keys_file=str(key_file)))
