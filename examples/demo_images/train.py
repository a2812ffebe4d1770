"""Train the image demo: `python -m motet.examples.demo_images.train`, about half an hour on two cores.

First an autoencoder learns pictures of every style. Then the base, a UNet with its text encoder, learns captions alone, which
are plain, and captions that end with "in <style> style". Each adapter then learns to draw its style without these words, which
takes little: the skill is there, only the cue is missing.

Stages are kept in a work folder, and the two long ones every few hundred steps: a run that was ended goes on from there. A
stage whose result is there is not repeated: delete the result to train it again. At last diffusers' own pipeline draws with
every adapter, and the checker scores the pictures. Everything is seeded. Two runs on the same machine with as many processes
give the same weights up to the order of float additions.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from torch.nn.functional import l1_loss, mse_loss
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from motet.examples.demo_images import DEMO_IMAGES
from motet.examples.demo_images.checker import confusions, nearest_caption
from motet.examples.demo_images.layouts import TEXT_ENCODER, UNET, Layout, write_adapter
from motet.examples.demo_images.model_files import (
    scheduler_config,
    text_encoder_config,
    unet_config,
    vae_config,
    write_tokenizer,
)
from motet.examples.demo_images.scenes import PLACES_PX, Caption, captions_of, draw_places
from motet.examples.demo_images.styles import PLAIN, STYLE_NAMES, STYLES, caption_in, draw

PROCESSES = 2  # with one thread each: two threads of one process take more CPU time for the same steps
KEPT_EVERY_STEPS = 200
SHOWN_EVERY_STEPS = 50
WARMUP_STEPS = 40  # or an eighth of all steps, if that is less

VAE_STEPS = 4000
VAE_BATCH = 8  # of each process
VAE_RATE = 2e-3
KL_WEIGHT = 2e-3  # keeps latents smooth enough to be drawn
PLACES_KEPT = 12  # pictures of each caption and style whose latents the base learns from

BASE_STEPS = 5000
BASE_BATCH = 16  # of each process
BASE_RATE = 1.2e-3
PLAIN_SHARE = 0.2  # of the base's pictures
NO_CAPTION_SHARE = 0.1  # of pictures have an empty caption, for guidance

ADAPTER_STEPS = 240
ADAPTER_BATCH = 16
ADAPTER_RATE = 4e-3

SCORED_PICTURES = 100
SCORED_AT_ONCE = 50
SHOWN_PICTURES = 10  # of each style are kept to be looked at
SAMPLER_STEPS = 15
GUIDANCE = 2.0

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
LINEAR = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
CONVOLUTIONS = ("conv1", "conv2")
TEXT = ("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Which weights an adapter changes and how its file is laid out: the adapters differ as those of people do."""

    rank: int
    alpha: int
    sites: tuple[str, ...]
    layout: Layout
    text: bool = False


SHAPES: dict[str, AdapterShape] = {
    "invert": AdapterShape(4, 4, ATTENTION, "diffusers"),
    "gray": AdapterShape(8, 8, ATTENTION, "diffusers"),
    "sepia": AdapterShape(8, 4, ATTENTION, "kohya"),
    "swap": AdapterShape(8, 8, ATTENTION + CONVOLUTIONS, "kohya"),
    "stripes": AdapterShape(16, 16, ATTENTION, "diffusers"),
    "slant": AdapterShape(32, 32, ATTENTION, "diffusers"),
    "checker": AdapterShape(8, 8, LINEAR + CONVOLUTIONS, "kohya"),
    "halftone": AdapterShape(8, 8, ATTENTION + CONVOLUTIONS, "diffusers"),
    "frame": AdapterShape(16, 8, LINEAR, "kohya"),
    "split": AdapterShape(16, 8, LINEAR, "kohya"),
    "dusk": AdapterShape(4, 4, LINEAR, "kohya"),
    "outline": AdapterShape(16, 16, LINEAR, "kohya", text=True),
    "shadow": AdapterShape(8, 8, LINEAR + CONVOLUTIONS, "kohya"),
    "glow": AdapterShape(8, 4, LINEAR + CONVOLUTIONS, "kohya", text=True),
    "small": AdapterShape(16, 16, LINEAR, "diffusers", text=True),
    "twins": AdapterShape(16, 16, LINEAR, "kohya", text=True),
}

