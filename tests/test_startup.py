"""benchmarks/tools/startup.py measures the starts of several checkouts."""

import importlib
import json
import sys

TRAIN = """
import json, os, pathlib, sys, time
of = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, cache = f"{of['--runs-dir']}/{of['--name']}", os.environ["JAX_COMPILATION_CACHE_DIR"]
hits = os.path.exists(cache)
os.makedirs(folder), os.makedirs(cache, exist_ok=True)
train = {"kind": "train", "loss": 2.5}
start = {"kind": "event", "event": "start", "commit": None, "device": "cpu"}
first = {"kind": "event", "event": "first step", "seconds": {"imports": 0.25}}
first |= {"cache_hits": hits, "cache_misses": 0}
pathlib.Path(folder, "log.jsonl").write_text("\\n".join(map(json.dumps, [start, train, first])))
print("first step  after 0.3 s", flush=True)
time.sleep(60)
"""


def test_rows_and_table_of_two_checkouts(tmp_path, monkeypatch, capsys):
    trees = [tmp_path / "before", tmp_path / "after"]
    for tree, text in zip(trees, (TRAIN, "raise SystemExit('no such option')"), strict=True):
        tree.mkdir()
        (tree / "train.py").write_text(text)
    out = tmp_path / "startup.json"
    arguments = ["--trees", *map(str, trees), "--cases", "bf16", "--warm", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["startup.py", *arguments])
    monkeypatch.syspath_prepend("benchmarks/tools")
    importlib.import_module("startup").main()
    rows = json.loads(out.read_text())["rows"]
    turns = [(str(tree), start) for start in ("cold", "warm") for tree in trees]
    assert [(row["tree"], row["start"]) for row in rows] == turns
    assert [row["cache_hits"] for row in rows[::2]] == [False, True]  # each tree has its cache
    assert rows[0]["parts"] == {"imports": 0.25} and rows[0]["loss"] == 2.5
    assert rows[0]["total"] < 50  # killed at the first step
    assert rows[1]["error"] == "no such option\n"
    assert "no such option" in capsys.readouterr().out
