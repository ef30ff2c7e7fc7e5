// A random fragment crosses as manifest, chunks and frames in a random order with repeats; what was
// bent on the way is an error or the same fragment, never another one.
#include <algorithm>

#include <kvmeld/fragment.hpp>
#include <kvmeld/replica/wire.hpp>

#include "support/law.hpp"
#include "support/random_cache.hpp"

namespace {

using kvmeld::ElementType;
using kvmeld::Fragment;

Fragment random_fragment() {
  test::Model m;
  m.type = *rc::gen::element(ElementType::f32, ElementType::f16, ElementType::bf16,
                             ElementType::q8_0, ElementType::i8);
  m.layers = *rc::gen::inRange(0, 5);
  m.heads = *rc::gen::inRange(1, 4);
  m.channels = 32 * *rc::gen::inRange(1, 3);
  m.value_channels = *rc::gen::element(-1, 32);
  m.rotary = *rc::gen::element(-1, 0, 16);
  const auto g = test::geometry(m);
  g->tenant = *rc::gen::element<std::string>("", "tenant a");
  if (m.layers > 1) g->layers[1].window = *rc::gen::inRange(0, 9);
  const auto tokens = static_cast<std::int64_t>(*rc::gen::inRange(0, 12));
  const auto ids = test::token_ids(tokens);
  const auto positions = test::gapped_positions(tokens, *rc::gen::inRange(0, 1000));
  kvmeld::SealOptions options;
  if (*rc::gen::arbitrary<bool>()) options.tokens = ids;
  if (*rc::gen::arbitrary<bool>()) options.positions = positions;
  std::vector<std::int64_t> hidden;
  for (int l = 0; l < m.layers; ++l)
    hidden.push_back(*rc::gen::inRange<std::int64_t>(0, tokens + 1));
  if (*rc::gen::arbitrary<bool>()) {
    options.role = kvmeld::Role::prefix;
  } else {
    options.drop_first = *rc::gen::inRange<std::int64_t>(0, tokens + 1);
    options.context.lead_in =
        kvmeld::lead_in_digest(std::span(ids).first(static_cast<std::size_t>(options.drop_first)));
  }
  const Fragment made = test::sealed(g, tokens, *rc::gen::arbitrary<std::uint64_t>(), options,
                                     test::Layout::slot_list, hidden)
                            .fragment;
  RC_ASSERT(made.valid());
  return made;
}

}  // namespace

TEST_CASE("what was sealed is what arrives") {
  test::law("a fragment crosses whole", [] {
    const Fragment fragment = random_fragment();
    const kvmeld::Payload& payload = fragment.payloads()[0];
    const std::size_t cut =
        *rc::gen::element<std::size_t>(1, 7, 64, 1000, kvmeld::replica::default_chunk_bytes);
    RC_PRE(payload.byte_count / cut < 2000);
    const kvmeld::replica::FrameOptions options{
        .scope = kvmeld::replica::frame_namespace(fragment.geometry().tenant, "m", "t")};
    const auto wire = kvmeld::replica::encode_manifest(fragment, cut);
    RC_ASSERT(wire.ok());
    const auto frame = kvmeld::replica::encode_frame(1, *wire, options);
    RC_ASSERT(frame.ok());
    const auto view = kvmeld::replica::decode_frame(*frame, options);
    RC_ASSERT(view.ok());
    const auto manifest = kvmeld::replica::decode_manifest(view->body);
    RC_ASSERT(manifest.ok());
    RC_ASSERT(kvmeld::replica::encode_manifest(*manifest) == *wire);
    kvmeld::replica::Assembler assembler(*manifest);
    const std::size_t chunks = manifest->chunks[0].size();
    std::vector<std::size_t> order;
    for (std::size_t c = 0; c < chunks; ++c) order.insert(order.end(), {c, c});
    test::Random random(*rc::gen::arbitrary<std::uint64_t>());
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    for (const std::size_t c : order) {
      RC_ASSERT(assembler
                    .add(manifest->chunks[0][c],
                         kvmeld::replica::encode_chunk(kvmeld::replica::raw_chunk(payload, c, cut)))
                    .ok());
    }
    RC_ASSERT(assembler.complete());
    const auto back = assembler.finish();
    RC_ASSERT(back.ok());
    RC_ASSERT(back->id() == fragment.id());
    RC_ASSERT(back->geometry() == fragment.geometry());
    RC_ASSERT(back->payloads()[0].plane_offsets == payload.plane_offsets);
    RC_ASSERT(back->payloads()[0].scale_offsets == payload.scale_offsets);
    RC_ASSERT(back->payloads()[0].positions == payload.positions);
    RC_ASSERT(back->payloads()[0].token_sets == payload.token_sets);
    RC_ASSERT(std::equal(payload.bytes.get(), payload.bytes.get() + payload.byte_count,
                         back->payloads()[0].bytes.get()));
    RC_ASSERT(kvmeld::verify_fragment(*back).ok());
  });
  test::law("a bent manifest, its checksum mended, names the same fragment or none", [] {
    const Fragment fragment = random_fragment();
    auto bytes = *kvmeld::replica::encode_manifest(fragment, 64);
    test::Random random(*rc::gen::arbitrary<std::uint64_t>());
    for (int round = 0; round < 20; ++round) {
      auto bent = bytes;
      for (std::uint64_t edits = 1 + random.below(4); edits > 0; --edits) {
        bent[random.below(bent.size() - 8)] = static_cast<std::byte>(random.next());
      }
      const std::uint64_t sum =
          kvmeld::replica::detail::accident_sum(std::span(bent).first(bent.size() - 8));
      std::memcpy(bent.data() + bent.size() - 8, &sum, 8);
      const auto got = kvmeld::replica::decode_manifest(bent);
      if (got.ok()) RC_ASSERT(got->fragment.id() == fragment.id());
    }
  });
}
