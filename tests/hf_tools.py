"""Edit and read exported files, and compare models."""

import json
import warnings

import jax
import numpy as np
import pytest
import safetensors.numpy

from gptjax.models.base import params_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

__all__ = ["assert_same", "edit_config", "edit_tensors", "read_gguf", "transformers"]


def edit_config(path, **fields):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(path, edit):
    file = path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    edit(tensors)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})


def assert_same(model, other):
    """Fail unless the parameters of two models, or of a model and a nested dict, are equal."""
    params, others = (
        each if isinstance(each, dict) else params_of(each) for each in (model, other)
    )
    assert jax.tree.structure(params) == jax.tree.structure(others)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), params, others)


def read_gguf(path):
    """A function of a field's name and an index, and the tensors as NumPy arrays of (out, in)."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is in the extra `gguf`")
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    return lambda name, *at: reader.fields[name].contents(*at), tensors
