"""Log-probabilities of tokens: rows of any length, batched in a few lengths, on all devices.

A row is padded on the right to the next of `LENGTHS`, so that at most one executable per length is
compiled. Causal attention: padding does not change the log-probabilities of the tokens before it.

Shapes: B rows of a batch over all devices, T time.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from gptjax.data import DataError
from gptjax.files import read_regular
from gptjax.models.base import Model, ModelConfig, graph, on_devices, params_of
from gptjax.parallel import Parallel, over_batch, put

# Padded numbers of input tokens of a row: the lengths below block_size, and block_size.
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Maximum number of tokens whose logits exist at the same time.
CHUNK = 16384
# Number of batches in flight, so that the device never waits.
IN_FLIGHT = 3


class EvaluationError(DataError, ValueError):
    """A file, an item or an option of an evaluation that the user can correct."""


def read_file(path: Path, hint: str) -> bytes:
    """Return the contents of a regular file. Raise EvaluationError that ends with `hint`."""
    try:
        return read_regular(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        text = getattr(error, "strerror", None) or error
        raise EvaluationError(f"{path}: {text}; {hint}") from error


@contextlib.contextmanager
def parsing(where: str) -> Iterator[None]:
    """Raise an error of parsing as an EvaluationError that begins with `where`."""
    try:
        yield
    except EvaluationError:
        raise
    except Exception as error:  # PyYAML raises errors of many types
        text = " ".join(str(error).split())
        raise EvaluationError(f"{where}: malformed: {type(error).__name__}: {text}") from error


class Row(NamedTuple):
    """Token ids, integers of shape (tokens,). Tokens from index `start` ≥ 1 on are scored."""

    tokens: np.ndarray
    start: int


class Score(NamedTuple):
    """Result of a row.

    Attributes:
        log_prob: sum of the natural logarithms of the scored tokens' probabilities.
        tokens: number of scored tokens.
        greedy: whether each scored token is the likeliest token; None if not computed.
    """

    log_prob: float
    tokens: int
    greedy: bool | None = None

    @property
    def mean(self) -> float:
        """Mean log-probability per token; NaN without tokens."""
        return self.log_prob / self.tokens if self.tokens else float("nan")


class Scorer:
    """Compute log-probabilities with one set of parameters.

    Args:
        config: shape, precision and kernels of the model.
        params: nested dict of parameters, on the devices and in the shardings of `parallel`.
        parallel: devices and strategy.
        batch_tokens: maximum number of input tokens of a batch on each device; at least one row.
            None: 65,536 on a GPU and 4,096 on a CPU.

    Attributes:
        max_length: maximum number of input tokens of a row, block_size.
        progress: called with the number of begun items and the number of all items.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: PyTree,
        parallel: Parallel,
        batch_tokens: int | None = None,
    ):
        if batch_tokens is None:
            batch_tokens = 65536 if _on_gpu(parallel) else 4096
        self.config, self.params, self.parallel = config.for_evaluation(), params, parallel
        self.batch_tokens, self.max_length = batch_tokens, config.block_size
        self.lengths = (*(n for n in LENGTHS if n < config.block_size), config.block_size)
        self.progress: Callable[[int, int], Any] = lambda done, total: None

    @classmethod
    def of(
        cls,
        model: Model,
        devices: list[jax.Device] | None = None,
        batch_tokens: int | None = None,
    ) -> "Scorer":
        """Return a scorer that copies a model's parameters to each device.

        Args:
            devices: None for all devices of JAX's default back end.
            batch_tokens: as in `Scorer`.
        """
        parallel = Parallel.of(jax.devices() if devices is None else devices)
        params = jax.device_put(params_of(model), parallel.replicated)
        return cls(model.config, params, parallel, batch_tokens)

    def rows_of_batch(self, length: int) -> int:
        """Return the number of rows of a batch of this length, over all devices."""
        rows, chunk = max(1, self.batch_tokens // length), _chunk_rows(length)
        return self.parallel.devices * (rows // chunk * chunk or rows)

    def score(self, rows: Iterable[Row], *, greedy: bool = False) -> list[Score]:
        """Return the score of each row, in the order of the rows.

        Args and errors: see `losses`.
        """
        scores = {}
        for index, _, losses, likeliest in self.losses(rows, greedy=greedy):
            is_greedy = None if likeliest is None else bool(likeliest.all())
            scores[index] = Score(-float(losses.sum()), len(losses), is_greedy)
        return [scores[index] for index in range(len(scores))]

    def score_items[Item](
        self, items: Sequence[Item], rows_of: Callable[[Item], list[Row]], *, greedy: bool = False
    ) -> list[list[Score]]:
        """Return the scores of the rows of each item. Errors: see `losses`.

        Args:
            rows_of: returns the rows of an item. It is called while the device scores earlier rows.
            greedy: as in `losses`.
        """
        sizes: list[int] = []

        def rows() -> Iterator[Row]:
            for item in items:
                found = rows_of(item)
                sizes.append(len(found))
                self.progress(len(sizes), len(items))
                yield from found

        scores = iter(self.score(rows(), greedy=greedy))
        return [list(itertools.islice(scores, size)) for size in sizes]

    def losses(
        self, rows: Iterable[Row], *, greedy: bool = False
    ) -> Iterator[tuple[int, Row, np.ndarray, np.ndarray | None]]:
        """Yield the losses of each row as batches complete, in any order.

        A row of more than max_length + 1 tokens loses its first tokens. A result has the index of
        the row; the row as scored; the negative log-probabilities of the scored tokens in nats, in
        fp64; and whether each token is the likeliest token, or None.

        Args:
            rows: read as batches fill. A generator may still be tokenizing later rows.
            greedy: also compute whether each scored token is the likeliest token. This needs the
                logits.

        Raises:
            EvaluationError: a row without a token before the first scored token, with an id out of
                the vocabulary, or with more than max_length scored tokens.
        """
        waiting: dict[int, list[tuple[int, Row]]] = {length: [] for length in self.lengths}
        in_flight: collections.deque = collections.deque()

        def read() -> Iterator[tuple]:
            batch, *arrays = in_flight.popleft()
            losses_BT, greedy_BT = jax.device_get(arrays)
            losses_BT = losses_BT.astype(np.float64)
            for i, (index, row) in enumerate(batch):
                at = slice(row.start - 1, len(row.tokens) - 1)
                yield index, row, losses_BT[i, at], greedy_BT[i, at] if greedy else None

        def dispatch(length: int) -> Iterator[tuple]:
            size = self.rows_of_batch(length)
            batch, waiting[length] = waiting[length][:size], waiting[length][size:]
            in_flight.append((batch, *self._run(length, [row for _, row in batch], greedy)))
            if len(in_flight) >= IN_FLIGHT:
                yield from read()

        for index, row in enumerate(rows):
            row = self._fitted(row)
            length = next(n for n in self.lengths if len(row.tokens) - 1 <= n)
            waiting[length].append((index, row))
            if len(waiting[length]) == self.rows_of_batch(length):
                yield from dispatch(length)
        for length in self.lengths:
            while waiting[length]:
                yield from dispatch(length)
        while in_flight:
            yield from read()

    def _fitted(self, row: Row) -> Row:
        """Return a row of at most max_length + 1 tokens after checking it."""
        crop = max(0, len(row.tokens) - self.max_length - 1)
        tokens, start = row.tokens[crop:], row.start - crop
        if not 1 <= start <= len(tokens):
            raise EvaluationError(
                f"expected a row with at least one token before at most {self.max_length} scored "
                f"tokens (the model's block_size), got {len(row.tokens)} tokens, scored from index "
                f"{row.start}"
            )
        return Row(tokens, start)

    def _run(self, length: int, rows: list[Row], greedy: bool):
        """Start the computation of a batch; return arrays of losses and of greedy tokens."""
        windows_BT1 = np.zeros((self.rows_of_batch(length), length + 1), np.int32)
        for i, row in enumerate(rows):
            windows_BT1[i, : len(row.tokens)] = row.tokens
        low, high = int(windows_BT1.min()), int(windows_BT1.max())
        if low < 0 or high >= self.config.vocab_size:
            raise EvaluationError(
                f"expected token ids in [0, {self.config.vocab_size}), the model's vocabulary, got "
                f"{low if low < 0 else high}: the tokenizer is not the model's"
            )
        local = np.split(windows_BT1, jax.process_count())[jax.process_index()]
        windows_BT1 = put(over_batch(self.parallel.mesh, axis=0), local)
        rows_per_device = self.rows_of_batch(length) // self.parallel.devices
        chunk = length * min(rows_per_device, _chunk_rows(length))
        config = dataclasses.replace(self.config, loss_chunk=chunk)
        return _function(config, self.parallel, greedy)(self.params, windows_BT1)


def _on_gpu(parallel: Parallel) -> bool:
    return parallel.mesh.devices.flat[0].platform == "gpu"


def _chunk_rows(length: int) -> int:
    """Return the number of rows whose logits exist at the same time on a device."""
    return max(1, CHUNK // length)


@functools.lru_cache(maxsize=64)
def _function(config: ModelConfig, parallel: Parallel, greedy: bool) -> Callable:
    """Return a compiled function: (params, windows_BT1) → losses_BT, and greedy_BT or ().

    The results have a copy on every device, so that each process reads them.
    """
    graphdef, score = graph(config), _greedy if greedy else _losses

    def scores(params, step, windows_BT1, over_devices):
        model = nnx.merge(graphdef, params)
        found = score(model, windows_BT1[:, :-1], windows_BT1[:, 1:])
        return over_devices(functools.partial(jax.lax.all_gather, tiled=True), found)

    def run(params, windows_BT1):
        return on_devices(scores, graphdef, params, None, windows_BT1, 0, parallel)

    # As in training, see `gptjax.training.compilation.compiler_options`.
    options = {"xla_gpu_enable_triton_gemm": False} if _on_gpu(parallel) else {}
    return jax.jit(run, out_shardings=parallel.replicated, compiler_options=options)


def _losses(
    model: Model, tokens_BT: Int[Array, "B T"], targets_BT: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], tuple[()]]:
    return model.losses(tokens_BT, targets_BT).reshape(tokens_BT.shape), ()


def _greedy(
    model: Model, tokens_BT: Int[Array, "B T"], targets_BT: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return the loss of each token, and whether the token is the argmax of the logits.

    The logits are computed for one chunk of rows at a time, to limit their memory.
    """

    def chunk(args):
        x_BTC, targets_BT = args
        logits_BTV = model.logits(x_BTC).astype(jnp.float32)
        target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
        losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT
        return losses_BT, jnp.argmax(logits_BTV, axis=-1) == targets_BT

    x_BTC, shape = model.hidden(tokens_BT), tokens_BT.shape
    chunks = tokens_BT.size // (model.config.loss_chunk or tokens_BT.size)
    split = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), (x_BTC, targets_BT))
    losses, greedy = jax.lax.map(chunk, split)
    return losses.reshape(shape), greedy.reshape(shape)
