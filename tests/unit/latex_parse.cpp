// Formulas that are equal and formulas that are not; the normal form against numbers; bad input;
// the index.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <kvmeld/formula/formula.hpp>

#include "support/catch.hpp"

namespace {

using kvmeld::ErrorCode;
using kvmeld::formula::FormulaIndex;
using kvmeld::formula::FormulaOptions;
using kvmeld::formula::parse_formula;

struct Pair {
  const char* a;
  const char* b;
};

std::string normal(const std::string& text, const FormulaOptions& options = {}) {
  const auto formula = parse_formula(text, options);
  INFO(text << ": " << formula.error().message());
  REQUIRE(formula.ok());
  REQUIRE(formula->hash == kvmeld::formula::detail::formula_hash(formula->normal));
  return formula->normal;
}

const FormulaOptions renaming{.rename_free = true};

kvmeld::FragmentId id(std::uint8_t n) {
  kvmeld::FragmentId out;
  out.bytes.fill(n);
  return out;
}

}  // namespace

TEST_CASE("formulas that mean the same are equal") {
  const Pair pairs[] = {
      // one sign in several writings
      {"∑_{i=1}^n i", "\\sum_{i=1}^n i"},
      {"Σ_{i=1}^n i", "\\sum_{i=1}^n i"},
      {"\\Sigma_{i=1}^n i", "\\sum\\limits_{i=1}^{n} i"},
      {"Σ x_k", "∑ x_k"},
      {"Σ x_k", "\\sum x_k"},
      {"Σ_{i=1}^n", "\\sum_{i=1}^n"},
      {"Π_{i=1}^n i", "∏_{i=1}^n i"},
      {"\\sum^n_{i=1} i", "\\sum_{i=1}^n i"},
      {"\\frac{a}{b}", "a/b"},
      {"\\frac ab", "a/b"},
      {"\\dfrac{a+b}{c}", "(a+b)/c"},
      {"\\frac12", "1/2"},
      {"a \\cdot b", "ab"},
      {"a·b", "a × b"},
      {"α + β", "\\alpha+\\beta"},
      {"x²", "x^2"},
      {"x^{2}", "x^2"},
      {"x₁", "x_1"},
      {"x^{-1}", "x⁻¹"},
      {"√x", "\\sqrt{x}"},
      {"\\sqrt[2]{x}", "\\sqrt x"},
      {"a ≤ b", "a \\leq b"},
      {"x ∈ ℝ", "x \\in \\mathbb{R}"},
      {"∫_0^1 x dx", "\\int_{0}^{1} x\\,\\mathrm{d}x"},
      {"\\int \\frac{dx}{x}", "\\int \\frac{1}{x} dx"},
      {"\\int dx f(x)", "\\int f(x) dx"},
      {"0.50", ".5"},
      {"\\left( a + b \\right)^2", "(a+b)^{2}"},
      {"$a+b$", "a + b"},
      {"a \\; + \\quad b.", "a+b"},
      {"a + b % a comment", "a+b"},
      {"𝑥+𝑦", "x+y"},
      {"\\varepsilon", "ϵ"},
      // bound variables
      {"\\sum_{i=1}^n a_i", "\\sum_{k=1}^n a_k"},
      {"\\sum_{i=1}^n \\sum_{j=1}^m a_{ij}", "\\sum_{p=1}^n \\sum_{q=1}^m a_{pq}"},
      {"\\sum_{i=1}^n \\sum_{i=1}^m b_i", "\\sum_{j=1}^n \\sum_{i=1}^m b_i"},
      {"\\int_0^1 f(x) dx", "\\int_0^1 f(t) dt"},
      {"\\int_0^1\\int_0^x f(x,y) dy dx", "\\int_0^1\\int_0^s f(s,t) dt ds"},
      {"\\iint f(x,y) dx dy", "\\iint f(u,v) du dv"},
      {"\\lim_{x\\to 0} \\frac{\\sin x}{x}", "\\lim_{h \\to 0} \\sin(h)/h"},
      {"\\forall x \\in S: x > 0", "\\forall y∈S, y>0"},
      {"\\forall \\epsilon > 0 \\exists \\delta > 0: \\delta < \\epsilon", "∀ a>0 ∃ b>0: b<a"},
      {"\\max_{x \\in S} f(x)", "\\max_{y\\in S} f(y)"},
      {"\\sum_{1 \\le i \\le n} i^2", "\\sum_{1 \\le k \\le n} k^2"},
      {"\\sum_{i,j} a_{i,j}", "\\sum_{p,q} a_{pq}"},
      // order, grouping, signs
      {"a+b+c", "c+(b+a)"},
      {"abc", "c(ba)"},
      {"a-b", "-b+a"},
      {"a-(b-c)", "a-b+c"},
      {"-(a-b)c", "(b-a)c"},
      {"(-a)b", "-(ab)"},
      {"a/(bc)", "a/b/c"},
      {"a/(b/c)", "ac/b"},
      {"|a-b|", "|b-a|"},
      {"-(a-b)(c-d)", "(b-a)(c-d)"},
      {"x(a-b+c-d)", "-x(b-a+d-c)"},
      {"a = b", "b = a"},
      {"a < b", "b > a"},
      {"a \\le b < c", "c > b \\ge a"},
      {"a = b = c", "c = b = a"},
      {"A \\subseteq B", "B \\supseteq A"},
      {"P \\implies Q", "Q \\Leftarrow P"},
      {"A ∪ B", "B \\cup A"},
      {"\\{1, 2, 3\\}", "\\{3, 1, 2\\}"},
      {"x \\in A \\land y \\in B", "y \\in B \\wedge x \\in A"},
      {"\\sin 2x", "\\sin(2x)"},
      {"\\sin^2 x + \\cos^2 x = 1", "1 = \\cos^2(x) + \\sin^2(x)"},
      {"\\binom{n}{k}", "\\dbinom nk"},
      {"n! = n(n-1)!", "n! = (n-1)! n"},
      {"a ± b", "a \\pm b"},
  };
  for (const auto& [a, b] : pairs) {
    INFO(a << "   and   " << b);
    CHECK(normal(a) == normal(b));
    CHECK(normal(a, renaming) == normal(b, renaming));
  }
}

