"""The layers of an image checkpoint that an adapter can change, its *sites*, from its configurations alone. No torch.

    model_index.json                            which pipeline it is and which parts it has
    unet/config.json                            UNet2DConditionModel of Stable Diffusion 1, 2 and XL
    text_encoder/, text_encoder_2/config.json   CLIPTextModel, CLIPTextModelWithProjection

Sites are all linear and convolution layers of these parts, under the names of their modules in diffusers and transformers 5.
Configurations are data: every size has a bound, and a field whose effect on the layers is not known here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from motet.shared.hf_config import UnsupportedModel, read_json, shorten

INDEX = "model_index.json"
UNET = "unet"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
PIPELINES = tuple(f"StableDiffusion{form}{task}Pipeline" for form in ("", "XL") for task in ("", "Img2Img", "Inpaint"))
ENCODERS = ("CLIPTextModel", "CLIPTextModelWithProjection")
LATENT_CHANNELS = 4
"""Channels of latents. A UNet that reads more gets a mask and a masked picture as well."""
SIZE_MAX = 1 << 16
"""The largest number of channels or features."""
BLOCKS_MAX = 8
RESNETS_MAX = 16  # of a block
DEPTH_MAX = 64  # of a transformer
TRANSFORMERS_MAX = 1024
"""The most transformer blocks of a UNet. SDXL has 70."""
ENCODER_LAYERS_MAX = 128

_CROSS_DOWN, _CROSS_UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
_DOWN_TYPES, _UP_TYPES = (_CROSS_DOWN, "DownBlock2D"), (_CROSS_UP, "UpBlock2D")
_FIXED: dict[str, tuple[Any, ...]] = {
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "num_attention_heads": (None,),
    "dual_cross_attention": (False,),
    "mid_block_only_cross_attention": (None, False),
    "reverse_transformer_layers_per_block": (None,),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "class_embeddings_concat": (False,),
    "addition_embed_type": (None, "text_time"),
    "resnet_time_scale_shift": ("default",),
    "resnet_skip_time_act": (False,),
    "time_embedding_type": ("positional",),
    "time_embedding_dim": (None,),
    "time_cond_proj_dim": (None,),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "attention_type": ("default",),
    "cross_attention_norm": (None,),
}
"""{field of a UNet that changes its layers: the values that are served}. One that is absent has a served value."""


_PLACE = re.compile(  # where a site is; what is left is its role
    r"(?:down_blocks\.\d+|mid_block|up_blocks\.\d+)\.(?:attentions\.\d+\.(?:transformer_blocks\.\d+\.)?|resnets\.\d+\.)?"
    r"|(?:text_model\.)?encoder\.layers\.\d+\."
)


class Site(msgspec.Struct, frozen=True):
    """A linear layer or a convolution (without groups)."""

    part: str  # unet, text_encoder or text_encoder_2
    name: str  # of the module within the part
    kind: str  # linear or conv
    size_in: int  # features or channels
    size_out: int
    kernel: int = 1  # rows and columns alike
    stride: int = 1

    @property
    def path(self) -> str:
        """The name within the checkpoint, e.g. `unet.conv_in`."""
        return f"{self.part}.{self.name}"

    @property
    def fan_in(self) -> int:
        """Inputs of one output: columns of A. For a convolution in the order [channel][row][column]."""
        return self.size_in * self.kernel * self.kernel

    @property
    def role(self) -> str:
        """What it does where it is, in a word for people, e.g. `to_q`, `conv1` or `ff`."""
        words = [word for word in _PLACE.sub("", self.name, count=1).split(".") if not word.isdigit()]
        return "ff" if words[0] == "ff" else words[-1]

    @property
    def group(self) -> str:
        """Its class: sites of a part with one role and shape, e.g. `unet.attn1.to_q 320x320` (fan in x outputs)."""
        return f"{self.part}.{_PLACE.sub('', self.name, count=1)} {self.fan_in}x{self.size_out}"


class ImageShapes(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint's configurations say."""

    pipeline: str  # as model_index.json names it
    family: str  # sd15, sd2, sdxl or sdxl-refiner
    in_channels: int  # of the UNet: 9 for inpainting
    sites: tuple[Site, ...]

    @property
    def inpaints(self) -> bool:
        """Whether the UNet reads a mask and a masked picture besides the latents."""
        return self.in_channels > LATENT_CHANNELS

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(site.part for site in self.sites))

    def classes(self) -> dict[str, tuple[Site, ...]]:
        """{class: its sites}, both in the order of `sites`."""
        found: dict[str, list[Site]] = {}
        for site in self.sites:
            found.setdefault(site.group, []).append(site)
        return {name: tuple(sites) for name, sites in found.items()}


