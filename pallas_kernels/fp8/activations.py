"""Activations of the FP8 layers: the scale of the result, and the array that the backward pass
reads.

    gelu:          the derivative gelu'(u)
    relu_squared:  the result y = relu(u)², since the derivative is 2·√y
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.feed_forward import ACTIVATIONS
from pallas_kernels.fp8.conversion import E4M3

DERIVATIVE_SCALE = 256.0
"""Factor of a derivative of GELU that is stored in e4m3. The derivative is between −0.13 and
1.13."""


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation y(u) with its result in e4m3.

    Attributes:
        name: key of `ACTIVATIONS`.
        scale: factor of y in e4m3.
        derivative_dtype: dtype of the stored derivative: e4m3, times `DERIVATIVE_SCALE`, or bf16.
            None: the derivative is 2·√y, and the backward pass reads y.
    """

    name: str
    scale: float
    derivative_dtype: jax.typing.DTypeLike | None

    def __call__(self, u):
        """Return y and its derivative."""
        return ACTIVATIONS[self.name](u)

    @property
    def stored_scale(self) -> float:
        """Factor of the derivative in its stored dtype."""
        return DERIVATIVE_SCALE if self.derivative_dtype == E4M3 else 1.0

    def derivative(self, saved):
        """Return the derivative times `derivative_scale`, from the saved array in fp32."""
        return jnp.sqrt(saved) if self.derivative_dtype is None else saved

    @property
    def derivative_scale(self) -> float:
        return self.scale**0.5 / 2 if self.derivative_dtype is None else self.stored_scale


GELU = Activation("gelu", 8.0, E4M3)
"""As `layers.ACTIVATION_SCALE`: e4m3 represents 0.002 … 56 with a relative error of 1/16."""
RELU_SQUARED = Activation("relu_squared", 1.0, None)
"""Squares have a wider range: 1/64 … 448 with a relative error of 1/16, which is u from 1/8 to
21."""
