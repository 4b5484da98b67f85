"""Find retired names in code and discouraged phrases in prose.

    python tools/check_words.py [FILE ...]

Every finding is printed as `file:line: message`; the exit code is 1 if there is one. Names are
looked for in Python code (definitions, uses, arguments, imports), phrases in the comments,
docstrings and string literals of Python files and in the whole text of other files.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

RETIRED = {
    "About": "FeatureFunction", "Aggregator": "SecAggServer", "Answers": "StackedUploads",
    "Beside": "RowFeatures", "Bond": "PairSecrets", "Cores": "CpuBudget",
    "Counts": "RunCounters", "Crowd": "SecAggTransport", "Cut": "DisjointPartition",
    "Diary": "MethodLog", "Draws": "Rng", "FEWEST": "MIN_CLIENTS", "Failure": "FailedUpload",
    "FileRoom": "FileCacheStorage", "Finish": "ClientResult", "Follower": "RunFollower",
    "Garbled": "MalformedMessage", "GridLink": "FlowerTransport", "Guard": "ClipAndNoise",
    "Heats": "HeatMapFigure", "Holder": "ColumnSink", "Judge": "Evaluator",
    "Keeper": "CoresetSelector", "Known": "FeatureCache", "LocalCrowd": "SimulatedParticipants",
    "JoinedInputs": "JoinedExamples", "Material": "Source",
    "Natural": "NonNegativeInt", "Net": "BoundNetwork", "NormalizedSource": "Source",
    "NotNegative": "NonNegativeFloat", "OpenRequest": "UnmaskRequest", "Pass": "ForwardPass",
    "Participant": "SecAggClient", "PoolShares": "PoolPartition",
    "Refused": "UnsafeRequest", "Room": "CacheStorage", "Scores": "Evaluation",
    "Sealed": "MaskedUpload", "SecureTally": "SecureUploadCollector",
    "SettleRequest": "DropoutRequest", "Shard": "ClientData", "Silence": "NoProgress",
    "Space": "Subspace", "Spot": "RoundPosition", "Spread": "GramAccumulator",
    "Standing": "RunProgress", "SystemDraws": "SystemRng", "Tally": "UploadCollector",
    "TooFew": "BelowThreshold", "Versions": "ClientStateHistory", "Whole": "Integer",
    "absorb": "aggregate", "as_the_model_reads": "tokenize_if_text",
    "ask_to_end": "terminate", "broadcast_lasting": "OncePerTask",
    "busiest": "max_uploads_per_client", "colour": "color", "colours": "colors",
    "consolidates": "task_end", "crowd": "transport", "finish_all": "make_upload",
    "found_federation": "create_federation", "hand_in": "create_submission",
    "heaviest": "max_client_weight", "hyper_parameters": "hyperparameters",
    "is_known": "is_builtin", "judges": "evaluators", "keep_own_method": "save_custom_method",
    "knowing": "with_cached_features", "lead_run": "run_submission",
    "leave_page": "write_run_report", "left_over": "interference", "lifted": "stacked",
    "loss_outputs": "active_outputs", "make_material": "normalize_source",
    "make_shares": "make_partition", "mean_scores": "mean_evaluation",
    "needed_of": "min_survivors", "no_switch": "reject_bool", "occurring": "unique_labels",
    "own_method_folder": "custom_method_dir", "preferred_head": "Preferences.head",
    "preferred_weighting": "Preferences.weighting", "project_right": "project_out_rows",
    "remembering": "with_feature_cache", "rounds_in_all": "total_rounds",
    "seconds_a_client": "seconds_per_client", "settles_at_once": "is_incremental",
    "shown_fields": "per_client_fields",
    "spelled_out": "fill_defaults", "summarise": "summarize", "take_part": "run_node",
    "taking_part": "running_nodes", "tally": "collector", "tells_of_progress": "is_progress",
    "widen": "add_directions", "with_usual_values": "resolve_normalization",
    "without_defaults": "drop_defaults",
}  # fmt: skip
"""Names that no code may define or use, with their successors."""

SECAGG = ("src/perdure/privacy/secagg/", "tests/privacy/", "tests/federation/")
RETIRED_EXCEPT = {
    "Masked": ("PresentPartition", SECAGG),
    "Shares": ("Partition", SECAGG),
}
"""Retired names with another meaning in some folders: successor, and the folders."""

_UNITS = (
    "task|client|round|row|class|step|layer|node|seed|method|process|core|example|batch|epoch|"
    "second|minute|line|column|mode|group|worker|machine|image|pixel|parameter"
)
_COUNTED = (
    "rounds|bytes|seconds|clients|examples|tasks|rows|classes|values|images|steps|epochs|columns|"
    "outputs|lines|numbers|calls|messages|uploads|times|once|twice|GB|MB|kB|ms|s"
)

PHRASES = {
    r"of (?:its|their|his|her|our|your|[\w-]+'s) own"
    r"(?=\s*(?:[^\s\w\\(]|$)|\s+(?:in|on|as|for|and|or|but|that|which|to|with|by|is|are|has|from)\b)":
        "'custom', 'separate' or 'local'",
    rf"\b(?:(?:{_COUNTED})|[Oo]ne(?: (?!of\b)\w+)?) an? (?:{_UNITS})\b(?! (?:that|of))": "'per'",
    r"\bin all(?=[.,;:)]|\s*$)": "'in total'",
    r"\bgo(?:es|ing)? on\b": "'continue' or 'resume'",
    r"\bcom(?:e|es|ing) along\b": "'is bundled' or 'arrives'",
    r"\bst(?:and|ands|ood) still\b": "'is frozen'",
    r"\b(?:is|are|was|were|be|been|being) told\b|\btold (?:to be|that|what|which|of|by|apart)\b":
        "'given', 'passed', 'predicted' or 'distinguished'",
    r"\bWithout it\b|[;,(] without it\b|\bwithout it[,:]":
        "'If None, ...', 'Default: ...' or name the thing",
    r"\bby itself\b": "'automatically' or 'alone'",
    r"[Oo]ptimis(?!t|m)": "'optimiz...'",
    r"[Nn]ormalis": "'normaliz...'",
    r"[Vv]ectoris": "'vectoriz...'",
    r"(?:[Ss]ummar|[Ii]nitial|[Ss]erial|[Qq]uant|[Rr]egular|[Cc]entral|[Ss]ynchron|[Rr]andom|"
    r"[Mm]inim|[Mm]axim|[Gg]eneral|[Oo]rgan|[Rr]ecogn)is(?:e|ation|ing)": "'...ize'",
    r"[Hh]yper-parameter": "'hyperparameter'",
    r"\b[Ww]hole numbers?\b": "'integer'",
    r"\b(?:[Ss]ome|[Ee]very)body\b": "the noun, such as 'client' or 'user'",
    r"\b[Ww]hoever\b": "the noun, such as 'the holder of the key'",
    r"\banew\b": "'again'",
    r"[Nn]eighbour": "'neighbor'",
    r"\b[Gg]rey": "'gray'",
    r"[Cc]olour": "'color'",
    r"\b(?:[Cc]entre|[Bb]ehaviour|[Ll]abelled(?!by)|[Mm]odelled|[Tt]ravelled|[Ff]avour)":
        "the American spelling",
    r"(?<![\w.])(?<!Return\s)None: (?=[a-z])": "'If None, ...'",
    r"\b(?:for|by|of|to) who\b|\bWho [a-z]+": "a subject, such as 'clients that'",
    r"\bgot [^;\n]*, allowed\b": "'{key}: must be {expected}, got {value!r}'",
}  # fmt: skip
"""Phrases that prose avoids, as regular expressions, with what to write instead."""

SUFFIXES = (".py", ".md", ".yaml", ".js", ".css", "Makefile")
EXEMPT = (
    "tools/check_words.py", "tests/tools/test_check_words.py",
)  # fmt: skip
"""Files that must name old words."""


@dataclass(frozen=True)
class Finding:
    """A retired name or a discouraged phrase."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the named files, or all files of the repository; return the exit code."""
    parser = argparse.ArgumentParser(description="Find retired names and discouraged phrases.")
    parser.add_argument("files", nargs="*", help="default: all files that git tracks")
    paths = parser.parse_args(arguments).files or tracked_files()
    findings = [
        finding
        for path in paths
        if is_checked(path)
        for finding in check(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def tracked_files() -> list[str]:
    """Return the paths of all files that git tracks, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def is_checked(path: str) -> bool:
    """Return whether a file is one of those whose words are checked."""
    return path.endswith(SUFFIXES) and not path.startswith(EXEMPT)


def check(path: str, text: str) -> list[Finding]:
    """Return the findings in a file.

    Args:
        path: Path relative to the root, with slashes. Its ending says whether it is Python.
        text: Content of the file.

    """
    is_python = path.endswith(".py")
    names = retired_names(path, text) if is_python else ()
    prose = prose_of(text) if is_python else text
    findings = [*names, *phrases(path, prose)]
    return sorted(findings, key=lambda finding: finding.line)


def retired_names(path: str, text: str) -> Iterator[Finding]:
    """Yield the retired names that Python code defines or uses."""
    tree = ast.parse(text)
    foreign = _foreign_modules(tree)
    for node in ast.walk(tree):
        for name in _names(node, foreign):
            successor = _successor(name, path)
            if successor is not None:
                line = getattr(node, "lineno", 1)
                yield Finding(path, line, f"{name!r} is retired, use {successor!r}")


def _successor(name: str, path: str) -> str | None:
    successor, folders = RETIRED_EXCEPT.get(name, (RETIRED.get(name), ()))
    return None if path.startswith(folders) and folders else successor


def _foreign_modules(tree: ast.AST) -> set[str]:
    """Return the names of modules of other packages, whose attributes are not ours to name."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    aliases = (alias for node in imports for alias in node.names)
    return {
        alias.asname or alias.name.partition(".")[0]
        for alias in aliases
        if alias.name.partition(".")[0] != "perdure"
    }


def _names(node: ast.AST, foreign: set[str]) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.arg(arg=name):
            return [name]
        case ast.Attribute(value=ast.Name(id=owner)) if owner in foreign:
            return []
        case ast.Attribute(attr=name):
            return [name]
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.alias(name=name, asname=asname):
            return [*name.split("."), *([asname] if asname else [])]
    return []


def prose_of(code: str) -> str:
    """Return Python code with everything but comments and strings replaced by NUL characters.

    Line breaks stay, and so do positions. Comment signs and quotation marks become spaces, so that
    a phrase is found across lines and across strings that are joined implicitly.
    """
    lines = code.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    prose = [sign if sign.isspace() else "\0" for sign in code]
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in _PROSE:
            begin = starts[token.start[0] - 1] + token.start[1]
            prose[begin : begin + len(token.string)] = _bare(token)
    return "".join(prose)


_PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def _bare(token: tokenize.TokenInfo) -> str:
    """Return a comment or string of the same length without its signs."""
    if token.type == tokenize.COMMENT:
        return token.string.replace("#", " ", 1)
    opening = re.match(r"\w*(\"\"\"|'''|\"|')", token.string)
    if opening is None:
        return token.string
    size, end = len(opening[0]), len(opening[1])
    return " " * size + token.string[size:-end] + " " * end


def phrases(path: str, text: str) -> Iterator[Finding]:
    """Yield the discouraged phrases in a text; line breaks count as spaces."""
    for pattern, hint in PHRASES.items():
        for found in re.finditer(pattern.replace(" ", r"\s+"), text):
            line = text.count("\n", 0, found.start()) + 1
            words = " ".join(found[0].split())
            yield Finding(path, line, f"{words!r}: write {hint}")


if __name__ == "__main__":
    sys.exit(main())
