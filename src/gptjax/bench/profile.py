"""`python -m gptjax.bench profile`: where one training step spends its time, kernel by kernel, and
the trace itself.

A kernel in the trace names the HLO instruction that launched it. The compiled program's text says
where in the model each instruction comes from: its `op_name` holds the `jax.named_scope`s of the
source (models/gpt2.py names the parts) and the transformations around them, such as
`jit(train_step)/transpose(jvp(attention))/dot_general`. A fusion that has none is what most of its
instructions are.
"""

import collections
import dataclasses
import re
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from gptjax.bench import step as bench_step
from gptjax.bench.kernels import BenchError
from gptjax.bench.step import OurStep, Preset, Step
from gptjax.bench.table import Row, print_table

# Scope in the source → what the table calls it, in its order.
PARTS = {
    "embedding": "embedding",
    "norm": "norm, residual",
    "attention": "attention",
    "mlp": "MLP",
    "head": "head, loss",
}
# No scope of their own: what is outside of the differentiated part, what only moves or casts data,
# and what is none of these.
OPTIMIZER, COPIES, OTHER = "optimizer, clip", "copies, casts", "other"
ORDER = (*PARTS.values(), OPTIMIZER, COPIES, OTHER)
PASSES = ("forward", "recomputed", "backward", "update")
COLOURS = dict(zip(PASSES, ("#1b6ca8", "#c9b7dd", "#e07b39", "#3fa34d"), strict=True)) | {
    "idle": "#d0d0d0"
}

# Steps before the trace, and those timed without it.
WARM_UP, TIMED = 3, 10


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an instruction comes from."""

    part: str
    """One of `ORDER`."""
    pass_: str
    """One of `PASSES`."""
    op: str
    """The operation in the source, the last word of its op_name; the HLO opcode where there is no
    op_name."""
    product: bool
    """Whether it is a matrix product, or has one in it."""
    encloses: bool = False
    """Whether it only runs others, which are in the trace themselves."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch on the device."""

    name: str
    hlo_op: str
    """The instruction; empty where the trace names none."""
    op_name: str
    """What the trace itself says of the source, without what all op_names begin with; empty where
    it says nothing."""
    start_ns: float | int
    duration_ns: float | int


