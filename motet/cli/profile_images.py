"""The image side of `motet profile`: a profile of what was measured of an image worker, and its table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.table import Table

from motet.cli.terminal import table
from motet.policies.times.image_fit import fit_images
from motet.policies.times.perf_fit import fit_link
from motet.services.worker.config import WorkerConfig
from motet.shared.errors import MotetError
from motet.shared.profile import VERSION, Profile, StorageTimes

if TYPE_CHECKING:
    from motet.services.worker.image_profiling import MeasuredImages


def image_profile(measured: MeasuredImages, config: WorkerConfig) -> Profile:
    """The profile of an image worker. Raises ValueError where no model fits the steps, MotetError where nothing was copied."""
    if measured.link is None:
        raise MotetError("no adapter was copied to the device")
    facts, perf = fit_images(
        measured.steps, latent_px=measured.latent_px, rows_max=measured.rows_max, area_max=measured.area_max
    )
    store, disk, link = fit_link(measured.store), fit_link(measured.disk), measured.link
    perf = replace(perf, fetch_base_ms=store[0], fetch_ms_per_mib=store[1], load_ms_per_mib=(1 << 20) / link.gb_per_s / 1e6)
    return Profile(
        motet_profile=VERSION,
        name=f"{measured.limits.base_model} on {measured.limits.device}",
        limits=measured.limits,
        perf=perf,
        images=facts,
        engine=config.options,
        storage=StorageTimes.of(config.adapters.host_cache_mib, config.adapters.disk_cache_mib, disk=disk, store=store),
        link=link,
    )


def image_table(profile: Profile) -> Table:
    """The measured step times for people."""
    facts = profile.images
    assert facts is not None, "it draws pictures"
    shown = table("step", "rows", "ms", right=("rows", "ms"), title=f"R2 of denoising {facts.r2:.4f}")
    shown.add_row("encode, and for each request", "", f"{facts.encode_ms:.2f} + {facts.encode_request_ms:.2f}")
    for size in facts.sizes:
        name = f"{size.width * facts.latent_px}x{size.height * facts.latent_px}"
        for rows, took_ms in zip(size.rows, size.step_ms, strict=True):
            shown.add_row(f"denoise {name}", str(rows), f"{took_ms:.2f}")
        shown.add_row(f"decode {name}, and for each picture", "", f"{size.decode_ms:.2f} + {size.decode_picture_ms:.2f}")
    shown.add_row("for each row of 512x512 and rank", "", f"{facts.rank_ms:.4f}")
    shown.add_row("for each different adapter", "", f"{facts.adapter_ms:.4f}")
    return shown
