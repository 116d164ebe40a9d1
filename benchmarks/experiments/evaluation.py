"""Time HellaSwag: 10,042 made-up items of the lengths of the published ones, GPT-2 124M in bf16.

    python benchmarks/experiments/evaluation.py --out benchmarks/results/evaluation.json

Each pass reads the file, tokenizes it on the host and scores all four endings of every item, as
`python -m gptjax.evaluate` does. The first pass compiles. Time and memory do not depend on the
weights, which are random. The lengths are drawn so that an item has 170 tokens on average: llm.c's
hellaswag_val.bin has 3.6 MB for 10,042 items, 179 uint16 each with the headers.
"""

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

# About one token of GPT-2's BPE each.
WORDS = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but "
    "have an had they you were their one all we can her has there been if more when will would who "
    "so no out up into do any your what them then two now make over such our man me even most made "
    "after also did many before must through back years where much way well down should because "
    "each just those people how too little state good very make world still own see men work long "
    "get here between both life being under never day same another know while last might us great "
    "old year off come since against go came right used take three water house hand board paper"
).split()
# Share of the items, mean and standard deviation of the words of contexts and endings: captions of
# videos (ActivityNet) and articles (WikiHow).
KINDS = ((0.32, (28, 10), (13, 5)), (0.68, (78, 20), (33, 12)))


@dataclasses.dataclass(frozen=True)
class Options:
    """Time HellaSwag."""

    preset: str = "gpt2"
    """Size of the model, a name of gptjax.PRESETS."""
    layers: int | None = None
    """Blocks of the model; None for those of the preset."""
    precision: str = "bf16"
    """Precision of the computation."""
    items: int = 10042
    """Made-up items."""
    tokenizer: Literal["gpt2", "byte"] = "gpt2"
    """byte needs no files, but has about five times as many tokens."""
    passes: int = 3
    """Passes over the items; the first compiles."""
    batch_tokens: int | None = None
    """Tokens that a device scores at a time. None: the default of the command."""
    seed: int = 0
    """Seed of the items and the weights."""
    out: Path | None = None
    """JSON file for the results."""


def write_items(path: Path, count: int, seed: int) -> None:
    """Write items of the published form."""
    rng = np.random.default_rng(seed)

    def text(mean: float, deviation: float) -> str:
        count = max(3, round(rng.normal(mean, deviation)))
        return " ".join(rng.choice(WORDS, count)) + "."

    with path.open("w") as file:
        for index in range(count):
            _, context, ending = KINDS[int(rng.random() > KINDS[0][0])]
            item = {
                "ind": index,
                "activity_label": "Made up",
                "ctx": text(*context),
                "split": "val",
                "label": int(rng.integers(4)),
                "endings": [text(*ending) for _ in range(4)],
                "source_id": f"made_up~{index}",
            }
            file.write(json.dumps(item) + "\n")


def main(options: Options) -> None:
    import jax
    from flax import nnx

    from gptjax import PRESETS, Precision
    from gptjax.bench import results
    from gptjax.bench.table import Row, print_table
    from gptjax.data import get_tokenizer
    from gptjax.evaluation import Scorer, read_hellaswag, score_choices

    config = dataclasses.replace(PRESETS[options.preset], precision=Precision(options.precision))
    if options.layers is not None:
        config = dataclasses.replace(config, n_layer=options.layers)
    tokenizer = get_tokenizer(options.tokenizer)
    scorer = Scorer.of(config.build(nnx.Rngs(options.seed)), batch_tokens=options.batch_tokens)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "hellaswag_val.jsonl")
        write_items(path, options.items, options.seed)
        for number in range(1, options.passes + 1):
            began = time.perf_counter()
            questions = read_hellaswag(path)
            metrics = score_choices(scorer, tokenizer, questions).metrics()
            seconds = time.perf_counter() - began
            rows.append({"pass": number, "seconds": round(seconds, 3), "acc": metrics["acc"]})
            rows[-1] |= {"items/s": round(options.items / seconds, 1)}
        began = time.perf_counter()
        texts = [t for q in questions for t in (q.context, *(f" {e}" for e in q.endings))]
        tokens = tokenizer.encode_batch(texts)
        tokenizing = time.perf_counter() - began
    lengths = [sum(map(len, tokens[i : i + 5])) for i in range(0, len(tokens), 5)]
    about = {
        "preset": options.preset,
        "precision": options.precision,
        "devices": jax.device_count(),
        "items": options.items,
        "tokens_per_item": round(float(np.mean(lengths)), 1),
        "tokenizing_seconds": round(tokenizing, 3),
    }
    print_table(
        f"HellaSwag, {', '.join(f'{name} {value}' for name, value in about.items())}",
        ("seconds", "items/s"),
        [Row(f"pass {r['pass']}", [f"{r['seconds']:.2f}", f"{r['items/s']:.0f}"]) for r in rows],
    )
    if options.out:
        command = results.script_command("benchmarks/experiments/evaluation.py")
        device = jax.devices()[0].device_kind
        results.write(options.out, results.new(command, rows, device=device, **about))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
