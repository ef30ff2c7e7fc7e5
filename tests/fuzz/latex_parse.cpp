// Hostile formulas. With -DKVMELD_LIBFUZZER and clang's -fsanitize=fuzzer this is a fuzzer;
// otherwise a test that mutates some formulas.

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <kvmeld/formula/formula.hpp>

namespace {

using namespace kvmeld;

/// The first byte says how: names kept or not, narrow bounds or those that hold by default. Whether
/// it is a formula.
bool try_one(std::string_view bytes) {
  const auto how = static_cast<unsigned char>(bytes[0]);
  const std::string text(bytes.substr(1));
  formula::FormulaOptions options;
  options.rename_free = (how & 1U) != 0;
  if ((how & 2U) != 0)
    options.max_depth = 6, options.max_free = 4, options.max_renaming_steps = 300;
  const auto formula = parse_formula(text, options);
  if (!formula && formula.error().message().empty()) std::abort();
  if (formula && (formula->normal.empty() || formula->hash == Digest128{})) std::abort();
  // Blanks around a formula are none of it, nor is what it is read with twice.
  options.max_bytes += 2;
  const auto again = parse_formula(" " + text + " ", options);
  if (text.size() + 2 <= options.max_bytes && (text.empty() || text.back() != '\\')) {
    if (again.ok() != formula.ok() ||
        (formula && (again->normal != formula->normal || again->steps != formula->steps)))
      std::abort();
  }
  formula::FormulaIndex index(options, 2);
  FragmentId id;
  for (std::uint8_t n = 1; n < 4; ++n) {
    id.bytes[0] = n;
    (void)index.remember(id, n == 1 ? "$x^2 + y$" : n == 2 ? text : "$" + text + "$");
    if (index.segments() > 2) std::abort();
  }
  (void)index.recall(text);
  (void)index.recall("$" + text + "$");
  id.bytes[0] = 2;
  index.forget(id);
  id.bytes[0] = 3;
  index.forget(id);
  id.bytes[0] = 1;
  index.forget(id);
  if (index.segments() != 0 || index.formulas() != 0) std::abort();
  return formula.ok();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  try_one({reinterpret_cast<const char*>(data), size});
  return 0;
}

#ifndef KVMELD_LIBFUZZER
#include "support/catch.hpp"

TEST_CASE("mutated formulas end in an error or a normal form") {
  const std::vector<std::string> corpus = {
      "\\sum_{i=1}^{n} i^2 = \\frac{n(n+1)(2n+1)}{6}",
      "\\int_0^1 \\int_0^x f(x,y) dy dx - \\iint_D g dx dy",
      "\\forall x \\in \\mathbb{R}, \\exists! y: x + y = 0",
      "ab+bc+cd+de+ef+fa",
      "a+b+c+d+e+f+g+h+u+v+w",
      "|a-b| \\le \\sqrt[3]{\\hat{x}_{ij}^{2}} < \\|z\\|",
      "\\lim_{x \\to 0} \\frac{\\sin 2x}{x} = 2",
      "∑_{k≤n} α² ≠ ∏ x₁ ⊗ ℝ",
      "\\left\\{ 1, 2, \\dots \\right\\} \\cup \\{x\\}",
      "$x^2$ and $$\\binom nk$$ or \\(a!b\\) \\[ \\max_{i,j} A_{ij} \\]",
      "x^{-1} A^T B' : \\text{if } \\operatorname{tr} X"};
  const std::vector<std::string> words = {
      "\\frac",    "\\sqrt[", "_{",   "^{",      "}", "{",       "(", ")", "|",
      "\\|",       "\\int ",  " d x", "\\sum_",  "=", "<",       ",", "-", "/",
      "\\forall ", "\\ln_",   "²",    "\\text{", "$", "\\left.", "'"};
  std::mt19937_64 random(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  int formulas = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string text = static_cast<char>(below(4)) + corpus[below(corpus.size())];
    for (std::size_t edits = 1 + below(4); edits > 0; --edits) {
      const std::size_t at = 1 + below(text.size() - 1);
      switch (below(5)) {
        case 0:
          text[at] = static_cast<char>(text[at] ^ static_cast<char>(1U << below(7)));
          break;
        case 1:
          text.erase(at, 1 + below(6));
          break;
        case 2:
          text += text.substr(at);
          break;
        default:
          text.insert(at, words[below(words.size())]);
      }
      if (text.size() < 2) text += 'x';
    }
    formulas += try_one(text);
  }
  // Both ends are met.
  CHECK(formulas > 400);
  CHECK(formulas < 3600);
}
#endif
