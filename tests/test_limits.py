"""The code stays small, and its imports point one way."""

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import demo
import grpo

ROOT = Path(__file__).parents[1]
CORE = ("grpo.py", "geoqa.py", "vision_tokens.py", "reward.py")
TOP = {*CORE, "losses.py", "demo.py", "report.py"}
SOURCE = sorted(path for folder in (".", "support", "recipes", "demo_model") for path in (ROOT / folder).glob("*.py"))
ABOVE = {"grpo", "demo", "report", "recipes", "demo_model", "tests", "tools"}  # what support must not import
SET_ASIDE = {  # their signatures are a library's
    "attention", "branching_convolution.branching", "branching_delta_rule.branching", "one_token_delta_rule.rule",
    "one_token_convolution.convolution", "fused_delta_rule", "FusedDeltaRule.forward"}
MODULES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE}


def lines(name):
    return len((ROOT / name).read_text(encoding="utf-8").splitlines())


def functions(node, name=""):
    """Yields (qualified name, node) of every function below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            qualified = f"{name}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield qualified, child
            yield from functions(child, qualified)
        else:
            yield from functions(child, name)


def test_lengths():
    assert lines("grpo.py") <= 640 and sum(map(lines, CORE)) <= 1150 and lines("losses.py") <= 200
    assert sum(lines(path) for path in SOURCE) <= 4300
    assert {path.name for path in SOURCE if path.parent == ROOT} == TOP


@pytest.mark.parametrize("path", SOURCE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_are_short(path):
    for name, node in functions(MODULES[path]):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        assert node.end_lineno - first < 40, f"{name} has {node.end_lineno - first + 1} lines"
        count = len(arguments) - (arguments[:1] in (["self"], ["cls"], ["ctx"]))
        assert count <= 6 or name in SET_ASIDE, f"{name} has {count} parameters"
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 120


def test_the_config_is_readable():
    inherited = {field.name for field in dataclasses.fields(grpo.RunSettings)}
    assert 20 < len({field.name for field in dataclasses.fields(grpo.Config)} - inherited) <= 36
    assert {field.name for field in dataclasses.fields(demo.DemoConfig)} == {
        field.name for field in dataclasses.fields(grpo.Config)}


def imported(module):
    """The first part of each module's name that is imported anywhere, also inside functions."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def test_imports_point_one_way():
    for path, module in MODULES.items():
        if path.parent.name == "support":
            assert not ABOVE & set(imported(module)), path
        elif path.name in ("losses.py", "geoqa.py", "vision_tokens.py", "reward.py"):
            assert not (ABOVE | TOP - {path.name}) & set(imported(module)), path
    errors = imported(MODULES[ROOT / "support" / "errors.py"])
    assert not list(errors), "text helpers and the error stand at the bottom"


def test_no_import_runs_in_a_circle():
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCE}
    heads = {names[path]: {node.module for node in module.body if isinstance(node, ast.ImportFrom)}
             for path, module in MODULES.items()}
    for start in heads:
        reached, left = set(), list(heads[start])
        while left:
            name = left.pop()
            if name in heads and name not in reached:
                reached.add(name)
                left += heads[name]
        assert start not in reached, f"{start} imports itself through others"


@pytest.mark.slow
def test_help_comes_quickly():
    done = subprocess.run([sys.executable, "grpo.py", "--help"], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"COLUMNS": "120"})
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) <= 100
