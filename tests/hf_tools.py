"""Edit the files that save_hf and transformers write."""

import json

import safetensors.numpy


def edit_config(path, **fields):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(path, edit):
    file = path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    edit(tensors)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
