"""What the text of the C++ files tells: includes, comments, functions, components."""

import collections
import re

# ---- Text ----------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)"
    r'|(?P<raw>R"(?P<tag>[^\s()\\]{0,16})\(.*?\)(?P=tag)")'
    r'|(?P<string>"(?:\\.|[^"\\\n])*")'
    r"|(?P<number>\b\d[\w.]*(?:'[\w.]+)*)"  # before characters, for the ' that groups its digits
    r"|(?P<character>'(?:\\.|[^'\\\n])*')",
    re.S,
)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.M)


def blank(text):
    return re.sub(r"[^\n]", " ", text)


def code_of(text):
    """The text with comments and the insides of literals blanked; every line keeps its number."""

    def replaced(match):
        found = match.group()
        if match.lastgroup == "number":
            return found.replace("'", "0")
        if match.lastgroup == "comment":
            return blank(found)
        return '"' + blank(found)[2:] + '"'

    return TOKEN.sub(replaced, text)


def comment_lines(text):
    """How many lines hold a comment and nothing else, and how many hold anything."""
    pairs = list(zip(text.split("\n"), code_of(text).split("\n")))
    filled = sum(bool(line.strip()) for line, _ in pairs)
    return sum(bool(line.strip()) and not code.strip() for line, code in pairs), filled


def head_comment(text):
    """What the comments say that stand before the first include or other code."""
    first = re.search(r"^(?![ \t]*#\s*pragma once\b)[ \t]*\S", code_of(text), re.M)
    head = text[: first.start()] if first else text
    comments = [m.group("comment") for m in TOKEN.finditer(head) if m.group("comment")]
    words = " ".join(re.sub(r"^(///?<?|/\*+!?)|\*/$", "", comment).strip() for comment in comments)
    return re.sub(r"SPDX-License-Identifier: \S+|Copyright [^.]*", "", words).strip()


def is_sentence(words):
    return bool(re.search(r"\w+ \w+.*[.:](\s|$)", words))


# ---- Functions -----------------------------------------------------------------------------------

Function = collections.namedtuple("Function", "name line lines complexity")
# A switch counts once, however many cases it lists.
BRANCH = re.compile(r"\b(?:if|for|while|switch|catch)\b|\?|\|\||(?<=\s)&&(?=\s)")
NOT_A_NAME = {"requires", "decltype", "noexcept", "explicit", "alignas", "__attribute__", "sizeof"}


def without_directives(code):
    """Blanks preprocessor lines and the macros that open the namespace. Where a branch of an #if
    opens more braces than it closes, or fewer, only the first branch stays."""
    code = re.sub(r"^KVMELD_NAMESPACE_\w+$", ";", code, flags=re.M)
    lines, kept, stack = code.split("\n"), [], []
    continued = False
    for line in lines:
        directive = re.match(r"\s*#\s*(\w+)", line)
        if continued or directive:
            if directive and not continued:
                word = directive.group(1)
                if word in ("if", "ifdef", "ifndef"):
                    stack.append([0, None])
                elif word in ("else", "elif") and stack:
                    if stack[-1][1] is None:
                        stack[-1][1] = stack[-1][0]
                elif word == "endif" and stack:
                    stack.pop()
            continued = line.endswith("\\")
            kept.append("")
            continue
        if any(first not in (None, 0) for _, first in stack):
            kept.append("")
            continue
        for branch in stack:
            branch[0] += line.count("{") - line.count("}")
        kept.append(line)
    return "\n".join(kept)


def without_groups(head, opening, closing):
    pattern = re.compile(
        re.escape(opening) + r"[^" + re.escape(opening + closing) + r"]*" + re.escape(closing)
    )
    while True:
        shorter = pattern.sub(" ", head)
        if shorter == head:
            return head
        head = shorter


def kind_of_brace(head):
    """What a { opens after this text at namespace or class scope: scope, function or value."""
    flat = re.sub(r"\boperator\s*\(\s*\)", "operator_call", head)
    flat = re.sub(r"\boperator\s*[^\s\w(]+", "operator_sign", flat)
    outside = without_groups(flat, "(", ")")
    untemplated = without_groups(outside.replace("->", "  "), "<", ">")
    if re.search(r"\b(namespace|extern)\b[^;=]*$", untemplated) and "(" not in flat:
        return "scope"
    if re.search(r"\b(class|struct|union|enum)\b", untemplated) and "=" not in untemplated:
        return "scope"
    if re.search(r"(=|&&|\|\||!|\brequires)\s*requires\s*$", outside):
        return (
            "value"  # an expression; after a function's parameters it is a clause before the body
        )
    if "=" in untemplated:
        return (
            "function"
            if re.search(r"\]\s*(\(.*\)[^()]*)?$", flat, re.S) and "[" in flat
            else "value"
        )
    if "(" not in flat:
        return "value"
    if re.search(r"\)[^():]*(?<!:):(?!:)", flat) and re.search(r"[\w>]\s*$", flat):
        return "value"  # a member's initialiser of a constructor
    return "function"


def matching(code, at):
    depth = 0
    for match in re.compile(r"[{}]").finditer(code, at):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    return None


