"""The image demo's tokenizer, and the layouts in which its adapters are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import CLIPTokenizer

from motet.examples.demo_images.layouts import TEXT_ENCODER, UNET, Weights, write_adapter
from motet.examples.demo_images.model_files import END, START, WORDS, build_merges, build_vocabulary, write_tokenizer
from motet.examples.demo_images.scenes import CAPTIONS
from motet.examples.demo_images.styles import STYLE_NAMES, caption_in

SITE = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0"
CONVOLUTION = "up_blocks.1.resnets.0.conv1"
TEXT_SITE = "encoder.layers.1.self_attn.q_proj"
ALPHA = 2.0


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


def parts() -> dict[str, tuple[Weights, dict[str, object]]]:
    unet = {
        f"{SITE}.lora_A.weight": torch.randn(4, 8),
        f"{SITE}.lora_B.weight": torch.randn(6, 4),
        f"{CONVOLUTION}.lora_A.weight": torch.randn(4, 8, 3, 3),
        f"{CONVOLUTION}.lora_B.weight": torch.randn(6, 4, 1, 1),
    }
    text = {f"{TEXT_SITE}.lora_A.weight": torch.randn(4, 8), f"{TEXT_SITE}.lora_B.weight": torch.randn(8, 4)}
    config: dict[str, object] = {"r": 4, "lora_alpha": ALPHA, "target_modules": {"to_out.0", "conv1"}}
    return {UNET: (unet, config), TEXT_ENCODER: (text, config)}


def read(path: Path) -> tuple[Weights, dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def test_every_word_of_a_caption_is_one_token(tokenizer_folder: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(tokenizer_folder)
    vocabulary = build_vocabulary()
    for style in STYLE_NAMES:
        text = caption_in(style, CAPTIONS[4])
        words = [vocabulary[f"{word}</w>"] for word in text.split()]
        assert tokenizer(text).input_ids == [vocabulary[START], *words, vocabulary[END]]


def test_prompts_are_padded_to_the_77_tokens_of_the_text_encoder(tokenizer_folder: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(tokenizer_folder)
    ids = tokenizer("a red circle on sky", padding="max_length", truncation=True).input_ids
    assert len(ids) == tokenizer.model_max_length == 77
    assert set(ids[6:]) == {build_vocabulary()[END]}


@pytest.mark.parametrize("text", ["A Red CIRCLE on sky", "a painting of a fox, 2026!", "grün  und\nblau", "日本"])
def test_the_two_files_of_the_tokenizer_are_enough_to_make_its_tokens(tokenizer_folder: Path, text: str) -> None:
    bpe = models.BPE.from_file(
        str(tokenizer_folder / "vocab.json"), str(tokenizer_folder / "merges.txt"), end_of_word_suffix="</w>"
    )
    own = Tokenizer(bpe)
    own.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "removed", invert=True), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    assert own.encode(text).ids == CLIPTokenizer.from_pretrained(tokenizer_folder)(text).input_ids[1:-1]


def test_merges_have_no_duplicates_and_words_do_not_change_each_other() -> None:
    merges = build_merges()
    assert len(set(merges)) == len(merges)
    assert all(f"{word}</w>" in build_vocabulary() for word in WORDS)


def test_the_layout_of_diffusers_keeps_names_and_brings_the_configuration(tmp_path: Path) -> None:
    given = parts()
    path = write_adapter(tmp_path / "one", "diffusers", ALPHA, given)
    tensors, metadata = read(path)
    assert path.name == "pytorch_lora_weights.safetensors"
    assert tensors.keys() == {
        *(f"unet.{site}.lora_{matrix}.weight" for site in (SITE, CONVOLUTION) for matrix in "AB"),
        *(f"text_encoder.text_model.{TEXT_SITE}.lora_{matrix}.weight" for matrix in "AB"),
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    config = json.loads(metadata["lora_adapter_metadata"])
    assert config["unet.r"] == config["text_encoder.r"] == 4
    assert config["unet.target_modules"] == ["conv1", "to_out.0"]
    torch.testing.assert_close(tensors[f"unet.{SITE}.lora_A.weight"], given[UNET][0][f"{SITE}.lora_A.weight"].half())


def test_the_layout_of_kohya_has_an_alpha_for_each_site_and_convolutions_in_four_dimensions(tmp_path: Path) -> None:
    given = parts()
    tensors, metadata = read(write_adapter(tmp_path / "two", "kohya", ALPHA, given))
    site = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_out_0"
    convolution = "lora_unet_up_blocks_1_resnets_0_conv1"
    text = "lora_te_text_model_encoder_layers_1_self_attn_q_proj"
    assert tensors.keys() == {
        f"{name}.{key}" for name in (site, convolution, text) for key in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    assert tensors[f"{convolution}.lora_down.weight"].shape == (4, 8, 3, 3)
    assert tensors[f"{convolution}.lora_up.weight"].shape == (6, 4, 1, 1)
    assert {float(tensors[f"{name}.alpha"]) for name in (site, convolution, text)} == {ALPHA}
    assert metadata["ss_network_dim"] == "4"
    torch.testing.assert_close(tensors[f"{site}.lora_up.weight"], given[UNET][0][f"{SITE}.lora_B.weight"].half())
