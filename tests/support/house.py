#!/usr/bin/env python3
"""Measures the layout of the tree; tests/house.sh says how to call it."""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import house_names
import house_text as text

# Every figure, in the order of the report, and its bound. A bound is loosened or tightened here.
BOUNDS = {
    "headers": ("<=", 115),
    "public_headers": ("<=", 75),
    "core_public_headers": ("<=", 40),
    "public_names": None,
    "public_names_in_kvmeld": ("<", 300),
    "public_macros": None,
    "names_not_as_listed": ("<=", 0),
    "names_without_comment": ("<=", 0),
    "names_outside_their_namespace": ("<=", 0),
    "include_cycles": ("<=", 0),
    "include_directions": ("<=", 0),
    # What holds today; the rule is 60 lines and a complexity of 20, and these only fall.
    "longest_function": ("<=", 100),
    "highest_complexity": ("<=", 33),
    "braces_not_understood": ("<=", 1),
    "longest_example": ("<=", 80),
    "lines_over_100_columns": ("<=", 0),
    "files_not_formatted": ("<=", 0),
    "comment_percent": (">=", 12),
    "headers_without_sentence": ("<=", 0),
    "detail_names_across": ("<=", 0),
    # Of named kernels, whose tests and benchmarks are the exception.
    "detail_names_in_examples": None,
    "detail_names_in_tests": None,
    "lazy_in_public_headers": ("<=", 0),
    "parse_errors": ("<=", 0),
}
# The rules themselves, where the tree is not there yet; the self-test holds its own tree to them.
RULES = BOUNDS | {
    "longest_function": ("<=", 60),
    "highest_complexity": ("<=", 20),
    "braces_not_understood": ("<=", 0),
    "detail_names_in_examples": ("<=", 0),
}
FOLDERS = ("include", "tests", "examples", "benchmarks")
SUFFIXES = {".hpp", ".cuh", ".cpp", ".cu", ".inc"}
LIST_HEAD = """\
# The public names: NAMESPACE::NAME HEADER, then macros. A test compares this list with the headers.
# Written by: bash tests/house.sh --write-names
"""


class Figure:
    def __init__(self, value, items=(), over=None):
        self.value = value  # None: not measured
        self.items = list(items)  # what it counts, in words
        self.over = self.items if over is None else list(over)  # those that a breach names

    def breaks(self, bound):
        if bound is None or self.value is None:
            return False
        sign, limit = bound
        return not {"<": self.value < limit, "<=": self.value <= limit, ">=": self.value >= limit}[
            sign
        ]


class Tree:
    """The C++ files below a root, read once."""

    def __init__(self, root):
        self.root = root
        self.files = {}  # path relative to root → text
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*")):
                if path.suffix in SUFFIXES and path.is_file():
                    self.files[str(path.relative_to(root))] = path.read_text()
        inside = "include/kvmeld/"
        self.headers = {f[len(inside) :]: t for f, t in self.files.items() if f.startswith(inside)}
        self.codes = {header: text.code_of(t) for header, t in self.headers.items()}
        self.includes = {header: self.included(t) for header, t in self.headers.items()}

    def included(self, content):
        names = [
            n[len("kvmeld/") :] for n in text.INCLUDE.findall(content) if n.startswith("kvmeld/")
        ]
        return sorted({n for n in names if n in self.headers})


# ---- From the text -------------------------------------------------------------------------------


def count_headers(tree, figures):
    for name, chosen in (
        ("headers", lambda header: True),
        ("public_headers", text.is_public),
        ("core_public_headers", text.is_core_public),
    ):
        headers = sorted(filter(chosen, tree.headers))
        figures[name] = Figure(len(headers), headers)


def check_includes(tree, figures):
    cycles = [" <-> ".join(group) for group in text.cycles(tree.includes)]
    figures["include_cycles"] = Figure(len(cycles), cycles)
    directions = text.direction_breaches(tree.includes)
    figures["include_directions"] = Figure(len(directions), directions)


def check_functions(tree, figures):
    functions, unread = [], []
    for header, content in tree.headers.items():
        found, understood = text.functions_of(content)
        functions += [(header, function) for function in found]
        unread += [] if understood else [header]
    figures["braces_not_understood"] = Figure(len(unread), unread)
    for name, measure in (("longest_function", "lines"), ("highest_complexity", "complexity")):
        ordered = sorted(
            ((getattr(f, measure), f"{h}:{f.line} {f.name}") for h, f in functions), reverse=True
        )
        words = [f"{value:4} {where}" for value, where in ordered]
        limit = BOUNDS[name][1]
        over = [w for w, (value, _) in zip(words, ordered) if value > limit]
        figures[name] = Figure(ordered[0][0] if ordered else 0, words[: max(10, len(over))], over)


