#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvmeld/anchor/latex_normal.hpp>
#include <kvmeld/status.hpp>

KVMELD_NAMESPACE_BEGIN
namespace detail {

/// Numbers the free variables of a formula, the same way for every consistent choice of their names
/// where those that stay alike are so by a symmetry of the formula.
///
/// Each variable is told apart by what stands around it, round after round (colour refinement).
/// Variables that stay alike are numbered in any order where the formula is the same with each two
/// of them exchanged; else the first by name is taken to go before the rest, which is as good as
/// any where a symmetry brings each there. Without one (a triangle and a square side by side)
/// numbers and steps hang on the names: two writings may then be missed as one formula, never two
/// formulas be taken for one.
template <class = void>
class LatexRenaming {
 public:
  /// @param taken       steps that other parts of the formula have taken
  /// @param most_steps  parts put together, over and over, to tell variables apart: those taken
  /// among them
  LatexRenaming(const LatexTree& tree, std::span<const LatexOp> ops, std::uint32_t root,
                const LatexFree& free, std::size_t taken, std::size_t most_steps)
      : form_(tree, ops, free),
        root_(root),
        taken_(taken),
        most_steps_(most_steps),
        count_(free.names.size()) {}

  /// (free variables) distinct numbers. Errors: `oversized` for more than `most` variables, or
  /// where the steps do not do, which is so for every choice of names or for none where variables
  /// that stay alike have a symmetry that brings one to the other.
  [[nodiscard]] Result<std::vector<std::size_t>> run(std::size_t most) {
    if (count_ > most)
      return error(ErrorCode::oversized, "a formula of ", count_, " free variables, more than ",
                   most, "; raise max_free");
    std::vector<std::size_t> rank(count_, 0);
    for (bool settled = count_ == 0; !settled;) {
      refine(rank);
      if (spent()) {
        return error(ErrorCode::oversized, "a formula whose ", count_,
                     " free variables are too much alike to be told apart in ", most_steps_,
                     " steps; raise max_renaming_steps");
      }
      const std::vector<std::size_t> members = members_of(rank);
      const auto r = static_cast<std::size_t>(
          std::find_if(members.begin(), members.end(), [](std::size_t n) { return n > 1; }) -
          members.begin());
      settled = r == members.size();
      if (settled) break;
      // Ranks leave room, as a class of n spans n numbers.
      std::size_t next = r;
      if (exchangeable(rank, r)) {
        for (std::size_t& other : rank) other = other == r ? next++ : other;
      } else {
        const auto one = std::find(rank.begin(), rank.end(), r);
        for (std::size_t& other : rank) other += other == r ? 1 : 0;
        *one = r;
      }
    }
    return rank;
  }
  /// Steps taken so far, by other parts too.
  [[nodiscard]] std::size_t steps() const noexcept { return taken_ + form_.steps(); }

 private:
  [[nodiscard]] bool spent() const noexcept { return steps() > most_steps_; }
  [[nodiscard]] static std::vector<std::size_t> members_of(const std::vector<std::size_t>& rank) {
    std::vector<std::size_t> members(rank.size(), 0);
    for (const std::size_t r : rank) ++members[r];
    return members;
  }
  /// Classes of variables told apart by the formula around each, where the others go by their
  /// class. A class's rank is how many come before it.
  void refine(std::vector<std::size_t>& rank) {
    for (;;) {
      const std::vector<std::size_t> members = members_of(rank);
      const auto classes = count_ - static_cast<std::size_t>(
                                        std::count(members.begin(), members.end(), std::size_t{0}));
      for (std::size_t v = 0; v < count_; ++v) form_.call(v, "?" + detail::decimal(rank[v]));
      std::vector<std::pair<std::size_t, Digest128>> around(count_);
      for (std::size_t v = 0; v < count_; ++v) {
        around[v].first = rank[v];
        if (members[rank[v]] < 2) continue;
        form_.call(v, "!");
        around[v].second = form_.text(root_);
        form_.call(v, "?" + detail::decimal(rank[v]));
        if (spent()) return;
      }
      auto sorted = around;
      std::sort(sorted.begin(), sorted.end());
      for (std::size_t v = 0; v < count_; ++v)
        rank[v] = static_cast<std::size_t>(
            std::lower_bound(sorted.begin(), sorted.end(), around[v]) - sorted.begin());
      sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
      if (sorted.size() == classes || sorted.size() == count_) return;
    }
  }
  /// Whether each two variables of a class may be exchanged: the first with every other one, which
  /// makes up all orders. All are tried though one fails: which one that is hangs on the names, and
  /// the steps must not.
  [[nodiscard]] bool exchangeable(const std::vector<std::size_t>& rank, std::size_t of) {
    const auto call = [&](std::size_t v, std::size_t name) {
      form_.call(v, "?" + detail::decimal(name));
    };
    for (std::size_t v = 0; v < count_; ++v) call(v, v);
    const Digest128 before = form_.text(root_);
    const auto first =
        static_cast<std::size_t>(std::find(rank.begin(), rank.end(), of) - rank.begin());
    bool all = true;
    for (std::size_t v = first + 1; v < count_ && !spent(); ++v) {
      if (rank[v] != of) continue;
      call(first, v);
      call(v, first);
      all = form_.text(root_) == before && all;
      call(first, first);
      call(v, v);
    }
    return all;
  }

  LatexNormal<LatexHash> form_;
  std::uint32_t root_;
  std::size_t taken_;
  std::size_t most_steps_;
  std::size_t count_;
};

}  // namespace detail
KVMELD_NAMESPACE_END
