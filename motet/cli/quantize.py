"""`motet quantize`: writes a model in 8 or 4 bits once, instead of rounding it at every start of a worker."""

from __future__ import annotations

from pathlib import Path

import click

from motet.shared.config import ConfigError
from motet.shared.hub import resolve_model


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--bits", type=click.Choice(["8", "4"]), default="8", show_default=True, help="Bits of each weight.")
def quantize(model: str, out: Path, bits: str) -> None:
    """Write MODEL, a directory or Hugging Face id, to the new directory OUT with weights of 8 or 4 bits.

    The layout is that of compressed-tensors. `motet worker --model OUT` needs no --quantization.
    Embeddings, norms and the matrix to the vocabulary keep their type.
    """
    from motet.services.worker.native.quantize import quantize as write  # torch takes seconds to import

    try:
        report = write(resolve_model(model), out, int(bits), lambda name: click.echo(name, err=True))
    except (ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{out}: {report.bytes_before >> 20} MiB became {report.bytes_after >> 20} MiB; error of the rounded weights:"
        f" {report.error:.2%} of their RMS"
    )