TEST_CASE("formulas that mean different things differ") {
  const Pair pairs[] = {
      {"Σ", "\\sum"},  // free, a letter
      {"Σ + 1", "\\sum + 1"},
      {"AΣ", "A\\sum"},
      {"\\Sigma^{-1} x", "\\sum^{-1} x"},
      {"|Σ|", "|\\sum|"},
      {"a/b", "b/a"},
      {"a-b", "b-a"},
      {"a-b-c", "a-(b-c)"},
      {"a/b/c", "a/(b/c)"},
      {"x^2", "x_2"},
      {"x^{23}", "x^23"},  // TeX's script is one digit
      {"x^{a+b}", "x^a+b"},
      {"(a+b)c", "a+bc"},
      {"a_{ij}", "a_i j"},
      {"\\sum_{i=1}^n a_i", "\\sum_{i=0}^n a_i"},
      {"\\sum_{i=1}^n a_i", "\\prod_{i=1}^n a_i"},
      {"\\sum_{i=1}^n a_n", "\\sum_{i=1}^n a_i"},
      {"\\sum_{i=1}^n \\sum_{j=1}^m a_{ij}", "\\sum_{i=1}^n \\sum_{j=1}^m a_{ji}"},
      {"\\sum_i (a_i + b)", "\\sum_i a_i + b"},
      {"\\int_0^1 x dx", "\\int_0^1 x dt"},
      {"\\int_0^1 f(x) dx", "\\int_1^0 f(x) dx"},
      {"\\forall x \\exists y: x < y", "\\exists y \\forall x: x < y"},
      {"\\forall x: P", "\\exists x: P"},
      {"a < b", "a \\le b"},
      {"a < b", "b < a"},
      {"a \\in B", "B \\in a"},
      {"a = b = c", "a = c = b"},
      {"P \\implies Q", "Q \\implies P"},
      {"(a, b)", "(b, a)"},
      {"[a, b)", "[a, b]"},
      {"\\{a, b\\}", "(a, b)"},
      {"f(2x)", "2f(x)"},
      {"f'(x)", "f(x)"},
      {"f''", "f'"},
      {"\\sin x", "\\cos x"},
      {"\\sin x y", "\\sin(x) y"},
      {"\\sqrt{x}", "\\sqrt[3]{x}"},
      {"\\hat x", "\\bar x"},
      {"\\mathbb{R}", "R"},
      {"1", "2"},
      {"\\pi", "2"},
      {"|x|", "\\|x\\|"},
      {"\\text{a) b}", "\\text{a} b"},
      {"n!", "n"},
      {"A \\cup B", "A \\cap B"},
      {"\\log_2 x", "\\log_3 x"},
      {"x \\cdot \\infty", "x"},
  };
  for (const auto& [a, b] : pairs) {
    INFO(a << "   and   " << b);
    CHECK(normal(a) != normal(b));
  }
  CHECK(parse_formula("a/b")->hash != parse_formula("b/a")->hash);
}

TEST_CASE("free variables are renamed where it is asked for, and then consistently") {
  const Pair equal[] = {
      {"x^2 + y", "b + a^2"},
      {"x^2 + y^2 = z^2", "a^2 + b^2 = c^2"},
      {"xy + yz", "ca + ab"},
      {"xy + yz + zw", "ab + bc + cd"},
      {"xy+yz+zx", "pq+qr+rp"},
      {"\\frac{a}{a+b}", "\\frac{\\lambda}{\\mu+\\lambda}"},
      {"\\sum_{i=1}^n x_i", "\\sum_{j=1}^m y_j"},
      {"f(g(x))", "g(f(y))"},
      {"A \\mathbf{x} = \\mathbf{b}", "M \\mathbf{u} = \\mathbf{v}"},
      {"a+b+c+d+e", "v+w+x+y+z"},
      // two triangles, a square and a triangle: variables that stay alike round after round (those
      // of the latter by no symmetry, so that the first by name must be in the square both times)
      {"ab+bc+ca+uv+vw+wu", "xw+wu+ux+ya+ab+by"},
      {"ab+bc+cd+da+uv+vw+wu", "xy+yz+zx+pq+qr+rs+sp"},
      {"a = b = c", "x = y = z"},
  };
  for (const auto& [a, b] : equal) {
    INFO(a << "   and   " << b);
    CHECK(normal(a, renaming) == normal(b, renaming));
    CHECK(normal(a) != normal(b));
  }
  const Pair different[] = {
      {"x^2 + y", "x^2 + x"},
      {"x + y", "x + x"},
      {"xy + yz", "xy + zw"},
      {"x^y", "x^x"},
      {"\\pi x", "y x"},
      {"\\frac{a}{a+b}", "\\frac{a}{c+b}"},
      {"\\sum_{i=1}^n x_i", "\\sum_{i=1}^n x_n"},
      {"ab+bc+ca+uv+vw+wu", "ab+bc+cd+de+ef+fa"},  // two triangles and a hexagon
      {"a-b", "a+b"},
  };
  for (const auto& [a, b] : different) {
    INFO(a << "   and   " << b);
    CHECK(normal(a, renaming) != normal(b, renaming));
  }
  CHECK(parse_formula("a+b+c", {.rename_free = true, .max_free = 2}).error().code() ==
        ErrorCode::oversized);
  CHECK(parse_formula("a+b+c", {.max_free = 2}).ok());
}

