"""Write the tables of docs/: measured figures from the files in benchmarks/results/, and the back
ends of each GPU from the registry of pallas_kernels.

    python benchmarks/tools/result_tables.py            # replace the tables
    python benchmarks/tools/result_tables.py --check    # exit code 1 if a table is not current

A table is between `<!-- table: NAME -->` and `<!-- end -->` in its page. Below each table are the
device and the date of the measurement, and links to the result files.
"""

import argparse
import re
import sys
from pathlib import Path

from _tables import ROOT, TABLES, Results

TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def generate(name: str) -> str:
    """Return a table with its caption, between its markers."""
    page, table = TABLES[name]
    results = Results(ROOT / page)
    # There is no caption without results.
    parts = [f"<!-- table: {name} -->", table(results), results.caption(), "<!-- end -->"]
    return "\n\n".join(filter(None, parts))


def current(page: Path, text: str) -> str:
    """Return a page's text with its tables replaced.

    Raises:
        ValueError: the tables of the page are not those that TABLES has for it.
    """
    expected = sorted(name for name, (of, _) in TABLES.items() if ROOT / of == page)
    if (found := sorted(TABLE.findall(text))) != expected:
        raise ValueError(f"{page}: expected the tables {expected}, found {found}")
    return TABLE.sub(lambda match: generate(match[1]), text)


def pages() -> list[Path]:
    return sorted({ROOT / page for page, _ in TABLES.values()})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    try:
        texts = {page: page.read_text(encoding="utf-8") for page in pages()}
        new = {page: current(page, text) for page, text in texts.items()}
    except (OSError, ValueError) as error:  # a page or a result is absent, or not as expected
        print(f"error: {error}", file=sys.stderr)
        return 1
    stale = [page for page in texts if new[page] != texts[page]]
    for page in stale:
        if not arguments.check:
            page.write_text(new[page], encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'not current' if arguments.check else 'written'}")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
