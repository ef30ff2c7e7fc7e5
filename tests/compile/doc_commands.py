#!/usr/bin/env python3
"""Checks that what the documentation tells a reader to run or to open is there.

    doc_commands.py ROOT

Of every `bash {examples,benchmarks,tests}/run.sh ...` in README.md, CONTRIBUTING.md and docs/*.md: the
example exists and knows the flags, the filter matches a benchmark's or a test's name. And that files
of the tree and headers that are named exist. Nothing is built, so benchmarks are known by the
beginnings of their names in the source.
"""
import itertools
import pathlib
import re
import shlex
import sys

COMMAND = re.compile(r"bash (examples|benchmarks|tests)/run\.sh([^`\n]*)")
FILE = re.compile(r"\b((?:examples|benchmarks|tests|docs)/[\w/]+\.(?:cpp|hpp|cu|cuh|py|sh|md|cmake))\b")
HEADER = re.compile(r"<(kvmeld/[\w/]+\.(?:hpp|cuh))>")


def expanded(pattern):
    """A regular expression's alternatives without their groups: a(b|c)d|e gives abd, acd, e."""
    depth, parts, current = 0, [[]], ""
    alternatives = []
    for c in pattern + "|":
        if c == "(" and depth == 0:
            parts.append([current])
            current = ""
        elif c == ")" and depth == 1:
            parts.append(current.split("|"))
            current = ""
        elif c == "|" and depth == 0:
            parts.append([current])
            alternatives += ["".join(p) for p in itertools.product(*[p for p in parts if p])]
            parts, current = [[]], ""
            continue
        else:
            current += c
        depth += (c == "(") - (c == ")")
    return alternatives


def literal(pattern):
    """What stands before the first operator of a regular expression."""
    return re.match(r"[^.*+?\[\]^$\\{}]*", pattern.lstrip("^")).group()


class Checker:
    def __init__(self, root):
        self.root = root
        self.problems = []
        self.commands = 0
        text = "".join(p.read_text() for p in sorted((root / "benchmarks").glob("*.?pp")))
        names = re.findall(r'"([a-z_]+(?:/[^"]*)?)"', text)
        self.benchmarks = [name for name in names if "/" in name] + ["compile_time/"]
        tests = sorted((root / "tests").glob("*/*.c*"))
        self.tests = [str(p.relative_to(root / "tests").with_suffix("")) for p in tests]

    def example(self, arguments):
        name = "01"
        if arguments and not arguments[0].startswith("-"):
            name = arguments.pop(0)
        folder = self.root / "examples"
        sources = [p for p in (folder / f"{name}.cpp",) if p.exists()]
        if name.isdigit():
            sources = sorted((folder / "studies").glob(f"{name}_*"))
        sources = sources or sorted((folder / "studies").glob(f"[0-9][0-9]_{name}.*"))
        sources = sources or sorted((folder / "studies").glob(f"[0-9][0-9]_*_{name}.*"))
        if not sources:
            return f"there is no example or study {name}"
        shared = (folder / "studies" / "support" / "study.hpp").read_text()
        text = shared + "".join(source.read_text() for source in sources)
        known = set(re.findall(r"--[a-z][a-z0-9-]*", text)) | {"--model", "--list"}
        for argument in arguments:
            if argument.startswith("--") and argument.split("=")[0] not in known:
                return f"{name} has no flag {argument}"
        return None

    def benchmark(self, arguments):
        if arguments and arguments[0] in ("--table", "--avx2"):
            arguments.pop(0)
        if not arguments or arguments[0].startswith("-"):
            return None
        for alternative in expanded(arguments[0]):
            start = literal(alternative)
            if "/" in start:
                found = any(n.startswith(start) or start.startswith(n) for n in self.benchmarks)
            else:
                found = any(start in name for name in self.benchmarks)
            if not found:
                return f"no benchmark is called {alternative}"
        return None

    def test(self, arguments):
        if not arguments or arguments[0] == "--long":
            return None
        if any(re.search(arguments[0], name) for name in self.tests):
            return None
        return f"no test is called {arguments[0]}"

    def page(self, path):
        text = path.read_text().replace("\\\n", " ")
        found = [(m.group(), self.check(m.group(1), m.group(2))) for m in COMMAND.finditer(text)]
        self.commands += len(found)
        for name in FILE.findall(text):
            found.append((name, None if (self.root / name).is_file() else "there is no such file"))
        for name in HEADER.findall(text):
            there = (self.root / "include" / name).is_file()
            found.append((name, None if there else "there is no such header"))
        for what, problem in found:
            if problem:
                self.problems.append(f"{path.relative_to(self.root)}: {what}: {problem}")

    def check(self, folder, rest):
        arguments = shlex.split(rest, comments=True)
        if "[FILTER]" in arguments:
            return None
        return {"examples": self.example, "benchmarks": self.benchmark, "tests": self.test}[folder](
            arguments
        )


def main():
    root = pathlib.Path(sys.argv[1])
    checker = Checker(root)
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    for page in pages:
        checker.page(page)
    print("\n".join(checker.problems))
    print(f"{checker.commands} commands in {len(pages)} pages")
    sys.exit(1 if checker.problems or checker.commands < 20 else 0)


if __name__ == "__main__":
    main()
