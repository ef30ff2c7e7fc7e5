#!/usr/bin/env python3
"""Times rapidfuzz's editops on the pairs of align/edit/... (benchmarks/align.cpp). Needs: pip install rapidfuzz"""
import sys
import time

try:
    from rapidfuzz.distance import Levenshtein
except ImportError:
    sys.exit("rapidfuzz is not installed (pip install rapidfuzz)")

WORD = (1 << 64) - 1


class Random:
    """SplitMix64, as in benchmarks/align.cpp."""

    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state + 0x9E3779B97F4A7C15) & WORD
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        return (z ^ (z >> 31)) % n


def texts(count, edits):
    random = Random(1)
    a = [random.below(32000) for _ in range(count)]
    b = list(a)
    for _ in range(edits):
        kind, at = random.below(3), random.below(len(b))
        if kind == 0:
            b[at] = random.below(32000)
        elif kind == 1:
            del b[at]
        else:
            b.insert(at, random.below(32000))
    return a, b


for count, edits, rounds in ((1000, 10, 50), (10000, 100, 10), (10000, 1000, 10), (100000, 1000, 1)):
    a, b = texts(count, edits)
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        operations = Levenshtein.editops(a, b)
        best = min(best, time.perf_counter() - begin)
    print(f"rapidfuzz editops, {count} tokens, {edits} edits: {best * 1e6:.1f} us, distance {len(operations)}")
