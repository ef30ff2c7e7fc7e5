#!/usr/bin/env python3
"""Compile time of headers against the standard headers that they pull in.

    header_time.py --compiler g++ --include include [--compiled] [--limit 1.5] [--memory-limit 1.5] [--json] kvmeld/kvmeld.hpp...

For each header two files are compiled: one that includes it, and one that includes the standard headers which it and
its own includes name. The factor is the median over pairs of neighbouring runs, since the speed of a shared machine drifts by
a third within seconds; even so it moves by .2. The memory that g++ allocates with its collector off moves by nothing, and
its time goes with it: that is what a test can hold to a limit.
"""
import argparse
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile

INCLUDE = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.MULTILINE)


def std_includes(root, header, seen):
    """Names of all standard headers that `header` includes, by itself or through the library's own headers."""
    if header in seen:
        return set()
    seen.add(header)
    found = set()
    for name in INCLUDE.findall((root / header).read_text()):
        if (root / name).exists():
            found |= std_includes(root, name, seen)
        elif re.fullmatch(r"[a-z_]+", name):
            found.add(name)
    return found


def seconds(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit("does not compile: %s\n%s" % (" ".join(command), done.stderr))
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def megabytes(command):
    """Peak memory of the largest process of `command`, a g++ that never collects."""
    pid = os.posix_spawnp(command[0], command + ["--param", "ggc-min-heapsize=4000000"], os.environ)
    _, status, usage = os.wait4(pid, 0)
    if status != 0:
        sys.exit("does not compile: %s" % " ".join(command))
    return usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--include", type=pathlib.Path, default=pathlib.Path("include"))
    parser.add_argument("--limit", type=float)
    parser.add_argument("--memory-limit", type=float, help="of g++ only")
    parser.add_argument("--compiled", action="store_true", help="as users of the companion library read it: without bodies")
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="print in Google Benchmark's format")
    parser.add_argument("headers", nargs="+")
    arguments = parser.parse_args()

    failed, rows = False, []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for header in arguments.headers:
            ours, std = folder / "ours.cpp", folder / "std.cpp"
            ours.write_text("#include <%s>\n" % header)
            std.write_text("".join("#include <%s>\n" % name for name in sorted(std_includes(arguments.include, header, set()))))
            command = [arguments.compiler, "-std=c++20", "-O0", "-I%s" % arguments.include, "-c", "-o", str(folder / "out.o")]
            command += ["-DKVMELD_COMPILED=1"] if arguments.compiled else []
            times = [(seconds(command + [str(ours)]), seconds(command + [str(std)])) for _ in range(arguments.runs)]
            mine, base = min(t[0] for t in times), min(t[1] for t in times)
            factor = statistics.median(t[0] / t[1] for t in times)
            rows.append({"name": "compile_time/" + header, "run_name": "compile_time/" + header, "run_type": "iteration",
                         "iterations": arguments.runs, "real_time": mine * 1e3, "cpu_time": mine * 1e3,
                         "time_unit": "ms", "ratio": 1 / factor})
            failed |= arguments.limit is not None and factor > arguments.limit
            if not arguments.json:
                print("%-44s %5.2f s, its std includes %5.2f s, factor %.2f%s"
                      % (header, mine, base, factor, " (limit %.2f)" % arguments.limit if arguments.limit else ""))
            if arguments.memory_limit is not None:
                mine, base = megabytes(command + [str(ours)]), megabytes(command + [str(std)])
                failed |= mine > arguments.memory_limit * base
                print("%-44s %5.0f MB, its std includes %4.0f MB, factor %.2f (limit %.2f)"
                      % (header, mine, base, mine / base, arguments.memory_limit))
    if arguments.json:
        json.dump(rows, sys.stdout, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