def name_in(head):
    for match in re.finditer(
        r"(operator\s*[^\s\w(]+|operator\s*\(\)|~?[A-Za-z_][\w:]*)\s*\(", head
    ):
        if match.group(1) not in NOT_A_NAME and not match.group(1).startswith("KVMELD_"):
            return match.group(1)
    named = re.search(r"(\w+)\s*=", head)
    return named.group(1) if named else "?"


def functions_of(text):
    """Every function with a body, and whether all braces were understood."""
    code = without_directives(code_of(text))
    found, start, depth, parens = [], 0, 0, 0
    at = 0
    while at < len(code):
        c = code[at]
        if c in "([":
            parens += 1
        elif c in ")]":
            parens -= 1
        elif c == ";" and parens == 0:
            start = at + 1
        elif c == "}" and parens == 0:
            depth -= 1
            start = at + 1
        elif c == "{":
            head = code[start:at]
            kind = "value" if parens else kind_of_brace(head)
            if kind == "scope":
                depth += 1
                start = at + 1
            else:
                end = matching(code, at)
                if end is None:
                    return found, False
                if kind == "function":
                    first = (
                        start
                        + len(head)
                        - len(re.sub(r"^\s*((public|private|protected)\s*:\s*)?", "", head))
                    )
                    line = code.count("\n", 0, first) + 1
                    body = code[at:end]
                    found.append(
                        Function(
                            name_in(re.sub(r"^\s*(public|private|protected)\s*:", "", head)),
                            line,
                            code.count("\n", first, end) + 1,
                            1 + len(BRANCH.findall(body)),
                        )
                    )
                    start = end + 1
                at = end
        at += 1
    return found, depth == 0 and parens == 0


# ---- Components ----------------------------------------------------------------------------------

CORE_FOLDERS = {"policies", "detail", "extend"}
LEAVES = {"engine", "cuda", "metrics", "testing"}
MAY_INCLUDE = {
    "core": set(),
    "anchors": {"core"},
    "formula": {"core"},
    "fit": {"core", "anchors"},
    "replica": {"core"},
    "stores": {"core", "replica"},
    "coordinator": {"core", "replica"},
    "mpi": {"core", "replica"},
}
NAMESPACES = {"engine": "llama", "cuda": "gpu"}
# Doors of anchors that stand on replicas, as headers of anchors/detail may that serve only them.
ANCHORS_ON_REPLICA = {"anchors/exchange.hpp", "anchors/tiers.hpp"}
# What the core itself stands on.
GROUND = {"config.hpp", "status.hpp", "version.hpp"}
GROUND_MAY_INCLUDE = GROUND | {"detail/util.hpp"}


def component(header):
    folder = header.split("/")[0] if "/" in header else ""
    if header == "testing.hpp":
        return "testing"
    return "core" if not folder or folder in CORE_FOLDERS else folder


def is_public(header):
    return "detail" not in header.split("/")[:-1]


def is_core_public(header):
    return is_public(header) and component(header) == "core"


def namespace_of(name):
    """The namespace of a component."""
    return "kvmeld" if name == "core" else "kvmeld::" + NAMESPACES.get(name, name)


def cycles(graph):
    """The strongly connected sets of more than one header, and headers that include themselves."""
    index, low, stack, on_stack, found = {}, {}, [], set(), []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on_stack.add(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in on_stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while not group or group[-1] != node:
                group.append(stack.pop())
                on_stack.discard(group[-1])
            if len(group) > 1 or node in graph[node]:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def reachable(graph, roots):
    seen, waiting = set(), list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(graph.get(node, ()))
    return seen


def direction_breaches(graph):
    """Includes that rule 9 does not allow: from a header, to a header, and why."""
    others = [
        h
        for h in graph
        if component(h) == "anchors" and is_public(h) and h not in ANCHORS_ON_REPLICA
    ]
    under_others = reachable(graph, others)
    found = []
    for header in sorted(graph):
        mine = component(header)
        if mine not in MAY_INCLUDE and mine not in LEAVES:
            found.append(f"{header}: {mine}/ is no component")
            continue
        allowed = set(MAY_INCLUDE.get(mine, MAY_INCLUDE)) | {mine}
        if mine == "anchors" and header not in under_others:
            if header in ANCHORS_ON_REPLICA or not is_public(header):
                allowed.add("replica")
        for other in sorted(graph[header]):
            theirs = component(other)
            if theirs not in allowed:
                found.append(f"{header} includes {other}: {mine} may not stand on {theirs}")
            elif theirs != mine and not is_public(other):
                found.append(f"{header} includes {other}: the detail of another component")
            elif header in GROUND and other not in GROUND_MAY_INCLUDE:
                found.append(
                    f"{header} includes {other}: the core stands on it, not it on the core"
                )
    return found


def detail_words(header, code):
    """Names written as COMPONENT::detail::NAME by another component."""
    mine = namespace_of(component(header)).split("::")[-1]
    known = {namespace_of(name).split("::")[-1] for name in list(MAY_INCLUDE) + list(LEAVES)}
    found = set()
    for match in re.finditer(r"(\w+)\s*::\s*detail\b(?:\s*::\s*(\w+))?", code):
        if match.group(1) in known and match.group(1) != mine:
            found.add(f"{header} names {match.group(1)}::detail::{match.group(2) or ''}")
    return found