TEST_CASE("a chain's steps are the formulas that they are by themselves") {
  const auto hash = [](const char* text, const FormulaOptions& options = {}) {
    return parse_formula(text, options)->hash;
  };
  const auto chain = parse_formula("(a+b)^2 = a^2 + 2ab + b^2 \\ge 4ab");
  REQUIRE(chain->steps.size() == 2);
  CHECK(chain->steps[0] == hash("a^2+b^2+2ab = (b+a)^2"));
  CHECK(chain->steps[1] == hash("4ab \\le a^2 + 2ab + b^2"));
  CHECK(parse_formula("a = b")->steps.empty());
  const auto list = parse_formula("a = b, c = d = e");
  REQUIRE(list->steps.size() == 4);
  CHECK(list->steps[0] == hash("b=a"));
  CHECK(list->steps[1] == hash("e = d = c"));
  CHECK(list->steps[2] == hash("d=c"));
  CHECK(parse_formula("x = y = z^2", renaming)->steps[1] == hash("q^2 = p", renaming));
}

namespace {

/// A random formula that can be computed, and written in many ways.
struct Term {
  enum Kind { number, variable, index, plus, times, minus, over, power, sum } kind;
  int value = 0;  // number, which variable, how many binders up, exponent, upper bound
  std::vector<std::shared_ptr<Term>> parts;
};
using TermPointer = std::shared_ptr<Term>;

struct Random {
  std::mt19937_64 engine;
  int below(int n) { return static_cast<int>(engine() % static_cast<std::uint64_t>(n)); }

  TermPointer term(int depth, int binders) {
    const auto make = [](Term t) { return std::make_shared<Term>(std::move(t)); };
    const int kind = depth == 0 ? below(3) : below(9);
    switch (kind) {
      case 0:
        return make({Term::number, 1 + below(4), {}});
      case 1:
        return make({Term::variable, below(3), {}});
      case 2:
        return binders > 0 ? make({Term::index, below(binders), {}})
                           : make({Term::variable, below(3), {}});
      case 3:
      case 4: {
        Term t{kind == 3 ? Term::plus : Term::times, 0, {}};
        for (int i = 2 + below(2); i > 0; --i) t.parts.push_back(term(depth - 1, binders));
        return make(std::move(t));
      }
      case 5:
        return make({Term::minus, 0, {term(depth - 1, binders), term(depth - 1, binders)}});
      case 6:
        return make({Term::over, 0, {term(depth - 1, binders), term(depth - 1, binders)}});
      case 7:
        return make({Term::power, 2 + below(2), {term(depth - 1, binders)}});
      default:
        return make({Term::sum, 2 + below(2), {term(depth - 1, binders + 1)}});
    }
  }
  static double value(const Term& t, const double* variables, std::vector<double>& indices) {
    const auto of = [&](std::size_t i) { return value(*t.parts[i], variables, indices); };
    double out = t.kind == Term::times ? 1 : 0;
    switch (t.kind) {
      case Term::number:
        return t.value;
      case Term::variable:
        return variables[t.value];
      case Term::index:
        return indices[indices.size() - 1 - static_cast<std::size_t>(t.value)];
      case Term::plus:
        for (std::size_t i = 0; i < t.parts.size(); ++i) out += of(i);
        return out;
      case Term::times:
        for (std::size_t i = 0; i < t.parts.size(); ++i) out *= of(i);
        return out;
      case Term::minus:
        return of(0) - of(1);
      case Term::over:
        return of(0) / of(1);
      case Term::power:
        return std::pow(of(0), t.value);
      case Term::sum:
        for (int k = 1; k <= t.value; ++k) {
          indices.push_back(k + 0.5);  // so that an index is no number of the formula
          out += of(0);
          indices.pop_back();
        }
        return out;
    }
    return out;
  }
  /// In a writing drawn anew each time: order, signs, names of indices, parentheses.
  std::string write(const Term& t, std::vector<std::string>& names) {
    std::string out;
    const auto shuffled = [&] {
      auto parts = t.parts;
      std::shuffle(parts.begin(), parts.end(), engine);
      return parts;
    };
    const auto closed = [&](const Term& part) {
      return below(2) ? "(" + write(part, names) + ")"
                      : "\\left(" + write(part, names) + "\\right)";
    };
    switch (t.kind) {
      case Term::number:
        return std::to_string(t.value) + (below(4) == 0 ? ".0" : "");
      case Term::variable:
        return t.value == 0 ? "x" : t.value == 1 ? below(2) ? "{\\beta}" : "β" : "z";
      case Term::index:
        return names[names.size() - 1 - static_cast<std::size_t>(t.value)];
      case Term::plus:
        for (const auto& p : shuffled())
          out += (out.empty() ? "" : below(3) == 0 ? " - -" : "+") + closed(*p);
        return out;
      case Term::times:
        for (const auto& p : shuffled())
          out += (out.empty()     ? ""
                  : below(3) == 0 ? " \\cdot "
                  : below(2)      ? "×"
                                  : " ") +
                 closed(*p);
        return out;
      case Term::minus:
        return below(2) ? closed(*t.parts[0]) + (below(2) ? "-" : "−") + closed(*t.parts[1])
                        : "-" + closed(*t.parts[1]) + "+" + closed(*t.parts[0]);
      case Term::over:
        return below(2)
                   ? "\\frac{" + write(*t.parts[0], names) + "}{" + write(*t.parts[1], names) + "}"
                   : closed(*t.parts[0]) + "/" + closed(*t.parts[1]);
      case Term::power:
        return closed(*t.parts[0]) + (below(2)       ? "^" + std::to_string(t.value)
                                      : t.value == 2 ? "²"
                                                     : "³");
      case Term::sum: {
        std::string index;
        do index = std::string(1, static_cast<char>('i' + below(9)));
        while (std::find(names.begin(), names.end(), index) != names.end());
        names.push_back(index);
        const std::string body = closed(*t.parts[0]);
        names.pop_back();
        const char* const signs[] = {"\\sum", "∑", "Σ", "\\Sigma"};
        const std::string most = std::to_string(t.value);
        return std::string("{") + signs[below(4)] +
               (below(2) ? "_{" + index + "=1}^{" + most + "}"
                         : "^" + most + "_{" + index + " = 1}") +
               body + "}";
      }
    }
    return out;
  }
};

}  // namespace

