"""gptjax's training step, or its forward pass, as the benchmarks run it.

Random tokens are on the device and the state is donated. The step is called many times in a row:
the host runs ahead, and only the device is measured.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gptjax.bench import BenchError
from gptjax.config import Config
from gptjax.data import Batch
from gptjax.models.base import graph
from gptjax.parallel import Parallel, over_batch
from gptjax.training.compilation import compiler_options
from gptjax.training.memory import GIB, available_bytes, needed_bytes, peak_bytes
from gptjax.training.step import init_state, make_eval_step, make_train_step

# Mean tokens of a document with separate_documents: about FineWeb's.
DOCUMENT_TOKENS = 700


class JaxStep:
    """A training step, or the forward pass alone, on random tokens.

    Args:
        config: the shape of the step. On several devices each has the batch_tokens of the config.
        forward: the loss alone, without gradients, of one micro-batch.
        parallel: devices that share the step, with `device` among them; None for `device` alone.
        jit: False runs the same function operation by operation. Functions to which JAX itself
            applies `jit` stay compiled.

    Attributes:
        compiled: the executable; None before `compile`.
        compile_s: seconds of tracing, lowering and compiling.
    """

    def __init__(
        self,
        config: Config,
        device: jax.Device,
        *,
        parallel: Parallel | None = None,
        forward: bool = False,
        jit: bool = True,
    ):
        self.config, self.device, self.forward, self.jit = config, device, forward, jit
        self.compiled: jax.stages.Compiled | None = None
        self.compile_s = 0.0
        self.parallel = parallel or Parallel.of([device])
        self._state = None

    def compile(self, **options: bool | str) -> None:
        """Compile the step.

        Args:
            options: XLA's options, in addition to a training run's.
        """
        started = time.perf_counter()
        state = jax.eval_shape(lambda: init_state(self.config.model, self._tx, seed=0))
        state = self.parallel.with_shardings(state)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._over_batch),
            jax.eval_shape(self._random_batch),
        )
        scalar = self.parallel.replicated
        step = jax.jit(
            self._function(),
            donate_argnums=() if self.forward else 0,
            out_shardings=scalar if self.forward else (self.parallel.shardings(state), scalar),
        )
        lowered = step.lower(state.params if self.forward else state, batch)
        self.compiled = lowered.compile(compiler_options=compiler_options() | options)
        self.compile_s = time.perf_counter() - started

    def check_memory(self) -> None:
        """Raise BenchError if the executable needs more memory than the device has."""
        needed, available = needed_bytes(self.compiled), available_bytes(self.device)
        if needed > available:
            raise BenchError(
                f"needs {needed / GIB:.1f} GiB of {available / GIB:.1f}; nothing was allocated"
            )

    def run(self, steps: int) -> float:
        """Return the device's seconds for this number of consecutive steps."""
        if self._state is None:
            if self.jit and self.compiled is None:
                self.compile()
            self._state = init_state(self.config.model, self._tx, 0, self.parallel)
            self._batch = jax.device_put(self._random_batch(), self._over_batch)
            self._call = self.compiled or self._function()
        # Without jit nothing is donated: a second reference would keep the old state alive.
        state, self._state = self._state, None
        jax.block_until_ready(state)
        started = time.perf_counter()
        for _ in range(steps):
            if self.forward:
                last = self._call(state.params, self._batch)
            else:
                state, last = self._call(state, self._batch)
        jax.block_until_ready((state, last))
        taken = time.perf_counter() - started
        self._state = state
        return taken

    def rest(self) -> None:
        """Free the state; the next run begins with a new one."""
        self._state = None

    @property
    def peak(self) -> int | None:
        """Largest number of bytes that this process has allocated through JAX; None on a CPU."""
        return peak_bytes(self.device)

    @functools.cached_property
    def _tx(self):
        return self.config.build_optimizer(self.parallel.mesh)

    def _random_batch(self) -> Batch:
        sequences = self.config.micro_batch * self.parallel.devices
        shape = self.config.micro_batches(1), sequences, self.config.sequence_length + 1
        vocab_size, eot = self.config.model.vocab_size, None
        tokens = jax.random.randint(jax.random.key(1), shape, 0, vocab_size, jnp.int32)
        if self.config.separate_documents:
            eot = vocab_size - 1  # the last id of both tokenizers
            begins = jax.random.bernoulli(jax.random.key(2), 1 / DOCUMENT_TOKENS, shape)
            tokens = jnp.where(begins, eot, tokens)
        return Batch.of(tokens[0] if self.forward else tokens, eot)

    @property
    def _over_batch(self):
        return over_batch(self.parallel.mesh, axis=0 if self.forward else 1)

    def _function(self) -> Callable:
        graphdef = graph(self.config.model)
        if self.forward:
            return make_eval_step(graphdef, self.parallel)
        how = {"parallel": self.parallel, **self.config.step_options()}
        return make_train_step(graphdef, self._tx, **how)