def check_lines(tree, figures):
    wide = [
        f"{file}:{number} has {len(line)}"
        for file, content in tree.files.items()
        for number, line in enumerate(content.split("\n"), 1)
        if len(line) > 100
    ]
    figures["lines_over_100_columns"] = Figure(len(wide), wide)
    # Lines of examples/NAME.cpp; what measures stands in examples/studies.
    long = sorted(
        ((content.count("\n"), file) for file, content in tree.files.items()
         if file.startswith("examples/") and file.count("/") == 1),
        reverse=True,
    )
    most = BOUNDS["longest_example"][1]
    figures["longest_example"] = Figure(
        long[0][0] if long else 0,
        [f"{lines:4} {file}" for lines, file in long],
        [f"{lines:4} {file}" for lines, file in long if lines > most],
    )
    shares = {header: text.comment_lines(content) for header, content in tree.headers.items()}
    percent = 100 * sum(c for c, _ in shares.values()) / max(1, sum(n for _, n in shares.values()))
    poorest = sorted(
        (100 * comments / max(1, filled), h) for h, (comments, filled) in shares.items()
    )
    figures["comment_percent"] = Figure(
        round(percent, 1), [f"{share:5.1f} {h}" for share, h in poorest]
    )
    silent = [
        h for h, content in tree.headers.items() if not text.is_sentence(text.head_comment(content))
    ]
    figures["headers_without_sentence"] = Figure(len(silent), silent)
    lazy = [
        f"{header}:{number}"
        for header, code in tree.codes.items()
        if text.is_public(header)
        for number, line in enumerate(code.split("\n"), 1)
        if re.search(r"\bKVMELD_LAZY\b", line)
    ]
    figures["lazy_in_public_headers"] = Figure(len(lazy), lazy)


def check_detail_outside(tree, figures):
    """Uses of detail: none in examples and benchmarks; tests of named kernels may."""
    found = {"examples": set(), "benchmarks": set(), "tests": set()}
    for file, content in tree.files.items():
        folder = file.split("/")[0]
        if folder not in found:
            continue
        code = text.code_of(content)
        for name in re.findall(r"\bdetail\s*::\s*(\w+)|\bnamespace\s+[\w:= ]*\bdetail\b", code):
            found[folder].add(f"{file} names detail::{name}")
        for header in text.INCLUDE.findall(content):
            if re.match(r"kvmeld/(.*/)?detail/", header):
                found[folder].add(f"{file} includes {header}")
    programs = sorted(found["examples"] | found["benchmarks"])
    figures["detail_names_in_examples"] = Figure(len(programs), programs)
    figures["detail_names_in_tests"] = Figure(len(found["tests"]), sorted(found["tests"]))