TEST_CASE(
    "however a formula is written its normal form is one, and formulas of one normal form have one "
    "value") {
  Random random{std::mt19937_64(11)};
  const double variables[2][3] = {{1.37, -0.61, 2.29}, {0.83, 1.91, -1.13}};
  std::map<std::string, std::pair<double, double>> values;
  std::size_t met_again = 0;
  for (int n = 0; n < 3000; ++n) {
    const TermPointer term = random.term(1 + n % 3, 0);
    std::vector<std::string> names;
    std::vector<double> indices;
    const std::string text = random.write(*term, names), other = random.write(*term, names);
    INFO(text << "   and   " << other);
    const auto form = parse_formula(text), same = parse_formula(other);
    REQUIRE(form.ok());
    REQUIRE(same.ok());
    REQUIRE(form->normal == same->normal);
    const std::pair<double, double> value{Random::value(*term, variables[0], indices),
                                          Random::value(*term, variables[1], indices)};
    const auto [at, fresh] = values.try_emplace(form->normal, value);
    met_again += fresh ? 0 : 1;
    const auto near = [](double a, double b) {
      return a == b || std::abs(a - b) <= 1e-9 * (std::abs(a) + std::abs(b)) || !std::isfinite(a) ||
             !std::isfinite(b);
    };
    REQUIRE(near(at->second.first, value.first));
    REQUIRE(near(at->second.second, value.second));
  }
  CHECK(values.size() > 1000);
  CHECK(met_again > 50);
}

TEST_CASE("what is no formula has its reason") {
  const std::pair<const char*, ErrorCode> refused[] = {
      {"", ErrorCode::truncated},
      {"a +", ErrorCode::truncated},
      {"(a", ErrorCode::truncated},
      {"\\frac{a}", ErrorCode::truncated},
      {"{a", ErrorCode::truncated},
      {"|a", ErrorCode::truncated},
      {"\\sqrt[3", ErrorCode::truncated},
      {"\\mathbf{x", ErrorCode::truncated},
      {"x^", ErrorCode::truncated},
      {"\\", ErrorCode::truncated},
      {"\\mathbf", ErrorCode::truncated},
      {"\\forall", ErrorCode::truncated},
      {"a)", ErrorCode::corrupt},
      {"(a}", ErrorCode::corrupt},
      {"a}", ErrorCode::corrupt},
      {"x^a^b", ErrorCode::corrupt},
      {"x_a_b", ErrorCode::corrupt},
      {"* a", ErrorCode::corrupt},
      {"a + / b", ErrorCode::corrupt},
      {"\\forall 1: x", ErrorCode::corrupt},
      {"\\{a)", ErrorCode::corrupt},
      {"= a", ErrorCode::corrupt},
      {"\xff", ErrorCode::corrupt},
      {"a\xc3", ErrorCode::corrupt},
      {"\\sum_{i}_{j} x", ErrorCode::corrupt},
      {"\\begin{align} a", ErrorCode::unsupported},
      {"a \\\\ b", ErrorCode::unsupported},
      {"a & b", ErrorCode::unsupported},
      {"a # b", ErrorCode::unsupported},
      {"a \\@ b", ErrorCode::unsupported},
      {"{a \\over b}", ErrorCode::unsupported},
  };
  for (const auto& [text, code] : refused) {
    const auto formula = parse_formula(text);
    INFO(text << ": " << formula.error().message());
    REQUIRE_FALSE(formula.ok());
    CHECK(kvmeld::to_string(formula.error().code()) == kvmeld::to_string(code));
    CHECK(formula.error().message().find("byte") != std::string::npos);
  }
  CHECK(parse_formula(std::string(5000, 'x')).error().code() == ErrorCode::oversized);
  CHECK(parse_formula(std::string(4096, 'x')).ok());
  CHECK(parse_formula("((a))", {.max_depth = 2}).error().code() == ErrorCode::oversized);
}

