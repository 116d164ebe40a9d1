"""Array types of the public signatures: jaxtyping's where it is installed. The kernels need JAX
only."""

from typing import TYPE_CHECKING

from jax import Array as Array

if TYPE_CHECKING:
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
    from jaxtyping import Integer as Integer
    from jaxtyping import PyTree as PyTree
else:
    try:
        from jaxtyping import Float, Int, Integer, PyTree
    except ModuleNotFoundError:

        class Float:
            """An annotation that says nothing: `Float[Array, "B T"]` is `Float`."""

            def __class_getitem__(cls, _):
                return cls

        Int = Integer = PyTree = Float
