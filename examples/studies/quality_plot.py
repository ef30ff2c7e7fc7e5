#!/usr/bin/env python3
"""Draws what study 13_merge_quality measured: loss against tokens computed after the question, and against the number of agents.

Reads build/merge_quality.json and writes quality_tokens.svg and quality_agents.svg; equal results give equal bytes with one version of
matplotlib (Debian: python3-matplotlib).

  python3 examples/studies/quality_plot.py [RESULTS.json] [--folder docs] [--methods concat,refresh_1,...]
"""
import argparse
import json
import pathlib
import re

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

KINDS = {
    "text": ("one_agent", "none", "text_summary"),
    "as they are": ("naive", "concat", "ape", "pced"),
    "dropped lead-in": ("bos_4", "lead_in", "lead_in_calibrated", "similar_text", "neighbour"),
}
COLOURS = plt.get_cmap("tab10").colors


def family(method):
    """The methods that differ from this one only by an amount, which one curve joins."""
    if method.startswith("refresh_") and "query" not in method:
        return "refresh"
    for kind, methods in KINDS.items():
        if method in methods:
            return kind
    return re.sub(r"_\d+$", "", method)


def finish(figure, axes, path):
    for axis in axes:
        axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    print(path)


def draw_tokens(summary, agents, title, path):
    """KL to full text against tokens computed after the question, one curve a family; one panel a number of agents."""
    figure, axes = plt.subplots(1, len(agents), figsize=(6.2 * len(agents), 4.6), squeeze=False, sharey=True)
    families = list(dict.fromkeys(family(s["method"]) for s in summary if s["method"] != "full_text"))
    for axis, count in zip(axes[0], agents):
        for i, name in enumerate(families):
            points = [s for s in summary if s["agents"] == count and family(s["method"]) == name and s["method"] != "full_text"]
            points.sort(key=lambda s: (s["computed_after"], s["method"]))
            joined = name not in KINDS and name != "refresh"
            axis.plot([s["computed_after"] for s in points], [s["kl"] for s in points], "o-" if joined else "o", label=name,
                      color=COLOURS[i % len(COLOURS)], markersize=4.5, linewidth=1.2)
            for s in points:
                axis.annotate(s["method"], (s["computed_after"], s["kl"]), fontsize=6, xytext=(4, 3), textcoords="offset points")
        full = [s["computed_after"] for s in summary if s["agents"] == count and s["method"] == "full_text"]
        if full:
            axis.axvline(full[0], color="#888888", linestyle="--", linewidth=1)
            axis.annotate("full text", (full[0], 1), xycoords=("data", "axes fraction"), fontsize=7, ha="right", va="top", rotation=90)
        axis.set_xscale("log")
        axis.set_yscale("log")
        ticks = [count for power in range(1, 6) for count in (10**power, 2 * 10**power, 5 * 10**power)]
        axis.set_xticks(ticks, [str(count) for count in ticks])
        axis.minorticks_off()
        counts = [s["computed_after"] for s in summary]
        axis.set_xlim(min(counts) / 1.5, max(counts) * 1.5)
        axis.set_xlabel("tokens computed after the question")
        axis.set_title(f"{title}, {count} agents", fontsize=9)
    axes[0][0].set_ylabel("KL to full text, nats a token")
    axes[0][-1].legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    finish(figure, axes[0], path)


def draw_agents(summary, agents, methods, title, path):
    """KL and F1 ÷ full text's against the number of agents, one curve a method; bars are 95 % intervals."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4))
    for i, method in enumerate(methods):
        points = [s for count in agents for s in summary if s["agents"] == count and s["method"] == method]
        if not points:
            continue
        x = [s["agents"] for s in points]
        colour, marker = COLOURS[i % len(COLOURS)], "os^Dv"[i // len(COLOURS) % 5]
        if method != "full_text":
            axes[0].plot(x, [s["kl"] for s in points], marker=marker, color=colour, label=method, markersize=4.5, linewidth=1.2)
        ratio = [s["f1_ratio"] for s in points]
        spread = [[max(0, r - s["low"]) for r, s in zip(ratio, points)], [max(0, s["high"] - r) for r, s in zip(ratio, points)]]
        shifted = [count * 1.015 ** (i - len(methods) / 2) for count in x]
        axes[1].errorbar(shifted, ratio, yerr=spread, marker=marker, color=colour, label=method, markersize=4.5, linewidth=1.2, elinewidth=0.6)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("KL to full text, nats a token")
    axes[1].set_ylabel("F1 ÷ full text's")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(agents, [str(count) for count in agents])
        axis.minorticks_off()
        axis.set_xlabel("agents")
        axis.set_title(title, fontsize=9)
    axes[1].legend(*axes[0].get_legend_handles_labels(), fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    finish(figure, axes, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", default="build/merge_quality.json", type=pathlib.Path)
    parser.add_argument("--folder", default="docs", type=pathlib.Path, help="where the pictures go")
    parser.add_argument("--methods", help="of the second picture; by default all that were measured")
    flags = parser.parse_args()
    results = json.loads(flags.results.read_text())
    summary = results["summary"]
    agents = sorted({s["agents"] for s in summary})
    methods = flags.methods.split(",") if flags.methods else list(dict.fromkeys(s["method"] for s in summary))
    title = f"{results['data']}, {results['model'].removesuffix('.gguf')}"
    plt.rcParams.update({"svg.hashsalt": "kvmeld", "svg.fonttype": "none", "font.size": 8})
    flags.folder.mkdir(parents=True, exist_ok=True)
    draw_tokens(summary, agents, title, flags.folder / "quality_tokens.svg")
    draw_agents(summary, agents, methods, title, flags.folder / "quality_agents.svg")


if __name__ == "__main__":
    main()
