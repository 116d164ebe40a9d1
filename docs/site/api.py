"""Pages of the public names, from their signatures and docstrings.

A name is public if `__all__` of a module contains it. Docstrings are Markdown with the sections of
Google's style.
"""

import importlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import griffe

PACKAGES = {"gptjax": "src", "pallas_kernels": "."}
RST_LINK = re.compile(r"`([^`<]+?)\s*<(https?:[^>]+)>`_")
HEADINGS = {"parameters": "Arguments", "other parameters": "Arguments", "attributes": "Fields"}


def pages(root: Path, sources: str) -> dict[str, str]:
    """Return the text of every page by its path: an index, a page of each module and each name.

    Args:
        sources: address of the repository's files, or empty.
    """
    logging.getLogger("griffe").setLevel(logging.ERROR)  # "scale, bias" is no parameter's name
    folders = [root / folder for folder in PACKAGES.values()]
    loader = griffe.GriffeLoader(search_paths=folders, allow_inspection=False)
    packages = [loader.load(name) for name in PACKAGES]
    modules = {m.path: m for package in packages for m in public_modules(package)}
    out, first = {"index.md": table_page("# API", modules, "{}/index.md")}, {}
    for path, module in modules.items():
        names = sorted(importlib.import_module(path).__all__, key=str.lower)
        items = {name: definition_of(module[name]) for name in names}
        # A module hides the name that its package imports from it: gptjax.optim.normuon.
        items |= {name: item[name] for name, item in items.items() if item.is_module}
        out[f"{path}/index.md"] = table_page(f"# {path}\n\n{body(module)}", items, "{}.md")
        for name, item in items.items():
            original = first.setdefault(item.path, f"{path}.{name}")
            file = item.filepath.relative_to(root).as_posix()
            where = f"[Source]({sources}/{file}#L{item.lineno})" if sources else f"Source: `{file}`"
            out[f"{path}/{name}.md"] = page(f"{path}.{name}", item, original, where)
    return out


def public_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    """Yield the module and its submodules that have `__all__`."""
    if "__all__" in module.members:
        yield module
    for _, inner in sorted(module.modules.items()):
        if not inner.is_alias:
            yield from public_modules(inner)


def definition_of(item: griffe.Object | griffe.Alias) -> griffe.Object:
    return item.final_target if item.is_alias else item


def table_page(head: str, items: dict[str, griffe.Object], link: str) -> str:
    """Return a page with a link to each item."""
    rows = [f"| [{name}]({link.format(name)}) | {summary(i)} |" for name, i in items.items()]
    return "\n".join([head, "", "| name | meaning |", "| --- | --- |", *rows, ""])


def summary(item: griffe.Object) -> str:
    """Return the first sentence of a docstring as a table cell."""
    text = item.docstring.value.split("\n\n")[0] if item.docstring else ""
    return re.split(r"(?<=[.:]) ", " ".join(text.split()))[0].rstrip(":").replace("|", "\\|")


def page(path: str, item: griffe.Object, original: str, where: str) -> str:
    """Return the page of a public name: of a function, a class or a value."""
    name = path.rpartition(".")[2]
    if path != original:
        module, _, same = original.rpartition(".")
        return f"# {name}\n\n`{path}` is [`{original}`](../{module}/{same}.md).\n"
    parts = [f"# {name}", directive(path, item, ":::::")]
    has_equations = path.startswith(("pallas_kernels.", "gptjax.optim."))
    if has_equations and item.is_function and item.module.docstring:
        parts += [f"## Module {item.module.path}", body(item.module)]
    return "\n\n".join([*parts, f"{where}\n"])


def directive(path: str, item: griffe.Object, fence: str, is_member: bool = False) -> str:
    """Return the description of a name, with the descriptions of a class's members inside."""
    kind, options, head = item.kind.value, [], path
    if "property" in item.labels or item.is_attribute:
        kind = "attribute" if is_member else "data"
        for option, value in (("type", item.annotation), ("value", item.value)):
            if value is not None and len(str(value)) < 60:
                options.append(f":{option}: {json.dumps(str(value))}")
    elif item.is_function:
        kind, head = "method" if is_member else "function", item.signature(name=path)
    elif "dataclass" not in item.labels and "__init__" in item.all_members:
        init = definition_of(item.all_members["__init__"])
        head = init.signature(name=path, return_type=False)
    head = re.sub(r"\(self(, )?", "(", head)
    lines = [f"{fence}{{py:{kind}}} {head}", *options, "", body(item), ""]
    for name, member in item.all_members.items() if item.is_class else ():
        member = definition_of(member)
        documented = member.docstring or (member.is_attribute and member.annotation)
        if documented and (not name.startswith("_") or name == "__call__"):
            lines += [directive(name, member, fence[1:], is_member=True), ""]
    return "\n".join([*lines, fence])


def body(item: griffe.Object) -> str:
    """Return a docstring as Markdown: sections become lists of definitions."""
    if not item.docstring:
        return ""
    parts = []
    # The lines of a section are one result, not one each.
    whole = {"returns_multiple_items": False, "returns_named_value": False}
    for section in item.docstring.parse("google", warn_unknown_params=False, **whole):
        kind = section.kind.value
        if kind == "text":
            parts.append(section.value)
        elif kind == "admonition" and section.title == "Example":
            parts += ["**Example**", f"```python\n{section.value.contents}\n```"]
        elif kind == "admonition":
            text = RST_LINK.sub(r"[\1](\2)", section.value.contents)
            rows = re.sub(r"^(?=\S)", "- ", text, flags=re.MULTILINE)
            parts.append(f"**{section.title}**\n\n{rows}")
        elif kind == "examples":
            parts.append("**Examples**")
            parts += [t if k.value == "text" else f"```python\n{t}\n```" for k, t in section.value]
        else:
            parts.append(f"**{HEADINGS.get(kind, kind.capitalize())}**")
            parts += [definition(kind, entry) for entry in section.value]
    return RST_LINK.sub(r"[\1](\2)", "\n\n".join(parts))


def definition(kind: str, entry) -> str:
    """Return an entry of a section: an argument with its meaning, or a result."""
    text = entry.description.replace("\n", "\n  ")
    name = str(entry.annotation) if kind == "raises" else getattr(entry, "name", "")
    return f"`{name}`\n: {text}" if name else entry.description