def is_image_base(directory: Path) -> bool:
    """Whether the model in this directory draws pictures."""
    return (directory / INDEX).is_file()


def shrinks(config: Mapping[str, Any]) -> int:
    """By how much a UNet or an autoencoder of this configuration shrinks a picture, each way. Raises UnsupportedModel.

    Every block but the last halves it.
    """
    channels = config.get("block_out_channels")
    if not isinstance(channels, list | tuple) or not 1 <= len(channels) <= BLOCKS_MAX:
        raise UnsupportedModel("block_out_channels: a list of one number for each block is expected")
    return 1 << (len(channels) - 1)


def read_image_shapes(directory: Path) -> ImageShapes:
    """The sites of the checkpoint in `directory`. Raises UnsupportedModel naming the file, the field and the reason."""
    index = _file(directory, INDEX)
    parts = {part: _file(directory, f"{part}/config.json") for part in (UNET, *TEXT_ENCODERS) if _has(index, part)}
    return image_shapes_of(index, parts)


def image_shapes_of(index: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> ImageShapes:
    """The sites that a decoded `model_index.json` and {part: its decoded `config.json`} describe.

    Raises UnsupportedModel like `read_image_shapes`.
    """
    told = _Fields(INDEX, index)
    pipeline = told.text("_class_name", PIPELINES)
    is_xl = pipeline.startswith("StableDiffusionXL")
    for part in (UNET, TEXT_ENCODERS[is_xl]):
        if part not in parts:
            raise told.refused(part, "a checkpoint of this pipeline has it")
    classes = {part: _class(told, part) for part in (UNET, *TEXT_ENCODERS) if part in parts}
    unet = _Fields(f"{UNET}/config.json", parts[UNET])
    if (unet.raw.get("addition_embed_type") == "text_time") != is_xl:
        raise unet.refused("addition_embed_type", f"it does not belong to {pipeline}")
    sites = _unet(unet)
    for part in TEXT_ENCODERS:
        if part in parts:
            sites += _encoder(part, classes[part], _Fields(f"{part}/config.json", parts[part]))
    if is_xl:
        family = "sdxl" if TEXT_ENCODERS[0] in parts else "sdxl-refiner"
    else:
        family = "sd2" if unet.flag("use_linear_projection") else "sd15"
    return ImageShapes(pipeline=pipeline, family=family, in_channels=unet.size("in_channels", 4), sites=tuple(sites))


def _file(directory: Path, name: str) -> dict[str, Any]:
    value = read_json(directory / name)
    if value is None:
        raise UnsupportedModel(f"{directory} has no {name}: a checkpoint as written by diffusers' save_pretrained is expected")
    return value


def _has(index: Mapping[str, Any], part: str) -> bool:
    """Whether the index names a part; [null, null] stands for one that is left out."""
    told = index.get(part)
    return told is not None and told != [None, None]


def _class(index: _Fields, part: str) -> str:
    """The class of a part."""
    library, names = ("diffusers", ("UNet2DConditionModel",)) if part == UNET else ("transformers", ENCODERS)
    told = index.raw.get(part)
    for name in names:
        if told == [library, name]:
            return name
    raise index.refused(part, f"{library} and {' or '.join(names)} are expected")


class _Fields:
    """The fields of one configuration. Every method raises UnsupportedModel naming the file, the field and the reason."""

    def __init__(self, where: str, raw: Mapping[str, Any]) -> None:
        self.where, self.raw = where, raw

    def refused(self, key: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.where}: {key} is {_brief(self.raw.get(key))}: {why}")

    def size(self, key: str, default: int | None = None, most: int = SIZE_MAX) -> int:
        """A whole number from 1 to `most`. Without a default it must be there."""
        value = self.raw.get(key, default)
        self._check(key, value, most)
        return int(value)

    def sizes(self, key: str, count: int, default: int | None = None, most: int = SIZE_MAX) -> tuple[int, ...]:
        """`count` numbers, in the file a list of them or one for all."""
        value = self.raw.get(key, default)
        if not isinstance(value, list):
            self._check(key, value, most)
            return (value,) * count
        if len(value) != count:
            raise self.refused(key, f"a number or a list of {count} is expected, one for each block")
        for one in value:
            self._check(key, one, most)
        return tuple(value)

    def text(self, key: str, allowed: Sequence[str]) -> str:
        value = self.raw.get(key)
        if not isinstance(value, str) or value not in allowed:
            raise self.refused(key, f"{_either(allowed)} is served")
        return value

    def texts(self, key: str, allowed: Sequence[str]) -> tuple[str, ...]:
        """A list of 1 to `BLOCKS_MAX` of the texts that are allowed."""
        value = self.raw.get(key)
        if not isinstance(value, list) or not 1 <= len(value) <= BLOCKS_MAX:
            raise self.refused(key, f"a list of 1 to {BLOCKS_MAX} kinds of blocks is expected")
        if any(not isinstance(one, str) or one not in allowed for one in value):
            raise self.refused(key, f"{_either(allowed)} is served")
        return tuple(value)

    def flag(self, key: str) -> bool:
        """A truth value, false where it is absent."""
        value = self.raw.get(key, False)
        if not isinstance(value, bool):
            raise self.refused(key, "true or false is expected")
        return value

    def _check(self, key: str, value: object, most: int) -> None:
        if key not in self.raw and value is None:
            raise UnsupportedModel(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refused(key, f"whole numbers from 1 to {most} are served")


def _brief(value: object) -> str:
    """A value of a configuration for a message of one line."""
    if isinstance(value, dict) or (
        isinstance(value, list) and (len(value) > 16 or any(isinstance(v, list | dict) for v in value))
    ):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    return shorten(repr(value))


def _either(allowed: Sequence[object]) -> str:
    return " or ".join(repr(one) for one in allowed)


class _Sites(list[Site]):
    """Collects the sites of a part."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def linear(self, name: str, size_in: int, size_out: int) -> None:
        self.append(Site(self.part, name, "linear", size_in, size_out))

    def conv(self, name: str, size_in: int, size_out: int, kernel: int = 3, stride: int = 1) -> None:
        self.append(Site(self.part, name, "conv", size_in, size_out, kernel, stride))

    def pointwise(self, name: str, size_in: int, size_out: int) -> None:
        """A convolution with a kernel of 1x1."""
        self.conv(name, size_in, size_out, kernel=1)


class _Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """The checked fields of a UNet. Tuples are by block, from the first on the way down."""

    down: tuple[str, ...]
    up: tuple[str, ...]
    channels: tuple[int, ...]
    resnets: tuple[int, ...]
    depths: tuple[int, ...]
    cross: tuple[int, ...]  # width of the text encoding
    linear: bool  # whether projections before and after transformers are linear layers, not 1x1 convolutions
    time: int  # width of the time embedding


def _blocks(fields: _Fields) -> _Blocks:
    fields.text("_class_name", ("UNet2DConditionModel",))
    for key, values in _FIXED.items():
        value = fields.raw.get(key, values[0])
        if not any(type(value) is type(one) and value == one for one in values):
            raise fields.refused(key, f"{_either(values)} is served")
    crossing = fields.raw.get("only_cross_attention", False)
    if any(one is not False for one in (crossing if isinstance(crossing, list) else [crossing])):
        raise fields.refused("only_cross_attention", "False is served")
    down, up = fields.texts("down_block_types", _DOWN_TYPES), fields.texts("up_block_types", _UP_TYPES)
    count = len(down)
    if len(up) != count:
        raise fields.refused("up_block_types", f"{count} blocks are expected, as many as in down_block_types")
    if not isinstance(fields.raw.get("block_out_channels"), list):
        raise fields.refused("block_out_channels", "a list of numbers, one for each block, is expected")
    channels = fields.sizes("block_out_channels", count)
    heads = fields.sizes("attention_head_dim", count, 8)  # diffusers means the number of heads
    for size, head in zip(channels, heads, strict=True):
        if size % head:
            raise fields.refused("attention_head_dim", f"{size} channels cannot be divided into {head} heads")
    blocks = _Blocks(
        down=down,
        up=up,
        channels=channels,
        resnets=fields.sizes("layers_per_block", count, 2, most=RESNETS_MAX),
        depths=fields.sizes("transformer_layers_per_block", count, 1, most=DEPTH_MAX),
        cross=fields.sizes("cross_attention_dim", count, 1280),
        linear=fields.flag("use_linear_projection"),
        time=4 * channels[0],
    )
    transformers = sum((2 * n + 1) * depth for n, depth in zip(blocks.resnets, blocks.depths, strict=True)) + blocks.depths[-1]
    if transformers > TRANSFORMERS_MAX:
        raise fields.refused(
            "transformer_layers_per_block", f"{transformers} transformer blocks in all, {TRANSFORMERS_MAX} at most are served"
        )
    return blocks


def _unet(fields: _Fields) -> list[Site]:
    """All sites of a UNet, in the order in which a picture passes them."""
    blocks, sites = _blocks(fields), _Sites(UNET)
    channels = blocks.channels
    sites.conv("conv_in", fields.size("in_channels", 4), channels[0])
    embeddings = {"time_embedding": channels[0]}
    if fields.raw.get("addition_embed_type"):
        embeddings["add_embedding"] = fields.size("projection_class_embeddings_input_dim")
    for name, size in embeddings.items():
        sites.linear(f"{name}.linear_1", size, blocks.time)
        sites.linear(f"{name}.linear_2", blocks.time, blocks.time)
    for index, kind in enumerate(blocks.down):
        size_in, at = channels[max(0, index - 1)], f"down_blocks.{index}"
        for layer in range(blocks.resnets[index]):
            _resnet(sites, f"{at}.resnets.{layer}", size_in if layer == 0 else channels[index], channels[index], blocks.time)
            if kind == _CROSS_DOWN:
                _transformer(sites, f"{at}.attentions.{layer}", blocks, index)
        if index < len(channels) - 1:
            sites.conv(f"{at}.downsamplers.0.conv", channels[index], channels[index], stride=2)
    last = len(channels) - 1
    _resnet(sites, "mid_block.resnets.0", channels[last], channels[last], blocks.time)
    _transformer(sites, "mid_block.attentions.0", blocks, last)
    _resnet(sites, "mid_block.resnets.1", channels[last], channels[last], blocks.time)
    for step, kind in enumerate(blocks.up):
        index, at = last - step, f"up_blocks.{step}"
        for layer in range(blocks.resnets[index] + 1):
            is_last = layer == blocks.resnets[index]
            before = channels[min(index + 1, last)] if layer == 0 else channels[index]
            beside = channels[max(0, index - 1)] if is_last else channels[index]  # what comes across from the way down
            _resnet(sites, f"{at}.resnets.{layer}", before + beside, channels[index], blocks.time)
            if kind == _CROSS_UP:
                _transformer(sites, f"{at}.attentions.{layer}", blocks, index)
        if step < last:
            sites.conv(f"{at}.upsamplers.0.conv", channels[index], channels[index])
    sites.conv("conv_out", channels[0], fields.size("out_channels", 4))
    return sites


def _resnet(sites: _Sites, at: str, size_in: int, size_out: int, time: int) -> None:
    sites.conv(f"{at}.conv1", size_in, size_out)
    sites.linear(f"{at}.time_emb_proj", time, size_out)
    sites.conv(f"{at}.conv2", size_out, size_out)
    if size_in != size_out:
        sites.pointwise(f"{at}.conv_shortcut", size_in, size_out)


def _transformer(sites: _Sites, at: str, blocks: _Blocks, index: int) -> None:
    """Attention within the picture (attn1), attention to the text (attn2) and a gated feed-forward, `depths[index]` times."""
    size, cross = blocks.channels[index], blocks.cross[index]
    projection = sites.linear if blocks.linear else sites.pointwise
    projection(f"{at}.proj_in", size, size)
    for depth in range(blocks.depths[index]):
        block = f"{at}.transformer_blocks.{depth}"
        for attention, source in (("attn1", size), ("attn2", cross)):
            sites.linear(f"{block}.{attention}.to_q", size, size)
            sites.linear(f"{block}.{attention}.to_k", source, size)
            sites.linear(f"{block}.{attention}.to_v", source, size)
            sites.linear(f"{block}.{attention}.to_out.0", size, size)
        sites.linear(f"{block}.ff.net.0.proj", size, 8 * size)
        sites.linear(f"{block}.ff.net.2", 4 * size, size)
    projection(f"{at}.proj_out", size, size)


def _encoder(part: str, name: str, fields: _Fields) -> list[Site]:
    """All sites of a text encoder of the class `name`. Absent fields have the values of transformers' CLIPTextConfig."""
    sites, projected = _Sites(part), name == "CLIPTextModelWithProjection"
    prefix = "text_model." if projected else ""
    size, inner = fields.size("hidden_size", 512), fields.size("intermediate_size", 2048)
    for layer in range(fields.size("num_hidden_layers", 12, most=ENCODER_LAYERS_MAX)):
        at = f"{prefix}encoder.layers.{layer}"
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            sites.linear(f"{at}.self_attn.{projection}", size, size)
        sites.linear(f"{at}.mlp.fc1", size, inner)
        sites.linear(f"{at}.mlp.fc2", inner, size)
    if projected:
        sites.linear("text_projection", size, fields.size("projection_dim", 512))
    return sites
