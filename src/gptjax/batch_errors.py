"""Texts for the error that batch_tokens is not a multiple of the micro-batch's tokens.

One micro-batch on all devices has micro_batch × sequence_length × devices tokens. The functions
return the corrections that the error message lists.
"""

import math


def new_run(batch_tokens: int, micro_batch: int, sequence_length: int, devices: int) -> str:
    """Return the nearest valid values of batch_tokens, and a smaller micro-batch if one divides the
    batch."""
    tokens = micro_batch * sequence_length * devices
    below = batch_tokens // tokens * tokens
    nearest = f"{below + tokens} or {below}" if below else f"{below + tokens}"
    fits = _fitting(batch_tokens, micro_batch, sequence_length * devices)
    return f"take {nearest}" + (f", or --micro-batch {fits}" if fits else "")


def resumed_run(batch_tokens: int, micro_batch: int, sequence_length: int, devices: int) -> str:
    """Return corrections that do not change batch_tokens: fewer devices, or a smaller
    micro-batch."""
    choices = []
    for fewer in range(devices - 1, 0, -1):
        if batch_tokens % (micro_batch * sequence_length * fewer) == 0:
            choices.append(f"{fewer} device{'s' * (fewer > 1)}")
            break
    if fits := _fitting(batch_tokens, micro_batch, sequence_length * devices):
        choices.append(f"--micro-batch {fits}")
    choices = choices or ["another number of devices with another --micro-batch"]
    return f"a resumed run cannot change --batch-tokens: take {', or '.join(choices)}"


def _fitting(batch_tokens: int, micro_batch: int, tokens: int) -> int | None:
    """Return the largest divisor of the micro-batch whose tokens divide the batch, or None.

    Args:
        tokens: sequence_length × devices.
    """
    per_device, rest = divmod(batch_tokens, tokens)
    return None if rest else math.gcd(micro_batch, per_device)
