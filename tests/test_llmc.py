"""gptjax.weights.llmc against an independent reader and writer of the layout, with `struct`.

The layout is that of llm.c's `gpt2_write_to_checkpoint` and of `write_model` in its train_gpt2.py.
"""

import dataclasses
import struct

import numpy as np
import pytest
from comparison_tools import flatten
from saved_run_tools import random_model

import gptjax
from gptjax.models.base import params_of

HEADER = 1024


def config_of(**shape):
    sizes = {"vocab_size": 11, "padded_vocab_size": 16, "block_size": 7, "n_layer": 3}
    return gptjax.GPT2Config(**{"n_head": 2, "n_embd": 6} | sizes | shape)


def params(model):
    return {name: np.asarray(x) for name, x in flatten(params_of(model)).items()}


def read_independently(path):
    """Return arrays by llm.c's names, stacked over layers, in the layout of the file."""
    raw = path.read_bytes()
    magic, version, t, v, n, h, c, p = struct.unpack_from("<8i", raw)
    assert magic == 20240326 and not any(raw[32:HEADER])
    sizes = [
        ("wte", (p, c)), ("wpe", (t, c)),
        ("ln1w", (n, c)), ("ln1b", (n, c)),
        ("qkvw", (n, 3 * c, c)), ("qkvb", (n, 3 * c)),
        ("attprojw", (n, c, c)), ("attprojb", (n, c)),
        ("ln2w", (n, c)), ("ln2b", (n, c)),
        ("fcw", (n, 4 * c, c)), ("fcb", (n, 4 * c)),
        ("fcprojw", (n, c, 4 * c)), ("fcprojb", (n, c)),
        ("lnfw", (c,)), ("lnfb", (c,)),
    ]  # fmt: skip
    width, at, tensors = {3: 4, 5: 2}[version], HEADER, {}
    for name, shape in sizes:
        count = int(np.prod(shape))
        if width == 4:
            numbers = np.array(struct.unpack_from(f"<{count}f", raw, at), np.float32)
        else:  # bf16 is the upper half of fp32
            halves = np.array(struct.unpack_from(f"<{count}H", raw, at), np.uint32)
            numbers = (halves << 16).view(np.float32)
        tensors[name] = numbers.reshape(shape)
        at += width * count
    assert at == len(raw)
    return (t, v, n, h, c, p), tensors


LLMC_NAMES = {
    "ln_1.scale": "ln1w", "ln_1.bias": "ln1b",
    "attn.c_attn.kernel": "qkvw", "attn.c_attn.bias": "qkvb",
    "attn.c_proj.kernel": "attprojw", "attn.c_proj.bias": "attprojb",
    "ln_2.scale": "ln2w", "ln_2.bias": "ln2b",
    "mlp.c_fc.kernel": "fcw", "mlp.c_fc.bias": "fcb",
    "mlp.c_proj.kernel": "fcprojw", "mlp.c_proj.bias": "fcprojb",
}  # fmt: skip


def in_file(tensors, name):
    """Return the tensor in the file for gptjax's parameter `name`, in gptjax's layout."""
    if name.startswith("blocks."):
        _, layer, rest = name.split(".", 2)
        tensor = tensors[LLMC_NAMES[rest]][int(layer)]
        return tensor.T if rest.endswith("kernel") else tensor
    return tensors[{"ln_f.scale": "lnfw", "ln_f.bias": "lnfb"}.get(name, name)]


def round_to_bf16(x):
    """Round to nearest even, with integer arithmetic."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_layer": 1, "n_head": 3, "n_embd": 3, "vocab_size": 1, "padded_vocab_size": 1},
        {"n_layer": 2, "n_head": 1, "n_embd": 5, "block_size": 1, "padded_vocab_size": 11},
    ],
)
def test_layout(tmp_path, shape, dtype):
    """The file, by the independent reader, and what `load_llmc` reads."""
    model, path = random_model(config := config_of(**shape)), tmp_path / "model.bin"
    gptjax.save_llmc(model, path, dtype=dtype)
    header, tensors = read_independently(path)
    assert struct.unpack_from("<2i", path.read_bytes()) == (20240326, {"fp32": 3, "bf16": 5}[dtype])
    sizes = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "padded_vocab_size")
    assert header == tuple(getattr(config, name) for name in sizes)
    loaded = gptjax.load_llmc(path, recompute="block")
    assert loaded.config == dataclasses.replace(config, recompute="block")
    found = params(loaded)
    for name, expected in params(model).items():
        expected = round_to_bf16(expected) if dtype == "bf16" else expected
        np.testing.assert_array_equal(in_file(tensors, name), expected, err_msg=name)
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_a_pickle_of_pytorch_is_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"PK\3\4" + bytes(2000))
    with pytest.raises(gptjax.weights.WeightsError, match=r"zip archive, as of PyTorch's pickles"):
        gptjax.load_llmc(path)
