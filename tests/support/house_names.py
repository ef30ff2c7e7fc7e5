"""What the headers declare and which names they use, as libclang reads them."""

import glob
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from house_text import component

try:
    import clang.cindex as cindex
    from clang.cindex import CursorKind

    cindex.conf.lib  # loads the library
    MISSING = None
except Exception as error:  # no bindings, or bindings without their library
    MISSING = f"no libclang ({type(error).__name__}; Debian: apt install python3-clang)"


class Names:
    """The result: declarations (name, header) → Declaration, uses of detail, headers left out."""

    def __init__(self):
        self.declared = {}
        self.uses = set()
        self.left_out = {}
        self.errors = []


class Declaration:
    def __init__(self):
        self.documented = False
        self.forward = True
        self.namespace = ""
        self.line = 0


def tolerate_unknown_kinds():
    """Bindings older than their library know fewer kinds of cursors than it returns."""
    known = CursorKind.from_id

    def from_id(number):
        try:
            return known(number)
        except ValueError:
            return CursorKind.UNEXPOSED_EXPR

    CursorKind.from_id = staticmethod(from_id)


def package_flags():
    """Where Debian and examples/run.sh keep the packages that some headers need."""
    flags = ["-I/usr/include/eigen3"]
    if shutil.which("pkg-config"):
        run = subprocess.run(["pkg-config", "--cflags", "ompi-cxx"], capture_output=True, text=True)
        flags += run.stdout.split() if run.returncode == 0 else []
    cache = os.environ.get("KVMELD_CACHE") or os.path.expanduser("~/.cache/kvmeld")
    engines = sorted(glob.glob(cache + "/engine/*/include"))
    flags += ["-I" + engine for engine in engines[-1:]]
    nvcc = shutil.which("nvcc")
    homes = [
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
        nvcc and str(pathlib.Path(nvcc).resolve().parents[1]),
    ]
    flags += [
        "-I" + home + "/include"
        for home in homes
        if home and os.path.isfile(home + "/include/cuda_runtime.h")
    ]
    return flags


def generate_messages(include, folder):
    """Makes the headers of messages; without protoc, what includes these is left out."""
    plugin = shutil.which("grpc_cpp_plugin")
    protos = sorted(str(path) for path in include.rglob("*.proto"))
    if protos and plugin and shutil.which("protoc"):
        subprocess.run(
            [
                "protoc",
                "-I",
                str(include),
                "--cpp_out",
                folder,
                "--grpc_out",
                folder,
                "--plugin=protoc-gen-grpc=" + plugin,
            ]
            + protos,
            check=True,
        )


def parse_all(include, headers, flags, names):
    """Parses all headers at once, less those that a missing file keeps from being read."""
    source = str(include / "house_all.cpp")
    headers = list(headers)
    while True:
        text = "".join(f"#include <kvmeld/{header}>\n" for header in headers)
        # The bodies of functions for devices are errors to a C++ compiler; their names are read.
        unit = cindex.Index.create().parse(
            source,
            args=["-std=c++20", "-ferror-limit=0", "-I" + str(include)] + flags,
            unsaved_files=[(source, text)],
        )
        missing = None
        names.errors = []
        for diagnostic in unit.diagnostics:
            if diagnostic.severity < 3:
                continue
            absent = re.match(r"'(.*)' file not found", diagnostic.spelling)
            where = diagnostic.location.file
            if absent and diagnostic.severity == 4:
                missing = (absent.group(1), where.name)
            elif where is None or not where.name.endswith(".cuh"):
                names.errors.append(f"{where}:{diagnostic.location.line}: {diagnostic.spelling}")
        if missing is None:
            return unit
        kept = [h for h in headers if not includes_file(include, h, missing[1])]
        for header in set(headers) - set(kept):
            names.left_out[header] = missing[0]
        if len(kept) == len(headers):
            names.errors.append(f"{missing[1]}: '{missing[0]}' file not found")
            return unit
        headers = kept


def includes_file(include, header, path):
    seen, waiting = set(), [include / "kvmeld" / header]
    while waiting:
        file = waiting.pop()
        if os.path.abspath(file) == os.path.abspath(path):
            return True
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        waiting += [
            include / other
            for other in re.findall(r"#\s*include\s*<(kvmeld/[^>]+)>", file.read_text())
        ]
    return False


