#!/usr/bin/env python3
"""Times scikit-learn's Cholesky ridge on the shape of align/fit/... (benchmarks/projection_fit.cpp). Needs: pip install scikit-learn

One thread: the time compares with best_GBps there, (4096 * (1024 + 128) * 8) bytes in so many seconds."""
import os
import sys
import time

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
try:
    import numpy
    from sklearn.linear_model import Ridge
except ImportError:
    sys.exit("scikit-learn is not installed (pip install scikit-learn)")

ROWS, INPUTS, OUTPUTS = 4096, 1024, 128
random = numpy.random.default_rng(1)
x = random.uniform(-8, 8, (ROWS, INPUTS))
y = random.uniform(-8, 8, (ROWS, OUTPUTS))
best = {}
for bias in (True, False):
    for _ in range(7):
        model = Ridge(alpha=1.0, solver="cholesky", fit_intercept=bias)
        begin = time.perf_counter()
        model.fit(x, y)
        best[bias] = min(best.get(bias, 1e9), time.perf_counter() - begin)
size = ROWS * (INPUTS + OUTPUTS) * 8
for bias, seconds in best.items():
    print("sklearn Ridge(cholesky), intercept %-5s %8.1f ms  %6.3f GB/s" % (bias, seconds * 1e3, size / seconds * 1e-9))
