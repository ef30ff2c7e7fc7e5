#!/usr/bin/env python3
"""What a header costs g++, in memory of the compiler: the table of docs/performance.md.

    header_costs.py [--compiler g++]

Each row compiles a file with 20 element types and one piece of code for each of them, and prints the
memory above that of the same file without the pieces, for each type. Memory does not depend on what
else the machine does.
"""
import argparse
import os
import pathlib
import subprocess
import tempfile

INCLUDE = pathlib.Path(__file__).resolve().parents[1] / "include"
TYPES = 20
PRELUDE = """#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>
#include <kvmeld/config.hpp>
#include <kvmeld/status.hpp>
"""
VECTOR = "struct V{n} {{ std::vector<T{n}> items; }};\n"
ADD = "void add{n}(std::vector<T{n}>& to) {{ to.push_back({{}}); }}\n"
SPAN = "std::span<const T{n}> span{n}(const std::vector<T{n}>& v) {{ return {how}; }}\n"
MADE = "std::span<const T{n}>(v.data(), v.size())"
# What it is, the code for type n, and the code that is there without it.
ROWS = [
    ("`std::vector<T>` as a member", VECTOR, ""),
    ("`push_back` on one in an inline function", VECTOR + "inline " + ADD, VECTOR),
    ("the same in a lazy one", VECTOR + "template <class = void> " + ADD, VECTOR),
    ("a vector that becomes a `std::span<const T>`, inline", "inline " + SPAN.replace("{how}", "v"), ""),
    ("the same, lazy", "template <class = void> " + SPAN.replace("{how}", "v"), ""),
    ("the same by `extend::span_of`, lazy",
     "template <class = void> " + SPAN.replace("{how}", "kvmeld::extend::span_of(v)"), ""),
    ("`std::span<const T>(pointer, count)`, inline", "inline " + SPAN.replace("{how}", MADE), ""),
    ("the same, lazy", "template <class = void> " + SPAN.replace("{how}", MADE), ""),
    ("`std::optional<T>` as a member", "struct O{n} {{ std::optional<T{n}> value; }};\n", ""),
    ("`Result<T>` as a member", "struct R{n} {{ kvmeld::Result<T{n}> value; }};\n", ""),
    ("a copy of a struct with a vector in an inline function",
     VECTOR + "inline V{n} copy{n}(const V{n}& from) {{ return from; }}\n", VECTOR),
    ("`std::ranges::count`, once",
     "inline auto count{n}(std::span<const int> v) {{ return std::ranges::count(v, {n}); }}\n", ""),
]


def memory(compiler, pieces, count):
    """MB that the compiler had at most."""
    text = PRELUDE + "".join(f"struct T{n} {{ int value[{n + 1}]; }};\n" for n in range(TYPES))
    text += "".join(pieces.format(n=n) for n in range(count))
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "piece.cpp"
        source.write_text(text)
        command = [compiler, "-std=c++20", "-fsyntax-only", "-I", str(INCLUDE), str(source)]
        # The collector off, as in tests/compile/header_time.py.
        command += ["--param", "ggc-min-expand=10000", "--param", "ggc-min-heapsize=10000000"]
        child = subprocess.Popen(command)
        _, status, usage = os.wait4(child.pid, 0)
    if status != 0:
        raise SystemExit(f"{compiler} refused:\n{text}")
    return usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", default="g++")
    compiler = parser.parse_args().compiler
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    print(f"{compiler} {version}\n\n| what a header holds, for each element type | MB |\n| --- | ---: |")
    for what, pieces, without in ROWS:
        count = 1 if what.endswith("once") else TYPES
        cost = memory(compiler, pieces, count) - memory(compiler, without, count)
        print(f"| {what} | {cost / count:.1f} |", flush=True)


if __name__ == "__main__":
    main()
