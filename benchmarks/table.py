#!/usr/bin/env python3
"""Benchmark results as one JSON file, and as a Markdown table.

    table.py --merge RUN.json COMPILE_TIMES.json OUT.json
    table.py OUT.json
"""
import json
import pathlib
import sys


def load(path):
    path = pathlib.Path(path)
    return json.loads(path.read_text()) if path.exists() and path.stat().st_size else None


def merge(run, times, out):
    result = load(run) or {"context": {}, "benchmarks": []}
    result["benchmarks"] += load(times) or []
    if not result["benchmarks"]:
        sys.exit("no benchmark matched")
    pathlib.Path(out).write_text(json.dumps(result, indent=1) + "\n")


def duration(row):
    nanoseconds = row["real_time"] * {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[row["time_unit"]]
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return "%.3g %s" % (nanoseconds / size, unit)
    return "%.3g ns" % nanoseconds


def table(path):
    result = load(path)
    if result is None:
        sys.exit("%s is missing: run benchmarks/run.sh first" % path)
    context = result["context"]
    if context:
        print("%s, %s cores at %s MHz, Release build, %s\n" % (context.get("processor", "unknown processor"),
                                                            context.get("num_cpus"), context.get("mhz_per_cpu"),
                                                            context.get("date", "")[:10]))
    print("| benchmark | time | GB/s | ratio to its baseline |\n| --- | ---: | ---: | ---: |")
    for row in result["benchmarks"]:
        # With repetitions the median stands for all of them.
        if row.get("run_type") == "aggregate" and row.get("aggregate_name") != "median":
            continue
        if row.get("run_type") == "iteration" and row.get("repetitions", 1) > 1:
            continue
        rate = "%.1f" % (row["bytes_per_second"] / 1e9) if "bytes_per_second" in row else ""
        ratio = "%.2f" % row["ratio"] if "ratio" in row else ""
        print("| `%s` | %s | %s | %s |" % (row["run_name"], duration(row), rate, ratio))


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--merge":
        merge(*sys.argv[2:])
    elif len(sys.argv) == 2:
        table(sys.argv[1])
    else:
        sys.exit(__doc__)
