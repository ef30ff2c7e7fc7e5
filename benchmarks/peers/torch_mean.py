#!/usr/bin/env python3
"""Times torch.compile of the weighted mean of render/mean/bf16/MiB:16/agents:3 (benchmarks/render.cpp). Needs: pip install torch, and g++

One thread, f32 sums of bf16 rows, rounded to bf16; its GB/s (three inputs and one output) compare with best_GBps there."""
import statistics
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("torch is not installed (pip install torch; some 5 GB)")

torch.set_num_threads(1)
AGENTS, SIZE = 3, 16 << 20
generator = torch.Generator().manual_seed(1)
rows = [torch.randn(SIZE // 2, generator=generator).to(torch.bfloat16) for _ in range(AGENTS)]
weights = torch.tensor([0.5, 1.0, 2.0])


def mean(a, b, c, w):
    return ((a.float() * w[0] + b.float() * w[1] + c.float() * w[2]) / w.sum()).to(torch.bfloat16)


def mean_into(a, b, c, w, out):
    return out.copy_(mean(a, b, c, w))


out = torch.empty_like(rows[0])
forms = {"eager": lambda: mean(*rows, weights)}
compiled, compiled_into = torch.compile(mean), torch.compile(mean_into)
forms["torch.compile"] = lambda: compiled(*rows, weights)
forms["torch.compile, into memory of the caller"] = lambda: compiled_into(*rows, weights, out)
with torch.inference_mode():
    for name, form in forms.items():
        for _ in range(3):
            form()
        times = []
        for _ in range(10 if name == "eager" else 100):
            begin = time.perf_counter()
            form()
            times.append(time.perf_counter() - begin)
        moved = (AGENTS + 1) * SIZE * 1e-9
        print("%-42s best %7.2f ms %6.2f GB/s   median %7.2f ms" % (name, min(times) * 1e3, moved / min(times), statistics.median(times) * 1e3))
