"""The step times that a worker without a profile starts from."""

from __future__ import annotations

from motet.shared.model import PerfModel

# Measured with the demo model on two cores; the warm-up and the first real steps move it to where this worker is.
START_PERF = PerfModel(
    prefill_base_ms=4.0,
    prefill_token_ms=0.08,
    prefill_lora_ms=0.03,
    decode_base_ms=3.0,
    decode_row_ms=0.15,
    decode_lora_ms=0.008,
    load_base_ms=2.0,
    load_ms_per_mib=1.0,
    fetch_base_ms=5.0,  # from the object store at 1 Gbit/s; not refined
    fetch_ms_per_mib=8.0,
)

# Measured with the image demo's model on one core. Rows are those of `ImageParams.rows`: a small picture is a fraction of one.
START_IMAGE_PERF = PerfModel(
    prefill_base_ms=5.0,
    prefill_token_ms=0.05,
    prefill_lora_ms=0.5,
    decode_base_ms=5.0,
    decode_row_ms=500.0,
    decode_lora_ms=5.0,
    load_base_ms=2.0,
    load_ms_per_mib=1.0,
    fetch_base_ms=5.0,
    fetch_ms_per_mib=8.0,
)


def start_perf(engine: str) -> PerfModel:
    """The step times of `--engine` to start from."""
    return START_IMAGE_PERF if engine == "images" else START_PERF