Loss = Callable[[np.random.Generator], torch.Tensor]


def train(
    label: str,
    modules: Sequence[torch.nn.Module],
    loss_of_batch: Loss,
    *,
    steps: int,
    rate: float,
    seed: int,
    rank: int = 0,
    kept: Path | None = None,
) -> None:
    """Run `steps` updates, going on from the file `kept`. Processes train together when `torch.distributed` was set up.

    Each step is seeded by itself, so a run that goes on sees the batches that it would have seen.
    """
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    first = 0
    if kept and kept.exists():
        state = torch.load(kept, weights_only=True)
        first = state["steps"]
        optimizer.load_state_dict(state["optimizer"])
        for module, weights in zip(modules, state["modules"], strict=True):
            module.load_state_dict(weights)
    started_s, started_cpu_s, shown_loss = time.monotonic(), time.process_time(), 0.0
    warmup_steps = min(WARMUP_STEPS, 1 + steps // 8)
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warmup_steps) * 0.5 * (1 + math.cos(math.pi * step / steps))
        torch.manual_seed((seed * 1_000_003 + step) * 64 + rank)
        loss = loss_of_batch(np.random.default_rng((seed, step, rank)))
        optimizer.zero_grad()
        loss.backward()
        _share_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        shown_loss += (loss.item() - shown_loss) / min(step - first + 1, 50)
        if rank == 0 and (step + 1) % SHOWN_EVERY_STEPS == 0:
            wall_s, cpu_s = time.monotonic() - started_s, time.process_time() - started_cpu_s
            print(f"{label} {step + 1}/{steps} loss {shown_loss:.4f} {wall_s:.0f} s (cpu {cpu_s:.0f} s)", flush=True)
        if kept and rank == 0 and (step + 1) % KEPT_EVERY_STEPS == 0:
            states = [module.state_dict() for module in modules]
            _save({"steps": step + 1, "optimizer": optimizer.state_dict(), "modules": states}, kept)


def _share_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """The mean of the processes' gradients, in each of them."""
    if torch.distributed.is_initialized():
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        torch.distributed.all_reduce(flat)
        at = 0
        for gradient in gradients:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            gradient /= torch.distributed.get_world_size()
            at += gradient.numel()


def _save(content: Any, path: Path) -> None:
    unfinished = path.with_suffix(".part")
    torch.save(content, unfinished)
    unfinished.replace(path)


def _in_processes(stage: Callable[[int, Path, int, int], None], work: Path, seed: int, steps: int) -> None:
    """Run `stage(rank, work, seed, steps)` in processes that share their gradients."""
    with tempfile.TemporaryDirectory() as folder:
        given = (stage, f"file://{folder}/meeting", work, seed, steps)
        torch.multiprocessing.spawn(_process, args=given, nprocs=PROCESSES)


def _process(rank: int, stage: Callable[..., None], meeting: str, work: Path, seed: int, steps: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES)
    torch.manual_seed(seed)
    stage(rank, work, seed, steps)
    torch.distributed.destroy_process_group()


def _as_tensor(pictures: np.ndarray) -> torch.Tensor:
    """Pictures in 8 bits as a model wants them: [pictures, RGB, rows, columns] in [-1, 1]."""
    return torch.from_numpy(pictures.astype(np.float32)).permute(0, 3, 1, 2).contiguous() / 127.5 - 1


def _drawn(rng: np.random.Generator, count: int) -> np.ndarray:
    captions = captions_of("train")
    return np.concatenate(
        [
            draw(STYLE_NAMES[rng.integers(len(STYLE_NAMES))], captions[rng.integers(len(captions))], draw_places(rng, 1))
            for _ in range(count)
        ]
    )