# ----------------------------------------------------------------------------- the compiled program

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(r"(?:calls|to_apply)=\{?%?([\w.\-]+)")
_PRODUCT_TARGETS = ("__cublas", "__triton_gemm", "__triton_nested_gemm")
# Together they make nothing new of the data. A broadcast alone fills memory with one value.
_MOVING = {
    *("parameter", "constant", "bitcast", "bitcast-convert", "reshape", "convert"),
    *("copy", "copy-start", "copy-done", "transpose", "tuple", "get-tuple-element"),
    *("slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "broadcast"),
}


def places(text: str) -> dict[str, Place]:
    """Every instruction of a compiled program, by name.

    Args:
        text: `compiled.as_text()`.
    """
    bodies: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    body = None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            body = bodies[found[1]]
        elif body is not None and (found := _INSTRUCTION.match(line)):
            body.append((found[1], found[2]))
    differentiated = "jvp(" in text
    return {
        name: _place(words, bodies, differentiated)
        for body in bodies.values()
        for name, words in body
    }


def _place(words: str, bodies: dict, differentiated: bool) -> Place:
    inside = _inside(words, bodies)
    opcodes = {_opcode(w) for w in inside} | ({_opcode(words)} - {"fusion", "call"})
    op_names = [name for w in (words, *inside) if (name := _op_name(w))]
    own = _op_name(words)
    sources = [_source(name, differentiated) for name in ([own] if own else []) + op_names]
    # Its own, that of its last instruction, where that names a part; else the commonest of those
    # inside that do.
    known = [source for source in sources if source[0] != OTHER] or sources or [(OTHER, "forward")]
    part, pass_ = (
        known[0]
        if own and known[0] == sources[0]
        else collections.Counter(known).most_common(1)[0][0]
    )
    if opcodes and opcodes <= _MOVING:
        part = COPIES
    op = (own or (op_names[0] if op_names else "") or _opcode(words)).split(";")[0].split("/")[-1]
    product = bool(opcodes & {"dot", "convolution"}) or any(
        target in words for target in _PRODUCT_TARGETS
    )
    return Place(
        part, pass_, op, product, encloses=_opcode(words) in ("while", "call", "conditional")
    )


def _inside(words: str, bodies: dict) -> list[str]:
    """The instructions of a fusion, those of fusions inside it among them."""
    if _opcode(words) not in ("fusion", "call", "async-start"):
        return []
    found = [w for called in _CALLED.findall(words) for _, w in bodies.get(called, [])]
    return found + [inner for w in found for inner in _inside(w, bodies)]


def _place_of_name(op_name: str) -> Place:
    """Of a kernel whose instruction is not in the program's text."""
    part, pass_ = _source(op_name, differentiated=False)
    return Place(part, pass_, op_name.split("/")[-1], product=False)


def _opcode(words: str) -> str:
    found = _OPCODE.search(words)
    return found[1] if found else ""


def _op_name(words: str) -> str:
    found = _OP_NAME.search(words)
    # Reductions' own bodies, arguments and results have names that are not paths from the program's
    # root.
    return found[1] if found and found[1].startswith("jit(") else ""


def _source(op_name: str, differentiated: bool) -> tuple[str, str]:
    """Part and pass of an op_name."""
    path = op_name.split(";")[0]
    if "rematted_computation" in path:
        pass_ = "recomputed"
    else:
        pass_ = "backward" if "transpose(" in path else "forward"
    scopes = [word for word in re.split(r"[/(),]", path) if word in PARTS]
    if scopes:
        return PARTS[scopes[-1]], pass_
    if differentiated and "jvp(" not in path:
        return OPTIMIZER, "update"
    return OTHER, pass_


# ---------------------------------------------------------------------------------------- the trace


def newest_xplane(folder: Path) -> Path:
    """The newest trace that `jax.profiler` has written into a folder.

    Raises:
        BenchError: there is none.
    """
    found = sorted(
        folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime
    )
    if not found:
        raise BenchError(f"jax.profiler left no trace in {folder}/plugins/profile")
    return found[-1]


def read_kernels(xplane: Path, module: str) -> list[Kernel]:
    """`kernels`, of a `.xplane.pb` file."""
    with warnings.catch_warnings():
        # Of jaxlib's own types, at their first use.
        warnings.filterwarnings(
            "ignore", message="builtin type .* has no __module__", category=DeprecationWarning
        )
        return kernels(list(jax.profiler.ProfileData.from_file(str(xplane)).planes), module)


def kernels(planes: Sequence, module: str) -> list[Kernel]:
    """What ran on the device, in the order of its starts: on a GPU the kernels and copies, on a CPU
    XLA's operations.

    Args:
        planes: those of `jax.profiler.ProfileData`.
        module: name of the program, such as jit_train_step; what other programs launched is left
            out.

    Raises:
        BenchError: the GPU's part of the trace has another form.
    """
    of_gpu = [
        line for plane in planes if plane.name.startswith("/device:GPU:0") for line in plane.lines
    ]
    # The other lines of that plane are sums over the same kernels, where there are any.
    streams = [line for line in of_gpu if line.name.startswith("Stream")]
    if of_gpu and not streams:
        raise BenchError(
            "expected lines named Stream #… of the GPU in the trace, found "
            f"{[line.name for line in of_gpu]}"
        )
    lines = streams or [
        line for plane in planes if plane.name == "/host:CPU" for line in plane.lines
    ]
    found = []
    for event in (event for line in lines for event in line.events):
        stats = dict(event.stats)
        # A GPU's copies may name no program; the threads of a CPU hold much that is no operation.
        if stats.get("hlo_module", module if streams else None) == module:
            op, op_name = (
                str(stats.get("hlo_op", "")),
                str(stats.get("tf_op") or stats.get("name") or ""),
            )
            found.append(Kernel(event.name, op, op_name, event.start_ns, event.duration_ns))
    return sorted(found, key=lambda kernel: kernel.start_ns)


def summary(found: Sequence[Kernel], instructions: dict[str, Place]) -> dict:
    """Where the time of a step went.

    Args:
        found: of one step.
        instructions: from `places`.

    Returns:
        "span_ms", from the first kernel's start to the last one's end; "busy_ms", when at least one
        ran; "idle_ms", the rest; "kernel_ms", the sum over the kernels, more than busy_ms where
        some ran side by side; "parts", a dict for each part and pass; "kernels", a dict for each
        kernel of each of them, the longest first; "gaps", the ten longest idle times.

    Raises:
        BenchError: there are no kernels.
    """
    placed = [
        (kernel, instructions.get(kernel.hlo_op) or _place_of_name(kernel.op_name))
        for kernel in found
    ]
    # A loop's or a call's event lies over those of its body.
    placed = [(kernel, place) for kernel, place in placed if not place.encloses]
    if not placed:
        raise BenchError(
            "the trace has no kernels of the step; on a GPU it takes CUPTI (pip install "
            "nvidia-cuda-cupti)"
        )
    parts: dict[tuple, dict] = {}
    by_kernel: dict[tuple, dict] = {}
    gaps, busy, end, last = [], 0.0, placed[0][0].start_ns, ""
    for kernel, place in placed:
        ms = kernel.duration_ns / 1e6
        key = {"part": place.part, "pass": place.pass_}
        part = parts.setdefault(
            tuple(key.values()), key | {"ms": 0.0, "products_ms": 0.0, "calls": 0}
        )
        name = re.sub(r"([._]\d+)+$", "", kernel.name)  # XLA numbers its kernels
        key |= {"name": name, "op": place.op, "product": place.product}
        one = by_kernel.setdefault(tuple(key.values()), key | {"ms": 0.0, "calls": 0})
        part["products_ms"] += ms * place.product
        for row in (part, one):
            row["ms"] += ms
            row["calls"] += 1
        if kernel.start_ns > end:
            gaps.append({"us": (kernel.start_ns - end) / 1e3, "after": last, "before": name})
        stop = kernel.start_ns + kernel.duration_ns
        busy += max(0, stop - max(end, kernel.start_ns))
        if stop >= end:
            end, last = stop, name
    span = end - placed[0][0].start_ns
    order = [(part, pass_) for part in ORDER for pass_ in PASSES]
    return {
        "span_ms": span / 1e6,
        "busy_ms": busy / 1e6,
        "idle_ms": (span - busy) / 1e6,
        "kernel_ms": sum(part["ms"] for part in parts.values()),
        "parts": [parts[key] for key in order if key in parts],
        "kernels": sorted(by_kernel.values(), key=lambda row: -row["ms"]),
        "gaps": sorted(gaps, key=lambda gap: -gap["us"])[:10],
    }


# -------------------------------------------------------------------------------- table and picture


def show(result: dict, top: int) -> None:
    """Print a row for each part with its passes, and a row for each of its longest kernels."""
    span, kernel_ms, rows = result["span_ms"], result["kernel_ms"], result["parts"]
    table = []
    for part in ORDER:
        of_part = [row for row in rows if row["part"] == part]
        if not of_part:
            continue
        table.append(_part(part, sum(row["ms"] for row in of_part), span, of_part))
        for row in [row for row in result["kernels"] if row["part"] == part][:top]:
            name = f"  {row['name'][:44]} · {row['op'][:24]}"
            figures = [f"{row['ms']:.3f}" if row["pass"] == pass_ else "" for pass_ in PASSES]
            table.append(Row(name, [*figures, "", "", "", str(row["calls"])]))
    table += [Row(), _part("all kernels", kernel_ms, span, rows)]
    table.append(_part("idle", result["idle_ms"], span))
    table.append(_part("first kernel to last", span, span))
    columns = (*PASSES, "ms", "share", "products", "calls")
    print_table(f"{_title(result)}: {_headline(result)}", columns, table)


def _part(name: str, ms: float, span: float, rows: Sequence[dict] = ()) -> Row:
    """Row of a part: milliseconds by pass and in all, share of the span, products, calls."""
    by_pass = [sum(row["ms"] for row in rows if row["pass"] == pass_) for pass_ in PASSES]
    products, calls = (sum(row[column] for row in rows) for column in ("products_ms", "calls"))
    figures = [f"{value:.3f}" if value else "" for value in (*by_pass, products)]
    return Row(
        name, [*figures[:-1], f"{ms:.3f}", f"{ms / span:.1%}", figures[-1], str(calls or "")]
    )


def _title(result: dict) -> str:
    return f"{result['device']}, {bench_step.label(result).removeprefix('gptjax · ')}"


def _headline(result: dict) -> str:
    return f"{result['untraced_ms']:.2f} ms a step without the trace, {result['span_ms']:.2f} in it"


def draw(result: dict, path: Path) -> None:
    """A bar for each part, in a colour for each pass; its ending names the format (png, pdf,
    svg)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    names = [part for part in ORDER if any(row["part"] == part for row in result["parts"])]
    figure, axes = plt.subplots(figsize=(9, 0.42 * (len(names) + 1) + 1.3))
    used, longest = {}, 0.0
    for y, part in enumerate(names):
        left = 0.0
        for row in (row for row in result["parts"] if row["part"] == part):
            axes.barh(y, row["ms"], left=left, height=0.7, color=COLOURS[row["pass"]])
            left += row["ms"]
            used[row["pass"]] = COLOURS[row["pass"]]
        axes.text(
            left, y, f"  {left:.2f} ms, {left / result['span_ms']:.1%}", fontsize=8, va="center"
        )
        longest = max(longest, left)
    axes.barh(len(names), result["idle_ms"], height=0.7, color=COLOURS["idle"])
    share = result["idle_ms"] / result["span_ms"]
    axes.text(
        result["idle_ms"],
        len(names),
        f"  {result['idle_ms']:.2f} ms, {share:.1%}",
        fontsize=8,
        va="center",
    )
    axes.set_yticks(range(len(names) + 1), [*names, "idle"], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(longest, result["idle_ms"]))
    axes.set_xlabel("ms a step, in the trace")
    axes.set_title(f"{_title(result)}\n{_headline(result)}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    shown = {name: used[name] for name in PASSES if name in used}
    axes.legend(
        handles=[Patch(color=c, label=n) for n, c in shown.items()], fontsize=8, loc="lower right"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


# ----------------------------------------------------------------------------------------- the step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Traces one training step and says which part of the model takes how long; writes the trace,
    JSON and a picture."""

    out: Path
    """Folder for all of it: profile.json, profile.png, and the trace in plugins/profile/."""
    config: Path | None = None
    """An experiment card, as for `step`. The options below override it."""
    preset: Preset | None = None
    """The model's shape, where there is no card (default: gpt2)."""
    precision: Literal["fp32", "tf32", "bf16", "bf16_residual_fp32"] | None = None
    """Default: the card's, or bf16."""
    batch: int | None = None
    """Sequences a step, in one micro-batch (default: the card's micro-batch, or 64)."""
    sequence_length: int | None = None
    """Default: the card's, or 1024."""
    attention: str | None = None
    """Back end of attention, as --model.attention of train.py."""
    loss: str | None = None
    """Back end of the head and its loss, as --model.loss."""
    norm: str | None = None
    """Back end of LayerNorm, as --model.norm."""
    mlp: str | None = None
    """Back end of the MLP, as --model.mlp."""
    recompute: Literal["none", "block", "sublayer"] | None = None
    """Activations recomputed in the backward pass, as --model.recompute."""
    algorithm: Literal["adamw", "normuon", "muon"] | None = None
    """The optimizer."""
    forward: bool = False
    """The forward pass and its loss alone."""
    top: int = 4
    """Longest kernels shown of each part; profile.json has all."""

    def run(self) -> None:
        same = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("out", "top")
        }
        same |= {
            "batch": () if self.batch is None else (self.batch,),
            "recompute": (self.recompute,) if self.recompute else (),
        }
        (config,) = Step(**same).configs()
        device = bench_step.one_device()
        name = self.config.stem if self.config else self.preset or "gpt2"
        # By default the cache does not look at op_names, and a program in it may have those of
        # older sources.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        row = bench_step.describe(name, config, forward=self.forward)
        row |= {"device": device.device_kind, "back_ends": config.kernels()}
        row |= trace(OurStep(config, device, forward=self.forward), self.out)
        found = bench_step.result(
            bench_step.command_line("profile", self), [row], device, torch=False
        )
        bench_step.write(self.out / "profile.json", found)
        draw(row, self.out / "profile.png")
        show(row, self.top)
        print(
            f"wrote {self.out / 'profile.png'}\nwrote {row['trace']}, for https://ui.perfetto.dev"
        )


def trace(step: OurStep, folder: Path) -> dict:
    """Compiles and warms up a step, traces one, and returns its `summary`, with "untraced_ms" and
    "trace", the file for Perfetto.

    Raises:
        BenchError: it needs more memory than there is, or the trace shows nothing of it.
    """
    # In a CUDA graph all kernels have one name, that of the graph.
    step.compile(
        **({"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else {})
    )
    step.check_memory()
    text = step.compiled.as_text()
    step.run(WARM_UP)
    untraced_ms = 1e3 * step.run(TIMED) / TIMED
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would slow the host and fill the trace
    # The tracer's own start shows in its first step: that trace is thrown away.
    with tempfile.TemporaryDirectory() as thrown_away:
        for path in (thrown_away, folder):
            with jax.profiler.trace(path, profiler_options=options):
                step.run(1)
    xplane = newest_xplane(folder)
    module = re.match(r"HloModule ([\w.\-]+)", text)[1]
    found = summary(read_kernels(xplane, module), places(text))
    return found | {
        "untraced_ms": untraced_ms,
        "trace": str(xplane.with_name(xplane.name.replace("xplane.pb", "trace.json.gz"))),
    }
