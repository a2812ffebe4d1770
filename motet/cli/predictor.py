"""`motet predictor train` and `evaluate`: trains proxy models on files of finished requests, and measures their accuracy."""

from __future__ import annotations

from pathlib import Path

import click
from rich.progress import Progress
from rich.table import Table

from motet.cli.terminal import terminal
from motet.policies.lengths.features import unpack
from motet.policies.lengths.model import Curve
from motet.services.predictor.examples import read_examples
from motet.services.predictor.judge import BATCH, class_cuts, judge, latency_ms
from motet.shared.config import ConfigError

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option("--data", type=FILE, required=True, help="Finished requests: JSON lines with `prompt` and `output_tokens`.")
@click.option("--encoder", type=FOLDER, required=True, help="Directory of a Hugging Face encoder to fine-tune.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Directory to write.")
@click.option("--epochs", type=click.IntRange(1, 100), default=4, show_default=True, help="Passes over the data.")
@click.option("--seed", type=int, default=0, show_default=True, help="Order of the requests and first weights of the head.")
@click.option("--device", default="", help="cpu or cuda; by default a GPU if there is one.")
def train(data: Path, encoder: Path, out: Path, epochs: int, seed: int, device: str) -> None:
    """Fine-tune an encoder to predict output lengths from prompts.

    \b
      motet predictor train --data requests.jsonl --encoder DIRECTORY --out proxy
      motet predictor --predictor-proxy proxy
    """
    console = terminal()
    try:
        from motet.services.predictor import proxy as proxies

        examples = read_examples(data)
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("training", total=None)
            proxy = proxies.train(
                examples,
                encoder,
                epochs=epochs,
                seed=seed,
                device=device,
                progress=lambda done, steps: bar.update(task, completed=done, total=steps),
            )
        proxy.save(out)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    console.print(f"Trained on {proxy.facts.trained_on} of {len(examples)} requests, the others calibrate it: {out}")


@click.command()
@click.option("--data", type=FILE, required=True, help="Finished requests to judge with.")
@click.option(
    "--train", "train_data", type=FILE, required=True, help="Requests that the models learned from: they set the classes."
)
@click.option("--proxy", type=FOLDER, help="Directory of `motet predictor train`; without it only the default model is judged.")
def evaluate(data: Path, train_data: Path, proxy: Path | None) -> None:
    """Judge length models: accuracy by class, error, calibration and latency.

    The default model is fitted to --train. Classes are terciles and quintiles of its lengths.
    """
    from motet.services.predictor.fit import fit

    console = terminal()
    try:
        examples, learned = read_examples(data), read_examples(train_data)
        if not examples:
            raise ConfigError(f"{data}: no requests")
        lengths = [one.tokens for one in learned]
        cuts = class_cuts(lengths, 3), class_cuts(lengths, 5)
        fitted = fit([unpack(one.features) for one in learned], lengths)
        curve, model = Curve(fitted.model.edges, fitted.model.longest), fitted.model
        known = [unpack(one.features) for one in examples]
        rounds, batches = 100, max(1, len(examples) // BATCH)
        found = [
            (
                "default",
                judge(model.above(known), curve, fitted.levels, [one.tokens for one in examples], cuts),
                latency_ms(lambda number: model.above(known[number * BATCH : (number + 1) * BATCH]), batches, rounds),
            )
        ]
        if proxy is not None:
            import numpy as np

            from motet.services.predictor.proxy import Proxy

            reader, texts = Proxy.load(proxy), [one.text for one in examples]
            above = np.concatenate([reader.above(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH)])
            judged = judge(above, reader.curve, reader.facts.levels, [one.tokens for one in examples], cuts)
            took = latency_ms(lambda number: reader.above(texts[number * BATCH : (number + 1) * BATCH]), batches, rounds)
            found.append(("proxy", judged, took))
    except (ConfigError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    table = Table("", *(name for name, _, _ in found), title=f"{len(examples)} requests, classes cut at {cuts[0]} tokens")
    for name, show in _ROWS:
        table.add_row(name, *(show(judged, took) for _, judged, took in found))
    console.print(table)


_ROWS = (
    ("accuracy, 3 classes", lambda judged, _: f"{judged.accuracy_3:.3f}"),
    ("short, medium, long", lambda judged, _: ", ".join(f"{one:.2f}" for one in judged.accuracy_3_by_class)),
    ("accuracy, 5 classes", lambda judged, _: f"{judged.accuracy_5:.3f}"),
    ("Spearman's correlation", lambda judged, _: f"{judged.spearman:.3f}"),
    ("mean error of p50, tokens", lambda judged, _: f"{judged.mae_tokens:.1f}"),
    ("end below p50", lambda judged, _: f"{judged.below_p50:.1%}"),
    ("end below p90", lambda judged, _: f"{judged.below_p90:.1%}"),
    (f"a batch of {BATCH}, p50 and p99 ms", lambda _, took: f"{took[0]:.2f}, {took[1]:.2f}"),
)
