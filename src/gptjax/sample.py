"""Continue prompts with a model: `python -m gptjax.sample PATH --prompt "A language model is"`."""

import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gptjax import devices
from gptjax.config import ConfigError
from gptjax.data import DataError
from gptjax.model_options import ModelOptions
from gptjax.terminal import command_line, exit_code, printable

STREAMED = 8
"""Tokens per update of a streamed text."""


class SampleError(ValueError):
    """A wrong option or prompt."""


USER_ERRORS = (SampleError, DataError, ConfigError, devices.DeviceError, OSError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(ModelOptions):
    """Options of the command."""

    prompt: tuple[str, ...] = ()
    """One or several prompts. Without any, texts start after the end-of-text token."""
    prompt_file: tuple[Path, ...] = ()
    """UTF-8 files with one prompt each; - is standard input. The last newline is removed."""
    lines: bool = False
    """Read each line of the files as one prompt."""
    interactive: bool = False
    """Read one prompt per line and print its continuation. Ctrl-C stops the continuation, and at
    the prompt ends the program, as does Ctrl-D."""
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
        """Raise SampleError for options that contradict each other or are out of range."""
        if self.interactive and (self.prompt or self.prompt_file or self.json):
            raise SampleError(
                "--interactive reads prompts from the terminal and prints text; leave out "
                "--prompt, --prompt-file and --json"
            )
        if self.lines and not self.prompt_file:
            raise SampleError("--lines needs --prompt-file, got none")
        if min(self.num_samples, self.batch_size) < 1:
            raise SampleError("--num-samples and --batch-size must be at least 1")
        self.check_precision()


class Prompt(NamedTuple):
    """A prompt, and the name of its origin for messages."""

    name: str
    text: str


def read_prompts(options: Sample) -> list[Prompt]:
    """Return the prompts of --prompt and --prompt-file, in this order.

    Raises:
        SampleError: a prompt is empty, or a file is not UTF-8 text.
        OSError: a file cannot be read.
    """
    prompts = [Prompt(f"prompt {n}", text) for n, text in enumerate(options.prompt, 1)]
    for file in options.prompt_file:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        try:
            text = data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise SampleError(f"{file}: expected UTF-8 text, got other bytes: {error}") from error
        texts = text.split("\n") if options.lines else [text]
        prompts += [Prompt(f"{file}, prompt {n}", text) for n, text in enumerate(texts, 1)]
    for prompt in prompts:
        if not prompt.text:
            raise SampleError(f"{prompt.name}: expected a prompt, got an empty text")
    return prompts


class Sampler:
    """A loaded model, and the printing of its texts.

    Raises:
        SampleError, WeightsError, DataError: a wrong option or path.
    """

    def __init__(self, options: Sample):
        from gptjax.generation import check_options

        o = options
        try:
            check_options(o.max_new_tokens, o.temperature, o.top_k, o.top_p)
        except ValueError as error:
            raise SampleError(str(error).removeprefix("generate: ")) from error
        self.model, self.tokenizer = options.load()
        self.options = options

    def tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt; an empty text is the end-of-text token.

        Raises:
            SampleError: the model has no room for a new token.
        """
        if not prompt.text:
            return [self.tokenizer.eot]
        ids, room = self.tokenizer.encode(prompt.text).tolist(), self.model.config.block_size
        if len(ids) >= room:
            raise SampleError(
                f"{prompt.name}: expected at most {room - 1} tokens, one fewer than the model's "
                f"block_size, got {len(ids)}"
            )
        return ids

    def answer(self, prompts: Sequence[Prompt], turn: int = 0) -> None:
        """Print the samples of each prompt, in order.

        Args:
            turn: number of earlier calls. Each number selects other random draws.

        Raises:
            SampleError: a prompt is too long; nothing is printed.
        """
        encoded = [self.tokens(prompt) for prompt in prompts]
        count = self.options.num_samples
        rows = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(count)]
        size = self.options.batch_size
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        if len(batches) > 1:  # equal batch sizes, so that one executable serves all batches
            encoded.append([self.tokenizer.eot])
            batches[-1] = batches[-1] + [(len(prompts), 0)] * (size - len(batches[-1]))
        streamed = len(rows) == 1 and not self.options.json
        for number, batch in enumerate(batches, turn * len(batches)):
            completions = self._complete([encoded[p] for p, _ in batch], number, streamed)
            if streamed:
                # With --interactive, the user has just typed the prompt.
                self._stream("" if self.options.interactive else prompts[0].text, completions)
            else:
                *_, done = completions
                for (p, sample), completion in zip(batch, done, strict=True):
                    if p < len(prompts):
                        self._print(prompts[p].text, p + 1, sample + 1, completion)

    def _complete(self, prompts: list[list[int]], number: int, streamed: bool) -> Iterator[list]:
        """Return an iterator over the completions as they grow; `number` selects the key."""
        import jax

        from gptjax.generation.stream import complete

        options = self.options
        key = jax.random.key(options.seed, impl="threefry2x32")  # not JAX's configured default
        if number:  # no position: `generate` folds positions into the key
            key = jax.random.fold_in(key, self.model.config.block_size + number)
        return complete(
            self.model,
            self.tokenizer,
            prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            key=key,
            stop=options.stop,
            stop_at_eot=options.stop_at_eot,
            **({"steps": STREAMED} if streamed else {}),
        )

    def _stream(self, prompt: str, completions: Iterator[list]) -> None:
        shown = 0
        for (completion,) in completions:
            text = prompt + completion.text
            print(printable(text[shown:]), end="", flush=True)
            shown = len(text)
        print(flush=True)

    def _print(self, prompt: str, number: int, sample: int, completion: Any) -> None:
        c = completion
        if self.options.json:
            row = {"prompt": prompt, "sample": sample, "text": c.text}
            print(json.dumps(row | {"tokens": c.tokens, "stop": c.stopped}), flush=True)
            return
        about = json.dumps(prompt[:60], ensure_ascii=False) if prompt else "end-of-text"
        header = f"--- prompt {number}, sample {sample}: {about}, stopped by {c.stopped}"
        print(printable(f"{header}\n{c.text}"), flush=True)


def interact(sampler: Sampler) -> None:
    """Answer one prompt per line, until the end of standard input.

    Ctrl-C ends an answer.

    Raises:
        KeyboardInterrupt: Ctrl-C while no prompt is answered.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing in `input`
    turn = 0
    while True:
        try:
            prompt = Prompt("the prompt", input("> "))
        except EOFError:
            print()
            return
        if not prompt.text:
            continue
        try:
            sampler.answer([prompt], turn)
            turn += 1
        except KeyboardInterrupt:
            turn += 1
            print(flush=True)
        except SampleError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)


