"""A Hugging Face Llama, fine-tuned on a text, sampled, exported, and loaded by transformers."""

import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizer_tools as tools
import torch
from hf_tools import read_gguf, transformers
from train_tools import losses, rows, run

import gptjax
from gptjax import cli, evaluate, export, model_options, sample
from gptjax.data import find_dataset, open_shard
from gptjax.data.__main__ import main as data

CONFIG = Path(__file__).parents[1] / "configs" / "llama_finetune.py"
SHORT = (
    "--sequence-length 32 --batch-tokens 256 --micro-batch 4 --max-steps 6 --val-every 6 "
    "--val-tokens 256 --sample-every 6 --checkpoint-every 6 --model.precision fp32 --device cpu "
    "--optimizer.learning-rate 1e-3 --optimizer.warmup-steps 2"
).split()
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0}
LLAMA_3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 16}
# Llama 3.2 1B and TinyLlama in small: head, rope and storage differ.
KINDS = {
    "3.2": (True, LLAMA_3, torch.bfloat16),
    "2": (False, {"rope_type": "default", "rope_theta": 1e4}, torch.float16),
}


def write_llama(folder, kind):
    """A folder as `save_pretrained` writes it: config.json, safetensors, tokenizer.json."""
    tied, rope, dtype = KINDS[kind]
    torch.manual_seed(0)
    tokenizer = tools.llama3_kind()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=96,
            rms_norm_eps=1e-5,
            rope_parameters=rope,
            tie_word_embeddings=tied,
            bos_token_id=tokenizer.token_to_id(tools.BOS),
            eos_token_id=tokenizer.token_to_id(tools.EOS),
            initializer_range=0.2,
        )
    )
    model.to(dtype).save_pretrained(folder)
    special = {"bos_token": tools.BOS, "eos_token": tools.EOS}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_hugging_face_folder_and_back(
    tmp_path, monkeypatch, capsys, one_device, program_cache, optax_promotion, kind
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_options, "cache_folder", lambda: None)
    write_llama("llama_hf", kind)
    Path("book.txt").write_text("".join(tools.TEXTS) * 8)
    assert data("text book.txt --tokenizer llama_hf --name own --data-dir data".split()) == 0
    command = ["--config", str(CONFIG), "--name", "tuned", "--init-from", "llama_hf"]
    config = cli.from_command_line([*command, "--dataset", "own", "--data-dir", "data", *SHORT])
    code, shown = run(config)
    assert code == 0, shown
    val = rows(config, "val")
    assert len(losses(config)) == 6 and val[6]["loss"] < val[0]["loss"] - 0.1

    model, tokenizer = gptjax.load("runs/tuned")
    assert tokenizer.name == gptjax.data.get_tokenizer("llama_hf").name
    assert gptjax.load("runs/tuned/checkpoints/6").tokenizer.name == tokenizer.name
    assert (model.lm_head is None) == KINDS[kind][0] and model.config.block_size == 96
    capsys.readouterr()
    options = "--temperature 0 --max-new-tokens 20 --json --device cpu --no-stop-at-eot"
    assert sample.main(["runs/tuned", "--prompt", "document 7", *options.split()]) == 0
    sampled = json.loads(capsys.readouterr().out)
    assert sampled["text"] == tokenizer.decode(sampled["tokens"])

    if kind == "2":
        scored = "--task bits-per-byte --dataset own --data-dir data --device cpu --out bits.json"
        assert evaluate.main(["runs/tuned", *scored.split()]) == 0
        (row,) = json.loads(Path("bits.json").read_text())["rows"]
        dataset = find_dataset("own", Path("data"))
        ids = np.concatenate([open_shard(path) for path in dataset.val])
        assert row["bytes"] == len(tokenizer.decode(ids[2:]).encode()) and row["tokens"] == len(ids)

    assert export.main(Path("runs/tuned"), "hf", Path("my_llama")) == 0
    assert f"with the tokenizer {tokenizer.name}" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained("my_llama")
    fast = transformers.AutoTokenizer.from_pretrained("my_llama")
    assert theirs.generation_config.eos_token_id == fast.eos_token_id == tokenizer.eot
    for prompt in ("document 7", "The naïve word", "don't"):
        ids = fast.encode(prompt)
        assert ids == [*tokenizer.prefix, *tokenizer.encode(prompt)]
        with torch.no_grad():
            found = theirs.generate(
                torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None
            )
        ours = gptjax.generate(
            model, np.int32([ids]), max_new_tokens=24, temperature=0, key=jax.random.key(0)
        )
        assert found[0].tolist() == ours[0].tolist()
        if prompt == "document 7":
            assert sampled["tokens"] == ours[0, len(ids) : len(ids) + 20].tolist()
    assert gptjax.load("my_llama").tokenizer.name == tokenizer.name

    narrow = {"dtype": "bf16"}
    assert export.main(Path("runs/tuned"), "hf", Path("narrow"), **narrow) == 0
    halves = transformers.AutoModelForCausalLM.from_pretrained("narrow", dtype="auto")
    for (name, half), whole in zip(halves.named_parameters(), theirs.parameters(), strict=True):
        assert half.dtype == torch.bfloat16 and torch.equal(half, whole.bfloat16()), name

    assert export.main(Path("runs/tuned"), "gguf", Path("my_llama.gguf"), **narrow) == 0
    fields, tensors = read_gguf("my_llama.gguf")
    gguf = importlib.import_module("gguf")
    embedding = gguf.quants.dequantize(tensors["token_embd.weight"], gguf.GGMLQuantizationType.BF16)
    assert torch.equal(torch.from_numpy(embedding), halves.model.embed_tokens.weight.float())
    assert tensors["output_norm.weight"].dtype == np.float32
    assert fields("general.file_type") == gguf.LlamaFileType.MOSTLY_BF16
    assert fields("tokenizer.ggml.pre") == "llama-bpe"
    assert ("output.weight" in tensors) != KINDS[kind][0]
    assert ("rope_freqs.weight" in tensors) == (kind != "2")
