"""Damaged checkpoints are never restored without a word.

Two checkpoints of a small model are saved. Each trial copies them and changes one thing: a bit, a
block of zeros or the length of one file of the newer one, or folders and files as a whole (renamed,
swapped, mixed, missing). Then the newest readable one is restored, as train.py does.

Outcomes: `fell back` (the damage was named and the older checkpoint restored), `refused` (no
checkpoint was restored, in a sentence), `same` (the change touched no value that is read, and
everything restored is what was saved). Failures: `silent wrong`, `crash`, `hang`, `control
characters`.
"""

import functools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from attack_tools import counted, damage, flip_bits, in_a_process, judged, resize, zero_block

from gptjax.config import Config
from gptjax.training import resume
from gptjax.training.checkpoint import Checkpoints, silence_orbax
from gptjax.weights import CheckpointError
from gptjax.weights.sources import CHECKPOINTS

OLD, NEW = 15, 30


def make(folder: Path):
    """Save two checkpoints; return their states."""
    keys, states, checkpoints = jax.random.split(jax.random.key(0), 4), {}, Checkpoints(folder, 2)
    params = {"w": jax.random.normal(keys[0], (64, 48)), "b": jax.random.normal(keys[1], (300,))}
    for step in (OLD, NEW):
        states[step] = {
            "params": jax.tree.map(lambda x, step=step: x * step, params),
            "low": jax.random.normal(keys[2], (33, 7)).astype(jnp.bfloat16),
            "rng": jax.random.key_data(keys[3]),
            "step": jnp.int32(step),
        }
        checkpoints.save(step, states[step], {"data": {"position": step * 16}})
        checkpoints.wait()
    checkpoints.close()
    return states


def restore(folder: Path, states: dict) -> str:
    """Restore the newest readable checkpoint; return the outcome."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), states[OLD]
    )
    found = resume.find(Config(name=folder.parent.name, runs_dir=folder.parent.parent))
    if found.step is None:
        return "refused"
    pairs = zip(
        jax.tree.leaves(found.restore(like)), jax.tree.leaves(states.get(found.step)), strict=True
    )
    if found.meta["data"]["position"] != found.step * 16 or not all(
        np.array_equal(*pair) for pair in pairs
    ):
        return "silent wrong"
    return "fell back" if found.damaged else "same"


# Changes of the content of a file: mostly a bit.
CONTENTS = (*(6 * (flip_bits,)), zero_block, resize, resize)
# Changes of the folder of checkpoints: moves, copies (from to) and removals, one after another.
MOVES = {
    "steps swapped": "mv 30 x; mv 15 30; mv x 15",
    "states swapped": "mv 30/state x; mv 15/state 30/state; mv x 15/state",
    "metadata swapped": "mv 30/meta x; mv 15/meta 30/meta; mv x 15/meta",
    "only the older one is left": "rm 30",
    "only the newer one is left": "rm 15",
    "both removed": "rm 30; rm 15",
    "an empty folder of a later step": "mkdir 45",
    "a file with a step's name": "cp 30/meta/metadata 45",
    "a foreign folder": "mkdir notes",
    "the state is a file": "rm 30/state; cp 30/meta/metadata 30/state",
    "the state is empty": "rm 30/state; mkdir 30/state",
    **{
        f"{move} to {later}": f"{move} {later}"
        for move in ("mv 30", "mv 15", "cp 15")
        for later in (31, 100000)
    },
}
PARTS = ("state", "meta", "_CHECKPOINT_METADATA", "commit_success.txt", "state/_METADATA")
for name in (*PARTS, "state/manifest.ocdbt", "state/d"):
    MOVES[f"{name} removed"] = f"rm 30/{name}"
    MOVES[f"{name} of the older one"] = f"rm 30/{name}; cp 15/{name} 30/{name}"


def moves(text: str) -> Callable[[Path], None]:
    """Return the change of a text of `MOVES`."""
    actions = {
        "mv": shutil.move,
        "cp": lambda a, b: (shutil.copytree if a.is_dir() else shutil.copyfile)(a, b),
        "rm": lambda a: shutil.rmtree(a) if a.is_dir() else a.unlink(),
        "mkdir": Path.mkdir,
    }

    def change(folder: Path) -> None:
        for step in text.split("; "):
            name, *paths = step.split()
            actions[name](*(folder / path for path in paths))

    return change


def folder_changes() -> dict[str, Callable[[Path], None]]:
    changes = {name: moves(text) for name, text in MOVES.items()}
    changes["a link to the older one"] = lambda folder: (folder / "45").symlink_to(folder / "15")
    return changes


def run(flips: int, seed: int = 0) -> list[dict]:
    """Change bytes of one file in each of `flips` trials, spread over all files; then make each
    change of whole files and folders."""
    silence_orbax()
    rng, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as temporary:
        good = Path(temporary) / "good"
        states = make(good)
        files = sorted(
            str(p.relative_to(good)) for p in (good / str(NEW)).rglob("*") if p.is_file()
        )
        change = lambda folder, name: damage(folder / name, rng.choice(CONTENTS), rng)
        trials = [(name, functools.partial(change, name=name)) for name in files]
        trials = [trials[i % len(trials)] for i in range(flips)]
        for number, (name, change) in enumerate([*trials, *folder_changes().items()]):
            folder = Path(temporary) / f"trial{number}" / CHECKPOINTS
            shutil.copytree(good, folder)
            change(folder)
            outcome, said = judged(functools.partial(restore, folder, states), CheckpointError)
            rows.append({"change": name, "outcome": outcome, "said": said})
            shutil.rmtree(folder)
    return rows


def test_damaged_checkpoints_are_never_restored_without_a_word():
    """In a process of its own, which a crash or a hang would end."""
    found = counted(in_a_process(__file__, 40), {"fell back", "refused", "same"})
    assert found["fell back"] > 20


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
