#!/usr/bin/env python3
"""Gates on the real models: what examples measure must not get worse than the documentation says.

    gates.py lead_in | reuse | two_models      (bash tests/run.sh --long runs all three)

Each runs one example by the command that it prints, reads the JSON file that this writes, and
compares. Counts of right answers are compared by the bound of their exact 95 % interval (Clopper
and Pearson, 1934), so that a gate holds for what was shown and not for luck.
"""
import json
import math
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEVEL = 0.05


def interval(right, total):
    """The 95 % interval of a share of which `right` in `total` was seen."""

    def tail(share, counts):
        return sum(math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in counts)

    def solve(too_low):
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if too_low(middle) else (low, middle)
        return low

    upper_tail, lower_tail = range(right, total + 1), range(right + 1)
    low = 0.0 if right == 0 else solve(lambda share: tail(share, upper_tail) < LEVEL / 2)
    high = 1.0 if right == total else solve(lambda share: tail(share, lower_tail) > LEVEL / 2)
    return low, high


def run(example, *flags):
    """What an example wrote."""
    output = ROOT / "build" / "gates" / (example + ".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)  # example 01 would go on where it stopped
    where = str(output.relative_to(ROOT))
    command = ["bash", "examples/run.sh", example, *flags, "--output", where]
    print(" ".join(command), flush=True)
    subprocess.run(command, cwd=ROOT, check=True)
    return json.loads(output.read_text())


class Gate:
    """Prints every comparison, the failed ones too."""

    failed = False

    def least(self, what, value, bound):
        self.compare(what, value, ">=", bound, value >= bound)

    def most(self, what, value, bound):
        self.compare(what, value, "<=", bound, value <= bound)

    def compare(self, what, value, sign, bound, holds):
        self.failed |= not holds
        print(f"{'ok    ' if holds else 'FAILED'} {what}: {value:.4g} {sign} {bound:.4g}")

    def counts(self, what, right, total):
        low, high = interval(right, total)
        print(f"       {what}: {right} of {total} right, {low:.3f} to {high:.3f}")
        return low, high


def lead_in(gate):
    """Four agents: behind a lead-in a merge answers as full text does, in both orders."""
    methods = ["full_text", "concat", "lead_in", "lead_in_reversed"]
    flags = ["--agents", "4", "--seeds", "2", "--questions", "104", "--methods", ",".join(methods)]
    rows = run("01", *flags)["rows"]
    low, high, kl = {}, {}, {}
    for method in methods:
        mine = [row for row in rows if row["method"] == method]
        total = sum(row["total"] for row in mine)
        low[method], high[method] = gate.counts(method, sum(row["right"] for row in mine), total)
        kl[method] = sum(row["kl"] * row["total"] for row in mine) / total
    gate.least("full text, lower bound", low["full_text"], 0.95)
    for method in ("lead_in", "lead_in_reversed"):
        gate.least(f"{method}, lower bound", low[method], 0.9)
        gate.most(f"{method}, KL to full text", kl[method], 0.2)
        gate.least(f"{method}, lower bound, over concat's upper", low[method], high["concat"] + 0.2)


def reuse(gate):
    """Documents of one template behind other instructions: K, V and KL against full prefill."""
    flags = ["--texts", "structured", "--long-tokens", "0", "--anchors", "5,10", "--threads", "2"]
    result = run("07", *flags)
    rows = {(row["mode"], row["anchors"]): row for row in result["rows"]}
    rotated = rows["rotated_reuse", 0]
    blended = rows["blended", 10]
    for name, row in (("rotated_reuse", rotated), ("blended", blended)):
        gate.counts(name, row["right"], row["total"])
        gate.least(f"{name}, share reused", row["reuse_rate"], 1)
        gate.most(f"{name}, KL to full prefill", row["kl"], 0.005)

    def upper(row, what):  # of the mean
        spread = row["spread"][what]
        return spread["mean"] + 1.96 * spread["deviation"] / math.sqrt(spread["n"])

    for what, bound, share in (("k_error", 0.045, 0.5), ("v_error", 0.22, 0.7)):
        gate.most(f"rotated_reuse, {what}, upper bound of the mean", upper(rotated, what), bound)
        gate.most(f"blended, {what}, upper bound", upper(blended, what), share * rotated[what])
    layer = result["layer_0"]["structured"]
    gate.most("layer 0, measured offset of K", layer["k_offset"]["mean"], 0.001)
    gate.most("layer 0, measured offset of V", layer["v_offset"]["mean"], 0.001)
    gate.least("layer 0, K one position off", layer["k_offset_one_position_off"]["mean"], 0.05)


def two_models(gate):
    """The 1.5B sibling answers from the 0.5B model's cache through a map that is fitted here."""
    result = run("10", "--refit", "--fit-tokens", "8600", "--questions", "24", "--threads", "2")
    rows = {row["method"]: row for row in result["rows"]}
    bounds = {name: gate.counts(name, row["right"], row["total"]) for name, row in rows.items()}
    gate.least("attention cosine of the fit", result["gate"]["score"], result["gate"]["bar"])
    gate.least("the target's own cache, lower bound", bounds["target_own"][0], 0.8)
    gate.least("mapped, lower bound", bounds["mapped"][0], 0.6)
    gate.most("mapped, KL to the target's own", rows["mapped"]["kl"], 0.6)
    gate.most("no note, upper bound", bounds["no_notes"][1], 0.2)


def main():
    gates = {"lead_in": lead_in, "reuse": reuse, "two_models": two_models}
    if len(sys.argv) != 2 or sys.argv[1] not in gates:
        sys.exit(__doc__)
    gate = Gate()
    gates[sys.argv[1]](gate)
    sys.exit(1 if gate.failed else 0)


if __name__ == "__main__":
    main()
