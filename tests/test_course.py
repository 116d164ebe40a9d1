"""docs/course: the solutions pass the tests of every chapter, and the exercises as shipped fail.

Chapter 12 needs four devices, so its solution is tested by the reader's command, in a process of
its own.
"""

import ast
import copy
import functools
import importlib
import re
from pathlib import Path

import pytest
from process_tools import python

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "docs" / "course"
CHAPTERS = sorted(path.name for path in COURSE.glob("ch[0-9][0-9]_*"))
FOUR_DEVICES = "ch12_devices"
MOST_WORDS = 700


def file_of(chapter):
    return COURSE / chapter / f"test_{chapter[:4]}.py"


def names_in(chapter):
    """The names of a chapter's tests, read from the source: imports would slow each collection."""
    functions = ast.parse(file_of(chapter).read_text(encoding="utf-8")).body
    names = [node.name for node in functions if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_")]


@pytest.fixture
def course(monkeypatch):
    """Import a module of the course by its path from docs/course."""
    monkeypatch.syspath_prepend(str(COURSE))
    return importlib.import_module


@pytest.mark.parametrize(
    "chapter, test",
    [
        (chapter, test)
        for chapter in CHAPTERS
        if chapter != FOUR_DEVICES
        for test in names_in(chapter)
    ],
)
def test_the_solution_passes(chapter, test, course):
    tests = course(f"{chapter}.{file_of(chapter).stem}")
    getattr(tests, test)(course(f"{chapter}.solution"))


def test_four_devices_by_the_readers_command():
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--solutions")
    shown = python(*command, f"docs/course/{FOUR_DEVICES}", cwd=ROOT)
    count = len(names_in(FOUR_DEVICES))
    assert re.search(rf"^{count} passed in", shown, flags=re.MULTILINE), shown


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_test_of_an_exercise_fails(chapter, course):
    tests = course(f"{chapter}.{file_of(chapter).stem}")
    for test in names_in(chapter):
        with pytest.raises((NotImplementedError, AssertionError)):
            getattr(tests, test)(course(f"{chapter}.exercise"))


def is_todo(statement):
    """Whether a statement is what an exercise has in place of a solution."""
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Raise) and "NotImplementedError" in ast.dump(statement)
    )


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_an_exercise_is_its_solution_without_the_bodies(chapter):
    exercise, solution = (
        ast.parse((COURSE / chapter / name).read_text(encoding="utf-8"))
        for name in ("exercise.py", "solution.py")
    )
    todos = {
        node.name: node.body[1]
        for node in exercise.body
        if isinstance(node, ast.FunctionDef) and is_todo(node.body[-1])
    }
    assert todos
    without = copy.deepcopy(solution)
    for node in without.body:
        if isinstance(node, ast.FunctionDef) and node.name in todos:
            assert not is_todo(node.body[-1])
            node.body[1:] = [todos[node.name]]
    assert ast.dump(without) == ast.dump(exercise)


def test_the_overview_links_every_chapter():
    text = (COURSE / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((ch\w+/README\.md)\)", text)
    assert links == [f"{chapter}/README.md" for chapter in CHAPTERS] and len(CHAPTERS) == 12


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_page_is_short_and_its_examples_run(chapter, course):
    """Each page ends with the place in gptjax; the examples print their comments."""
    text = (COURSE / chapter / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= MOST_WORDS
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    assert headings[-1] == "In gptjax" and "Exercise" in headings
    assert re.search(rf"^pytest docs/course/{chapter}( -s)?$", text, flags=re.MULTILINE)
    exercise = (COURSE / chapter / "exercise.py").read_text(encoding="utf-8")
    for name in re.findall(r"^\d+\. `(\w+)", text, flags=re.MULTILINE):
        assert f"def {name}(" in exercise
    examples = re.findall(r"^```py\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert examples
    for example in examples:
        printed: list[str] = []
        exec(example, {"print": functools.partial(_keep, printed)})
        assert printed == re.findall(r"(?:print\(.*\)  |^)# (.+)$", example, flags=re.MULTILINE)


def _keep(printed, *values):
    printed.append(" ".join(map(str, values)))
