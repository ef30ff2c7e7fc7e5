#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvmeld/align/alignment.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// A token of a fragment as a matcher sees it.
struct GridToken {
  TokenId id = -1;
  std::uint32_t token = 0;      ///< index in the fragment
  const double* row = nullptr;  ///< its direction; null: none, or not asked for
};

/// Output tokens that grow as fragments join, one after the other, in canonical order.
///
/// A column stands for its founder: later fragments are matched with the founder's id and
/// direction.
template <class = void>
class TokenGrid {
 public:
  struct Column {
    GridToken founder;
    TokenId id;            ///< of all its tokens; −1 where they differ
    std::uint32_t source;  ///< whose token the founder is
    std::uint32_t first;   ///< its contributions, in order of source: a list in `links_`
    std::uint32_t last;
  };

  [[nodiscard]] const std::vector<Column>& columns() const noexcept { return columns_; }

  /// Joins a fragment. Its tokens without partner become columns in front of the column of its next
  /// token that has one, behind what stands there; at the end where none follows.
  ///
  /// @param column_of for each token the column that it joins, −1: none; no column twice
  void add(std::uint32_t source, std::span<const GridToken> tokens,
           std::span<const std::int32_t> column_of) {
    // of new columns in front of each; a counting sort keeps their order
    std::vector<std::uint32_t> count(columns_.size() + 2, 0);
    std::vector<std::uint32_t> front(tokens.size());
    auto next = static_cast<std::uint32_t>(columns_.size());
    for (std::size_t t = tokens.size(); t-- > 0;) {
      if (column_of[t] >= 0) {
        next = static_cast<std::uint32_t>(column_of[t]);
      } else {
        ++count[next + 1];
      }
      front[t] = next;
    }
    for (std::size_t c = 1; c < count.size(); ++c) count[c] += count[c - 1];
    std::vector<std::uint32_t> fresh(count.back());
    std::vector<std::uint32_t> end(count.begin(), count.end() - 1);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const std::uint32_t link = static_cast<std::uint32_t>(links_.size());
      links_.push_back({{source, tokens[t].token, 1.0F}, no_link});
      if (column_of[t] < 0) {
        fresh[end[front[t]]++] = static_cast<std::uint32_t>(t);
        continue;
      }
      Column& column = columns_[static_cast<std::size_t>(column_of[t])];
      if (column.id != tokens[t].id) column.id = -1;
      links_[column.last].next = link;
      column.last = link;
    }
    if (fresh.empty()) return;
    const auto first_link = static_cast<std::uint32_t>(links_.size() - tokens.size());
    std::vector<Column> grown;
    grown.reserve(columns_.size() + fresh.size());
    for (std::size_t c = 0; c <= columns_.size(); ++c) {
      for (std::uint32_t f = count[c]; f < count[c + 1]; ++f) {
        const GridToken& token = tokens[fresh[f]];
        grown.push_back({token, token.id, source, first_link + fresh[f], first_link + fresh[f]});
      }
      if (c < columns_.size()) grown.push_back(columns_[c]);
    }
    columns_ = std::move(grown);
  }

  /// One output token a column, from `first_position` on.
  [[nodiscard]] Alignment alignment(std::int64_t first_position) const {
    Alignment out;
    out.groups.resize(1);
    out.positions.reserve(columns_.size());
    out.tokens.reserve(columns_.size());
    out.groups[0].contributions.reserve(links_.size());
    for (const Column& column : columns_) {
      for (std::uint32_t l = column.first; l != no_link; l = links_[l].next)
        out.groups[0].contributions.push_back(links_[l].contribution);
      out.positions.push_back(first_position++);
      out.tokens.push_back(column.id);
      out.groups[0].end_row();
    }
    return out;
  }

 private:
  static constexpr std::uint32_t no_link = UINT32_MAX;
  struct Link {
    Contribution contribution;
    std::uint32_t next;
  };

  std::vector<Column> columns_;
  std::vector<Link> links_;
};

}  // namespace detail
KVMELD_NAMESPACE_END
