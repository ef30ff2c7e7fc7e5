// An order whose optional member is misspelled: its render ids would leave out what it reads.
// error: kvmeld: this policy has a member that is nearly 'metadata'
#include <kvmeld/merger.hpp>

struct Mine {
  static constexpr bool reproducible = true;
#ifdef KVMELD_BAD
  static constexpr kvmeld::MetadataFields meta_data = kvmeld::MetadataFields::provenance;
#else
  static constexpr kvmeld::MetadataFields metadata = kvmeld::MetadataFields::provenance;
#endif
  kvmeld::Result<std::vector<std::uint32_t>> order(std::span<const kvmeld::Source> sources) const {
    return kvmeld::ById{}.order(sources);
  }
  void digest(kvmeld::Hasher&) const {}
};

const auto merger = kvmeld::merger(Mine{});
