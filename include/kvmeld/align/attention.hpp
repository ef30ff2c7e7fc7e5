#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <kvmeld/align/aligner.hpp>
#include <kvmeld/align/attention_layer.hpp>
#include <kvmeld/align/attention_rows.hpp>
#include <kvmeld/cache/fragment_view.hpp>
#include <kvmeld/tensor/float_environment.hpp>

KVMELD_NAMESPACE_BEGIN

/// Over what a softmax of `Attention` runs.
enum class AttentionMode : std::uint8_t {
  exact,  ///< all tokens of all fragments together: what one model would read from all of them
  /// Each fragment by itself, then the mean over fragments: every agent counts alike, however well
  /// it fits.
  per_agent_mean,
};

namespace detail {

/// Turns dots into weights in place, of which those of `range` sum to `share`; −infinity: not
/// there. False: not finite.
[[nodiscard]] inline bool softmax_range(const AttentionSteps& steps, double factor, double share,
                                        std::span<float> range) noexcept {
  float largest = -INFINITY;
  for (const float x : range) largest = x > largest ? x : largest;
  const double top = fma(static_cast<double>(largest), factor, 0.0);
  if (!std::isfinite(top)) return false;
  double total = 0;
  for (std::size_t at = 0; at < range.size(); at += attended_block) {
    const std::size_t n = range.size() - at < attended_block ? range.size() - at : attended_block;
    float dots[attended_block], weights[attended_block];
    for (std::size_t j = 0; j < attended_block; ++j) dots[j] = j < n ? range[at + j] : -INFINITY;
    total += steps.weigh(dots, factor, top, weights);
    for (std::size_t j = 0; j < n; ++j) range[at + j] = weights[j];
  }
  for (float& w : range) w = static_cast<float>(static_cast<double>(w) * share / total);
  return std::isfinite(total);
}

}  // namespace detail

/// Pools all tokens into `count` summary tokens: coordinator queries, given for each layer and KV
/// head, attend over every key of every fragment, and what they read becomes the cache.
///
/// Output token j stands at the j-th free position and has no id. In each layer and head, with w =
/// softmax(q·k · scale / temperature) over the tokens that the layer holds, V = Σ w·v and K = Σ
/// w·(key un-rotated) turned to the output's position: a weighted mean with
/// `AlignmentGroup::head_weights`, so the fuser is `WeightedMean` (or `Sum`: weights add up to 1).
/// A model reads the result only as well as its queries were chosen; unlike concatenation it keeps
/// no single token. For exact attention whose result is a vector and no token, see `attend`.
///
/// Weights are made when the plan is made, on the host, by the arithmetic of `attend`. O(count ·
/// bytes of keys) time, and count · tokens · heads · layers weights of 4 bytes. No fragments: no
/// output. Reproducible, and blind to the order in which fragments came. A coordinator and pooling
/// of this kind: Perceiver (Jaegle et al. 2021, arXiv:2103.03206), Set Transformer (Lee et al.
/// 2019, arXiv:1810.00825). Errors: those of `attend`; `oversized` beyond 2^31 weights a head;
/// `payload_missing`.
struct Attention {
  static constexpr bool reproducible = true;

  std::shared_ptr<const std::vector<float>> queries{};  ///< (query, layer, KV head, key channel)
  std::int64_t count = 1;                               ///< queries, and so output tokens
  QueryFrame frame = QueryFrame::pre_rope;
  std::vector<std::int64_t> positions{};  ///< (query) of `at_positions`
  float scale = 0.0F;                     ///< 0: 1 / √channels
  float temperature = 1.0F;
  AttentionMode mode = AttentionMode::exact;

  [[nodiscard]] Result<Alignment> align(std::span<const Source> ordered,
                                        std::int64_t first_position) const {
    return align_all(ordered, first_position);
  }
  void digest(Hasher& hasher) const {
    hasher.text("kvmeld.Attention");
    hasher.value(count);
    hasher.value(frame);
    hasher.value(scale);
    hasher.value(temperature);
    hasher.value(mode);
    hasher.values(std::span<const std::int64_t>(positions));
    hasher.values(queries == nullptr ? std::span<const float>() : std::span<const float>(*queries));
  }

