"""Who may import whom: docs/architecture.md says it, this enforces it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import opentinker

ROOT = Path(opentinker.__file__).parent
LINKED = ("environments", "scheduler", "server")
HEAVY = frozenset({"torch", "ray", "vllm", "transformers", "peft", "accelerate"})
MAY_IMPORT = {
    "core": {"core"},
    "environments": {"core", "environments"},
    "scheduler": {"core", "scheduler"},
    "server": {"core", "server"},
    "cli": {"core", "cli"},
}
"""What each part may import of OpenTinker. Beyond that, `cli` imports the linked parts within functions."""


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    lazy: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def part_of(module: str) -> str:
    """The part that `opentinker.<...>` belongs to."""
    first = module.split(".")[1] if "." in module else ""
    return "cli" if first == "__main__" else first if first in (*LINKED, "cli") else "core"


def files() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield part_of("opentinker." + ".".join(path.relative_to(ROOT).with_suffix("").parts)), path
    for name in LINKED:  # rglob does not follow links
        for path in sorted((ROOT / name).rglob("*.py")):
            yield name, path


def imports(path: Path) -> Iterator[Import]:
    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import(names=names):
                    yield from (Import(path, child.lineno, name.name, lazy) for name in names)
                case ast.ImportFrom(module=str(module), level=0, names=names):
                    # `from opentinker import server` names a part, too.
                    found = [f"{module}.{name.name}" for name in names] if module == "opentinker" else [module]
                    yield from (Import(path, child.lineno, name, lazy) for name in found)
                case ast.ImportFrom(level=level) if level:
                    yield Import(path, child.lineno, "." * level, lazy)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    yield from visit(child, True)
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    yield from visit(child, True)
                case _:
                    yield from visit(child, lazy)

    return visit(ast.parse(path.read_text()), False)


ALL = [(part, found) for part, path in files() for found in imports(path)]


def test_all_parts_are_looked_at() -> None:
    assert {part for part, _ in ALL} == set(MAY_IMPORT)


def test_each_part_imports_only_what_lies_below_it() -> None:
    wrong = []
    for part, found in ALL:
        if not found.module.startswith("opentinker"):
            continue
        target = part_of(found.module)
        if part == "cli" and found.lazy and target in LINKED:
            continue
        if target not in MAY_IMPORT[part]:
            wrong.append(str(found))
    assert wrong == []


def test_the_core_and_the_cli_never_import_the_heavy_libraries_not_even_lazily() -> None:
    wrong = [str(found) for part, found in ALL if part in ("core", "cli") and found.module.split(".")[0] in HEAVY]
    assert wrong == []


def test_imports_are_absolute_and_never_of_bare_top_level_names() -> None:
    wrong = [str(f) for _, f in ALL if f.module.startswith(".") or f.module.split(".")[0] in LINKED]
    assert wrong == []


CORE_MODULES = [
    ".".join(("opentinker", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for part, path in files()
    if part in ("core", "cli")
]


@pytest.mark.parametrize("modules", [["opentinker"], CORE_MODULES], ids=["the package", "every module of core and cli"])
def test_importing_loads_none_of_the_heavy_libraries(modules: list[str]) -> None:
    code = f"""
import sys
from importlib import import_module
for module in {modules!r}:
    import_module(module)
print(sorted({set(HEAVY)!r} & {{name.split(".")[0] for name in sys.modules}}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_importing_the_package_loads_next_to_nothing() -> None:
    code = "import sys; before = set(sys.modules); import opentinker; print(*sorted(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"httpx", "pydantic", "numpy", "renderers", "typer", "rich"} & {n.split(".")[0] for n in result.stdout.split()}


def test_every_public_name_exists() -> None:
    for name in opentinker.__all__:
        assert getattr(opentinker, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = opentinker.Nonsense