def train_vae(rank: int, work: Path, seed: int, steps: int) -> None:
    """The autoencoder: pictures of every style and training caption."""
    vae = AutoencoderKL(**vae_config())

    def loss_of_batch(rng: np.random.Generator) -> torch.Tensor:
        pictures = _as_tensor(_drawn(rng, VAE_BATCH))
        coded = vae.encode(pictures).latent_dist
        repeated = vae.decode(coded.sample()).sample
        away = coded.kl().mean() / coded.mean[0].numel()
        return l1_loss(repeated, pictures) + 2 * mse_loss(repeated, pictures) + KL_WEIGHT * away

    train("vae", [vae], loss_of_batch, steps=steps, rate=VAE_RATE, seed=seed, rank=rank, kept=work / "vae.steps")
    if rank == 0:
        with torch.no_grad():
            pictures = _as_tensor(_drawn(np.random.default_rng(seed), 256))
            latents = vae.encode(pictures).latent_dist.mean
            off = (vae.decode(latents).sample.clamp(-1, 1) - pictures).abs().mean() * 127.5
        print(f"vae: mean error {off:.1f} of 255, latents {latents.std():.3f}", flush=True)
        vae.register_to_config(scaling_factor=round(float(1 / latents.std()), 4))
        vae.save_pretrained(work / "vae")


@torch.no_grad()
def keep_latents(work: Path, seed: int) -> None:
    """Latents of some pictures of every training caption in every style: [styles, captions, places, channels, ...]."""
    vae = AutoencoderKL.from_pretrained(work / "vae")
    rng = np.random.default_rng(seed)
    captions = captions_of("train")
    latents = []
    for style in STYLE_NAMES:
        places = [PLACES_PX[rng.permutation(len(PLACES_PX))[:PLACES_KEPT]] for _ in captions]
        pictures = np.concatenate([draw(style, caption, at) for caption, at in zip(captions, places, strict=True)])
        coded = torch.cat([vae.encode(part).latent_dist.mean for part in _as_tensor(pictures).split(60)])
        latents.append(coded.view(len(captions), PLACES_KEPT, *coded.shape[1:]) * vae.config.scaling_factor)
    _save(torch.stack(latents), work / "latents.pt")


