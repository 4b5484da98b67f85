"""Measure the source of the library: who names whom, second dispatches, copies, cycles, lengths.

Part of `tools/house.py`. The docstring of each function says how its measure is counted.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src" / "perdure"

# All names of the library that this file knows, so that a renamed one is changed here alone.
REGISTRY, KIND_KEYS = "Registry", ("kind", "source")
"""What makes classes kinds: the call of a table, and the keys that name one."""
KIND_WORDS = {
    "kind", "kinds", "source", "resembles", "method", "stream", "model", "engine", "optimizer",
    "partition", "aggregation", "schedule",
}  # fmt: skip
"""Last words of expressions that hold the name of a kind."""
CONSTANT = "a constant in capitals"
COMPAT = re.compile(
    r"(core/moved|(config|cli)/aliases|config/saved|config/earlier_\w+|config/run_format"
    r"|report/older_results|methods/base)\.py"
)
"""Files that serve versions of the past."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Items = list[str]


class Tree:
    """The files of the library as syntax trees.

    Args:
        folder: Folder of the package, whose name is that of the package.

    """

    def __init__(self, folder: Path = SRC) -> None:
        self.folder = folder
        paths = sorted(folder.rglob("*.py"))
        self.texts = {self._module(path): path.read_text(encoding="utf-8") for path in paths}
        self.paths = {self._module(path): path.relative_to(folder).as_posix() for path in paths}
        self.trees = {module: ast.parse(text) for module, text in self.texts.items()}
        self.nodes = {module: list(ast.walk(tree)) for module, tree in self.trees.items()}
        self.kinds = dict(self._kinds())

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.folder.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def module_of(self, path: str) -> str | None:
        """Return the module that a dotted path names or lies in; None if it is not one of these."""
        path = path.replace(":", ".")
        while path and path not in self.trees:
            path = path.rpartition(".")[0]
        return path or None

    def imports(self, nodes: Iterable[ast.AST]) -> Iterator[str]:
        """Yield the modules that import statements (none of which is relative) name."""
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                yield from filter(None, (self.module_of(start + each.name) for each in node.names))

    def importers(self) -> dict[str, set[str]]:
        """Return for each module the others that name it, by import or in a dotted string."""
        dotted = re.compile(rf"{self.folder.name}(\.\w+)+(:\w+(\.\w+)*)?")
        found: dict[str, set[str]] = {module: set() for module in self.trees}
        for module, nodes in self.nodes.items():
            texts = (node.value for node in nodes if isinstance(node, ast.Constant))
            strings = [text for text in texts if isinstance(text, str) and dotted.fullmatch(text)]
            named = [*self.imports(nodes), *filter(None, map(self.module_of, strings))]
            for target in named:
                found[target] |= {module} - {target}
        return found

    def _kinds(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield the class of each kind with its module and name ("" if it has none)."""
        classes: dict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
        for module, nodes in self.nodes.items():
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append((module, node))
        for nodes in self.nodes.values():
            dicts = {name: value for name, value in _assigned(nodes) if isinstance(value, ast.Dict)}
            for node in nodes:
                if isinstance(node, ast.Call) and _word(node.func) == REGISTRY:
                    given = [*node.args, *(keyword.value for keyword in node.keywords)]
                    tables = (dicts.get(v.id) if isinstance(v, ast.Name) else v for v in given)
                    yield from self._registered(
                        (t for t in tables if isinstance(t, ast.Dict)), classes
                    )

    def _registered(
        self, tables: Iterable[ast.Dict], classes: dict[str, list[tuple[str, ast.ClassDef]]]
    ) -> Iterator[tuple[str, tuple[str, str]]]:
        for table in tables:
            for key, value in zip(table.keys, table.values, strict=True):
                kind = str(getattr(key, "value", ""))
                if isinstance(value, ast.Constant):
                    cls = re.split("[.:]", str(value.value))[-1]
                    yield cls, (self.module_of(str(value.value)) or "", kind)
                elif key is None:  # `**dict.fromkeys(NAMES, "path.of.Class")`: one for many names
                    texts = (
                        each.value for each in ast.walk(value) if isinstance(each, ast.Constant)
                    )
                    for text in filter(self.module_of, map(str, texts)):
                        yield text.rpartition(".")[2], (self.module_of(text) or "", kind)
                elif found := classes.get(_word(value)):
                    yield _word(value), (found[0][0], kind)

    def at(self, module: str, node: ast.AST) -> str:
        """Return where a node stands and its first line."""
        line = ast.unparse(node).splitlines()[0]
        return f"{self.paths[module]}:{getattr(node, 'lineno', 0)}: {line}"


@cache
def library() -> Tree:
    """Return the library as it is now, read once."""
    return Tree()


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield _word(target), node.value


def _calls(node: ast.AST) -> Iterator[ast.AST]:
    return (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))


def _word(node: ast.AST) -> str:
    """Return the last word of a name, an attribute, or what is read by a string key."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    if isinstance(node, ast.Call) and _word(node.func) == "get" and node.args:
        return str(getattr(node.args[0], "value", ""))
    return ""


def _words(node: ast.AST) -> set[str]:
    return {_word(inner) for inner in ast.walk(node)}


def _literal_kind(cls: ast.ClassDef) -> str:
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and _word(node.target) in KIND_KEYS:
            return str(getattr(node.value, "value", ""))
    return ""


def _body(function: Function) -> list[ast.stmt]:
    """Return the statements of a function after its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def one_importer(tree: Tree) -> Items:
    """List files that exactly one other file names, and that hold no registered kind.

    A file names another by an import statement (wherever it stands) or by a string that is as a
    whole the dotted path of it or of something in it. `from package import name` names the
    file that `name` is, else the package's `__init__.py`. A package counts as its `__init__.py`.
    """
    kinds = {module for module, _ in tree.kinds.values()}
    return [
        f"{tree.paths[module]} <- {tree.paths[next(iter(names))]}"
        for module, names in tree.importers().items()
        if len(names) == 1 and module not in kinds
    ]


def second_dispatch(tree: Tree) -> Items:
    """List the places that ask for a kind outside the file of its class.

    Kinds are the classes in tables of a Registry and those of a config's unions, unions of these,
    and classes between them and a section's base class. A place is a call of isinstance or
    issubclass or a class pattern of `match` that names such a class; or a comparison (==, !=, in,
    not in) of an expression whose last word says that it is a kind (KIND_WORDS: `config.kind`,
    `values["kind"]`) with the string of a kind's name, or with a constant in capitals.
    """
    home: dict[str, set[str]] = defaultdict(set)
    for cls, (module, name) in tree.kinds.items():
        home[cls].add(module)
        if name:
            home[f"'{name}'"].add(module)
    for cls, module in _groups(tree):
        home[cls].add(module)
    found = []
    for module, nodes in tree.nodes.items():
        for node in nodes:
            names: set[str] = set()
            if isinstance(node, ast.Call) and _word(node.func) in ("isinstance", "issubclass"):
                names = _words(node.args[1])
            elif isinstance(node, ast.MatchClass):
                names = {_word(node.cls)}
            elif isinstance(node, ast.Compare):
                names = set(_kinds_compared(node))
            if any(name == CONSTANT or module not in home.get(name, {module}) for name in names):
                found.append(tree.at(module, node))
    return found


def _kinds_compared(node: ast.Compare) -> Iterator[str]:
    operands = [node.left, *node.comparators]
    if not any(_word(operand) in KIND_WORDS for operand in operands):
        return
    for operand in operands:
        constants = (
            operand.elts if isinstance(operand, ast.Tuple | ast.Set | ast.List) else [operand]
        )
        yield from (f"'{one.value}'" for one in constants if isinstance(one, ast.Constant))
        if isinstance(operand, ast.Name) and operand.id.isupper() and _word(node.left) in KIND_KEYS:
            yield CONSTANT


def _groups(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield unions of kinds and classes between kinds and sections' bases, with their modules."""
    homes: dict[str, str] = {}
    bases: dict[str, Items] = {}
    for module, nodes in tree.nodes.items():
        for name, value in _assigned(nodes):
            words = _words(value) - {""} if isinstance(value, ast.BinOp) else set()
            if words and words <= tree.kinds.keys():
                yield name, module
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                homes[node.name], bases[node.name] = module, [_word(base) for base in node.bases]
    for base in {base for cls in tree.kinds for base in bases.get(cls, ())}:
        if any(above in homes for above in bases.get(base, ())):
            yield base, homes[base]


def duplicates(tree: Tree) -> Items:
    """List functions that have the same arguments and statements as another one.

    Counted are functions of at least two statements besides the docstring (four with it and `def`).
    Names and constants must be the same; docstrings and decorators are ignored.
    """
    groups: dict[str, Items] = defaultdict(list)
    for module, nodes in tree.nodes.items():
        for node in nodes:
            if isinstance(node, Function) and len(_body(node)) >= 2:
                same = "".join(ast.dump(part) for part in (node.args, *_body(node)))
                groups[same].append(f"{tree.paths[module]}:{node.lineno}: {node.name}")
    return [item for group in groups.values() if len(group) > 1 for item in group]


def compat_modules(tree: Tree) -> Items:
    """List the files that only serve versions of the past (COMPAT)."""
    return [path for path in tree.paths.values() if COMPAT.fullmatch(path)]


def long_files(tree: Tree, lines: int = 450) -> Items:
    """List files of more lines than one reads in a sitting."""
    return [
        f"{tree.paths[module]}: {len(text.splitlines())}"
        for module, text in tree.texts.items()
        if len(text.splitlines()) > lines
    ]


def function_lines(tree: Tree) -> list[int]:
    """Return the lengths of all functions without signature and docstring, in ascending order."""
    bodies = (
        _body(node) for nodes in tree.nodes.values() for node in nodes if isinstance(node, Function)
    )
    return sorted((b[-1].end_lineno or 0) - b[0].lineno + 1 if b else 0 for b in bodies)


def cycles(tree: Tree) -> Items:
    """List files that import themselves over others by statements at the top of files.

    Imports below `if TYPE_CHECKING` and within functions do not count.
    """
    needs = {module: set(tree.imports(body.body)) - {module} for module, body in tree.trees.items()}
    reached: dict[str, set[str]] = {}
    for module in needs:
        found, new = set[str](), set(needs[module])
        while new:
            found |= new
            new = set().union(*(needs[each] for each in new)) - found
        reached[module] = found
    return [tree.paths[module] for module, found in reached.items() if module in found]


def needed_files(module: str, tree: Tree) -> Items:
    """List the files of methods and algebra that one opens to read a module of methods.

    They are those that it imports, directly or through such files; packages' own files do not
    count.
    """
    found, new = set[str](), {module}
    while new:
        named = {name for each in new for name in tree.imports(tree.nodes[each])}
        paths = {name: tree.paths[name] for name in named}
        found |= new
        new = {
            name
            for name, path in paths.items()
            if path.startswith(("methods/", "algebra/")) and not path.endswith("__init__.py")
        } - found
    return [tree.paths[name] for name in found - {module}]


SOURCE_MEASURES: dict[str, Callable[[Tree], Items]] = {
    "files with one importer": one_importer,
    "second dispatches": second_dispatch,
    "duplicates": duplicates,
    "compat modules": compat_modules,
    "long files": long_files,
    "files in import cycles": cycles,
    "files that FOT needs": partial(needed_files, "perdure.methods.fot"),
    "files that FedProTIP needs": partial(needed_files, "perdure.methods.fedprotip"),
}