TEST_CASE("nesting is bounded, whatever nests") {
  const char* const shells[][2] = {{"(", ")"},         {"{", "}"},          {"\\frac{1}{", "}"},
                                   {"\\sqrt{", "}"},   {"x^{", "}"},        {"|", ""},
                                   {"-", ""},          {"\\sin ", ""},      {"\\sum_{i=1}^n ", ""},
                                   {"\\int ", ""},     {"\\forall x ", ""}, {"\\hat ", ""},
                                   {"\\frac1", ""},    {"a=(", ")"},        {"\\neg ", ""},
                                   {"x_{", "}"},       {"f(", ")"},         {"", "!"},
                                   {"x^", ""},         {"\\max_{x", "}"},   {"\\{", "\\}"},
                                   {"\\log_{", "} x"}, {"\\binom{", "}n"},  {"\\sqrt[", "]x"}};
  for (const auto& [opens, closes] : shells) {
    for (const std::size_t deep : {20U, 400U, 1000U}) {
      std::string text;
      for (std::size_t i = 0; i < deep; ++i) text += opens;
      text += "x";
      for (std::size_t i = 0; i < deep; ++i) text += closes;
      FormulaOptions options{.max_bytes = 1 << 20};
      const auto formula = parse_formula(text, options);
      INFO(opens << " x " << closes << ": " << formula.error().message());
      if (deep >= 400)
        CHECK(
            (!formula.ok() || text.find('!') != std::string::npos || formula->normal.size() < 100));
    }
  }
  // Long is not deep.
  std::string sum = "1";
  for (int i = 0; i < 800; ++i) sum += i % 2 ? "+x y" : "-z/2";
  CHECK(parse_formula(sum, {.max_bytes = 1 << 16}).ok());
}

TEST_CASE("a formula within formulas is read once, however deep") {
  // Each shell tells how it is written around what the level below wrote. Twice the work a level
  // would be seen at some twenty levels.
  const auto bars = [](const std::string& in, std::size_t level) {
    return level % 2 ? "|a-" + in + "|" : "\\|a-" + in + "\\|";
  };
  struct Shell {
    const char* name;
    std::string (*around)(const std::string& in, std::size_t level);
  };
  const Shell shells[] = {
      {"sets", [](const std::string& in, std::size_t) { return "\\{a," + in + "\\}"; }},
      {"sets of one", [](const std::string& in, std::size_t) { return "\\{" + in + "\\}"; }},
      {"bars", bars},
      {"norms of sets",
       [](const std::string& in, std::size_t level) {
         return level % 2 ? "\\|\\{a," + in + "\\}\\|" : "|\\{b," + in + "\\}|";
       }},
      {"maxima", [](const std::string& in, std::size_t) { return "\\max^{" + in + "} a"; }},
      {"least of a set",
       [](const std::string& in, std::size_t) { return "\\inf^2 \\{a," + in + "\\}"; }},
      {"signs", [](const std::string& in, std::size_t) { return "-(a-" + in + ")"; }},
      {"quotients", [](const std::string& in, std::size_t) { return "\\frac{a}{b-" + in + "}"; }},
      {"products", [](const std::string& in, std::size_t) { return "-a(b-" + in + ")"; }},
      {"chains", [](const std::string& in, std::size_t) { return "(a<b=" + in + ")"; }},
      {"unions", [](const std::string& in, std::size_t) { return "a\\cup(b\\cap " + in + ")"; }},
      {"sums", [](const std::string& in, std::size_t) { return "\\sum_{i=1}^n(a_i-" + in + ")"; }},
      {"integrals", [](const std::string& in, std::size_t) { return "\\int_0^1(x-" + in + ")dx"; }},
      {"powers", [](const std::string& in, std::size_t) { return "a^{b-" + in + "}"; }},
      {"functions", [](const std::string& in, std::size_t) { return "\\sin(a-" + in + ")"; }},
  };
  for (const Shell& shell : shells) {
    std::string text = "x";
    std::size_t level = 0;
    for (bool read = true; read && level < 64; ++level) {
      text = shell.around(text, level);
      for (const FormulaOptions& options : {FormulaOptions{}, renaming}) {
        const std::clock_t begun = std::clock();
        const auto formula = parse_formula(text, options);
        const double seconds = static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC;
        INFO(shell.name << ", " << level + 1 << " levels: " << formula.error().message());
        REQUIRE(seconds < 2);
        read = formula.ok();
        if (!read) CHECK(formula.error().message().find("max_depth") != std::string::npos);
      }
    }
    INFO(shell.name);
    CHECK(level > 10);
    CHECK(level < 64);
  }
  CHECK(normal("\\{\\list\\}") != normal("\\{\\}"));  // a name is no list
  CHECK(normal("\\max^2 \\{a,b\\}") == normal("(\\max \\{b,a\\})^2"));
}

