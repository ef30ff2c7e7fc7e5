#pragma once
// Sealed notes of two models in one file, so that a fit with other options, or on more text, need
// not read the old text again.

#include "engine.hpp"

#include <kvmeld/kvmeld.hpp>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace example {

/// One text as two models hold it.
struct Paired {
  kvmeld::Fragment source, target;
};

/// Records one after the other: token count, first position, token ids, canonical bytes of both.
/// For models with one tokenizer.
class PairFile {
 public:
  /// @param path is made where it is not there; empty: nothing is kept. The file is of these two
  /// models and this text, or refused.
  static kvmeld::Result<std::unique_ptr<PairFile>> open(
      const std::string& path, std::shared_ptr<const kvmeld::Geometry> source,
      std::shared_ptr<const kvmeld::Geometry> target, const std::string& text) {
    auto file = std::unique_ptr<PairFile>(new PairFile(std::move(source), std::move(target)));
    if (path.empty()) return file;
    file->file_.reset(std::fopen(path.c_str(), "r+b"));
    if (!file->file_) file->file_.reset(std::fopen(path.c_str(), "w+b"));
    if (!file->file_)
      return kvmeld::Status(kvmeld::ErrorCode::invalid_argument, "cannot open " + path);
    const std::string head =
        "kvmeld pairs\n" + file->source_->model + "\n" + file->target_->model + "\n" + text + "\n";
    std::string found(head.size(), '\0');
    std::rewind(file->file_.get());
    found.resize(std::fread(found.data(), 1, found.size(), file->file_.get()));
    if (found.empty()) {
      file->put(head.data(), head.size());
    } else if (found != head) {
      return kvmeld::Status(kvmeld::ErrorCode::invalid_argument,
                            path + " holds pairs of other models or another text");
    }
    file->at_ = static_cast<long>(head.size());
    return file;
  }

  /// The next record, or none where the file ends, or is torn, and `add` goes on.
  kvmeld::Result<std::optional<Paired>> next(const Tokens& expected) {
    if (!file_) return std::optional<Paired>();
    std::fseek(file_.get(), at_, SEEK_SET);
    std::int32_t head[2];
    if (!get(head, sizeof head) || head[0] != static_cast<std::int32_t>(expected.size()))
      return std::optional<Paired>();
    Tokens tokens(expected.size());
    if (!get(tokens.data(), tokens.size() * sizeof(llama_token)) || tokens != expected)
      return std::optional<Paired>();
    Paired pair;
    for (const bool first : {true, false}) {
      auto fragment = read_one(first ? source_ : target_, tokens, head[1]);
      if (!fragment) return fragment.error();
      if (!fragment->valid()) return std::optional<Paired>();
      (first ? pair.source : pair.target) = *std::move(fragment);
    }
    at_ = std::ftell(file_.get());
    return std::optional<Paired>(std::move(pair));
  }

  void add(const Paired& pair) {
    if (!file_ || pair.source.token_count() != pair.target.token_count()) return;
    std::fseek(file_.get(), at_, SEEK_SET);
    const auto& first = pair.source.payloads()[0];
    const std::int32_t head[2] = {static_cast<std::int32_t>(pair.source.token_count()),
                                  static_cast<std::int32_t>(first.positions.front())};
    put(head, sizeof head);
    put(pair.source.tokens().data(), pair.source.tokens().size_bytes());
    put(first.bytes.get(), first.byte_count);
    put(pair.target.payloads()[0].bytes.get(), pair.target.payloads()[0].byte_count);
    std::fflush(file_.get());
    at_ = std::ftell(file_.get());
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  PairFile(std::shared_ptr<const kvmeld::Geometry> source,
           std::shared_ptr<const kvmeld::Geometry> target)
      : source_(std::move(source)), target_(std::move(target)) {}
  bool get(void* to, std::size_t size) { return std::fread(to, 1, size, file_.get()) == size; }
  void put(const void* from, std::size_t size) { (void)std::fwrite(from, 1, size, file_.get()); }

  kvmeld::Result<kvmeld::Fragment> read_one(const std::shared_ptr<const kvmeld::Geometry>& geometry,
                                            const Tokens& tokens, std::int32_t first) {
    kvmeld::HostCache cache(geometry, static_cast<std::int64_t>(tokens.size()));
    for (std::size_t p = 0; p < cache.mutable_ref().planes().size(); ++p) {
      const auto& plane = cache.mutable_ref().planes()[p];
      if (!get(plane.data,
               static_cast<std::size_t>(kvmeld::byte_size(plane.shape.type, plane.shape.channels) *
                                        plane.shape.heads * plane.tokens)))
        return kvmeld::Fragment();
    }
    std::vector<std::int64_t> positions;
    for (std::size_t i = 0; i < tokens.size(); ++i)
      positions.push_back(first + static_cast<std::int64_t>(i));
    return kvmeld::seal(cache.kv_cache_ref(), {.tokens = tokens, .positions = positions});
  }

  std::shared_ptr<const kvmeld::Geometry> source_, target_;
  std::unique_ptr<std::FILE, Close> file_;
  long at_ = 0;
};

}  // namespace example
