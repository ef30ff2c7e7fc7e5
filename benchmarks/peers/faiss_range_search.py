#!/usr/bin/env python3
"""Times faiss's IndexBinaryFlat.range_search against kvmeld on 1,000,000 signatures, in turn, one thread each.

Needs: pip install faiss-cpu numpy; a C++20 compiler (CXX, or g++) and xxhash.h. Exits with 1 where answers differ or kvmeld is less than
1.5 times as fast. `scan` reads every signature; `look-up` is what AnchorPool does: the scan, or the index where that is faster."""
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import time

try:
    import faiss
    import numpy
except ImportError:
    sys.exit("faiss and numpy are not installed (pip install faiss-cpu numpy)")

COUNT, QUERIES, ROUNDS = 1_000_000, 20, 15
here = pathlib.Path(__file__).resolve().parent
faiss.omp_set_num_threads(1)


def build(folder):
    target = pathlib.Path(folder, "libkvmeld_scan.so")
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-I", str(here.parent.parent / "include"),
                    str(here / "faiss_range_search.cpp"), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.kvmeld_signatures.restype = ctypes.c_void_p
    library.kvmeld_signatures.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for name in ("kvmeld_scan", "kvmeld_look_up"):
        getattr(library, name).restype = ctypes.c_size_t
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    library.kvmeld_hits.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.kvmeld_free.argtypes = [ctypes.c_void_p]
    return library


def seconds(work):
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


random = numpy.random.default_rng(1)
signatures = random.integers(0, 1 << 64, COUNT, dtype=numpy.uint64)
queries = random.integers(0, 1 << 64, QUERIES, dtype=numpy.uint64)
for i in range(200):  # some are near some query, by 0 to 19 bits
    flips = random.choice(64, i % 20, replace=False)
    signatures[random.integers(COUNT)] = queries[i % QUERIES] ^ numpy.uint64(sum(1 << int(bit) for bit in flips))
index = faiss.IndexBinaryFlat(64)
index.add(signatures.view(numpy.uint8).reshape(COUNT, 8))
failed = False
with tempfile.TemporaryDirectory() as folder:
    library = build(folder)
    ours = library.kvmeld_signatures(signatures.ctypes.data, COUNT)
    for distance in (9, 16):
        best = {"faiss": float("inf"), "scan": float("inf"), "look-up": float("inf")}
        for turn in range(ROUNDS):
            for query in queries:
                row = numpy.array([query]).view(numpy.uint8).reshape(1, 8)
                took, (_, _, expected) = seconds(lambda: index.range_search(row, distance + 1))  # faiss finds below its radius
                best["faiss"] = min(best["faiss"], took)
                for name, call in (("scan", library.kvmeld_scan), ("look-up", library.kvmeld_look_up)):
                    took, count = seconds(lambda: call(ours, int(query), distance))
                    best[name] = min(best[name], took)
                    if turn == 0:
                        found = numpy.zeros(count, dtype=numpy.uint32)
                        library.kvmeld_hits(ours, found.ctypes.data)
                        if not numpy.array_equal(found, numpy.sort(expected)):
                            sys.exit("%s within %d bits: %d answers, faiss has %d" % (name, distance, count, len(expected)))
        ratios = {name: best["faiss"] / best[name] for name in ("scan", "look-up")}
        failed = failed or min(ratios.values()) < 1.5
        print("%d signatures within %2d bits, best of %d: faiss %.3f ms, scan %.3f ms (%.1f x), look-up %.3f ms (%.1f x)"
              % (COUNT, distance, ROUNDS * QUERIES, best["faiss"] * 1e3, best["scan"] * 1e3, ratios["scan"], best["look-up"] * 1e3, ratios["look-up"]))
    library.kvmeld_free(ours)
sys.exit(1 if failed else 0)
