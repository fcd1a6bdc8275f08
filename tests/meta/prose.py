"""Count the word habits that our English avoids, in the text for people: docstrings, comments and
messages. Text in code font (`…`) does not count.

    python tests/meta/prose.py [--lines HABIT] PATH…
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HABITS = {
    "clause as a noun": r"\bwhat (?:is|are|was|were|has|had|it|its|they|he|we|comes?|came|goes|"
    r"went|stands?|lies|runs?|ran|can|could|may|must|should|would|will|does|did|this|that|the|a|an|each|"
    r"one|happens|happened|another|follows|remains|belongs|any)\b",
    "docstring begins with What": r"\A(?:What)\b",
    "docstring begins with As": (
        r"\A(?:As|Those|Which|Of|By|From|Its|Whatever|Whoever|Who|Whose)\b"
    ),
    "tell, told": r"\b(?:tells?|told)\b",
    "say, said": r"\b(?:says?|said)\b",
    "nobody, somebody, anybody": r"\b(?:no|some|any)body\b",
    "who without a noun": r"\bwhoever\b|(?:^|[.:;,(] |\b(?:and|by|for|of|to|or|from|with) )who\b",
    # "No longer" is an adverb, and `None` is a value of Python.
    "negated nouns": r"\b(?:is|are|was|were) (?:no(?! longer)|(?-i:none))\b",
    "possessives apart": (
        r"\bof (?:ours|theirs|its own|their own|his own|mine|yours)\b|\ba person's\b"
    ),
    "lower-case linux": r"\blinux\b(?![./_-])",
    "goes on": r"\b(?:go|goes|going|went) on\b",
    "any more": r"\bany ?more\b",
    "beside": r"\bbeside\b",
    "anew": r"\banew\b",
    "to be had": r"\bto be had\b|\bcan be had\b",
    "for ever": r"\bfor ?ever\b",
}
_PATTERNS = {
    habit: re.compile(pattern, re.IGNORECASE if "linux" not in habit else 0)
    for habit, pattern in HABITS.items()
}
_CODE_FONT = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)


class Text(NamedTuple):
    """A text for people, and the line where it begins."""

    line: int
    text: str
    is_docstring: bool


def texts(source: str) -> Iterator[Text]:
    """Yield the docstrings, the messages (string literals with a space) and the comments."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(id(first.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(node.lineno, node.value, id(node) in docstrings)
    comments = [
        (token.start[0], token.string.lstrip("#: "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from (Text(line, text, is_docstring=False) for line, text in comments)


def matches(source: str) -> Iterator[tuple[str, int, str]]:
    """Yield (habit, line, the words around it) for each match."""
    for text in texts(source):
        prose = _CODE_FONT.sub("`", text.text)
        for habit, pattern in _PATTERNS.items():
            if habit.startswith("docstring") and not text.is_docstring:
                continue
            for match in pattern.finditer(prose):
                line = text.line + prose.count("\n", 0, match.start())
                start = max(0, match.start() - 30)
                yield habit, line, " ".join(prose[start : match.end() + 40].split())


def files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def count(paths: list[Path]) -> Counter[str]:
    """Return how often each habit occurs below these paths."""
    counter: Counter[str] = Counter(dict.fromkeys(HABITS, 0))
    for path in files(paths):
        counter.update(habit for habit, _, _ in matches(path.read_text()))
    return counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--lines", action="store_true", help="print each match with its line")
    arguments = parser.parse_args()
    if arguments.lines:
        for path in files(arguments.paths):
            for habit, line, words in matches(path.read_text()):
                print(f"{path}:{line}: {habit}: … {words} …")
    for habit, number in count(arguments.paths).items():
        print(f"{number:6}  {habit}")


if __name__ == "__main__":
    main()
