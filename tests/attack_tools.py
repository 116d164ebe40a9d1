"""Run a file of attacks as a process, and judge the outcomes of its trials."""

import json
from collections import Counter

from process_tools import python


def in_a_process(file: str, trials: int) -> list[dict]:
    """Run a file of attacks as a script; return the rows that it prints."""
    return json.loads(python(file, str(trials)))


def counted(rows: list[dict], right: set[str]) -> Counter:
    """Return the number of rows with each outcome; fail if one is not among the right ones."""
    assert [row for row in rows if row["outcome"] not in right] == []
    return Counter(row["outcome"] for row in rows)
