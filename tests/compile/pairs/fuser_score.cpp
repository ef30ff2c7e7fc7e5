// A fuser of a score alone, misspelled: without a form it cannot be mistaken for an unweighted
// mean. error: kvmeld: this type is no FusePolicy: it needs one of 'float select(OrderedValues)
// const', 'mixing() const', 'Status score(const Scoring&
#include <kvmeld/policy.hpp>

#ifdef KVMELD_BAD
#define SCORE scores
#else
#define SCORE score
#endif

struct FirstOnly {
  static constexpr bool reproducible = true;
  [[nodiscard]] kvmeld::Status SCORE(const kvmeld::Scoring&, std::span<double> weights) const {
    for (double& w : weights.subspan(1)) w = 0;
    return {};
  }
  void digest(kvmeld::Hasher&) const {}
};

const kvmeld::Fuser fuser{FirstOnly{}};
