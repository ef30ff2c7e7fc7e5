#pragma once
// Caches in several layouts, filled with repeatable numbers, whose addresses are worked out here
// and not by the library.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <kvmeld/exec.hpp>
#include <kvmeld/extend/rows.hpp>
#include <kvmeld/fragment.hpp>

namespace test {

/// SplitMix64: the same numbers everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  /// In [−4, 4), a multiple of 2^−20.
  float value() {
    return static_cast<float>(static_cast<std::int32_t>(next() >> 41) - (1 << 22)) * 0x1p-20F;
  }

 private:
  std::uint64_t state_;
};

/// A model in few words; −1 takes the default that stands beside it.
struct Model {
  kvmeld::ElementType type = kvmeld::ElementType::f32;
  int layers = 2;
  int heads = 2;
  int channels = 64;
  int value_channels = -1;  // channels
  int first = 0;            // first rotary channel
  int rotary = -1;          // channels − first; 0: keys carry no position
  kvmeld::RopePairing pairing = kvmeld::RopePairing::half_split;
  double base = 10000.0;
};

inline std::shared_ptr<kvmeld::Geometry> geometry(const Model& m = {}) {
  auto g = std::make_shared<kvmeld::Geometry>();
  g->model = "test model";
  g->tokenizer = "test tokenizer";
  kvmeld::RopeSpec rope = kvmeld::RopeSpec::none();
  const int rotary = m.rotary < 0 ? m.channels - m.first : m.rotary;
  if (rotary > 0) {
    rope = kvmeld::RopeSpec::rotary(rotary, m.base, m.pairing);
    rope.first_channel = m.first;
  }
  for (int l = 0; l < m.layers; ++l) {
    g->layers.push_back(kvmeld::attention_layer(m.type, m.heads, m.channels, rope));
    if (m.value_channels >= 0) g->layers.back().planes[1].channels = m.value_channels;
  }
  return g;
}

/// Values by plane, then ((token · heads) + head) · channels + channel.
using Dense = std::vector<std::vector<double>>;

enum class Layout { canonical, head_first, paged, slot_list, transposed_values, split_channels };
inline constexpr Layout all_layouts[] = {
    Layout::canonical, Layout::head_first,        Layout::paged,
    Layout::slot_list, Layout::transposed_values, Layout::split_channels};

/// A cache that owns its memory; bytes that hold no element, and elements that were not filled, are
/// `untouched`.
class TestCache {
 public:
  static constexpr std::byte untouched{0x5A};

  /// @param hidden  for each layer, how many leading tokens it does not hold (slot-list layout
  /// only); empty: none.
  TestCache(std::shared_ptr<const kvmeld::Geometry> geometry, std::int64_t tokens,
            Layout layout = Layout::canonical, std::vector<std::int64_t> hidden = {})
      : geometry_(std::move(geometry)),
        tokens_(tokens),
        capacity_((tokens + 7) / 4 * 4),
        hidden_(std::move(hidden)) {
    // Blocks and slots lie backwards, with a stride that skips: nothing but the table finds them.
    const std::int64_t blocks = capacity_ / block;
    for (std::int64_t b = 0; b < blocks; ++b)
      blocks_.push_back(static_cast<std::int32_t>(blocks - 1 - b));
    for (std::int64_t t = 0; t < capacity_; ++t) slots_.push_back((t * 5 + 3) % capacity_);
    if (std::gcd(capacity_, std::int64_t{5}) != 1) {
      for (std::int64_t t = 0; t < capacity_; ++t)
        slots_[static_cast<std::size_t>(t)] = capacity_ - 1 - t;
    }
    std::size_t l = 0;
    for (const kvmeld::LayerShape& layer : geometry_->layers) {
      layer_slots_.push_back(slots_);
      for (std::size_t t = 0; !hidden_.empty() && t < static_cast<std::size_t>(hidden_[l]); ++t)
        layer_slots_[l][t] = -1;
      ++l;
      for (const kvmeld::PlaneShape& shape : layer.planes)
        layouts_.push_back(usable(layout, shape));
    }
    std::vector<kvmeld::MutablePlaneRef> planes;
    std::size_t p = 0;
    for (l = 0; l < geometry_->layers.size(); ++l) {
      for (const kvmeld::PlaneShape& shape : geometry_->layers[l].planes) {
        const auto rows = static_cast<std::size_t>(capacity_ * shape.heads);
        buffers_.emplace_back(
            rows * static_cast<std::size_t>(kvmeld::byte_size(shape.type, shape.channels)),
            untouched);
        planes.push_back(declare(shape, layouts_[p], buffers_[p].data(), layer_slots_[l].data()));
        plane_layer_.push_back(l);
        ++p;
      }
    }
    ref_ = kvmeld::MutableKvCacheRef(geometry_, std::move(planes), tokens_);
  }
  TestCache(const TestCache&) = delete;
  TestCache& operator=(const TestCache&) = delete;

