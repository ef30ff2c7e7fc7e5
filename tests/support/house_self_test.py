"""Breaks each rule once in a small tree: each must be named, and the tree without must pass."""

import contextlib
import io
import pathlib
import shutil
import tempfile

import house

# A tree that keeps every rule. Its headers stand for the components of the real one.
TREE = {
    "include/kvmeld/kvmeld.hpp": """\
/// The umbrella includes the core.
#pragma once

#include <kvmeld/policies/mean.hpp>
#include <kvmeld/status.hpp>
""",
    "include/kvmeld/status.hpp": """\
/// A status says what went wrong.
#pragma once

#define KVMELD_INLINE inline

namespace kvmeld {
inline namespace v0 {

/// The outcome of a call.
struct [[nodiscard]] Status {
  Status(int first, int second) : code{first}, why(second) {}
  int code{0};
  int why{0};
};

/// Holds for statuses.
template <class T>
concept StatusLike = requires(T status) {
  status.code;
};

}  // namespace v0
}  // namespace kvmeld
""",
    "include/kvmeld/detail/rows.hpp": """\
/// Rows are copied here.
#pragma once

namespace kvmeld {
namespace detail {

inline int copy_row(int row) { return row; }

}  // namespace detail
}  // namespace kvmeld
""",
    "include/kvmeld/policies/mean.hpp": """\
/// A mean of rows.
#pragma once

#include <kvmeld/detail/rows.hpp>
#include <kvmeld/status.hpp>

/// Other components may use a macro that expands to the detail of the core.
#define KVMELD_COPY_ROW(row) ::kvmeld::detail::copy_row(row)

namespace kvmeld {

/// The mean of two rows.
KVMELD_INLINE int mean(int a, int b) { return a > 1'000 && b > 0 ? detail::copy_row(a) : b; }

}  // namespace kvmeld
""",
    "include/kvmeld/extend/visit.hpp": """\
/// Writers of components visit fields by this.
#pragma once

namespace kvmeld::extend {

/// Calls a visitor.
template <class Visitor>
void visit(Visitor visitor) {
  visitor();
}

}  // namespace kvmeld::extend
""",
    "include/kvmeld/replica/replica.hpp": """\
/// A replica of a set.
#pragma once

#include <kvmeld/policies/mean.hpp>
#include <kvmeld/replica/detail/session.hpp>

namespace kvmeld::replica {

/// Joins two replicas.
inline int join(int a) { return KVMELD_COPY_ROW(detail::session(a)); }

}  // namespace kvmeld::replica
""",
    "include/kvmeld/replica/detail/session.hpp": """\
/// One session of reconciliation.
#pragma once

namespace kvmeld::replica::detail {

inline int session(int a) { return a; }

}  // namespace kvmeld::replica::detail
""",
    "include/kvmeld/anchors/pool.hpp": """\
/// A pool of anchors.
#pragma once

#include <kvmeld/status.hpp>

namespace kvmeld::anchors {

/// The size of a pool.
inline int size(int a) { return a; }

}  // namespace kvmeld::anchors
""",
    "include/kvmeld/anchors/tiers.hpp": """\
/// Tiers of anchors that stand on replicas.
#pragma once

#include <kvmeld/anchors/detail/directory.hpp>
#include <kvmeld/replica/replica.hpp>
""",
    "include/kvmeld/anchors/detail/directory.hpp": """\
/// Where the anchors of a replica lie.
#pragma once

#include <kvmeld/replica/replica.hpp>
""",
    "include/kvmeld/engine/llama.hpp": """\
/// An engine stands on anything.
#pragma once

#include <kvmeld/anchors/tiers.hpp>

namespace kvmeld::llama {

/// Tokens of an engine.
inline int tokens(int a) { return a; }

}  // namespace kvmeld::llama
""",
    "examples/01.cpp": "int main() { return 0; }\n",
    "tests/kernels.cpp": "#include <kvmeld/detail/rows.hpp>\nint main() { return 0; }\n",
}
STATUS, MEAN = "include/kvmeld/status.hpp", "include/kvmeld/policies/mean.hpp"
POOL, REPLICA = "include/kvmeld/anchors/pool.hpp", "include/kvmeld/replica/replica.hpp"
LLAMA, ROWS = "include/kvmeld/engine/llama.hpp", "include/kvmeld/detail/rows.hpp"
SESSION = "include/kvmeld/replica/detail/session.hpp"
HEAD = "/// Numbered headers fill a folder.\n#pragma once\n"


