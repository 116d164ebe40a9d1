"""Journeys of a new user, from the installed wheel alone: `PYTHON .ci/journeys.py`.

PYTHON is that of an environment with the wheel. Each journey runs in a folder without the
repository, with an empty home, without a network and on the CPU. The times are printed.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMOKE = Path(__file__).with_name("smoke.py")
BIN = Path(sys.executable).parent
FOLDER = Path(tempfile.mkdtemp())
# Every download fails at once.
PROXY = dict.fromkeys(
    ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
)
KEPT = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
ENVIRONMENT = {"HOME": str(FOLDER / "home"), "PATH": f"{BIN}:/usr/bin:/bin", **PROXY, **KEPT}
# Ten steps of the schedule, so that a journey takes seconds.
SHORT = "--val-tokens 4096 --sample-every 0 --optimizer.warmup-steps 2"
TEXT = "The quick brown fox jumps over the lazy dog. " * 3000


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def run(command: str, code: int = 0, **environment: str) -> str:
    """Run a command in the journey's folder and return its output. Fail on another exit code."""
    done = subprocess.run(
        shlex.split(command),
        cwd=FOLDER / "work",
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != code:
        sys.exit(f"{command}: exit code {done.returncode}, expected {code}\n{done.stdout}")
    return done.stdout


def file(name: str) -> Path:
    return FOLDER / "work" / name


def expect(text: str, output: str) -> None:
    if not re.search(text, output, re.M):
        sys.exit(f"expected {text!r} in:\n{output}")


def first_look() -> None:
    """see what there is: --help, --version, doctor"""
    commands = re.findall(r"^  (\w+) +\w", run("gptjax"), re.M)
    expect(r"gptjax \d+\.\d+", run("gptjax --version"))
    for command in commands:
        expect(r"usage: gptjax", run(f"gptjax {command} --help"))
    expect("nothing failed", run("gptjax doctor --no-kernels"))


def first_model() -> None:
    """train the first model by its config's name, and resume it"""
    train = f"gptjax train --config gpt2_tiny {SHORT} --optimizer.schedule-steps 60"
    expect("next: gptjax sample runs/gpt2_tiny", run(f"{train} --max-steps 30"))
    expect("resuming from step 30", run(f"{train} --max-steps 60"))


def sample() -> None:
    """sample from the run, streamed and as JSON"""
    expect("^def ", run("gptjax sample runs/gpt2_tiny --prompt 'def ' --max-new-tokens 8"))
    shown = run("gptjax sample runs/gpt2_tiny --prompt a b --json --max-new-tokens 4")
    rows = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert [row["prompt"] for row in rows] == ["a", "b"], shown


def evaluate() -> None:
    """score the run on a text of one's own"""
    file("own.txt").write_text(TEXT[:3000])
    shown = run("gptjax evaluate runs/gpt2_tiny --task bits-per-byte --file own.txt")
    expect(r"bits-per-byte +[0-7]\.", shown)


def plot() -> None:
    """plot the loss, or read which extra is missing"""
    if has("matplotlib"):
        run("gptjax plot runs/gpt2_tiny --out loss.png")
        assert file("loss.png").read_bytes()[1:4] == b"PNG"
    else:
        expect(r"pip install 'gptjax\[plot\]'", run("gptjax plot runs/gpt2_tiny", code=1))


def own_text() -> None:
    """prepare text files, and train with the command that is printed"""
    file("books").mkdir()
    for name in ("a.txt", "b.txt"):
        file("books").joinpath(name).write_text(TEXT)
    # The default tokenizer needs a download; without one, a note says that bytes replace it.
    shown = run("gptjax data text books --name own")
    expect("NOTE: using the BYTE tokenizer", shown)
    command = shown.split("next: ")[1].splitlines()[0]
    expect("validation loss", run(f"{command} {SHORT} --max-steps 5"))


def pairs() -> None:
    """fine-tune the run on pairs of prompt and answer"""
    rows = [{"question": f"{n} + 1 =", "answer": f" {n + 1}"} for n in range(3000)]
    file("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = "--prompt-field question --answer-field answer"
    run(f"gptjax data jsonl pairs.jsonl {fields} --name pairs --tokenizer byte")
    train = f"gptjax train --config gpt2_tiny --name pairs --dataset pairs {SHORT}"
    shown = run(f"{train} --init-from runs/gpt2_tiny --max-steps 5")
    expect("the others are prompts", shown)


def own_config() -> None:
    """write train.py and a config with init, change the config, and train"""
    run("gptjax init mine")
    expect("is not overwritten", run("gptjax init mine", code=1))
    config = file("mine/configs/gpt2_tiny.py")
    text = config.read_text()
    config.write_text(text.replace("n_layer=4", "n_layer=2").replace('"gpt2_tiny"', '"two"'))
    train = f"{sys.executable} mine/train.py --config mine/configs/gpt2_tiny.py"
    expect("2 layers", run(f"{train} {SHORT} --max-steps 5"))


def hugging_face() -> None:
    """export to Hugging Face's format, sample from the folder and fine-tune it"""
    run("gptjax export runs/gpt2_tiny --to hf --out hf")
    expect("^def ", run("gptjax sample hf --prompt 'def ' --max-new-tokens 8"))
    train = f"gptjax train --config gpt2_tiny --name tuned --init-from hf {SHORT}"
    expect(r"weights +hf", run(f"{train} --max-steps 5"))


def other_programs() -> None:
    """export for llm.c, and for llama.cpp, or read which extra is missing"""
    run("gptjax export runs/gpt2_tiny --to llmc --out model.bin")
    assert file("model.bin").stat().st_size > 3_000_000
    export = "gptjax export runs/gpt2_tiny --to gguf --out model.gguf"
    if has("gguf"):
        run(export)
        assert file("model.gguf").read_bytes()[:4] == b"GGUF"
    else:
        expect(r"pip install 'gptjax\[gguf\]'", run(export, code=1))


def longer() -> None:
    """train a finished run further: one option"""
    train = f"gptjax train --config gpt2_tiny --name wsd {SHORT} --optimizer.schedule wsd"
    run(f"{train} --max-steps 10")
    expect("resuming from step 10", run(f"{train} --max-steps 20"))


def own_tokenizer() -> None:
    """train with a tokenizer of one's own, or read which extra is missing"""
    train = "gptjax data train-tokenizer books/a.txt books/b.txt --vocab-size 300"
    if not has("tokenizers"):
        expect(r"pip install 'gptjax\[tokenizers\]'", run(train, code=1))
        return
    run(train)
    shown = run("gptjax data text books --name bpe --tokenizer tokenizer.json")
    command = shown.split("next: ")[1].splitlines()[0]
    expect("validation loss", run(f"{command} --name bpe --model.n-layer 1 {SHORT} --max-steps 5"))
    expect("^The quick", run("gptjax sample runs/bpe --prompt 'The quick' --max-new-tokens 8"))


def llama() -> None:
    """fine-tune a Llama folder, export it, and compare it with transformers where that is"""
    write_llama(file("llama"))
    # Its data has bytes: the folder has no tokenizer.
    train = f"gptjax train --config llama_finetune --init-from llama --dataset pairs {SHORT}"
    short = "--sequence-length 64 --batch-tokens 512 --micro-batch 8 --model.block-size 64"
    expect(
        r"weights +llama", run(f"{train} {short} --model.precision fp32 --device cpu --max-steps 5")
    )
    run("gptjax export runs/llama_finetune --to hf --out tuned_llama")
    greedy = "--prompt ab --json --temperature 0 --max-new-tokens 12 --no-stop-at-eot"
    shown = json.loads(run(f"gptjax sample runs/llama_finetune {greedy}").splitlines()[-1])
    if not (has("transformers") and has("torch")):
        print("    skipped: loading the export needs transformers and torch")
        return
    file("theirs.py").write_text(THEIRS)
    theirs = json.loads(run(f"{sys.executable} theirs.py tuned_llama").splitlines()[-1])
    assert theirs == shown["tokens"], (theirs, shown)


THEIRS = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
print(model.generate(torch.tensor([[97, 98]]), **options)[0, 2:].tolist())
"""


def write_llama(folder: Path) -> None:
    """A Llama with random weights, as Hugging Face stores one."""
    import numpy as np
    from safetensors.numpy import save_file

    hidden, inner, layers, heads, vocabulary = 64, 128, 2, 4, 257
    attention = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    up = {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    matrices = attention | up | {"mlp.down_proj": (hidden, inner)}
    shapes = {
        f"model.layers.{i}.{name}": matrices[name] for i in range(layers) for name in matrices
    }
    shapes |= {name: (vocabulary, hidden) for name in ("model.embed_tokens", "lm_head")}
    random = np.random.default_rng(0)
    weights = {name: 0.1 * random.standard_normal(shape) for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    weights |= {
        f"model.layers.{i}.{name}": np.ones(hidden) for i in range(layers) for name in norms
    }
    weights["model.norm"] = np.ones(hidden)
    folder.mkdir()
    save_file(
        {f"{name}.weight": array.astype(np.float32) for name, array in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "rms_norm_eps": 1e-5}
    config |= {"vocab_size": vocabulary, "max_position_embeddings": 64, "rope_theta": 10_000.0}
    folder.joinpath("config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def plan() -> None:
    """predict memory, time and cost on GPUs that one does not have, or read what is missing"""
    command = "gptjax plan gpt2_tiny --gpu h100 --price 3"
    if has("jax_triton"):
        expect(r"^memory +\d", run(command))
    else:
        expect("pip install jax-triton", run(command, code=1))


def own_code() -> None:
    """import the model, the optimizer and the kernels in a program of one's own"""
    shutil.copy(SMOKE, file("smoke.py"))
    expect("smoke test passed", run(f"{sys.executable} smoke.py"))


JOURNEYS = (
    *(first_look, first_model, sample, evaluate, plot, own_text, pairs, own_config, hugging_face),
    *(other_programs, longer, own_tokenizer, llama, plan, own_code),
)


def main() -> None:
    for name in ("home", "work"):
        (FOLDER / name).mkdir()
    place = run(f"{sys.executable} -c 'import gptjax; print(gptjax.__file__)'").strip()
    if not Path(place).is_relative_to(sys.prefix):
        sys.exit(f"expected gptjax from the wheel, got {place}")
    began = time.perf_counter()
    for number, journey in enumerate(JOURNEYS, start=1):
        start = time.perf_counter()
        journey()
        print(f"{number:>2}  {time.perf_counter() - start:5.1f} s  {journey.__doc__}", flush=True)
    print(f"    {time.perf_counter() - began:5.1f} s  all {len(JOURNEYS)} journeys")
    shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
