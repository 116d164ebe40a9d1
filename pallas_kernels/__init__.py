"""GPU kernels for GPT-2, importable without gptjax.

Each module holds one operation: its mathematics, a plain-JAX `reference()`, its back ends, and a public function whose
`implementation=` argument names the back end. `"auto"` takes the fastest that supports the device, dtype and shape; a named
one works or raises. This is the one seam through which the model reaches attention and the loss.
"""

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.linear_cross_entropy import linear_cross_entropy

__all__ = ["flash_attention", "linear_cross_entropy"]
