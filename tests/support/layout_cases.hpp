#pragma once
// Every layout as its engine defines it: extents of its tensors and, for one element, an index on
// each axis. Addresses come from these alone (row-major, last axis contiguous), so that the
// library's strides are checked against something written apart.

#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <kvmeld/layouts.hpp>

namespace test {

using kvmeld::ElementType;
using kvmeld::Plane;
using kvmeld::SlotKind;
using kvmeld::TokenPlacement;

using Memory = std::vector<std::vector<std::byte>>;  // one vector a tensor

struct Setup {
  ElementType type = ElementType::f16;
  std::int64_t heads = 3;
  std::int64_t channels = 64;
  std::int64_t tokens = 7;
  SlotKind kind = SlotKind::identity;
  bool holes = true;
  std::uint32_t seed = 1;
};

// Where the tokens of a case are: the tables that the library reads, and the slots that the test
// computed itself.
struct Tokens {
  std::vector<std::int32_t> narrow;
  std::vector<std::int64_t> wide;
  std::vector<std::int64_t> slots;  // -1: hole
  TokenPlacement placement;
};

struct Address {
  std::size_t tensor = 0;
  std::int64_t byte = 0;
};

struct LayoutCase {
  std::shared_ptr<const kvmeld::Geometry> geometry;
  std::shared_ptr<Tokens> tokens;
  std::vector<std::int64_t> tensor_bytes;
  std::function<Address(std::size_t layer, std::size_t plane, std::int64_t slot, std::int64_t head,
                        std::int64_t channel)>
      address;
  std::function<kvmeld::Result<kvmeld::KvCacheRef>(const Memory&)> read;
  std::function<kvmeld::Result<kvmeld::MutableKvCacheRef>(Memory&)> write;
};

inline std::int64_t flat(std::initializer_list<std::int64_t> extents,
                         std::initializer_list<std::int64_t> indices) {
  std::int64_t at = 0;
  auto index = indices.begin();
  for (const std::int64_t extent : extents) at = at * extent + *index++;
  return at;
}
inline std::int64_t bytes_of(ElementType type, std::int64_t elements) {
  switch (type) {
    case ElementType::f64:
      return elements * 8;
    case ElementType::f32:
      return elements * 4;
    case ElementType::f16:
    case ElementType::bf16:
      return elements * 2;
    case ElementType::q8_0:
      return elements / 32 * 34;
    default:
      return elements;
  }
}
inline std::int64_t step_of(ElementType type) { return type == ElementType::q8_0 ? 32 : 1; }

constexpr std::int64_t case_layers = 2, case_blocks = 9, case_block_tokens = 4,
                       case_capacity = case_blocks * case_block_tokens;

inline std::shared_ptr<Tokens> place(const Setup& s, std::int64_t reserved = 0) {
  auto out = std::make_shared<Tokens>();
  std::mt19937 random(s.seed);
  const auto shuffled = [&](std::int64_t first, std::int64_t count) {
    std::vector<std::int64_t> v;
    for (std::int64_t i = first; i < count; ++i) v.push_back(i);
    for (std::size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[random() % i]);
    return v;
  };
  const auto n = static_cast<std::size_t>(s.tokens);
  if (s.kind == SlotKind::identity) {
    for (std::int64_t t = 0; t < s.tokens; ++t) out->slots.push_back(2 + t);
    out->placement = TokenPlacement::in_order(s.tokens, 2);
    return out;
  }
  const bool by_block = s.kind == SlotKind::block_table_i32 || s.kind == SlotKind::block_table_i64;
  out->wide = shuffled(by_block ? 0 : reserved, by_block ? case_blocks : case_capacity);
  if (s.holes && out->wide.size() > 1) out->wide[1] = -1;
  if (by_block) {
    for (std::size_t t = 0; t < n; ++t) {
      const std::int64_t block = out->wide[t / case_block_tokens];
      out->slots.push_back(block < 0 ? -1
                                     : block * case_block_tokens +
                                           static_cast<std::int64_t>(t % case_block_tokens));
    }
  } else {
    out->wide.resize(n);
    out->slots = out->wide;
  }
  for (const std::int64_t x : out->wide) out->narrow.push_back(static_cast<std::int32_t>(x));
  const std::span<const std::int64_t> wide = out->wide;
  const std::span<const std::int32_t> narrow = out->narrow;
  switch (s.kind) {
    case SlotKind::block_table_i32:
      out->placement = TokenPlacement::block_table(narrow, s.tokens);
      break;
    case SlotKind::block_table_i64:
      out->placement = TokenPlacement::block_table(wide, s.tokens);
      break;
    case SlotKind::slot_list_i32:
      out->placement = TokenPlacement::slot_list(narrow);
      break;
    default:
      out->placement = TokenPlacement::slot_list(wide);
      break;
  }
  return out;
}

inline std::shared_ptr<const kvmeld::Geometry> key_value_geometry(const Setup& s,
                                                                  std::int64_t value_channels = 0) {
  kvmeld::Geometry g;
  g.model = "layout test";
  for (std::int64_t l = 0; l < case_layers; ++l) {
    kvmeld::LayerShape layer =
        kvmeld::attention_layer(s.type, static_cast<std::int32_t>(s.heads),
                                static_cast<std::int32_t>(s.channels), kvmeld::RopeSpec::none());
    if (value_channels > 0) layer.planes[1].channels = static_cast<std::int32_t>(value_channels);
    g.layers.push_back(layer);
  }
  return std::make_shared<const kvmeld::Geometry>(std::move(g));
}

template <class Byte, class Bytes>
kvmeld::KeyValueBuffers<Byte> split(Bytes& memory) {  // tensors alternate: keys, values, keys, …
  kvmeld::KeyValueBuffers<Byte> out;
  for (std::size_t i = 0; i < memory.size(); ++i)
    (i % 2 == 0 ? out.keys : out.values).push_back(std::span<Byte>(memory[i]));
  return out;
}
template <class Byte, class Bytes>
kvmeld::Buffers<Byte> all_of(Bytes& memory) {
  kvmeld::Buffers<Byte> out;
  for (auto& tensor : memory) out.push_back(std::span<Byte>(tensor));
  return out;
}

// Key and value tensors of `elements` each, for every layer; `at` is the element's flat index in
// its tensor.
template <class Factory, class Options, class At>
LayoutCase separate(const Setup& s, std::shared_ptr<Tokens> tokens, std::int64_t elements,
                    Factory factory, Options options, At at) {
  LayoutCase c;
  c.geometry = key_value_geometry(s);
  c.tokens = std::move(tokens);
  c.tensor_bytes.assign(static_cast<std::size_t>(2 * case_layers), bytes_of(s.type, elements));
  c.address = [s, at](std::size_t l, std::size_t p, std::int64_t slot, std::int64_t h,
                      std::int64_t ch) {
    return Address{2 * l + p, bytes_of(s.type, at(p, slot, h, ch))};
  };
  c.read = [g = c.geometry, factory, options](const Memory& m) {
    return factory(g, split<const std::byte>(m), options);
  };
  c.write = [g = c.geometry, factory, options](Memory& m) {
    return factory(g, split<std::byte>(m), options);
  };
  return c;
}

// One tensor a layer, or one for all; `at` says which element.
template <class Factory, class Options, class At>
LayoutCase shared(const Setup& s, std::shared_ptr<Tokens> tokens, bool one_tensor,
                  std::int64_t elements, Factory factory, Options options, At at,
                  std::int64_t value_channels = 0) {
  LayoutCase c;
  c.geometry = key_value_geometry(s, value_channels);
  c.tokens = std::move(tokens);
  c.tensor_bytes.assign(one_tensor ? 1 : static_cast<std::size_t>(case_layers),
                        bytes_of(s.type, elements));
  c.address = [s, at, one_tensor](std::size_t l, std::size_t p, std::int64_t slot, std::int64_t h,
                                  std::int64_t ch) {
    return Address{one_tensor ? 0 : l,
                   bytes_of(s.type, at(static_cast<std::int64_t>(l), static_cast<std::int64_t>(p),
                                       slot, h, ch))};
  };
  c.read = [g = c.geometry, factory, options](const Memory& m) {
    return factory(g, all_of<const std::byte>(m), options);
  };
  c.write = [g = c.geometry, factory, options](Memory& m) {
    return factory(g, all_of<std::byte>(m), options);
  };
  return c;
}

inline LayoutCase contiguous_hnd(const Setup& s) {
  auto tokens = place(s);
  const std::int64_t H = s.heads, D = s.channels, S = case_capacity;
  return separate(
      s, tokens, 3 * H * S * D, [](auto&&... a) { return kvmeld::contiguous_view(a...); },
      kvmeld::ContiguousOptions{
          .tokens = tokens->placement, .max_tokens = S, .batch = 3, .batch_index = 1},
      [=](std::size_t, std::int64_t t, std::int64_t h, std::int64_t c) {
        return flat({3, H, S, D}, {1, h, t, c});
      });
}
inline LayoutCase contiguous_nhd(const Setup& s) {
  auto tokens = place(s);
  const std::int64_t H = s.heads, D = s.channels, S = case_capacity;
  return separate(
      s, tokens, 2 * H * S * D, [](auto&&... a) { return kvmeld::contiguous_view(a...); },
      kvmeld::ContiguousOptions{.tokens = tokens->placement,
                                .max_tokens = S,
                                .order = kvmeld::AxisOrder::token_head_channel,
                                .batch = 2,
                                .batch_index = 1},
      [=](std::size_t, std::int64_t t, std::int64_t h, std::int64_t c) {
        return flat({2, S, H, D}, {1, t, h, c});
      });
}
inline LayoutCase ort(const Setup& s) {
  auto tokens = place(s);
  const std::int64_t H = s.heads, D = s.channels, S = case_capacity;
  return separate(
      s, tokens, 2 * H * S * D, [](auto&&... a) { return kvmeld::ort_view(a...); },
      kvmeld::OrtOptions{
          .tokens = tokens->placement, .max_length = S, .batch = 2, .batch_index = 0},
      [=](std::size_t, std::int64_t t, std::int64_t h, std::int64_t c) {
        return flat({2, H, S, D}, {0, h, t, c});
      });
}
inline LayoutCase llama(const Setup& s, bool transposed) {
  auto tokens = place(s);
  const std::int64_t H = s.heads, D = s.channels, S = case_capacity;
  return separate(
      s, tokens, 2 * H * S * D, [](auto&&... a) { return kvmeld::llama_view(a...); },
      kvmeld::LlamaOptions{.tokens = tokens->placement,
                           .cells = S,
                           .transposed_values = transposed,
                           .streams = 2,
                           .stream = 1},
      [=](std::size_t p, std::int64_t t, std::int64_t h, std::int64_t c) {
        if (p == 1 && transposed) return flat({2, H * D, S}, {1, h * D + c, t});
        return flat({2, S, H * D}, {1, t, h * D + c});
      });
}
inline LayoutCase sglang(const Setup& s) {
  auto tokens = place(s, 1);
  const std::int64_t H = s.heads, D = s.channels, S = case_capacity;
  return separate(
      s, tokens, H * S * D, [](auto&&... a) { return kvmeld::sglang_view(a...); },
      kvmeld::SglangOptions{.tokens = tokens->placement, .slots = S},
      [=](std::size_t, std::int64_t t, std::int64_t h, std::int64_t c) {
        return flat({S, H, D}, {t, h, c});
      });
}
inline LayoutCase split_channel(const Setup& s) {
  auto tokens = place(s);
  const std::int64_t H = s.heads, D = s.channels, N = case_block_tokens,
                     x = 16 / bytes_of(s.type, 1);
  return separate(
      s, tokens, H * D * case_capacity,
      [](auto&&... a) { return kvmeld::split_channel_view(a...); },
      kvmeld::SplitChannelOptions{
          .tokens = tokens->placement, .blocks = case_blocks, .block_size = N},
      [=](std::size_t p, std::int64_t t, std::int64_t h, std::int64_t c) {
        if (p == 0) return flat({case_blocks, H, D / x, N, x}, {t / N, h, c / x, t % N, c % x});
        return flat({case_blocks, H, D, N}, {t / N, h, c, t % N});
      });
}

inline LayoutCase paged(const Setup& s, kvmeld::PagedLayout layout) {
  using kvmeld::PagedLayout;
  auto tokens = place(s);
  const std::int64_t H = s.heads, D = s.channels, N = case_block_tokens, B = case_blocks;
  const bool packed = layout == PagedLayout::block_head_token_packed ||
                      layout == PagedLayout::block_token_head_packed;
  // packed rows may hold values of another size
  const std::int64_t E = packed ? D + 32 : D, W = D + E;
  const bool padded = layout == PagedLayout::block_kv_token_head;
  const std::int64_t page = padded ? 2 * N * H * D + 64 : 0;
  return shared(
      s, tokens, false, padded ? B * page : B * N * H * W,
      [](auto&&... a) { return kvmeld::paged_view(a...); },
      kvmeld::PagedOptions{.tokens = tokens->placement,
                           .layout = layout,
                           .blocks = B,
                           .block_size = N,
                           .block_stride = page},
      [=](std::int64_t, std::int64_t p, std::int64_t t, std::int64_t h, std::int64_t c) {
        const std::int64_t b = t / N, n = t % N;
        switch (layout) {
          case PagedLayout::kv_block_token_head:
            return flat({2, B, N, H, D}, {p, b, n, h, c});
          case PagedLayout::kv_block_head_token:
            return flat({2, B, H, N, D}, {p, b, h, n, c});
          case PagedLayout::block_kv_token_head:
            return b * page + flat({2, N, H, D}, {p, n, h, c});
          case PagedLayout::block_kv_head_token:
            return flat({B, 2, H, N, D}, {b, p, h, n, c});
          case PagedLayout::block_head_token_packed:
            return flat({B, H, N, W}, {b, h, n, p * D + c});
          case PagedLayout::block_token_head_packed:
            return flat({B, N, H, W}, {b, n, h, p * D + c});
          case PagedLayout::block_token_head:
          case PagedLayout::block_head_token:
            break;  // `paged_apart`
        }
        return std::int64_t{-1};
      },
      E);
}
inline LayoutCase paged_apart(const Setup& s, kvmeld::PagedLayout layout, std::int64_t padding) {
  auto tokens = place(s);
  const std::int64_t H = s.heads, D = s.channels, N = case_block_tokens, B = case_blocks;
  const std::int64_t page = N * H * D + padding;
  return separate(
      s, tokens, B * page, [](auto&&... a) { return kvmeld::paged_view(a...); },
      kvmeld::PagedOptions{.tokens = tokens->placement,
                           .layout = layout,
                           .blocks = B,
                           .block_size = N,
                           .block_stride = padding == 0 ? 0 : page},
      [=](std::size_t, std::int64_t t, std::int64_t h, std::int64_t c) {
        const std::int64_t b = t / N, n = t % N;
        return b * page + (layout == kvmeld::PagedLayout::block_token_head
                               ? flat({N, H, D}, {n, h, c})
                               : flat({H, N, D}, {h, n, c}));
      });
}
inline LayoutCase cross_layer(const Setup& s, kvmeld::CrossLayerLayout layout) {
  using kvmeld::CrossLayerLayout;
  auto tokens = place(s);
  const std::int64_t H = s.heads, D = s.channels, N = case_block_tokens, B = case_blocks,
                     L = case_layers;
  return shared(
      s, tokens, true, B * L * 2 * N * H * D,
      [](auto&& g, auto&& buffers, auto&& o) { return kvmeld::cross_layer_view(g, buffers[0], o); },
      kvmeld::CrossLayerOptions{
          .tokens = tokens->placement, .layout = layout, .blocks = B, .block_size = N},
      [=](std::int64_t l, std::int64_t p, std::int64_t t, std::int64_t h, std::int64_t c) {
        const std::int64_t b = t / N, n = t % N;
        switch (layout) {
          case CrossLayerLayout::block_layer_kv_token_head:
            return flat({B, L, 2, N, H, D}, {b, l, p, n, h, c});
          case CrossLayerLayout::block_layer_kv_head_token:
            return flat({B, L, 2, H, N, D}, {b, l, p, h, n, c});
          case CrossLayerLayout::block_head_layer_kv_token:
            return flat({B, H, L, 2, N, D}, {b, h, l, p, n, c});
          case CrossLayerLayout::block_layer_token_head_packed:
            return flat({B, L, N, H, 2 * D}, {b, l, n, h, p * D + c});
          case CrossLayerLayout::block_head_layer_token_packed:
            return flat({B, H, L, N, 2 * D}, {b, h, l, n, p * D + c});
        }
        return std::int64_t{-1};
      });
}
// Two layers in one pool; the table of a case names blocks, the engine's offsets are made from it.
inline LayoutCase trtllm(Setup s) {
  s.holes = false;
  auto tokens = place(s);
  const std::int64_t H = s.heads, D = s.channels, N = case_block_tokens, B = case_blocks,
                     L = case_layers;
  auto offsets = std::make_shared<std::vector<std::vector<std::int32_t>>>(2);
  for (const std::int64_t b : tokens->wide) {
    for (std::size_t p = 0; p < 2; ++p)
      (*offsets)[p].push_back(static_cast<std::int32_t>(b * L * 2 + static_cast<std::int64_t>(p)));
  }
  LayoutCase c = shared(
      s, tokens, true, B * L * 2 * H * N * D,
      [offsets](auto&& g, auto&& buffers, auto&& o) { return kvmeld::trtllm_view(g, buffers, o); },
      kvmeld::TrtllmOptions{.keys = TokenPlacement::block_table((*offsets)[0], s.tokens),
                            .values = TokenPlacement::block_table((*offsets)[1], s.tokens),
                            .blocks = {B},
                            .block_size = N},
      [=](std::int64_t l, std::int64_t p, std::int64_t t, std::int64_t h, std::int64_t ch) {
        return flat({B, L, 2, H, N, D}, {t / N, l, p, h, t % N, ch});
      });
  return c;
}
inline LayoutCase latent(const Setup& s, kvmeld::LatentRow row, bool layers_in_block) {
  auto tokens = place(s);
  const std::int64_t R = s.channels, P = 64, N = case_block_tokens;
  const bool quantised = row == kvmeld::LatentRow::latent_scales_rope;
  kvmeld::Geometry g;
  g.model = "latent layout test";
  const ElementType rope_type = quantised ? ElementType::bf16 : s.type;
  for (std::int64_t l = 0; l < case_layers; ++l) {
    kvmeld::LayerShape layer;
    layer.planes = {{.plane = Plane::latent,
                     .type = s.type,
                     .heads = 1,
                     .channels = static_cast<std::int32_t>(R)},
                    {.plane = Plane::rope_part,
                     .type = rope_type,
                     .heads = 1,
                     .channels = static_cast<std::int32_t>(P),
                     .rotary = true}};
    layer.rope = kvmeld::RopeSpec::rotary(static_cast<std::int32_t>(P), 1e4,
                                          kvmeld::RopePairing::interleaved);
    if (quantised) {
      layer.planes[0].scales = kvmeld::ScaleScheme::per_channel_group;
      layer.planes[0].scale_group = 32;
    }
    g.layers.push_back(layer);
  }
  LayoutCase c;
  c.geometry = std::make_shared<const kvmeld::Geometry>(std::move(g));
  c.tokens = tokens;
  const std::int64_t latent_bytes = bytes_of(s.type, R), rope_bytes = bytes_of(rope_type, P),
                     scale_bytes = quantised ? R / 32 * 4 : 0;
  const std::int64_t row_bytes = latent_bytes + rope_bytes + scale_bytes;
  const std::int64_t in_block = layers_in_block ? case_layers : 1;
  c.tensor_bytes.assign(layers_in_block ? 1 : static_cast<std::size_t>(case_layers),
                        case_blocks * in_block * N * row_bytes);
  c.address = [=](std::size_t l, std::size_t p, std::int64_t slot, std::int64_t, std::int64_t ch) {
    const std::int64_t first =
        flat({case_blocks, in_block, N, row_bytes},
             {slot / N, layers_in_block ? static_cast<std::int64_t>(l) : 0, slot % N, 0});
    std::int64_t inside =
        p == 0 ? bytes_of(s.type, ch) : latent_bytes + scale_bytes + bytes_of(rope_type, ch);
    if (row == kvmeld::LatentRow::rope_latent)
      inside = p == 0 ? rope_bytes + bytes_of(s.type, ch) : bytes_of(rope_type, ch);
    return Address{layers_in_block ? 0 : l, first + inside};
  };
  const kvmeld::LatentOptions options{.tokens = tokens->placement,
                                      .row = row,
                                      .blocks = case_blocks,
                                      .block_size = N,
                                      .layers_in_block = layers_in_block};
  c.read = [g = c.geometry, options](const Memory& m) {
    return kvmeld::latent_view(g, all_of<const std::byte>(m), options);
  };
  c.write = [g = c.geometry, options](Memory& m) {
    return kvmeld::latent_view(g, all_of<std::byte>(m), options);
  };
  return c;
}

struct NamedLayout {
  const char* name;
  std::function<LayoutCase(const Setup&)> make;
  bool by_block = true;  // takes block tables
  bool by_slot = true;   // takes slot lists and identity
  bool block_types = true;
};

inline const std::vector<NamedLayout>& every_layout() {
  using kvmeld::CrossLayerLayout;
  using kvmeld::LatentRow;
  using kvmeld::PagedLayout;
  static const auto in = [](PagedLayout layout) {
    return [layout](const Setup& s) { return paged(s, layout); };
  };
  static const auto across = [](CrossLayerLayout layout) {
    return [layout](const Setup& s) { return cross_layer(s, layout); };
  };
  static const std::vector<NamedLayout> list = {
      {"contiguous HND", contiguous_hnd, false},
      {"contiguous NHD", contiguous_nhd, false},
      {"ONNX Runtime [B,H,S,D]", ort, false},
      {"llama.cpp cells", [](const Setup& s) { return llama(s, false); }, false},
      {"llama.cpp cells, V transposed", [](const Setup& s) { return llama(s, true); }, false, true,
       false},
      {"SGLang slots", sglang, false},
      {"split channel", split_channel, true, true, false},
      {"vLLM [2,B,N,H,D]", in(PagedLayout::kv_block_token_head)},
      {"vLLM [2,B,H,N,D]", in(PagedLayout::kv_block_head_token)},
      {"FlashInfer [B,2,N,H,D], padded blocks", in(PagedLayout::block_kv_token_head)},
      {"FlashInfer [B,2,H,N,D]", in(PagedLayout::block_kv_head_token)},
      {"vLLM packed [B,H,N,2D]", in(PagedLayout::block_head_token_packed)},
      {"vLLM packed [B,N,H,2D]", in(PagedLayout::block_token_head_packed)},
      {"K, V [B,N,H,D]",
       [](const Setup& s) { return paged_apart(s, PagedLayout::block_token_head, 0); }},
      {"K, V [B,H,N,D], padded blocks",
       [](const Setup& s) { return paged_apart(s, PagedLayout::block_head_token, 64); }},
      {"cross-layer [B,L,2,N,H,D]", across(CrossLayerLayout::block_layer_kv_token_head)},
      {"cross-layer [B,L,2,H,N,D]", across(CrossLayerLayout::block_layer_kv_head_token)},
      {"cross-layer [B,H,L,2,N,D]", across(CrossLayerLayout::block_head_layer_kv_token)},
      {"cross-layer [B,L,N,H,2D]", across(CrossLayerLayout::block_layer_token_head_packed)},
      {"cross-layer [B,H,L,N,2D]", across(CrossLayerLayout::block_head_layer_token_packed)},
      {"TensorRT-LLM pool", trtllm, true, false},
      {"MLA, latent then rope",
       [](const Setup& s) { return latent(s, LatentRow::latent_rope, false); }},
      {"MLA, rope then latent",
       [](const Setup& s) { return latent(s, LatentRow::rope_latent, false); }},
      {"MLA, layers in the block",
       [](const Setup& s) { return latent(s, LatentRow::latent_rope, true); }},
  };
  return list;
}

}  // namespace test