def numbered(folder, count):
    return {f"include/kvmeld/{folder}h{i}.hpp": HEAD for i in range(count)}


def included(file, header):
    return {
        file: TREE[file].replace("#pragma once\n", f"#pragma once\n\n#include <kvmeld/{header}>\n")
    }


def inserted(file, code, before="}  // namespace kvmeld"):
    at = TREE[file].index(before)
    return {file: TREE[file][:at] + code + "\n\n" + TREE[file][at:]}


def replaced(file, old, new):
    assert old in TREE[file]
    return {file: TREE[file].replace(old, new)}


LONG = "inline void lengthy() {\n" + "  int a = 0;\n" * 60 + "}"
BRANCHES = "inline int tangled(int a) {\n" + "  if (a) ++a;\n" * 20 + "  return a;\n}"
MANY = "".join(f"/// Counts to {i}.\ninline int many{i}() {{ return {i}; }}\n" for i in range(300))

# Only a parser sees whose detail this is.
UNQUALIFIED = HEAD + """
#include <kvmeld/policies/mean.hpp>

namespace kvmeld::fit {
inline int copy() { return detail::copy_row(1); }
}  // namespace kvmeld::fit
"""

# (figure, a word of what must be named, files changed)
FAULTS = [
    ("headers", "", numbered("replica/detail/", 116)),
    ("public_headers", "", numbered("anchors/", 76)),
    ("core_public_headers", "", numbered("", 41)),
    ("public_names_in_kvmeld", "kvmeld::many7", inserted(MEAN, MANY)),
    ("names_not_as_listed", "new: kvmeld::Extra ", inserted(MEAN, "/// Is new.\nstruct Extra {};")),
    (
        "names_not_as_listed",
        "new: kvmeld::Extra ",
        inserted(MEAN, "/// Is new.\ntemplate <class T>\nconcept Extra = true;"),
    ),
    ("names_not_as_listed", "lost: kvmeld::mean ", replaced(MEAN, "int mean(", "int average(")),
    ("names_not_as_listed", "new: KVMELD_EXTRA ", inserted(MEAN, "#define KVMELD_EXTRA 1")),
    (
        "names_outside_their_namespace",
        "kvmeld::anchors_size",
        inserted(POOL, "}\nnamespace kvmeld {\ninline int anchors_size();"),
    ),
    (
        "names_outside_their_namespace",
        "kvmeld::replica::stray",
        inserted(MEAN, "namespace replica {\nint stray();\n}"),
    ),
    (
        "include_cycles",
        "detail/rows.hpp <-> policies/mean.hpp",
        included(ROWS, "policies/mean.hpp"),
    ),
    ("include_cycles", "status.hpp", included(STATUS, "status.hpp")),
    ("include_directions", "core may not stand on replica", included(MEAN, "replica/replica.hpp")),
    (
        "include_directions",
        "anchors may not stand on replica",
        included(POOL, "replica/replica.hpp"),
    ),
    (
        "include_directions",
        "anchors may not stand on replica",
        included(POOL, "anchors/detail/directory.hpp"),
    ),
    (
        "include_directions",
        "replica may not stand on anchors",
        included(REPLICA, "anchors/pool.hpp"),
    ),
    (
        "include_directions",
        "replica may not stand on engine",
        included(REPLICA, "engine/llama.hpp"),
    ),
    (
        "include_directions",
        "metrics may not stand on engine",
        {"include/kvmeld/metrics/m.hpp": HEAD + "#include <kvmeld/engine/llama.hpp>\n"},
    ),
    ("include_directions", "the detail of another component", included(REPLICA, "detail/rows.hpp")),
    ("include_directions", "the core stands on it", included(STATUS, "detail/rows.hpp")),
    ("include_directions", "odd/ is no component", {"include/kvmeld/odd/h.hpp": HEAD}),
    ("longest_function", "lengthy", inserted(MEAN, LONG)),
    ("highest_complexity", "tangled", inserted(MEAN, BRANCHES)),
    (
        "braces_not_understood",
        "policies/mean.hpp",
        inserted(MEAN, "#define BRACE {\n/* } */ int open() {"),
    ),
    (
        "lines_over_100_columns",
        "tests/kernels.cpp:1 has 101",
        {"tests/kernels.cpp": "// " + "x" * 98 + "\n"},
    ),
    ("names_without_comment", "bare", inserted(MEAN, "inline int bare() { return 0; }\n")),
    ("longest_example", "examples/01.cpp", {"examples/01.cpp": "// A line.\n" * 81}),
    ("files_not_formatted", "examples/01.cpp", {"examples/01.cpp": "int  main() { return 0; }\n"}),
    (
        "comment_percent",
        "",
        inserted(MEAN, "\n".join(f"inline int plain{i}() {{ return {i}; }}" for i in range(250))),
    ),
    (
        "headers_without_sentence",
        "status.hpp",
        replaced(STATUS, "/// A status says what went wrong.\n", ""),
    ),
    (
        "headers_without_sentence",
        "status.hpp",
        replaced(STATUS, "A status says what went wrong.", "status"),
    ),
    (
        "detail_names_across",
        "kvmeld::detail::copy_row",
        inserted(REPLICA, "inline int f() { return kvmeld::detail::copy_row(1); }"),
    ),
    (
        "detail_names_across",
        "fit/f.hpp names kvmeld::detail::copy_row of detail/rows.hpp",
        {"include/kvmeld/fit/f.hpp": UNQUALIFIED},
    ),
    ("detail_names_across", "copy_row", inserted(SESSION, "using kvmeld::detail::copy_row;")),
    (
        "detail_names_across",
        "names kvmeld::detail::",
        inserted(LLAMA, "using namespace kvmeld::detail;"),
    ),
    (
        "detail_names_across",
        "replica::detail::session",
        inserted(LLAMA, "inline int g() { return replica::detail::session(1); }"),
    ),
    (
        "detail_names_in_examples",
        "includes kvmeld/detail/rows.hpp",
        {"examples/01.cpp": "#include <kvmeld/detail/rows.hpp>\n"},
    ),
    (
        "detail_names_in_examples",
        "detail::copy_row",
        {"benchmarks/b.cpp": "int f() { return kvmeld::detail::copy_row(1); }\n"},
    ),
    ("lazy_in_public_headers", "status.hpp", inserted(STATUS, "KVMELD_LAZY", "}  // namespace v0")),
    ("parse_errors", "unknown type", inserted(MEAN, "Unknown thing();")),
]


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def plant(root, repository):
    write(root, TREE)
    shutil.copy(repository / ".clang-format", root)
    figures, notes, lines = house.measure(root)
    house.write_names(root / "tests/public_names.txt", lines or [])
    return notes


