"""The one place that imports Mosaic GPU, whose interface still moves between JAX releases."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

__all__ = ["num_sms", "pl", "plgpu", "swizzled"]


def num_sms() -> int:
    """Multiprocessors of the GPU that is compiled for: the abstract mesh's where one is set, else
    the default device's."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract.num_cores if abstract is not None else jax.devices()[0].core_count


def swizzled(shape: tuple[int, ...], dtype):
    """Shared memory in the order that wgmma and TMA want."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
