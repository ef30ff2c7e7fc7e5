#!/usr/bin/env python3
"""What pycrdt (Yrs) needs to bring together the sets of state/reconcile/promised_bytes.

Needs: pip install pycrdt. Two documents hold a map of 6,000 ids each, of which 2,000 or 4,000 of
each differ; they exchange state vectors and updates. Prints bytes both ways and the best time of
ten; compare with `bytes` and `best_ms` of
bash benchmarks/run.sh state/reconcile/promised_bytes/ids:6000"""
import random
import sys
import time

try:
    from pycrdt import Doc, Map
except ImportError:
    sys.exit("pycrdt is not installed (pip install pycrdt)")

IDS = 6000


def documents(each):
    numbers = random.Random(each)
    new = lambda count: {numbers.randbytes(17).hex(): numbers.getrandbits(53) for _ in range(count)}
    docs = []
    for _ in range(2):
        docs.append(Doc())
        docs[-1]["set"] = Map()
    with docs[0].transaction():
        docs[0]["set"].update(new(IDS - each))
    docs[1].apply_update(docs[0].get_update(docs[1].get_state()))
    for doc in docs:
        with doc.transaction():
            doc["set"].update(new(each))
    return docs


def together(a, b):
    """Each sends its state vector, then what the other lacks."""
    states = a.get_state(), b.get_state()
    updates = a.get_update(states[1]), b.get_update(states[0])
    a.apply_update(updates[1])
    b.apply_update(updates[0])
    return sum(len(x) for x in (*states, *updates))


for each in (2000, 4000):
    best, sent = float("inf"), 0
    for _ in range(10):
        a, b = documents(each)
        begin = time.perf_counter()
        sent = together(a, b)
        best = min(best, time.perf_counter() - begin)
        if len(a["set"]) != IDS + each or dict(a["set"]) != dict(b["set"]):
            sys.exit("the sets differ")
    print(f"{IDS} ids, {each} of each differ: {sent} bytes, {best * 1e3:.1f} ms")