TEST_CASE("variables that are alike are told apart in a bounded number of passes") {
  // 24 variables, none unlike the next before one is taken: in one sum, in a ring, in pairs.
  std::string sum, ring, pairs;
  for (int i = 0; i < 24; ++i) {
    const auto name = [](int n) {
      return std::string(1, static_cast<char>((n < 12 ? 'j' : 'A') + n % 12));
    };
    sum += (i ? "+" : "") + name(i);
    ring += (i ? "+" : "") + name(i) + name((i + 1) % 24);
    pairs += name(i) + (i % 2 ? i < 23 ? "+" : "" : " ");
  }
  for (const std::string& text : {sum, ring, pairs}) {
    const std::clock_t begun = std::clock();
    INFO(text);
    CHECK(normal(text, renaming).size() < 1000);
    CHECK(static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC < 5);
  }
  // The same over and over, to 4 KB: those of a sum can all be exchanged, those of a ring take more
  // passes than steps are given.
  const auto repeated = [](const std::string& text) {
    std::string out = text;
    while (out.size() + text.size() < 4095) out += "+" + text;
    return out;
  };
  const auto with_other_names = [](std::string text) {
    for (char& c : text) {
      if (c >= 'j' && c < 'j' + 12)
        c = static_cast<char>('j' + (c - 'j') * 5 % 12);
      else if (c >= 'A' && c < 'A' + 12)
        c = static_cast<char>('A' + (c - 'A') * 7 % 12);
    }
    return text;
  };
  CHECK(normal(repeated(sum), renaming) == normal(with_other_names(repeated(sum)), renaming));
  for (const std::string& text :
       {repeated(ring), repeated(pairs), with_other_names(repeated(ring))}) {
    const std::clock_t begun = std::clock();
    const auto formula = parse_formula(text, renaming);
    REQUIRE_FALSE(formula.ok());
    CHECK(formula.error().code() == ErrorCode::oversized);
    CHECK(formula.error().message().find("max_renaming_steps") != std::string::npos);
    CHECK(static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC < 2);
    CHECK(parse_formula(text).ok());
  }
  const FormulaOptions patient{.rename_free = true, .max_renaming_steps = std::size_t{1} << 30U};
  CHECK(normal(pairs + "+" + pairs, patient) ==
        normal(with_other_names(pairs + "+" + pairs), patient));
  CHECK(normal(ring, patient) == normal(with_other_names(ring), renaming));
  // Two squares with a spoke each: exchanged pairwise nothing is the same, rotated it is.
  CHECK(normal("x(a+b+c+d)+ab+bc+cd+da", renaming) == normal("u(p+r+q+s)+pq+qr+rs+sp", renaming));
  CHECK(normal("x(a+b+c+d)+ab+bc+cd+da", renaming) != normal("x(a+b+c+d)+ab+ac+ad+da", renaming));
}

TEST_CASE(
    "a formula of many claims takes as long as one of its length without any, a few times over") {
  const auto seconds = [](const std::string& unit, const FormulaOptions& options,
                          std::size_t claims) {
    std::string text;
    while (text.size() < 8000) text += unit;
    text += "b";
    double best = 1e9;
    for (int run = 0; run < 3; ++run) {
      const std::clock_t begun = std::clock();
      const auto formula = parse_formula(text, options);
      best = (std::min)(best, static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC);
      INFO(unit << ": " << formula.error().message());
      REQUIRE(formula.ok());
      REQUIRE(formula->steps.size() >= claims);
    }
    return best;
  };
  for (const bool names : {false, true}) {
    const FormulaOptions options{
        .rename_free = names, .max_bytes = 1 << 15, .max_renaming_steps = std::size_t{1} << 30U};
    for (const auto& [unit, without] : {Pair{"a,", "a+"}, Pair{"-a,", "-a-"}, Pair{"a=", "a+"},
                                        Pair{"ab=", "ab+"}, Pair{"x<", "x+"}}) {
      const double one = seconds(without, options, 0), many = seconds(unit, options, 2500);
      INFO(unit << (names ? ", names changed: " : ": ") << many << " s, without claims " << one
                << " s");
      CHECK(many < 12 * one);
    }
  }
}

TEST_CASE("what renaming takes does not depend on the names") {
  const std::string letters = "jklmnopqrstuvwxyzABCDLMN";
  // a form's letters are a, b, c, … and A, B, C, …
  const auto named = [](const std::string& form, const std::string& names) {
    std::string out = form;
    for (char& c : out)
      c = c >= 'a' && c <= 'l'   ? names[static_cast<std::size_t>(c - 'a')]
          : c >= 'A' && c <= 'L' ? names[static_cast<std::size_t>(12 + c - 'A')]
                                 : c;
    return out;
  };
  std::mt19937_64 random(5);
  const auto least_steps = [](const std::string& text) {
    std::size_t refused = 0, read = 1 << 20;
    REQUIRE(parse_formula(text, {.rename_free = true, .max_renaming_steps = read}).ok());
    while (read - refused > 1) {
      const std::size_t middle = refused + (read - refused) / 2;
      (parse_formula(text, {.rename_free = true, .max_renaming_steps = middle}).ok() ? read
                                                                                     : refused) =
          middle;
    }
    return read;
  };
  // Variables that stay alike here have a symmetry that brings each to the others.
  for (const std::string form :
       {"ab+cd", "ab+cd+ef", "a-b", "(a-b)(c-d)", "a+(b-c)+(d-e)", "(a-b)+(c-d)+(e-f)(g-h)",
        "ab+bc+cd+da", "ab-bc+cd-da", "ab+bc+cd+de+ef+fa", "a(bc+de)+f(gh+ij)", "ab = cd",
        "ab+cd, ef = gh, a = b", "|a-b|+|c-d|", "a^{bc+de} - a^{fg+hi}",
        "AB+CD+EF+GH+IJ+KL+ab+cd+ef+gh+ij+kl"}) {
    std::string names = letters;
    const std::size_t steps = least_steps(named(form, names));
    const std::string one = normal(named(form, names), renaming);
    for (int n = 0; n < 5; ++n) {
      std::shuffle(names.begin(), names.end(), random);
      const std::string text = named(form, names);
      INFO(form << " as " << text);
      CHECK(least_steps(text) == steps);
      CHECK(normal(text, renaming) == one);
    }
  }
  // Twelve pairs, over and over, of neighbours in the alphabet, of its first half with its second,
  // and of any.
  std::string next, half, pairs;
  for (std::size_t i = 0; i < 12; ++i) {
    next += std::string("+") + letters[2 * i] + letters[2 * i + 1];
    half += std::string("+") + letters[i] + letters[12 + i];
    pairs += std::string("+") + static_cast<char>('a' + i) + static_cast<char>('A' + i);
  }
  std::size_t read = 0;
  const std::size_t most = 44;
  for (std::size_t times = 8; times <= most; times += 18) {
    const auto over = [&](const std::string& text) {
      std::string out;
      for (std::size_t t = 0; t < times; ++t) out += text;
      return out.substr(1);
    };
    std::string names = letters;
    std::shuffle(names.begin(), names.end(), random);
    const auto a = parse_formula(over(next), renaming), b = parse_formula(over(half), renaming),
               c = parse_formula(over(named(pairs, names)), renaming);
    INFO(times << " times");
    CHECK(a.ok() == b.ok());
    CHECK(a.ok() == c.ok());
    if (a.ok() && b.ok() && c.ok()) CHECK((a->hash == b->hash && a->hash == c->hash));
    read += a.ok() ? 1U : 0U;
  }
  CHECK(read > 0);
  // The error names the bound, not what earlier parts left of it.
  const auto refused =
      parse_formula("ab+cd, ab+cd, ab+cd", {.rename_free = true, .max_renaming_steps = 300});
  REQUIRE_FALSE(refused.ok());
  CHECK(std::string(refused.error().message()).find(" 300 steps") != std::string::npos);
}