class Walker:
    def __init__(self, include, codes, names):
        self.root = str(include / "kvmeld") + "/"
        self.codes = codes  # header → its text without comments
        self.names = names
        self.headers = {}

    def header_of(self, cursor):
        file = cursor.location.file
        if file is None:
            return None
        if file.name not in self.headers:
            inside = file.name.startswith(self.root)
            self.headers[file.name] = file.name[len(self.root) :] if inside else None
        return self.headers[file.name]

    @staticmethod
    def namespace(cursor):
        """The namespaces around it, less the inline ones; None for members and locals."""
        parts, parent = [], cursor.semantic_parent
        if parent is None or parent.kind not in (CursorKind.NAMESPACE, CursorKind.TRANSLATION_UNIT):
            return None
        while parent is not None and parent.kind == CursorKind.NAMESPACE:
            if not cindex.conf.lib.clang_Cursor_isInlineNamespace(parent):
                parts.append(parent.spelling)
            parent = parent.semantic_parent
        return "::".join(reversed(parts))

    def declarations(self, cursor):
        for child in cursor.get_children():
            header = self.header_of(child)
            if header is None:
                continue
            if child.kind in (CursorKind.NAMESPACE, CursorKind.LINKAGE_SPEC) or (
                child.kind == CursorKind.UNEXPOSED_DECL and not child.spelling
            ):
                self.declarations(child)
            else:
                self.declaration(child, header)

    def declaration(self, cursor, header):
        skipped = (CursorKind.USING_DIRECTIVE, CursorKind.STATIC_ASSERT, CursorKind.NAMESPACE_ALIAS)
        name = cursor.spelling
        if not name or cursor.kind in skipped or re.match(r"operator\b|<deduction guide", name):
            return
        # Definitions of members outside of their class, and specialisations, add no name.
        namespace = self.namespace(cursor)
        if cursor.kind == CursorKind.USING_DECLARATION:
            namespace = self.namespace(cursor) or ""
        elif cindex.conf.lib.clang_getSpecializedCursorTemplate(cursor) is not None:
            return
        if namespace is None or not re.match(r"[A-Za-z_]\w*$", name):
            return
        full = namespace + "::" + name if namespace else name
        declaration = self.names.declared.setdefault((full, header), Declaration())
        declaration.namespace = namespace
        declaration.line = declaration.line or cursor.location.line
        declaration.documented |= bool(cursor.raw_comment)
        classes = (
            CursorKind.CLASS_DECL,
            CursorKind.STRUCT_DECL,
            CursorKind.UNION_DECL,
            CursorKind.CLASS_TEMPLATE,
            CursorKind.ENUM_DECL,
        )
        declaration.forward &= cursor.kind in classes and not cursor.is_definition()

    def uses(self, cursor, header):
        """References to names in the detail of another component than the header's own."""
        library = cindex.conf.lib
        for child in cursor.get_children():
            here = self.header_of(child)
            if cursor.kind == CursorKind.TRANSLATION_UNIT and here is None:
                continue
            here = here or header
            targets = []
            if child.kind in (
                CursorKind.DECL_REF_EXPR,
                CursorKind.TYPE_REF,
                CursorKind.TEMPLATE_REF,
                CursorKind.MEMBER_REF,
            ):
                targets = [child.referenced]
            elif child.kind == CursorKind.OVERLOADED_DECL_REF:
                count = library.clang_getNumOverloadedDecls(child)
                targets = [library.clang_getOverloadedDecl(child, i) for i in range(count)]
            for target in targets:
                if target is not None:
                    self.use(target, here)
            self.uses(child, here)

    def use(self, target, header):
        namespace = self.namespace(target)
        home = self.header_of(target)
        if not namespace or home is None or "detail" not in namespace.split("::"):
            return
        name = re.match(r"\w*", target.spelling).group()
        # A macro may expand to the detail of its own component: only what is written here counts.
        if component(home) != component(header) and re.search(rf"\b{name}\b", self.codes[header]):
            self.names.uses.add(f"{header} names {namespace}::{name} of {home}")


def read_names(root, headers, codes, flags):
    names = Names()
    include = root / "include"
    tolerate_unknown_kinds()
    with tempfile.TemporaryDirectory() as generated:
        generate_messages(include, generated)
        unit = parse_all(include, headers, ["-I" + generated] + flags + package_flags(), names)
    walker = Walker(include, codes, names)
    walker.declarations(unit.cursor)
    walker.uses(unit.cursor, None)
    # A forward declaration is listed only where nothing defines the class.
    defined = {name for (name, _), declaration in names.declared.items() if not declaration.forward}
    for key in [k for k, d in names.declared.items() if d.forward and k[0] in defined]:
        del names.declared[key]
    return names
