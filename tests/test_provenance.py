"""gptjax.provenance: what produced a run."""

import datetime
import subprocess
import sys

from gptjax import provenance


def test_the_commit_is_that_of_the_sources_or_unknown(tmp_path, monkeypatch):
    """An installed package in somebody else's repository does not have that repository's commit."""
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    package = tmp_path / "site-packages" / "gptjax"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(provenance.gptjax, "__file__", str(package / "__init__.py"))
    assert provenance.commit() is None
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    assert provenance.commit() is None
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert head.stdout.startswith(provenance.commit())
    (package / "__init__.py").write_text("changed")
    assert provenance.commit() == f"{head.stdout[:12]}-dirty"


def test_the_record_of_a_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "a run"])
    monkeypatch.setattr(provenance, "commit", lambda: "0123456789ab")
    found = provenance.of_process()
    assert found["command"] == "python train.py --name 'a run'"
    began = datetime.datetime.fromisoformat(found["date"])
    assert abs(datetime.datetime.now().astimezone() - began) < datetime.timedelta(seconds=10)
    assert found["commit"] == "0123456789ab" and {"gptjax", "jax"} <= found["versions"].keys()


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None