def problem_of(root, figure, word):
    """Why a planted fault was not named, or nothing."""
    figures, notes, _ = house.measure(root)
    if figure not in house.breaches(figures):
        return f"{figure} is not broken: {figures[figure].value}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        house.report(figures, notes)
    if not any(word in item for item in figures[figure].over) and word:
        return f"{figure} does not name '{word}': {figures[figure].over}"
    return "" if f"{figure} is broken" in printed.getvalue() else f"{figure} is not reported"


def run():
    house.BOUNDS = house.RULES
    repository = pathlib.Path(__file__).resolve().parents[2]
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        clean = pathlib.Path(folder) / "clean"
        notes = plant(clean, repository)
        if any(note.startswith("skipped: ") for note in notes):
            print("\n".join(notes))
            return 77
        figures, _, _ = house.measure(clean)
        for name in house.breaches(figures):
            problems.append(f"the tree without a fault breaks {name}: {figures[name].over}")
        for number, (figure, word, files) in enumerate(FAULTS):
            faulty = pathlib.Path(folder) / str(number)
            shutil.copytree(clean, faulty)
            write(faulty, files)
            problem = problem_of(faulty, figure, word)
            if problem:
                problems.append(f"fault {number}: {problem}")
        # A header whose package is missing is left out, and its names stay as they are listed.
        write(clean, replaced(LLAMA, "#pragma once\n", "#pragma once\n\n#include <no/such.h>\n"))
        figures, notes, _ = house.measure(clean)
        if (
            house.breaches(figures)
            or "left out: engine/llama.hpp (no/such.h is not installed)" not in notes
        ):
            problems.append(f"a missing package: {house.breaches(figures)} {notes}")
    untried = {name for name, bound in house.BOUNDS.items() if bound} - {
        figure for figure, _, _ in FAULTS
    }
    problems += [f"no fault breaks {name}" for name in sorted(untried)]
    print("\n".join(problems + [f"{len(FAULTS)} faults, {len(problems)} problems"]))
    return 1 if problems else 0