def run(options: Sample) -> None:
    """Sample and print.

    Raises:
        SampleError, DataError, WeightsError, ConfigError, OSError: a wrong option or file.
    """
    import jax

    options.check()
    prompts = read_prompts(options) or [Prompt("no prompt", "")]
    used = options.select_devices(lambda note: print(printable(note), file=sys.stderr))
    try:
        sampler = Sampler(options)
        about = f"{used[0].device_kind}, {sampler.model.config.precision.name}"
        print(printable(f"{options.path}: {about}"), file=sys.stderr)
        if options.interactive:
            interact(sampler)
        else:
            sampler.answer(prompts)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise SampleError(
            "out of device memory: lower --batch-size or --max-new-tokens, free the device, or set "
            "--device cpu"
        ) from error


def main(args: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from gptjax.weights import WeightsError

    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)

    def command() -> None:
        options = command_line(
            Sample,
            prog="python -m gptjax.sample",
            description="Continue prompts with a model. One sample is printed after its prompt, as "
            "it is generated; several are printed when their batch is complete.",
            args=args,
        )
        run(options)

    return exit_code(command, (*USER_ERRORS, WeightsError), lambda: "\ninterrupted")


if __name__ == "__main__":
    from gptjax.training.checkpoint import silence_orbax

    silence_orbax()
    # No preallocation: the GPU may be shared with a training run.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.exit(main())