def check_format(tree, figures, notes):
    for name in ("clang-format-14", "clang-format"):
        program = shutil.which(name)
        version = (
            program
            and subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        )
        if version and re.search(r"version 14\.", version):
            break
    else:
        notes.append("skipped: no clang-format 14 (Debian 12: apt install clang-format)")
        figures["files_not_formatted"] = Figure(None)
        return
    run = subprocess.run(
        [program, "--dry-run", *tree.files], cwd=tree.root, capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(run.stderr)
    unclean = sorted(set(re.findall(r"^(\S+?):\d+:\d+: warning: code should be", run.stderr, re.M)))
    figures["files_not_formatted"] = Figure(len(unclean), unclean)


# ---- From the declarations -----------------------------------------------------------------------


def macros_of(code):
    """Macros that a header leaves defined."""
    defined = set(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(KVMELD_\w+)", code, re.M))
    return defined - set(re.findall(r"^[ \t]*#[ \t]*undef[ \t]+(KVMELD_\w+)", code, re.M))


def public_names(names):
    return {
        key: declaration
        for key, declaration in names.declared.items()
        if text.is_public(key[1])
        and declaration.namespace.split("::")[0] == "kvmeld"
        and "detail" not in declaration.namespace.split("::")
    }


def read_list(path):
    if not path.is_file():
        return set()
    return {line for line in path.read_text().split("\n") if line and not line.startswith("#")}


def check_names(tree, figures, notes, flags):
    """Fills the figures that need a parser, and returns the lines of the list."""
    for figure in (
        "public_names",
        "public_names_in_kvmeld",
        "names_without_comment",
        "detail_names_across",
        "names_not_as_listed",
        "names_outside_their_namespace",
        "parse_errors",
    ):
        figures[figure] = Figure(None)
    macros = {
        f"{macro} {h}"
        for h, code in tree.codes.items()
        if text.is_public(h)
        for macro in macros_of(code)
    }
    figures["public_macros"] = Figure(len(macros), sorted(macros))
    words = {
        word for header, code in tree.codes.items() for word in text.detail_words(header, code)
    }
    if house_names.MISSING:
        notes.append("skipped: " + house_names.MISSING)
        figures["detail_names_across"] = Figure(len(words), sorted(words))
        return None
    readable = [h for h in tree.headers if h.endswith((".hpp", ".cuh"))]
    names = house_names.read_names(tree.root, readable, tree.codes, flags)
    for header, missing in sorted(names.left_out.items()):
        notes.append(f"left out: {header} ({missing} is not installed)")
    public = public_names(names)
    listed = read_list(tree.root / "tests/public_names.txt")
    # What could not be read stays as it is listed.
    kept = {line for line in listed if line.split()[-1] in names.left_out}
    lines = {f"{name} {header}" for name, header in public} | kept
    distinct = sorted({line.split()[0] for line in lines if "::" in line})
    figures["public_names"] = Figure(len(distinct), distinct)
    flat = [name for name in distinct if name.count("::") == 1]
    figures["public_names_in_kvmeld"] = Figure(len(flat), flat)
    bare = sorted(
        f"{header}:{declaration.line} {name}"
        for (name, header), declaration in public.items()
        if not any(d.documented for (other, _), d in public.items() if other == name)
    )
    figures["names_without_comment"] = Figure(len(bare), bare)
    lines |= macros
    changes = [f"new: {line}" for line in sorted(lines - listed)] + [
        f"lost: {line}" for line in sorted(listed - lines)
    ]
    figures["names_not_as_listed"] = Figure(len(changes), changes)
    across = sorted(names.uses | words)
    figures["detail_names_across"] = Figure(len(across), across)
    strays = stray_names(names)
    figures["names_outside_their_namespace"] = Figure(len(strays), strays)
    figures["parse_errors"] = Figure(len(names.errors), names.errors)
    return lines


def stray_names(names):
    """Declarations outside of their component's namespace; the core's is what no other owns."""
    components = {text.namespace_of(c) for c in set(text.MAY_INCLUDE) | text.LEAVES if c != "core"}
    core_names = {n for n, header in names.declared if text.component(header) == "core"}
    strays = []
    for (name, header), declaration in names.declared.items():
        namespace = declaration.namespace
        home = text.namespace_of(text.component(header))
        within = (namespace + "::").startswith(home + "::")
        if text.component(header) == "core":
            within = within and not any(
                (namespace + "::").startswith(other + "::") for other in components
            )
        # An overload of a name of the core stands where its callers look for it.
        within = within or (namespace == "kvmeld" and name in core_names)
        if not within and not (declaration.forward and not namespace.startswith("kvmeld")):
            strays.append(f"{header}:{declaration.line} {name} is not in {home}")
    return sorted(strays)


def write_names(path, lines):
    names = sorted(line for line in lines if "::" in line)
    macros = sorted(line for line in lines if "::" not in line)
    path.write_text(LIST_HEAD + "\n".join(names) + "\n\n" + "".join(line + "\n" for line in macros))


# ---- The report ----------------------------------------------------------------------------------


def measure(root, flags=()):
    """All figures, what was left out, and the lines of the list of public names."""
    tree, figures, notes = Tree(root), {}, []
    count_headers(tree, figures)
    check_includes(tree, figures)
    check_functions(tree, figures)
    check_lines(tree, figures)
    check_detail_outside(tree, figures)
    check_format(tree, figures, notes)
    lines = check_names(tree, figures, notes, list(flags))
    assert set(figures) == set(BOUNDS)
    return figures, notes, lines


def breaches(figures):
    return [name for name, bound in BOUNDS.items() if figures[name].breaks(bound)]


def report(figures, notes):
    for name, bound in BOUNDS.items():
        value = figures[name].value
        limit = "-" if bound is None else f"{bound[0]}{bound[1]}"
        broken = "  broken" if figures[name].breaks(bound) else ""
        print(f"{name:30} {'-' if value is None else value:>7}  {limit}{broken}")
    for note in notes:
        print(note)
    for name in breaches(figures):
        items = figures[name].over
        print(f"\n{name} is broken (all of it: bash tests/house.sh --list {name}):")
        for item in items[:10]:
            print("  " + item)
        if len(items) > 10:
            print(f"  and {len(items) - 10} more")
        if name == "names_not_as_listed":
            print("  Where each of these is meant: bash tests/house.sh --write-names")


def main():
    parser = argparse.ArgumentParser(description=__doc__, prog="tests/house.sh")
    parser.add_argument(
        "--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2]
    )
    parser.add_argument(
        "--list", choices=list(BOUNDS), metavar="NAME", help="print all that one figure counts"
    )
    parser.add_argument("--write-names", action="store_true", help="rewrite tests/public_names.txt")
    parser.add_argument(
        "--self-test", action="store_true", help="break each rule once in a small tree"
    )
    parser.add_argument(
        "-I", action="append", default=[], metavar="DIR", help="where includes are looked for, too"
    )
    arguments = parser.parse_args()
    if arguments.self_test:
        import house_self_test

        return house_self_test.run()
    root = arguments.root.resolve()
    figures, notes, lines = measure(root, ["-I" + folder for folder in arguments.I])
    if arguments.list:
        print("\n".join(figures[arguments.list].items))
        return 0
    if arguments.write_names:
        if lines is None or figures["parse_errors"].value:
            print("\n".join(notes + figures["parse_errors"].items))
            return 1
        write_names(root / "tests/public_names.txt", lines)
        return 0
    report(figures, notes)
    if breaches(figures):
        return 1
    return 77 if any(note.startswith("skipped: ") for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