  [[nodiscard]] kvmeld::KvCacheRef ref() const { return ref_; }
  [[nodiscard]] const kvmeld::MutableKvCacheRef& out() { return ref_; }
  [[nodiscard]] const kvmeld::Geometry& geometry() const { return *geometry_; }
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }
  [[nodiscard]] std::vector<std::vector<std::byte>>& buffers() { return buffers_; }
  [[nodiscard]] const std::vector<std::vector<std::byte>>& buffers() const { return buffers_; }
  [[nodiscard]] const kvmeld::PlaneShape& shape(std::size_t plane) const {
    return ref_.planes()[plane].shape;
  }
  [[nodiscard]] std::size_t planes() const { return layouts_.size(); }
  [[nodiscard]] std::size_t layer_of(std::size_t plane) const { return plane_layer_[plane]; }
  [[nodiscard]] bool holds(std::size_t plane, std::int64_t token) const {
    return hidden_.empty() || token >= hidden_[plane_layer_[plane]];
  }

  /// Number of an element in its plane's buffer.
  [[nodiscard]] std::int64_t element(std::size_t plane, std::int64_t t, std::int64_t h,
                                     std::int64_t c) const {
    const std::int64_t heads = shape(plane).heads, channels = shape(plane).channels;
    switch (layouts_[plane]) {
      case Layout::canonical:
        return (t * heads + h) * channels + c;
      case Layout::head_first:
        return (h * capacity_ + t) * channels + c;
      case Layout::paged:
        return ((blocks_[static_cast<std::size_t>(t / block)] * block + t % block) * heads + h) *
                   channels +
               c;
      case Layout::slot_list:
        return (slots_[static_cast<std::size_t>(t)] * heads + h) * channels + c;
      case Layout::transposed_values:
        return (h * channels + c) * capacity_ + t;
      case Layout::split_channels:
        return ((h * (channels / split) + c / split) * capacity_ + t) * split + c % split;
    }
    return -1;
  }
  [[nodiscard]] double get(std::size_t plane, std::int64_t t, std::int64_t h,
                           std::int64_t c) const {
    const kvmeld::ElementType type = shape(plane).type;
    const std::byte* data = buffers_[plane].data();
    if (type == kvmeld::ElementType::f64) {
      double wide;
      std::memcpy(&wide, data + element(plane, t, h, c) * 8, 8);
      return wide;
    }
    return static_cast<double>(kvmeld::detail::load_element(type, data, element(plane, t, h, c)));
  }
  /// Sets one element of a type that is not stored in blocks.
  void set(std::size_t plane, std::int64_t t, std::int64_t h, std::int64_t c, float value) {
    kvmeld::detail::store_element(shape(plane).type, buffers_[plane].data(),
                                  element(plane, t, h, c), value);
  }
  /// The bytes of one element, or of the block that holds it.
  [[nodiscard]] const std::byte* bytes(std::size_t plane, std::int64_t t, std::int64_t h,
                                       std::int64_t c) const {
    const kvmeld::ElementType type = shape(plane).type;
    return buffers_[plane].data() +
           element(plane, t, h, c) / kvmeld::block_elements(type) * kvmeld::block_bytes(type);
  }
  [[nodiscard]] std::byte* bytes(std::size_t plane, std::int64_t t, std::int64_t h,
                                 std::int64_t c) {
    return const_cast<std::byte*>(std::as_const(*this).bytes(plane, t, h, c));
  }

  /// Fills every token that a layer holds with numbers in [−4, 4).
  void fill(std::uint64_t seed) {
    Random random(seed);
    for (std::size_t p = 0; p < planes(); ++p) {
      std::vector<float> row(static_cast<std::size_t>(shape(p).channels));
      for (std::int64_t t = 0; t < tokens_; ++t) {
        for (std::int64_t h = 0; h < shape(p).heads; ++h) {
          for (float& x : row) x = random.value();
          if (!holds(p, t)) continue;
          if (kvmeld::block_elements(shape(p).type) > 1) {
            kvmeld::extend::store_row(shape(p).type, kvmeld::Isa::baseline, row.data(),
                                      std::ssize(row), bytes(p, t, h, 0));
          } else {
            for (std::size_t c = 0; c < row.size(); ++c) {
              const auto channel = static_cast<std::int64_t>(c);
              set(p, t, h, channel, row[c]);
              // never −0, which seal would turn
              if (get(p, t, h, channel) == 0.0) set(p, t, h, channel, 0.0F);
            }
          }
        }
      }
    }
  }
  /// All values, as the layout's formula finds them.
  [[nodiscard]] Dense dense() const {
    Dense out(planes());
    for (std::size_t p = 0; p < planes(); ++p) {
      for (std::int64_t t = 0; t < tokens_; ++t) {
        for (std::int64_t h = 0; h < shape(p).heads; ++h) {
          for (std::int64_t c = 0; c < shape(p).channels; ++c)
            out[p].push_back(holds(p, t) ? get(p, t, h, c) : 0.0);
        }
      }
    }
    return out;
  }
  /// True if no byte of the buffers was written since construction.
  [[nodiscard]] bool is_untouched() const {
    return std::all_of(buffers_.begin(), buffers_.end(), [](const auto& buffer) {
      return std::all_of(buffer.begin(), buffer.end(), [](std::byte b) { return b == untouched; });
    });
  }

 private:
  static constexpr std::int64_t block = 4;  // tokens a page
  static constexpr std::int64_t split = 8;  // channels that stay together in the split layout

  static Layout usable(Layout layout, const kvmeld::PlaneShape& shape) {
    const bool cuts_rows = layout == Layout::transposed_values || layout == Layout::split_channels;
    if (cuts_rows && kvmeld::block_elements(shape.type) > 1) return Layout::canonical;
    if (layout == Layout::transposed_values && shape.plane == kvmeld::Plane::key)
      return Layout::canonical;
    if (layout == Layout::split_channels && shape.channels % split != 0) return Layout::canonical;
    return layout;
  }
  [[nodiscard]] kvmeld::MutablePlaneRef declare(const kvmeld::PlaneShape& shape, Layout layout,
                                                std::byte* data, const std::int64_t* slots) const {
    kvmeld::MutablePlaneRef plane;
    plane.data = data;
    plane.shape = shape;
    plane.tokens = tokens_;
    const std::int64_t channels = shape.channels, heads = shape.heads;
    plane.token_stride = channels * heads;
    plane.head_stride = channels;
    switch (layout) {
      case Layout::canonical:
        break;
      case Layout::head_first:
        plane.token_stride = channels;
        plane.head_stride = channels * capacity_;
        break;
      case Layout::paged:
        plane.slots = {.kind = kvmeld::SlotKind::block_table_i32,
                       .table = blocks_.data(),
                       .block_size = block,
                       .block_stride = block * heads * channels};
        break;
      case Layout::slot_list:
        plane.slots = {.kind = kvmeld::SlotKind::slot_list_i64, .table = slots};
        break;
      case Layout::transposed_values:
        plane.token_stride = 1;
        plane.head_stride = channels * capacity_;
        plane.channel_stride = capacity_;
        break;
      case Layout::split_channels:
        plane.token_stride = split;
        plane.head_stride = channels * capacity_;
        plane.channel_split = split;
        plane.split_stride = capacity_ * split;
        break;
    }
    return plane;
  }

  std::shared_ptr<const kvmeld::Geometry> geometry_;
  std::int64_t tokens_;
  std::int64_t capacity_;
  std::vector<std::int64_t> hidden_;
  std::vector<std::int32_t> blocks_;
  std::vector<std::int64_t> slots_;
  std::vector<std::vector<std::int64_t>> layer_slots_;  // (layers)
  std::vector<Layout> layouts_;                         // (planes)
  std::vector<std::size_t> plane_layer_;
  std::vector<std::vector<std::byte>> buffers_;  // (planes)
  kvmeld::MutableKvCacheRef ref_;
};

