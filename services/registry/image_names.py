"""What the tensors of an image adapter are called, in every layout that is served, and why others are not.

    PEFT         unet.<site>.lora_A.weight                                   text_encoder. and text_encoder_2. likewise
    diffusers    unet.<site>.lora.down.weight, text_encoder.<site>.lora_linear_layer.down.weight
    its first    unet.<...>.attn1.processor.to_q_lora.down.weight, text_encoder.<...>.self_attn.to_q_lora.down.weight
    kohya-ss     lora_unet_<site>.lora_down.weight, lora_te_, lora_te1_ (first text encoder), lora_te2_; a `_` for each dot
    the same     lora_unet_input_blocks_4_1_<...>: blocks as the original Stable Diffusion code numbers them

A `_` in kohya's names may stand for a dot or for itself, so names are never taken apart: they are looked up in a table of all
names that the base's sites can have. LyCORIS writes LoRA of convolutions (LoCon) in kohya's layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from motet.services.registry.files import shown
from motet.shared.errors import InvalidAdapter
from motet.shared.image_shapes import TEXT_ENCODERS, UNET, ImageShapes, Site

FOREIGN = " (was it trained for another base model?)"
A, B, MID, ALPHA = "A", "B", "mid", "alpha"
_HALVES = {"A": A, "down": A, "B": B, "up": B, "mid": MID}
_KEY = re.compile(
    r"(.+?)(?:(?:_lora|\.lora|\.lora_linear_layer)\.(down|up)\.weight|\.lora_(A|B|down|up|mid)(?:\.default)?\.weight|\.(alpha))",
    re.DOTALL,
)
_KOHYA = {UNET: ("lora_unet_",), TEXT_ENCODERS[0]: ("lora_te_", "lora_te1_"), TEXT_ENCODERS[1]: ("lora_te2_",)}


def _compiled(*rows: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """(expression, what a name that matches it means), in the order in which they are tried."""
    return tuple((re.compile(pattern), meaning) for pattern, meaning in rows)


_UNSERVED = _compiled(
    (r"\.hada_", "LoHa is not served"),
    (r"\.lokr_", "LoKr is not served"),
    (r"\.on_input$|\.ia3_", "(IA)3 is not served"),
    (r"\.(oft_|boft_|hra_|rescale$)", "OFT is not served"),
    (r"\.[ab][12]\.weight$|\.bm\.weight$", "GLoRA is not served"),
    (r"\.dora_scale$|\.lora_magnitude_vector", "DoRA rescales the base weights, which all adapters share"),
    (r"\.(diff|diff_b|set_weight|w_norm|b_norm)$", "whole weights are not served, only LoRA matrices"),
    (
        r"\.lora_[A-Z](\.default)?\.bias$|\.lora_(up|down|mid)\.bias$|\.lora\.(up|down)\.bias$",
        "biases of LoRA are not served",
    ),
    (r"\.scalar$", "scalars of LyCORIS are not served"),
    (r"\.vera_lambda|\.lora_embedding_", "only LoRA of linear layers and convolutions is served"),
    (
        r"^(base_model\.model\.)?(language_model\.)?(model\.)?(language_model\.|text_model\.)?layers\.\d+\.(self_attn|mlp)\.|"
        r"^(base_model\.model\.)?(model\.)?(embed_tokens|lm_head)\.",
        "an adapter of a language model, but the base model here makes images",
    ),
    (r"^base_model\.model\.", "its name lacks the part (unet., text_encoder.), which diffusers' save_lora_weights writes"),
    (r"^bundle_emb|^emb_params$|^string_to_|^clip_[lg]$", "textual inversion is not served"),
)
_FAMILY_OF_KEY = _compiled(
    (r"lora_unet_(double|single)_blocks_|(diffusion_model\.|transformer\.)?(double|single)_blocks\.", "FLUX"),
    (r"transformer\.single_transformer_blocks\.|lora_transformer_single_transformer_blocks_", "FLUX"),
    (r"lora_unet_joint_blocks_|lora_te3_|(diffusion_model\.)?joint_blocks\.", "Stable Diffusion 3"),
    (
        r"transformer\.transformer_blocks\.|lora_transformer_|lora_unet_transformer_blocks_",
        "FLUX, Stable Diffusion 3 or Qwen-Image",
    ),
    (r"diffusion_model\.blocks\.|lora_unet_blocks_|transformer\.blocks\.", "Wan"),
    (r"diffusion_model\.layers\.|transformer\.layers\.|lora_unet_layers_", "Z-Image or Lumina"),
    (r"lora_prior_|prior\.|lora_unet_down_blocks_\d+_\d+_channelwise", "Stable Cascade"),
    (r"diffusion_model\.|transformer(_\d)?\.", "a diffusion transformer"),
)
_FAMILY_OF_METADATA = _compiled(
    (r"sd15|sd[-_ ]?v?1\b|sd[-_ ]?v?1[._]|stable[-_ ]diffusion[-_ ]v?1\b", "sd15"),
    (r"sd[-_ ]?v?2\b|sd[-_ ]?v?2[._]|stable[-_ ]diffusion[-_ ]v?2\b", "sd2"),
    (r"(sdxl|stable[-_ ]diffusion[-_ ]xl).*refiner", "sdxl-refiner"),
    (r"sdxl|stable[-_ ]diffusion[-_ ]xl", "sdxl"),
    (r"sd[-_ ]?v?3|stable[-_ ]diffusion[-_ ]v?3", "Stable Diffusion 3"),
    (r"flux", "FLUX"),
    (r"qwen", "Qwen-Image"),
    (r"wan", "Wan"),
    (r"(lumina|z[-_ ]?image)", "Z-Image or Lumina"),
    (r"(stable[-_ ]cascade|wuerstchen)", "Stable Cascade"),
    (r"hunyuan", "Hunyuan"),
    (r"(chroma|auraflow|pixart|hidream|anima|cosmos)", "another family"),
)
_FAMILY_FIELDS = ("ss_base_model_version", "modelspec.architecture")


class Names:
    """All names that the sites of a base have in adapters' files."""

    def __init__(self, base: ImageShapes) -> None:
        self.table: dict[str, Site] = {}
        for site in base.sites:
            for name in _spellings(site):
                self.table[f"{site.part}.{name}"] = site
                for prefix in _KOHYA[site.part]:
                    self.table[prefix + name.replace(".", "_")] = site
        for name, site in _original(base).items():
            self.table[_KOHYA[UNET][0] + name] = site

    def place(self, key: str) -> tuple[Site, str, str]:
        """(site, what of it, the module's name without its part) of a tensor. The name is the file's own, where that has dots.

        What: A, B, mid or alpha. Raises InvalidAdapter with the reason for a tensor that is not served.
        """
        match = _KEY.fullmatch(key)
        name = match[1].replace(".processor.", ".") if match else ""
        if match and (site := self.table.get(name)):
            dotted = name.removeprefix(f"{site.part}.") if name.startswith(f"{site.part}.") else site.name
            return site, _HALVES.get(match[2] or match[3], ALPHA), dotted
        for pattern, reason in _UNSERVED:
            if pattern.search(key):
                raise InvalidAdapter(f"tensor {shown(key)}: {reason}")
        for pattern, family in _FAMILY_OF_KEY:
            if pattern.match(key):
                raise InvalidAdapter(f"tensor {shown(key)}: an adapter for {family}, which is not served")
        if match and name.startswith((*(f"{part}." for part in _KOHYA), *sum(_KOHYA.values(), ()))):
            raise InvalidAdapter(
                f"tensor {shown(key)}: the base model has no linear layer or convolution of this name{FOREIGN}"
            )
        raise InvalidAdapter(
            f"tensor {shown(key)}: not a LoRA matrix of the layouts of PEFT, diffusers (unet., text_encoder.) and kohya-ss "
            "(lora_unet_, lora_te_)"
        )


