"""How the gateway talks for an adapter: the base model's chat templates, tokens and defaults, or what the adapter brings.

A template whose text the base model has too is rendered in this process, like the base's. Any other one is a tenant's: it is
rendered in a process of its own (`rendering.Renderers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from motet.services.gateway.openai.prompt import Prompts
from motet.services.gateway.openai.rendering import Renderers
from motet.shared.adapter_chat import MAX_NEW_SPECIAL, AdapterChat, Template
from motet.shared.chat_sandbox import Render
from motet.shared.chat_templates import DEFAULT, TOOL_USE, ChatTemplate
from motet.shared.errors import BadRequest, Unavailable
from motet.shared.generation_config import GenerationDefaults
from motet.shared.text_files import WITHOUT

PROFILES_MAX = 256


class Chats(Protocol):
    """Finds what an adapter version brings for chats (`shared.adapter_watch.AdapterWatch`)."""

    def chat(self, digest: str) -> AdapterChat | None: ...


class ForeignTemplate:
    """An adapter's chat template for a request of one tenant; the counterpart of `ChatTemplate`."""

    def __init__(self, template: Template, special: Mapping[str, str], renderers: Renderers, tenant: str) -> None:
        self._source, self._special, self._renderers, self._tenant = template.source, dict(special), renderers, tenant
        self.reads, self.takes_images = frozenset(template.reads), template.takes_images

    async def render(self, messages: list[dict[str, Any]], **how: Any) -> str:
        """The conversation as text; arguments and errors as of `ChatTemplate.render`, and those of `Renderers.render`."""
        return await self._renderers.render(
            self._tenant, Render(source=self._source, special=self._special, messages=messages, **how)
        )


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What requests on the base model or on one adapter version use."""

    own: dict[str, ChatTemplate]  # templates that are safe to render here, by name
    foreign: dict[str, Template] = {}  # and others
    special: dict[str, str] = {}
    defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...] = ()  # beside the base's
    left_out: frozenset[int] = frozenset()  # special tokens that texts do not show, beside the base's
    whole: dict[str, int] = {}  # those that are plain entries of the base's vocabulary: in prompts they are one token


class Profiles:
    """Makes and remembers profiles."""

    def __init__(self, prompts: Prompts, chats: Chats, *, enabled: bool) -> None:
        """`enabled`: whether what adapters bring is used at all."""
        self._prompts, self._chats, self._enabled = prompts, chats, enabled
        self._renderers = Renderers()
        self._base = Profile(own=prompts.templates.named, defaults=prompts.defaults)
        self._known: dict[str, Profile] = {}

    async def close(self) -> None:
        """End the processes that render templates."""
        await self._renderers.close()

    def of(self, chat: str) -> Profile:
        """The profile of adapter versions with this `AdapterVersion.chat`, "" for the base model.

        Raises BadRequest when it has too many special tokens, Unavailable when its record has not arrived.
        """
        if not chat or not self._enabled:
            return self._base
        profile = self._known.pop(chat, None)
        if profile is None:
            brought = self._chats.chat(chat)
            if brought is None:
                raise Unavailable("the adapter's chat template has not arrived yet", param="model", retry_after_s=1.0)
            profile = self._made(brought)
        self._known[chat] = profile
        if len(self._known) > PROFILES_MAX:
            del self._known[next(iter(self._known))]
        return profile

    def template(self, profile: Profile, *, tools: bool, tenant: str) -> ChatTemplate | ForeignTemplate:
        """The template for a request with or without tools. Raises BadRequest when there is none."""
        for name in (TOOL_USE, DEFAULT) if tools else (DEFAULT,):
            if name in profile.own:
                return profile.own[name]
            if name in profile.foreign:
                return ForeignTemplate(profile.foreign[name], profile.special, self._renderers, tenant)
        return self._prompts.templates.chosen(tools=tools)

    def _made(self, chat: AdapterChat) -> Profile:
        base = self._prompts.templates
        special = base.special | chat.special
        sources = {name: template.source for name, template in chat.templates.items()}
        known = {template.source: template for template in base.named.values()}
        if not sources:
            sources = {name: template.source for name, template in base.named.items()}
        own = {name: self._with(known[source], special) for name, source in sources.items() if source in known}
        eos = self._id(chat.special["eos_token"]) if "eos_token" in chat.special else None
        skipped = {text: token for text in chat.special_tokens if (token := self._id(text)) is not None}
        added = {token.content for token in self._prompts.tokenizer.get_added_tokens_decoder().values()}
        whole = {text: token for text, token in skipped.items() if text not in added}
        if len(whole) > MAX_NEW_SPECIAL:
            raise BadRequest(
                f"the adapter has {len(whole)} special tokens that are plain entries of the base model's vocabulary, at most "
                f"{MAX_NEW_SPECIAL} are served: {WITHOUT}",
                param="model",
            )
        return Profile(
            own=own,
            foreign={name: template for name, template in chat.templates.items() if name not in own},
            special=special,
            defaults=_over(self._prompts.defaults, chat.generation),
            eos_token_ids=tuple(dict.fromkeys([*([] if eos is None else [eos]), *chat.eos_token_ids])),
            left_out=frozenset(skipped.values()),
            whole=whole,
        )

    def _with(self, template: ChatTemplate, special: dict[str, str]) -> ChatTemplate:
        """The base's template with other special tokens."""
        base = self._prompts.templates.special
        if all(base.get(name) == text for name, text in special.items() if name in template.reads):
            return template
        return ChatTemplate(template.source, special, "the base model's chat template")

    def _id(self, text: str) -> int | None:
        return self._prompts.tokenizer.token_to_id(text)


def _over(base: GenerationDefaults, given: GenerationDefaults) -> GenerationDefaults:
    """The base's defaults with an adapter's in their place."""
    named = {field: getattr(given, field) for field in GenerationDefaults.__struct_fields__}
    return msgspec.structs.replace(base, **{field: value for field, value in named.items() if value is not None})
