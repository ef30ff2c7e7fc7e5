#pragma once
// The ways to make one cache of several agents' notes that the table compares.

#include <array>
#include <span>
#include <string_view>
#include <vector>

namespace example {

struct Method {
  enum class Source { full_text, one_agent, text_summary, merged, mean };
  enum class Order { given, reversed, canonical };

  std::string_view name;
  Source source = Source::merged;
  bool lead_in = false;
  Order order = Order::given;
  bool rotate = true;
  /// Share of every later fragment's tokens that the engine recomputes, up to a sentence end.
  float seam = 0;
  bool seam_inside = false;  ///< The cut lies five tokens into the next sentence.
};

inline constexpr std::array<Method, 16> methods{{
    {.name = "full_text", .source = Method::Source::full_text},
    {.name = "one_agent", .source = Method::Source::one_agent},
    {.name = "text_summary", .source = Method::Source::text_summary},
    {.name = "naive", .rotate = false},
    {.name = "concat"},
    {.name = "concat_reversed", .order = Method::Order::reversed},
    {.name = "canonical", .order = Method::Order::canonical},
    {.name = "lead_in", .lead_in = true},
    {.name = "lead_in_reversed", .lead_in = true, .order = Method::Order::reversed},
    {.name = "lead_in_canonical", .lead_in = true, .order = Method::Order::canonical},
    {.name = "lead_in_no_rotation", .lead_in = true, .rotate = false},
    {.name = "seam_25", .seam = .25F},
    {.name = "seam_50", .seam = .5F},
    {.name = "seam_25_inside", .seam = .25F, .seam_inside = true},
    {.name = "lead_in_seam_25", .lead_in = true, .seam = .25F},
    {.name = "mean", .source = Method::Source::mean},
}};

inline const Method* find_method(std::string_view name) {
  for (const Method& method : methods)
    if (method.name == name) return &method;
  return nullptr;
}

}  // namespace example