def check_family(metadata: Mapping[str, str], family: str) -> None:
    """Raises InvalidAdapter for a file whose metadata name another family of base models. Unknown names say nothing."""
    for field in _FAMILY_FIELDS:
        told = metadata.get(field, "")[:200].lower()
        found = next((name for pattern, name in _FAMILY_OF_METADATA if pattern.match(told)), family)
        if found != family:
            raise InvalidAdapter(
                f"{field} is {shown(repr(metadata[field]))}: an adapter for {found}, but the base model is {family}"
            )


def _spellings(site: Site) -> set[str]:
    """The names of a site within its part: as its module is called today, and as files call it."""
    names = {site.name}
    if site.part == UNET:
        if site.name.endswith(".to_out.0"):
            names.add(site.name.removesuffix(".0"))
        return names
    if site.name != "text_projection":
        bare = site.name.removeprefix("text_model.")  # transformers 5 dropped this level in CLIPTextModel
        names |= {bare, f"text_model.{bare}"}
    return names | {
        name.replace(f".self_attn.{letter}_proj", f".self_attn.to_{letter}")
        for name in names
        for letter in ("q", "k", "v", "out")
    }


_RESNET = {
    "conv1": "in_layers_2",
    "time_emb_proj": "emb_layers_1",
    "conv2": "out_layers_3",
    "conv_shortcut": "skip_connection",
}
_OUTSIDE = {
    "conv_in": "input_blocks_0_0",
    "time_embedding.linear_1": "time_embed_0",
    "time_embedding.linear_2": "time_embed_2",
    "add_embedding.linear_1": "label_emb_0_0",
    "add_embedding.linear_2": "label_emb_0_2",
    "conv_out": "out_2",
}


def _original(base: ImageShapes) -> dict[str, Site]:
    """The UNet's sites under the names of the original code, which counts layers through all blocks."""
    unet = {site.name: site for site in base.sites if site.part == UNET}
    places = {"mid_block.resnets.0": "middle_block_0", "mid_block.attentions.0": "middle_block_1"}
    places["mid_block.resnets.1"] = "middle_block_2"
    for side, original, number in (("down_blocks", "input_blocks", 1), ("up_blocks", "output_blocks", 0)):
        block = 0
        while f"{side}.{block}.resnets.0.conv1" in unet:
            layer = 0
            while f"{side}.{block}.resnets.{layer}.conv1" in unet:
                places[f"{side}.{block}.resnets.{layer}"] = f"{original}_{number}_0"
                places[f"{side}.{block}.attentions.{layer}"] = f"{original}_{number}_1"
                number, layer = number + 1, layer + 1
            after = 2 if f"{side}.{block}.attentions.0.proj_in" in unet else 1
            places[f"{side}.{block}.upsamplers.0"] = f"{original}_{number - 1}_{after}"
            if f"{side}.{block}.downsamplers.0.conv" in unet:
                places[f"{side}.{block}.downsamplers.0"] = f"{original}_{number}_0"
                number += 1
            block += 1
    found = {}
    for name, site in unet.items():
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = site
            continue
        parts = name.split(".")
        depth = 3 if parts[0] == "mid_block" else 4
        inner = "_".join(parts[depth:])
        if "resnets" in parts:
            inner = _RESNET[inner]
        elif "downsamplers" in parts:
            inner = "op"
        found[f"{places['.'.join(parts[:depth])]}_{inner}"] = site
    return found
