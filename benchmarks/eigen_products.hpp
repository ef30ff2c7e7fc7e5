#pragma once

// Eigen's matrix product as a baseline, compiled for this very processor in a library with hidden
// templates: the rest of the program is compiled as a user gets it by default, and must not share
// instantiations with it.

#include <cstddef>

namespace bench {

/// c = a · b on one thread; all row-major. a: (rows, inner); b: (inner, columns); c: (rows,
/// columns)
void eigen_product(const float* a, const float* b, float* c, std::ptrdiff_t rows,
                   std::ptrdiff_t inner, std::ptrdiff_t columns);

}  // namespace bench
