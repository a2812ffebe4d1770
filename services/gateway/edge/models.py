"""The base model and adapters as /v1/models shows them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from motet.services.gateway.edge.adapters import created_unix_ms, public_source, shown_source
from motet.services.gateway.edge.parts import Gateway
from motet.shared.wire.registry import AdapterInfo


class ModelPermission(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM says that a client may do with a model."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The base model or an adapter, with the fields that vLLM gives a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "motet"
    root: Annotated[str, Meta(description="Source: a hub id, or the last part of a path.")]
    parent: Annotated[str | None, Meta(description="The base model of an adapter.")] = None
    max_model_len: int | None = None
    permission: list[ModelPermission]
    family: Annotated[str | UnsetType, Meta(description="Of an image adapter's base model: sd15, sd2, sdxl.")] = UNSET
    sites: Annotated[int | UnsetType, Meta(description="Of an image adapter: how many layers it changes.")] = UNSET


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """All models, the base model first."""

    object: Literal["list"] = "list"
    data: list[Model]


def base_card(gateway: Gateway) -> Model:
    """The base model."""
    name, created_s = gateway.config.base.name, gateway.started_s
    return Model(
        id=name,
        created=created_s,
        root=public_source(f"path:{gateway.config.base.model}").removeprefix("path:"),
        max_model_len=gateway.preparer.max_model_len,
        permission=_permission(name, created_s),
    )


def adapter_card(gateway: Gateway, info: AdapterInfo) -> Model:
    """An adapter."""
    name, created_s = info.entry.name, created_unix_ms(info) // 1000
    return Model(
        id=name,
        created=created_s,
        root=shown_source(info).split(":", 1)[-1],  # without what kind of source it was
        parent=gateway.config.base.name,
        permission=_permission(name, created_s),
        family=info.version.family or UNSET,
        sites=info.version.sites or UNSET,
    )


def _permission(name: str, created_s: int) -> list[ModelPermission]:
    return [ModelPermission(id=f"modelperm-{name}", created=created_s)]
