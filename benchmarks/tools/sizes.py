"""Print the lines of Python of each folder and the words of the documentation.

    python benchmarks/tools/sizes.py

Files that git does not track are not counted.
"""

import argparse
import subprocess
from collections import Counter
from pathlib import Path


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    root = Path(__file__).resolve().parents[2]
    lines, words = Counter(), Counter()
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, check=True, text=True
    )
    for name in map(Path, listed.stdout.splitlines()):
        folders = (name, *name.parents[:-1]) if len(name.parts) == 1 else name.parents[:-1]
        if name.suffix == ".py":
            lines.update(dict.fromkeys(folders, len((root / name).read_text().splitlines())))
        elif name.suffix == ".md":
            words.update(dict.fromkeys(folders, len((root / name).read_text().split())))
    for title, counts in (("lines of Python", lines), ("words of Markdown", words)):
        print(title)
        for folder, count in sorted(counts.items(), key=lambda item: item[0].parts):
            print(f"  {count:7,}  {folder.as_posix()}")


if __name__ == "__main__":
    main()