TEST_CASE("a chain without braces goes no deeper than braces do") {
  struct Chain {
    const char* link;
    // `corrupt`: what no depth makes a formula, and so is refused at its second link
    ErrorCode code;
  };
  const Chain chains[] = {
      {"\\ln_", ErrorCode::oversized},
      {"\\ln^", ErrorCode::oversized},
      {"\\ln_1^", ErrorCode::oversized},
      {"\\ln_-", ErrorCode::oversized},
      {"\\ln ", ErrorCode::oversized},
      {"\\sqrt", ErrorCode::oversized},
      {"\\sqrt[", ErrorCode::oversized},
      {"\\hat", ErrorCode::oversized},
      {"\\frac", ErrorCode::oversized},
      {"\\frac1", ErrorCode::oversized},
      {"\\binom", ErrorCode::oversized},
      {"x^\\ln_", ErrorCode::oversized},
      {"x_\\ln^", ErrorCode::oversized},
      {"\\max^\\ln_", ErrorCode::corrupt},
      {"\\sum_\\ln^", ErrorCode::corrupt},
      {"\\int_\\ln_", ErrorCode::corrupt},
      {"\\max^{", ErrorCode::oversized},
      {"\\sum ", ErrorCode::oversized},
      {"\\int ", ErrorCode::oversized},
      {"\\forall x_\\ln", ErrorCode::oversized},
      {"\\neg", ErrorCode::oversized},
      {"-", ErrorCode::oversized},
      {"f(", ErrorCode::oversized},
      {"x_{", ErrorCode::oversized},
      {"\\sqrt\\ln_", ErrorCode::oversized},
      {"|\\|", ErrorCode::oversized},
      {"\\{", ErrorCode::oversized},
      {"a^{", ErrorCode::oversized},
      {"d\\ln_", ErrorCode::oversized},
      {"\\ln_{", ErrorCode::oversized},
      {"x^", ErrorCode::corrupt},
      {"x_", ErrorCode::corrupt},
      {"_", ErrorCode::corrupt},
      {"^", ErrorCode::corrupt},
      {"\\max^", ErrorCode::corrupt},
  };
  for (const auto& [link, code] : chains) {
    const std::string_view one(link);
    // Cutting text into tokens takes long where memory is watched: one chain is of 200 KB.
    const bool many = one == "\\ln_";
    for (const std::size_t links : {std::size_t{1000}, many ? std::size_t{200'000} / one.size()
                                                            : std::size_t{6'000} / one.size()}) {
      std::string text;
      for (std::size_t i = 0; i < links; ++i) text += one;
      text += "x";
      const auto formula = parse_formula(text, {.max_bytes = 1 << 20});
      INFO(link << " x " << links << ": " << formula.error().message());
      REQUIRE_FALSE(formula.ok());
      CHECK(kvmeld::to_string(formula.error().code()) == kvmeld::to_string(code));
      const std::string message(formula.error().message());
      CHECK((message.find("max_depth 48") != std::string::npos) == (code == ErrorCode::oversized));
      // Where it stopped says how deep it went: no level is without its link.
      const std::size_t at = message.rfind("byte ");
      REQUIRE(at != std::string::npos);
      CHECK(std::stoul(message.substr(at + 5)) <= 50 * one.size());
    }
  }
  CHECK(parse_formula("\\ln_\\ln_\\ln_2 x").ok());
}

TEST_CASE("any bytes are read without harm") {
  std::mt19937_64 random(3);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const std::vector<std::string> pieces = {
      "\\sum",   "_",        "^",      "{",        "}",         "(",         ")",
      "[",       "]",        "|",      "\\|",      "\\int",     "d",         "x",
      "i",       "=",        "1",      "23",       "\\frac",    "\\sqrt",    "+",
      "-",       "/",        "\\cdot", "\\forall", "\\exists",  ",",         ".",
      ":",       "!",        "'",      "\\in",     "\\to",      "\\lim",     "Σ",
      "∑",       "²",        "₁",      "\\mathbf", "\\text{a}", "\\sin",     "f",
      "\\left(", "\\right)", "\\{",    "\\}",      "<",         "\\implies", "\\hat",
      "\\binom", "\\max",    "\\iint", "α",        "\\pi",      "\\neg",     "*",
      " ",       "$",        "%",      "\n",       "\\lfloor",  "\\rfloor",  "ℝ",
      "√"};
  std::size_t read = 0;
  FormulaIndex index({.rename_free = true}, 8);
  for (int n = 0; n < 30'000; ++n) {
    std::string text;
    if (n % 3 == 0) {
      for (std::size_t i = below(24); i > 0; --i) text += static_cast<char>(random());
    } else {
      for (std::size_t i = 1 + below(16); i > 0; --i) text += pieces[below(pieces.size())];
      if (n % 3 == 1 && !text.empty()) text[below(text.size())] = static_cast<char>(random());
    }
    const auto formula = parse_formula(text, {.rename_free = n % 2 == 0});
    read += formula.ok() ? 1U : 0U;
    if (formula.ok())
      REQUIRE(formula->normal == parse_formula(text, {.rename_free = n % 2 == 0})->normal);
    if (n % 16 == 0) {
      (void)kvmeld::formula::formulas_in(text);
      (void)index.remember(id(static_cast<std::uint8_t>(random() % 20)), "$" + text + "$");
      (void)index.recall("$" + text + "$");
      REQUIRE(index.segments() <= 8);
    }
  }
  CHECK(read > 800);
}

TEST_CASE("formulas are found in a text") {
  using Found = std::vector<std::string_view>;
  CHECK(kvmeld::formula::formulas_in("Let $x>0$; then $$x^2 > 0$$ and \\(y\\), \\[z = 1\\].") ==
        Found{"x>0", "x^2 > 0", "y", "z = 1"});
  CHECK(kvmeld::formula::formulas_in("costs \\$5 and $a\\$b$ more") == Found{"a\\$b"});
  CHECK(kvmeld::formula::formulas_in("$never closed") == Found{});
  CHECK(kvmeld::formula::formulas_in("\\[ open $a$") == Found{"a"});
  CHECK(kvmeld::formula::formulas_in("$$$$ $ $") == Found{" "});
  CHECK(kvmeld::formula::formulas_in("").empty());
}

TEST_CASE("an index recalls lemmas and steps derived before, and forgets") {
  FormulaIndex index({.rename_free = true}, 3);
  CHECK(index.remember(
            id(1), "Lemma. For all $n$: $\\sum_{i=1}^n i = \\frac{n(n+1)}{2}$, as Gauss knew.") ==
        2);
  CHECK(index.remember(id(2),
                       "We have \\[(a+b)^2 = a^2+2ab+b^2 \\ge 4ab,\\] hence $\\sqrt{ab} \\le "
                       "\\frac{a+b}{2}$.") == 2);
  // The same lemma in other letters, and a step of a derivation as a lemma.
  const auto lemma = index.recall("We need $\\frac{m(m+1)}2 = Σ_{k=1}^m k$ here.");
  REQUIRE(lemma.size() == 1);
  CHECK(lemma[0].segment == id(1));
  CHECK(lemma[0].formulas == 1);
  CHECK(lemma[0].steps == 0);
  const auto step = index.recall("$4xy \\le x^2 + y^2 + 2xy$");
  REQUIRE(step.size() == 1);
  CHECK(step[0].segment == id(2));
  CHECK(step[0].formulas == 0);
  CHECK(step[0].steps == 1);
  CHECK(index.recall("$n$ alone is in every text, and so is $2$").empty());
  CHECK(index.recall("$\\sum_{i=1}^n i^2$").empty());
  // More shared formulas come first; an id noted again is noted anew; the oldest goes.
  index.remember(id(3), "$\\sqrt{pq} \\le \\frac{p+q}{2}$ and $\\sum_{j=1}^n j = n(n+1)/2$");
  const auto both = index.recall("$\\sqrt{uv} \\le (u+v)/2$, $\\sum_{i=1}^n i = n(n+1)/2$");
  REQUIRE(both.size() == 3);
  CHECK(both[0].segment == id(3));
  CHECK(both[0].formulas == 2);
  index.remember(id(4), "$a^2+b^2=c^2$");
  CHECK(index.segments() == 3);
  CHECK(index.recall("$\\sum_{i=1}^n i = n(n+1)/2$").size() == 1);
  index.remember(id(4), "nothing");
  CHECK(index.recall("$x^2+y^2=z^2$").empty());
  index.forget(id(3));
  index.forget(id(3));
  index.forget(id(2));
  CHECK(index.segments() == 0);
  CHECK(index.formulas() == 0);
  // Names count where they are asked to.
  FormulaIndex by_name;
  by_name.remember(id(1), "$a^2+b$");
  CHECK(by_name.recall("$b + a^2$").size() == 1);
  CHECK(by_name.recall("$x^2+y$").empty());
  FormulaIndex none({}, 0);
  CHECK(none.remember(id(1), "$a+b$") == 0);
}
