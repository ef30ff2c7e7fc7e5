import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain
from conan.tools.files import copy, load

required_conan_version = ">=2.0"


class KvmeldConan(ConanFile):
    name = "kvmeld"
    description = "Merges the KV caches of several LLM agents (header-only C++20)"
    license = "Apache-2.0"
    topics = ("llm", "kv-cache", "crdt", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    exports_sources = "CMakeLists.txt", "cmake/*", "include/*", "LICENSE"
    no_copy_source = True
    # One option for each component that stands on another library; the headers are installed in any case.
    options = {name: [True, False] for name in ("redis", "grpc", "mpi", "openssl", "zstd", "eigen", "http")}
    default_options = {name: False for name in options}

    def set_version(self):
        text = load(self, os.path.join(self.recipe_folder, "include", "kvmeld", "version.hpp"))
        self.version = re.search(r'KVMELD_VERSION_STRING "([0-9.]+)"', text).group(1)

    def requirements(self):
        self.requires("xxhash/[>=0.8 <1]", transitive_headers=True)
        for option, requirement in (
            ("redis", "hiredis/[>=0.14 <2]"),
            ("grpc", "grpc/[>=1.50 <2]"),
            ("mpi", "openmpi/[>=4.1 <5]"),
            ("openssl", "openssl/[>=3 <4]"),
            ("zstd", "zstd/[>=1.5 <2]"),
            ("eigen", "eigen/[>=3.4 <4]"),
            ("http", "cpp-httplib/[>=0.11 <1]"),
        ):
            if self.options.get_safe(option):
                self.requires(requirement, transitive_headers=True, transitive_libs=True)

    def validate(self):
        check_min_cppstd(self, 20)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        folders = self.dependencies["xxhash"].cpp_info.includedirs
        toolchain.cache_variables["KVMELD_XXHASH_INCLUDE_DIR"] = folders[0]
        toolchain.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_id(self):
        self.info.clear()

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        # The package brings its own kvmeldConfig.cmake, which knows the components.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("share", "cmake", "kvmeld")]
        if self.settings.os == "Linux":
            self.cpp_info.system_libs = ["pthread"]
