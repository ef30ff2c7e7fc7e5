#include "eigen_products.hpp"

#include <Eigen/Core>

namespace bench {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

__attribute__((visibility("default"))) void eigen_product(const float* a, const float* b, float* c,
                                                          std::ptrdiff_t rows, std::ptrdiff_t inner,
                                                          std::ptrdiff_t columns) {
  Eigen::Map<RowMajor>(c, rows, columns).noalias() =
      Eigen::Map<const RowMajor>(a, rows, inner) * Eigen::Map<const RowMajor>(b, inner, columns);
}

}  // namespace bench