/// An executor that writes as if every output were larger than the processor's caches.
struct Streaming {
  static constexpr bool on_device = false;
  kvmeld::Isa isa = kvmeld::best_isa();

  template <kvmeld::RowWork W>
  kvmeld::Status bulk(std::int64_t rows, W work) const {
    work.streams = true;
    return kvmeld::exec::Sequential{.isa = isa}.bulk(rows, work);
  }
};

/// A fragment beside the numbers that went into it.
struct Sealed {
  kvmeld::Fragment fragment;
  Dense values;  // of payload 0
  std::vector<std::int64_t> positions;
  std::vector<std::int64_t> hidden;  // leading tokens that each layer does not hold; empty: none
};

/// Positions 3, 5, 6, 8, 9, 11, …: ascending with gaps.
inline std::vector<std::int64_t> gapped_positions(std::int64_t tokens, std::int64_t first = 3) {
  std::vector<std::int64_t> out;
  for (std::int64_t t = 0; t < tokens; ++t) out.push_back(first + t + (t + 1) / 2);
  return out;
}

/// Seals a random cache; an empty result means that `seal` refused, which the caller's next check
/// will show.
inline Sealed sealed(const std::shared_ptr<const kvmeld::Geometry>& g, std::int64_t tokens,
                     std::uint64_t seed, kvmeld::SealOptions options = {},
                     Layout layout = Layout::canonical,
                     const std::vector<std::int64_t>& hidden = {}) {
  TestCache cache(g, tokens, layout, hidden);
  cache.fill(seed);
  Sealed out;
  out.values = cache.dense();
  out.hidden = hidden;
  if (options.positions.empty()) {
    out.positions.resize(static_cast<std::size_t>(tokens));
    std::iota(out.positions.begin(), out.positions.end(), 0);
  } else {
    out.positions.assign(options.positions.begin(), options.positions.end());
  }
  const auto made = kvmeld::seal(cache.ref(), options);
  if (made) out.fragment = *made;
  return out;
}

/// Token ids first, first + 1, ….
inline std::vector<kvmeld::TokenId> token_ids(std::int64_t count, kvmeld::TokenId first = 100) {
  std::vector<kvmeld::TokenId> out(static_cast<std::size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

/// A copy of a fragment whose payload `index` is gone, as after an eviction.
inline kvmeld::Fragment evicted(const kvmeld::Fragment& fragment, std::size_t index = 0) {
  auto body = std::make_shared<kvmeld::Fragment::Body>(*fragment.body());
  body->payloads[index].bytes = nullptr;
  return kvmeld::Fragment(std::move(body));
}

}  // namespace test
