"""Build the site: the pages of docs/, a page for each public name and the executed notebooks.

python docs/site/build.py [OPTION OF sphinx-build …]

The site is build/site/html. A warning is an error.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import api
from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).parents[2]
DOCS, OUT = ROOT / "docs", ROOT / "build/site"
sys.path.insert(0, str(ROOT / "benchmarks/tools"))
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
NAME = re.compile(r"(?<![\[`])`([\w.]+)`(?![`\]])")
UNIT = re.compile(r"(?<=\d) (?=[%×](?: |$))", re.MULTILINE)


def sources() -> str:
    """Return the address of the repository's files on GitHub; empty outside GitHub Actions."""
    if "GITHUB_REPOSITORY" not in os.environ:
        return ""
    return "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/blob/{GITHUB_SHA}".format_map(os.environ)


def page_of() -> dict[Path, Path]:
    """Return the file of each Markdown page inside the site by its file in the repository."""
    pages = {path: path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md"))}
    pages |= {ROOT / name: Path(name.lower()) for name in ("CONTRIBUTING.md", "CHANGELOG.md")}
    return {
        path: page.with_name("index.md") if page.name == "README.md" else page
        for path, page in pages.items()
    }


def with_links(path: Path, pages: dict[Path, Path]) -> str:
    """Return a page whose links fit the site.

    A link to a file outside the site points to the code host; without one, the path is the text. A
    link whose text is the name of a page has the page's title.
    """
    here = pages[path].parent

    def link(match: re.Match) -> str:
        text, _, anchor = match.groups(default="")
        target = (path.parent / match[2]).resolve()
        if not target.exists():
            raise SystemExit(f"{path}: the link to {match[2]} has no target")
        if target in pages:
            new = pages[target].relative_to(here, walk_up=True).as_posix()
            text = "" if text.endswith(".md") else text
        elif target.is_relative_to(DOCS / "images"):
            new = target.relative_to(DOCS / here, walk_up=True).as_posix()
        else:
            file = target.relative_to(ROOT).as_posix()
            if not sources():
                return f"`{file}`" if file.endswith(text.strip("`")) else f"{text}: `{file}`"
            new = f"{sources()}/{file}"
        return f"[{text}]({new}{anchor})"

    return UNIT.sub("\N{NO-BREAK SPACE}", LINK.sub(link, path.read_text(encoding="utf-8")))


def with_names(page: str, text: str, names: dict[str, str]) -> str:
    """Return a page in which public names are links to their pages.

    Args:
        names: the page of each full name. In pages of the API and of kernels, names of the module
            are links, too.
    """
    folder = Path(page).parent
    module = {"api": folder.name, "kernels": "pallas_kernels"}.get(page.partition("/")[0], "")

    def link(match: re.Match) -> str:
        target = names.get(match[1]) or names.get(f"{module}.{match[1]}") or page
        new = Path(target).relative_to(folder, walk_up=True).as_posix()
        return match[0] if target == page else f"[{match[0]}]({new})"

    # Code, headings and the terms of definition lists are kept.
    kept = r"(^ *(`{3,}).*?^ *\2`*$|^    .*?$|^#.*?$|^ *`[^`]*`$)"
    parts = re.split(kept, text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if i % 3 == 1 else NAME.sub(link, part) for i, part in enumerate(parts) if i % 3 != 2
    )


def navigation(pages: dict[str, str]) -> None:
    """Append the tables of contents to the index pages.

    The captions are the sections of an index with links to pages of its folder. Pages without a
    link follow.
    """

    def index_of(page: str) -> str | None:
        folder, *outer = Path(page).parents
        folders = outer if Path(page).name == "index.md" else [folder, *outer]
        indices = ((folder / "index.md").as_posix() for folder in folders)
        return next((index for index in indices if index in pages), None)

    for index in [page for page in pages if Path(page).name == "index.md"]:
        folder = Path(index).parent
        below = [page for page in pages if index_of(page) == index]
        trees = {}
        for section in re.split(r"^(?=## )", pages[index], flags=re.MULTILINE):
            caption = section.partition("\n")[0].lstrip("# ")
            for _, link, _ in LINK.findall(section):
                page = (folder / link).as_posix()
                if page in below:
                    below.remove(page)
                    trees.setdefault(caption, []).append(link)
        for page in below:
            caption = "Notebooks" if page.startswith("notebooks/") else "Reference"
            trees.setdefault(caption, []).append(Path(page).relative_to(folder).as_posix())
        for caption, links in trees.items():
            look = ":maxdepth: 1" if caption == "Reference" else ":hidden:"
            tree = ["```{toctree}", look, f":caption: {caption}", "", *links, "```"]
            pages[index] += "\n".join(["", *tree, ""])


def main(options: list[str]) -> int:
    import document_options

    source = OUT / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(DOCS / "images", source / "images")
    files = page_of()
    pages = {page.as_posix(): with_links(path, files) for path, page in files.items()}
    pages["configuration.md"] = document_options.page()
    written = api.pages(ROOT, sources())
    pages |= {f"api/{name}": text for name, text in written.items()}
    navigation(pages)
    names = {page[4:-3].replace("/", "."): page for page in pages if page.startswith("api/")}
    pages = {page: with_names(page, text, names) for page, text in pages.items()}
    for name, text in pages.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    strict = ("--fail-on-warning", "--keep-going", "--quiet")
    where = ("-c", str(Path(__file__).parent), str(source), str(OUT / "html"))
    return sphinx([*strict, "-b", "dirhtml", *options, *where])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
