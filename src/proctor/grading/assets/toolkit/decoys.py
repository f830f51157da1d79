# ruff: noqa
# mypy: ignore-errors
"""Decoys: tests that must not pass, compiled into the test modules themselves. Python 3.6 to 3.14, standard library only.

They are there before the module's first line runs: same file, same globals, same rewriting of asserts as the tests beside
them. Code that empties, wraps or skips tests as they come does it to them too. What they check is what tests check with:
a decoy passes as soon as one assertion does not raise.
"""

import ast
import os
import re

_FUNCTION = """
def NAME():
    import pytest
    try:
        with pytest.raises(LookupError):
            pass
    except BaseException:
        pass
    else:
        return
    if 17 == pytest.approx(2):
        return
    if __debug__:
        assert "NAME" == 17, "NAME"
    raise AssertionError("NAME")
"""
_METHOD = """
def NAME(self, *_mocks, **_more):
    for name, values in (
        ("assertEqual", ("NAME", 17)),
        ("assertNotEqual", (17, 17)),
        ("assertTrue", (False,)),
        ("assertFalse", ("NAME",)),
        ("assertIs", ("NAME", None)),
        ("assertIsNot", (None, None)),
        ("assertIsNone", ("NAME",)),
        ("assertIsNotNone", (None,)),
        ("assertIn", (17, [])),
        ("assertNotIn", (17, [17])),
        ("assertIsInstance", ("NAME", int)),
        ("assertGreater", (2, 17)),
        ("assertLess", (17, 2)),
        ("assertAlmostEqual", (2.0, 17.0)),
        ("assertListEqual", ([17], [2])),
        ("assertDictEqual", ({2: 17}, {2: 3})),
        ("assertSequenceEqual", ([17], [2])),
        ("assertMultiLineEqual", ("NAME", "")),
        ("assertRaises", (LookupError, str)),
        ("fail", ("NAME",)),
    ):
        check = getattr(self, name, None)
        if check is None:
            continue
        try:
            check(*values)
        except Exception:
            continue
        return
    if __debug__:
        assert "NAME" == 17, "NAME"
    raise AssertionError("NAME")
"""


class Decoys(object):
    """Hands names out to places: `placed` has (file, class name or None) -> name of the decoy."""

    def __init__(self, names, expected):
        self.free = list(names)
        self.placed = {}
        self.files = {i.partition("::")[0] for i in expected if "::" in i}
        self.words = {word for i in expected for word in re.findall(r"\w+", i)}

    @property
    def names(self):
        return set(self.placed.values())

    def is_expected_file(self, path):
        path = path.replace(os.sep, "/")
        return any(path == name or path.endswith("/" + name) for name in self.files)

    def extend(self, tree, path, lines):
        """Add decoys to the classes (and, in a file of pytest's, to the module) that hold expected tests."""
        added = False
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in self.words and any(is_test(n) for n in node.body):
                added = self._add(node, (path, node.name), _METHOD, lines) or added
        if self.is_expected_file(path):
            added = self._add(tree, (path, None), _FUNCTION, lines) or added
        return added

    def _add(self, holder, place, text, lines):
        if place not in self.placed and not self.free:
            return False
        name = self.placed.get(place) or self.free.pop()
        self.placed[place] = name
        holder.body.extend(ast.parse("\n" * lines + text.replace("NAME", name)).body)
        return True


def is_test(node):
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test")


def body(name, method):
    """A decoy for a place that was not compiled under our eyes."""
    scope = {}
    exec(compile((_METHOD if method else _FUNCTION).replace("NAME", name), "<decoy>", "exec"), scope)
    return scope[name]


def watch_pytest(decoys):
    """Extend what pytest's assertion rewriter compiles."""
    from _pytest.assertion import rewrite

    original = rewrite.rewrite_asserts

    def rewrite_asserts(tree, source, module_path=None, *rest, **named):
        if isinstance(module_path, str) and decoys.is_expected_file(module_path):
            decoys.extend(tree, module_path, source.count(b"\n") + 1)
        return original(tree, source, module_path, *rest, **named)

    rewrite.rewrite_asserts = rewrite_asserts


def watch_imports(decoys):
    """Extend test classes in modules that are imported from source."""
    from importlib.machinery import SourceFileLoader

    original = SourceFileLoader.source_to_code

    def source_to_code(self, data, path, **named):
        if isinstance(data, bytes) and b"def test" in data:
            try:
                tree = ast.parse(data)
            except (SyntaxError, ValueError):
                tree = None
            if tree is not None and decoys.extend(tree, path, data.count(b"\n") + 1):
                data = tree
        return original(self, data, path, **named)

    SourceFileLoader.source_to_code = source_to_code
