#pragma once

/// The library's version, the only place where it is written; CMake reads it from here.
#define KVMELD_VERSION_MAJOR 0
#define KVMELD_VERSION_MINOR 1
#define KVMELD_VERSION_PATCH 0
#define KVMELD_VERSION_STRING "0.1.0"
