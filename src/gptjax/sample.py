"""Continue prompts with a model: `python -m gptjax.sample PATH --prompt "A language model is"`."""

import dataclasses
import functools
import io
import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from gptjax.config import ConfigError
from gptjax.generation import check_options
from gptjax.generation.stream import complete
from gptjax.model_options import ModelOptions
from gptjax.terminal import dimmed, exit_code, hint, printable
from gptjax.training import memory

STREAMED = 8
"""Tokens per update of a streamed text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(ModelOptions):
    """Options of the command."""

    prompt: tuple[str, ...] = ()
    """One or several prompts. Without any, texts start after the end-of-text token."""
    prompt_file: tuple[Path, ...] = ()
    """UTF-8 files with one prompt each; - is standard input. The last newline is removed."""
    max_new_tokens: int = 256
    """Maximum number of new tokens. A text also ends when prompt and text fill block_size."""
    temperature: float = 1.0
    """Temperature of the softmax; 0 selects the likeliest token."""
    top_k: int | None = None
    """Draw from this number of likeliest tokens."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens whose probabilities sum to at least this value."""
    seed: int = 0
    """Seed of the draws."""
    num_samples: int = 1
    """Texts for each prompt."""
    stop: tuple[str, ...] = ()
    """End a text before the first of these strings."""
    stop_at_eot: bool = True
    """End a text at the end-of-text token."""
    batch_size: int = 32
    """Texts that are generated at a time."""
    json: bool = False
    """Print one JSON object per text: prompt, sample, text, tokens, stop."""

    def check(self) -> None:
        """Raise ConfigError for options that contradict each other or are out of range."""
        if min(self.num_samples, self.batch_size) < 1:
            raise ConfigError("--num-samples and --batch-size must be at least 1")
        try:
            check_options(self.max_new_tokens, self.temperature, self.top_k, self.top_p)
        except ValueError as error:
            raise ConfigError(str(error).removeprefix("generate: ")) from error

    def prompts(self) -> list[str]:
        """Return the prompts of --prompt and --prompt-file, in this order; [""] without any.

        Raises:
            ConfigError: a prompt or a text of --stop is empty, or a file is not UTF-8 text.
            OSError: a file cannot be read.
        """
        prompts = [*self.prompt]
        for file in self.prompt_file:
            data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
            try:
                text = data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{file}: expected UTF-8 text: {error}") from error
            prompts.append(text)
        if "" in prompts:
            raise ConfigError(f"prompt {prompts.index('') + 1} is empty")
        if "" in self.stop:
            raise ConfigError("--stop: expected texts that are not empty")
        return prompts or [""]


def encoded(tokenizer: Any, prompts: Sequence[str], room: int) -> Iterator[list[int]]:
    """Yield the tokens of each prompt; an empty text is the beginning of a document.

    Raises:
        ConfigError: a prompt of `room` or more tokens.
    """
    for number, prompt in enumerate(prompts, 1):
        begin = [*tokenizer.prefix] if prompt else [tokenizer.eot, *tokenizer.prefix]
        ids = begin + tokenizer.encode(prompt).tolist()
        if len(ids) >= room:
            raise ConfigError(
                f"prompt {number}: expected at most {room - 1} tokens, one fewer than the "
                f"model's block_size, got {len(ids)}"
            )
        yield ids


def print_samples(options: Sample, model: Any, tokenizer: Any, prompts: Sequence[str]) -> None:
    """Print the samples of each prompt, in order.

    Raises:
        ConfigError: a prompt is too long; nothing is printed.
    """
    room = model.config.block_size
    tokens = [*encoded(tokenizer, prompts, room)]
    rows = [(p, n) for p in range(len(prompts)) for n in range(1, options.num_samples + 1)]
    batches = [[*batch] for batch in itertools.batched(rows, options.batch_size)]
    if len(batches) > 1:  # equal batch sizes, so that one executable serves all batches
        tokens.append([tokenizer.eot])
        batches[-1] += [(len(prompts), 0)] * (options.batch_size - len(batches[-1]))
    streamed = len(rows) == 1 and not options.json
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "stop", "stop_at_eot")
    how = {name: getattr(options, name) for name in names}
    how |= {"steps": STREAMED} if streamed else {}
    for number, batch in enumerate(batches):
        key = jax.random.key(options.seed, impl="threefry2x32")  # not JAX's configured default
        if number:  # no position: `generate` folds positions into the key
            key = jax.random.fold_in(key, room + number)
        completions = complete(model, tokenizer, [tokens[p] for p, _ in batch], key=key, **how)
        if streamed:
            _stream(prompts[0], completions)
            continue
        *_, done = completions
        for (p, n), completion in zip(batch, done, strict=True):
            if p < len(prompts):
                (_print_json if options.json else _print)(prompts[p], p + 1, n, completion)


def _stream(prompt: str, completions: Iterator[list]) -> None:
    print(dimmed(printable(prompt), sys.stdout), end="", flush=True)
    shown = 0
    for (completion,) in completions:
        print(printable(completion.text[shown:]), end="", flush=True)
        shown = len(completion.text)
    print(flush=True)


def _print_json(prompt: str, number: int, sample: int, completion: Any) -> None:
    row = {"prompt": prompt, "sample": sample, "text": completion.text}
    row |= {"tokens": completion.tokens, "stop": completion.stopped}
    print(json.dumps(row), flush=True)


def _print(prompt: str, number: int, sample: int, completion: Any) -> None:
    about = json.dumps(prompt[:60], ensure_ascii=False) if prompt else "end-of-text"
    header = f"--- prompt {number}, sample {sample}: {about}, stopped by {completion.stopped}"
    print(dimmed(printable(header), sys.stdout), printable(completion.text), sep="\n", flush=True)


def run(options: Sample) -> None:
    """Sample and print.

    Raises:
        DataError, WeightsError, ConfigError, DeviceError, OSError: a wrong option or file.
    """
    options.check()
    prompts = options.prompts()
    used = options.select_devices(lambda note: print(printable(note), file=sys.stderr))
    try:
        model, tokenizer = options.load()
        about = f"{used[0].device_kind}, {model.config.precision.name}"
        print(printable(f"{options.path}: {about}"), file=sys.stderr)
        print_samples(options, model, tokenizer, prompts)
        path = shlex.quote(str(options.path))
        hint(f"gptjax evaluate {path} --task bits-per-byte", piped=False)
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_full(error):
            raise
        raise ConfigError(
            "out of device memory: lower --batch-size or --max-new-tokens, free the device, or set "
            "--device cpu"
        ) from error


def main(args: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    for stream, how in ((sys.stdout, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=how)

    options = functools.partial(
        tyro.cli,
        Sample,
        prog="gptjax sample",
        description="Continue prompts with a model. One sample is printed after its prompt,\n"
        "as it is generated; several are printed when their batch is complete.",
        args=args,
    )
    return exit_code(lambda: run(options()), interrupted="\ninterrupted")


if __name__ == "__main__":
    from gptjax.training.checkpoint import silence_orbax

    silence_orbax()
    sys.exit(main())