 private:
  KVMELD_LAZY [[nodiscard]] Result<Alignment> align_all(std::span<const Source> ordered,
                                                        std::int64_t first_position) const {
    const FloatEnvironmentGuard guard;
    if (mode > AttentionMode::per_agent_mean)
      return detail::error(ErrorCode::unknown_field, "Attention: mode ", static_cast<int>(mode),
                           " is none of this build");
    std::vector<std::unique_ptr<FragmentView>> views;
    std::vector<AttendSource> sources;
    std::vector<std::size_t> begin{0};
    for (const Source& source : ordered) {
      // The first span is rendered in its encoding without lead-in, if it has one: weights are made
      // from the keys that are mixed.
      const std::size_t payload = sources.empty() && source.fragment->payloads().size() > 1 ? 1 : 0;
      if (source.fragment->payloads()[payload].bytes == nullptr) {
        return detail::error(ErrorCode::payload_missing,
                             "evicted payloads: ", source.fragment->id().hex(),
                             "; fetch it and plan again");
      }
      views.push_back(std::make_unique<FragmentView>(*source.fragment, payload));
      sources.push_back(
          {views.back()->ref(), source.fragment->payloads()[payload].positions, source.selected});
      begin.push_back(begin.back() + static_cast<std::size_t>(source.selected_count()));
    }
    const std::span<const float> values =
        queries == nullptr ? std::span<const float>() : std::span<const float>(*queries);
    const auto reader =
        detail::AttentionReader::of({values, count, frame, positions, scale, temperature}, sources);
    if (!reader) return reader.error();
    Alignment out;
    AlignmentGroup& group = out.groups.emplace_back();
    const std::size_t n = begin.back();
    if (n == 0) return out;
    const auto m = static_cast<std::size_t>(count);
    if (m > (std::size_t{1} << 31) / n)
      return detail::error(ErrorCode::oversized, "Attention: ", count, " queries over ", n,
                           " tokens");
    for (std::size_t q = 0; q < m; ++q) {
      out.positions.push_back(first_position + static_cast<std::int64_t>(q));
      out.tokens.push_back(-1);
      for (std::uint32_t s = 0; s < ordered.size(); ++s) {
        for (std::int64_t i = 0; i < ordered[s].selected_count(); ++i) {
          group.contributions.push_back(
              {s, static_cast<std::uint32_t>(ordered[s].selected_token(i)), 1.0F});
        }
      }
      group.end_row();
    }
    std::size_t rows = 0;
    for (std::size_t l = 0; l < reader->count(); ++l) rows += reader->layer(l).heads;
    group.head_weights.assign(rows * m * n, -INFINITY);
    float* weights = group.head_weights.data();  // (head, query, token) of the layer
    for (std::size_t l = 0; l < reader->count(); ++l) {
      KVMELD_TRY(weigh_layer(*reader, l, ordered, begin, weights));
      weights += reader->layer(l).heads * m * n;
    }
    return out;
  }

  KVMELD_LAZY [[nodiscard]] Status weigh_layer(const detail::AttentionReader& reader, std::size_t l,
                                               std::span<const Source> ordered,
                                               std::span<const std::size_t> begin,
                                               float* weights) const {
    const detail::AttentionReader::Layer& layer = reader.layer(l);
    detail::RowsInHand keys(reader, l, 0, static_cast<std::size_t>(count));
    const auto m = static_cast<std::size_t>(count);
    const std::size_t n = begin.back();
    std::vector<detail::AttendedToken> held;
    std::vector<std::span<const std::size_t>> ranges;  // that hold tokens: their begin and end
    for (std::size_t s = 0; s < ordered.size(); ++s) {
      held.clear();
      reader.tokens(l, s, held);
      if (!held.empty()) ranges.push_back(begin.subspan(s, 2));
      const auto stands_at = [&](std::size_t i, std::size_t k) {
        return ordered[s].selected_token(static_cast<std::int64_t>(i - begin[s])) ==
               static_cast<std::int64_t>(held[k].token);
      };
      std::size_t i = begin[s];
      for (std::size_t k = 0, some = 0; k < held.size(); k += some, i += some) {
        while (!stands_at(i, k)) ++i;
        for (some = 1; some < detail::attended_rows && k + some < held.size() &&
                       stands_at(i + some, k + some);)
          ++some;
        keys.take(std::span(held).subspan(k, some), detail::attended_rows);
        for (std::size_t h = 0; h < layer.heads; ++h) {
          const detail::RowParts& rows = keys.head(h);
          keys.dots()(layer.queries.data() + h * m * layer.key_width, m, rows,
                      weights + h * m * n + i, n);
        }
      }
    }
    const bool exact = mode == AttentionMode::exact;
    for (std::size_t r = 0; r < layer.heads * m; ++r) {
      const std::span<float> row(weights + r * n, n);
      bool finite = true;
      if (exact && !ranges.empty())
        finite = detail::softmax_range(keys.steps(), layer.factor, 1.0, row);
      for (std::size_t k = 0; k < ranges.size() && !exact; ++k) {
        const std::size_t first = ranges[k][0];
        finite = detail::softmax_range(keys.steps(), layer.factor,
                                       1.0 / static_cast<double>(ranges.size()),
                                       row.subspan(first, ranges[k][1] - first)) &&
                 finite;
      }
      if (!finite) {
        return detail::error(ErrorCode::non_finite, "Attention: query ", r % m, " at layer ", l,
                             " head ", r / m, ": q·k leaves f32; scale the queries");
      }
      for (float& w : row) w = w > 0.0F ? w : 0.0F;  // what the layer does not hold
    }
    return {};
  }
};

KVMELD_NAMESPACE_END
