// A fuser of one's own in twenty lines: it is planned, rendered, named and checked like the
// library's.
//
//   bash examples/run.sh custom_policy

#include <cstdio>
#include <cstring>
#include <memory>

#include <kvmeld/kvmeld.hpp>

// example-begin custom-fuser
/// Keeps, channel by channel, the value of the largest magnitude; equal magnitudes keep the first
/// fragment's.
struct Strongest {
  // comparisons only: equal inputs give equal bytes everywhere
  static constexpr bool reproducible = true;
  // acts per channel, so keys are compared un-rotated
  static constexpr bool rotation_equivariant = false;
  // one contribution is its own result: copied, not computed
  static constexpr bool keeps_single = true;

  KVMELD_HD static float magnitude(float x) { return x < 0 ? -x : x; }
  KVMELD_HD float init() const { return 0; }
  KVMELD_HD float absorb(float best, float value, float /*weight*/) const {
    return magnitude(value) > magnitude(best) ? value : best;
  }
  KVMELD_HD float join(float earlier, float later) const { return absorb(earlier, later, 1); }
  KVMELD_HD float finish(float best, float /*total_weight*/, int /*count*/) const { return best; }
  void digest(kvmeld::Hasher& hasher) const { hasher.text("example.Strongest"); }
};
// example-end

namespace {

/// A cache of two layers whose values rise with the token and carry the agent's sign.
kvmeld::Fragment fragment(const std::shared_ptr<const kvmeld::Geometry>& geometry, float sign,
                          std::int64_t tokens) {
  kvmeld::HostCache cache(geometry, tokens);
  auto* values = reinterpret_cast<float*>(cache.bytes().data());
  for (std::size_t i = 0; i < cache.bytes().size() / sizeof(float); ++i)
    values[i] = sign * static_cast<float>(1 + i % 7) / 8;
  return *kvmeld::seal(cache.kv_cache_ref());
}

}  // namespace

int main() {
  using namespace kvmeld;
  const RopeSpec rope = RopeSpec::rotary(64, 1e4, RopePairing::half_split);
  auto geometry = std::make_shared<Geometry>();
  geometry->layers.assign(2, attention_layer(ElementType::f32, 2, 64, rope));

  FragmentSet set;
  for (int agent = 0; agent < 3; ++agent) {
    const auto sealed =
        fragment(geometry, agent == 1 ? -2.0F : 1.0F + static_cast<float>(agent) / 4, 10 + agent);
    if (!set.insert(sealed, {.agent = static_cast<std::uint64_t>(agent), .sequence = 0})) return 1;
  }

  const auto merger = kvmeld::merger(ById{}, Aligner{TokenMatch{}}, Fuser{Strongest{}});
  static_assert(decltype(merger)::reproducible);

  HostCache out(geometry, 12);
  Digest128 first{};
  const auto report_on = [&](const char* name, const auto& exec) {
    const auto report = render(exec, set, merger, out.mutable_ref(), {}, {.content_digest = true});
    if (!report) {
      std::printf("%s: %s\n", name, report.error().message().c_str());
      return false;
    }
    if (first == Digest128{}) first = *report->content_digest;
    std::printf("%-12s %lld tokens  content %s\n", name, static_cast<long long>(report->tokens),
                report->content_digest->hex().c_str());
    return *report->content_digest == first;
  };
  const bool equal = report_on("sequential", exec::seq) && report_on("3 threads", exec::threads(3));
  std::puts(equal ? "one digest on every executor" : "the executors disagree");
  return equal ? 0 : 1;
}