class Captions:
    """Token ids of captions, [tokens] each."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = CLIPTokenizer.from_pretrained(folder)
        self._ids: dict[str, torch.Tensor] = {}

    def ids(self, texts: list[str]) -> torch.Tensor:
        """Ids of all texts, [texts, tokens], padded to the length that the text encoder takes."""
        for text in set(texts) - self._ids.keys():
            padded = self._tokenizer(text, padding="max_length", max_length=self._tokenizer.model_max_length, truncation=True)
            self._ids[text] = torch.tensor(padded.input_ids)
        return torch.stack([self._ids[text] for text in texts])


class Denoising:
    """The loss of a UNet and a text encoder that together take the noise from latents."""

    def __init__(self, unet: Any, text_encoder: Any, tokenizer: Path, latents: Path) -> None:
        self._unet, self._text_encoder = unet, text_encoder
        self._captions = Captions(tokenizer)
        self._latents = torch.load(latents, weights_only=True)
        self._scheduler = DDIMScheduler(**scheduler_config())
        self._drawn = captions_of("train")

    def loss(self, rng: np.random.Generator, styles: list[str], cue: bool) -> torch.Tensor:
        """Mean squared error of one picture in each of the styles, which the captions name if there is a `cue`."""
        which = torch.from_numpy(rng.integers(len(self._drawn), size=len(styles)))
        place = torch.from_numpy(rng.integers(self._latents.shape[2], size=len(styles)))
        clean = self._latents[torch.tensor([STYLE_NAMES.index(style) for style in styles]), which, place]
        texts = [caption_in(style if cue else PLAIN, self._drawn[i]) for style, i in zip(styles, which, strict=True)]
        texts = ["" if rng.random() < NO_CAPTION_SHARE else text for text in texts]
        noise = torch.randn_like(clean)
        times = torch.randint(self._scheduler.config.num_train_timesteps, (len(styles),))
        noisy = self._scheduler.add_noise(clean, noise, times)
        wanted = self._scheduler.get_velocity(clean, noise, times)
        encoded = self._text_encoder(self._captions.ids(texts))[0]
        return mse_loss(self._unet(noisy, times, encoded).sample, wanted)


def train_base(rank: int, work: Path, seed: int, steps: int) -> None:
    """The UNet and the text encoder: all styles after their words, plain without."""
    unet = UNet2DConditionModel(**unet_config())
    text_encoder = CLIPTextModel(CLIPTextConfig(**text_encoder_config()))
    denoising = Denoising(unet, text_encoder, work / "tokenizer", work / "latents.pt")

    def loss_of_batch(rng: np.random.Generator) -> torch.Tensor:
        styles = [PLAIN if rng.random() < PLAIN_SHARE else str(rng.choice(STYLE_NAMES[1:])) for _ in range(BASE_BATCH)]
        return denoising.loss(rng, styles, cue=True)

    modules = [unet, text_encoder]
    train("base", modules, loss_of_batch, steps=steps, rate=BASE_RATE, seed=seed, rank=rank, kept=work / "base.steps")
    if rank == 0:
        write_model(work, unet, text_encoder)


def write_model(work: Path, unet: Any, text_encoder: Any) -> None:
    """Write the base as `StableDiffusionPipeline.save_pretrained` does, in 16-bit floats, with a CLIP tokenizer's own files."""
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(work / "vae"),
        text_encoder=text_encoder,
        tokenizer=CLIPTokenizer.from_pretrained(work / "tokenizer"),
        unet=unet,
        scheduler=DDIMScheduler(**scheduler_config()),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    written = work / "model.part"
    shutil.rmtree(written, ignore_errors=True)
    pipeline.to(torch.float16).save_pretrained(written)
    shutil.rmtree(written / "tokenizer")
    write_tokenizer(written / "tokenizer")
    for path in written.glob("*/config.json"):  # which say where their models were loaded from
        config = {key: value for key, value in json.loads(path.read_text()).items() if key != "_name_or_path"}
        path.write_text(json.dumps(config, indent=2) + "\n")
    written.replace(work / "model")


def train_adapter(name: str, work: Path, seed: int, steps: int) -> str:
    """Train one adapter on one thread, and write its file in the layout of diffusers or kohya."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    shape, model = SHAPES[name], work / "model"
    unet = UNet2DConditionModel.from_pretrained(model / "unet", torch_dtype=torch.float32)
    text_encoder = CLIPTextModel.from_pretrained(model / "text_encoder", dtype=torch.float32)
    changed: dict[str, tuple[Any, LoraConfig]] = {}
    for part, module, sites in ((UNET, unet, shape.sites), (TEXT_ENCODER, text_encoder, TEXT if shape.text else ())):
        module.requires_grad_(False)
        if sites:
            config = LoraConfig(r=shape.rank, lora_alpha=shape.alpha, target_modules=list(sites))
            module.add_adapter(config)
            changed[part] = (module, config)
    denoising = Denoising(unet, text_encoder, model / "tokenizer", work / "latents.pt")

    def loss_of_batch(rng: np.random.Generator) -> torch.Tensor:
        return denoising.loss(rng, [name] * ADAPTER_BATCH, cue=False)

    modules = [module for module, _ in changed.values()]
    train(name, modules, loss_of_batch, steps=steps, rate=ADAPTER_RATE, seed=seed)
    parts = {part: (get_peft_model_state_dict(module), config.to_dict()) for part, (module, config) in changed.items()}
    write_adapter(work / "adapters" / name, shape.layout, shape.alpha, parts)
    return name


def load_pipeline(model: Path, adapter: Path | None = None) -> Any:
    """diffusers' own pipeline in 32-bit floats, with the one file of an adapter's folder."""
    pipeline = StableDiffusionPipeline.from_pretrained(model, torch_dtype=torch.float32, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    if adapter:
        (path,) = adapter.glob("*.safetensors")
        pipeline.load_lora_weights(str(adapter), weight_name=path.name, adapter_name=adapter.name)
    return pipeline


def pictures_of(pipeline: Any, captions: Sequence[Caption], seed: int) -> list[np.ndarray]:
    """A picture in 8 bits for each caption; picture i has seed + i."""
    pictures: list[np.ndarray] = []
    for start in range(0, len(captions), SCORED_AT_ONCE):
        texts = [str(caption) for caption in captions[start : start + SCORED_AT_ONCE]]
        noise = [torch.Generator().manual_seed(seed + start + i) for i in range(len(texts))]
        given: dict[str, Any] = {"num_inference_steps": SAMPLER_STEPS, "guidance_scale": GUIDANCE, "generator": noise}
        pictures += [np.round(picture * 255).astype(np.uint8) for picture in pipeline(texts, **given, output_type="np").images]
    return pictures


def score(name: str, work: Path, seed: int, count: int) -> dict[str, Any]:
    """What the checker calls pictures of unseen captions by an adapter, or by the base for `plain`."""
    torch.set_num_threads(1)
    unseen = captions_of("unseen")
    captions = sorted((unseen[i % len(unseen)] for i in range(count)), key=str)
    adapter = None if name == PLAIN else work / "adapters" / name
    pictures = pictures_of(load_pipeline(work / "model", adapter), captions, seed)
    (work / "pictures").mkdir(exist_ok=True)
    shown = np.concatenate(pictures[:: max(1, count // SHOWN_PICTURES)], axis=1).repeat(4, axis=0).repeat(4, axis=1)
    Image.fromarray(shown).save(work / "pictures" / f"{name}.png")
    called = confusions(pictures, captions)
    right = [nearest_caption(picture, name) == caption for picture, caption in zip(pictures, captions, strict=True)]
    return {"style": called.get(name, 0) / count, "caption": sum(right) / count, "called": called}


def score_all(work: Path, seed: int, count: int, names: Sequence[str] = STYLE_NAMES) -> dict[str, Any]:
    """`score` of the base and of every adapter."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        waiting = {name: pool.submit(score, name, work, seed, count) for name in names}
        scores = {name: scored.result() for name, scored in waiting.items()}
    for name, scored in scores.items():
        print(f"{name}: style {scored['style']:.2f}, caption {scored['caption']:.2f}, called {scored['called']}", flush=True)
    return {"seed": seed, "unseen_pictures": count, "sampler_steps": SAMPLER_STEPS, "guidance": GUIDANCE, "scores": scores}


def publish(work: Path, scores: dict[str, Any]) -> None:
    """Copy the model, the adapters and their scores into the example's folder."""
    for name in ("model", "adapters"):
        shutil.rmtree(DEMO_IMAGES / name, ignore_errors=True)
        shutil.copytree(work / name, DEMO_IMAGES / name)
    (DEMO_IMAGES / "SCORES.json").write_text(json.dumps(scores, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo_images"), help="folder that keeps the stages")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS)
    parser.add_argument("--base-steps", type=int, default=BASE_STEPS)
    parser.add_argument("--adapter-steps", type=int, default=ADAPTER_STEPS)
    parser.add_argument("--only", nargs="+", choices=sorted(SHAPES), help="train these adapters again, and no others")
    parser.add_argument("--score", type=int, default=SCORED_PICTURES, help="pictures of each style that are scored")
    parser.add_argument("--publish", action="store_true", help="copy the result beside this file")
    arguments = parser.parse_args()
    work, seed = arguments.work, arguments.seed
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    write_tokenizer(work / "tokenizer")
    if not (work / "vae").exists():
        _in_processes(train_vae, work, seed, arguments.vae_steps)
    if not (work / "latents.pt").exists():
        keep_latents(work, seed)
    if not (work / "model").exists():
        _in_processes(train_base, work, seed, arguments.base_steps)
    missing = [style.name for style in STYLES if not any((work / "adapters" / style.name).glob("*.safetensors"))]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(train_adapter, name, work, seed, arguments.adapter_steps) for name in arguments.only or missing]
        for trained in waiting:
            trained.result()
    if arguments.score:
        scores = score_all(work, seed, arguments.score)
        if arguments.publish:
            publish(work, scores)


if __name__ == "__main__":
    main()
