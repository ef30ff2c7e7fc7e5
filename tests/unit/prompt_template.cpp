// Prompt templates: how they are read, where slots and texts stand, what happens to tokens across
// boundaries, keys of offsets.

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <kvmeld/anchors/prompt.hpp>

#include "support/law.hpp"

using kvmeld::ErrorCode;
using kvmeld::Result;
using kvmeld::TokenId;
using kvmeld::anchors::BoundaryMismatch;
using kvmeld::anchors::fill_placeholders;
using kvmeld::anchors::FilledPrompt;
using kvmeld::anchors::PlaceholderHistory;
using kvmeld::anchors::PlaceholderValue;
using kvmeld::anchors::PromptRun;
using kvmeld::anchors::PromptTemplate;
using Source = PromptRun::Source;

namespace {

using Ids = std::vector<TokenId>;

/// Longest match, left to right: single bytes, and these. An id's text is never another's, so ids
/// tell where they stand.
constexpr std::string_view joins[] = {".\n", "ab", "abc", "1,", "ca", "  "};

std::string_view match(std::string_view rest) {
  std::string_view best = rest.substr(0, 1);
  for (const std::string_view join : joins) {
    if (join.size() > best.size() && rest.substr(0, join.size()) == join)
      best = rest.substr(0, join.size());
  }
  return best;
}
TokenId id_of(std::string_view token) {
  if (token.size() == 1) return static_cast<unsigned char>(token[0]);
  return static_cast<TokenId>(
      256 + (std::find(std::begin(joins), std::end(joins), token) - std::begin(joins)));
}
std::size_t length_of(TokenId id) { return id < 256 ? 1 : joins[id - 256].size(); }

Result<Ids> tokenizer(std::string_view text) {
  Ids out;
  while (!text.empty()) {
    const std::string_view token = match(text);
    out.push_back(id_of(token));
    text.remove_prefix(token.size());
  }
  return out;
}
Ids ids(std::string_view text) { return *tokenizer(text); }

PromptTemplate parsed(std::string_view text) {
  auto made = PromptTemplate::parse(text, tokenizer);
  REQUIRE(made.ok());
  return *made;
}
ErrorCode parse_error(std::string_view text) {
  return PromptTemplate::parse(text, tokenizer).status().code();
}

PlaceholderHistory value(const char* name, const char* text) { return {name, {{text, {}}}}; }

// example-begin: template
/// What the solver reads, and where each piece of it stands: a note, and what the planner said now
/// and a turn before.
template <kvmeld::anchors::Tokenizer T>
kvmeld::Result<kvmeld::anchors::FilledPrompt> solver_prompt(
    T& tokenizer, const kvmeld::anchors::PlaceholderValue& note,
    const std::vector<kvmeld::anchors::PlaceholderValue>& planner) {
  const auto made = kvmeld::anchors::PromptTemplate::parse(
      "Notes:{note} The planner said:{planner} Before:{planner@-1} Solve it.", tokenizer);
  if (!made) return made.error();
  const std::vector<kvmeld::anchors::PlaceholderHistory> values{{"note", {note}},
                                                                {"planner", planner}};
  return kvmeld::anchors::fill_placeholders(*made, values, tokenizer,
                                            {.trained_context = 4096, .agent = "solver"});
}
// example-end

struct Brief {
  Source source;
  int index;
  long first, position, tokens;
  int slot;
  bool operator==(const Brief&) const = default;
};
std::vector<Brief> brief(const FilledPrompt& prompt) {
  std::vector<Brief> out;
  for (const PromptRun& r : prompt.runs)
    out.push_back({r.source, r.index, r.first, r.position, r.tokens, r.slot});
  return out;
}
FilledPrompt filled(std::string_view text, const std::vector<PlaceholderHistory>& values,
                    const kvmeld::anchors::FillOptions& options = {}) {
  auto made = fill_placeholders(parsed(text), values, tokenizer, options);
  INFO(made.status().message());
  REQUIRE(made.ok());
  return *made;
}

}  // namespace

TEST_CASE("templates are read: slots between texts, braces, history") {
  const PromptTemplate made = parsed("the {{task}} is {question}, {planner@-12}{planner} said");
  REQUIRE(std::vector(made.texts().begin(), made.texts().end()) ==
          std::vector<std::string>{"the {task} is ", ", ", "", " said"});
  REQUIRE(std::vector(made.slots().begin(), made.slots().end()) ==
          std::vector<kvmeld::anchors::PromptPlaceholder>{
              {"question", 0}, {"planner", 12}, {"planner", 0}});
  REQUIRE(made.text_tokens()[1] == ids(", "));
  REQUIRE(made.text_tokens()[2].empty());
  REQUIRE(parsed("}}{{").texts()[0] == "}{");
  REQUIRE(parsed("{{{a}}}").texts()[0] == "{");
  REQUIRE(parsed("{{{a}}}").texts()[1] == "}");
  REQUIRE(parsed("no slot").slots().empty());

  REQUIRE(parse_error("") == ErrorCode::invalid_argument);
  for (const char* bad : {"{", "a {b", "a {b {c}", "}", "a } b", "{}", "{a b}", "{a@}", "{a@-}",
                          "{a@1}", "{a@-0}", "{a@-x}", "{@-1}", "{a@-1@-1}", "{a@-12345678}"}) {
    INFO(bad);
    REQUIRE(parse_error(bad) == ErrorCode::template_syntax);
  }
  REQUIRE(PromptTemplate::parse("abc {x", tokenizer).status().message().find("byte 4") !=
          std::string::npos);
  const auto refuses = [](std::string_view) -> Result<Ids> {
    return {ErrorCode::engine_failure, "no vocabulary"};
  };
  REQUIRE(PromptTemplate::parse("a{b}", refuses).status().code() == ErrorCode::engine_failure);
  REQUIRE(
      fill_placeholders(parsed("a{b}"), std::vector{value("b", "x")}, refuses).status().code() ==
      ErrorCode::engine_failure);
}

TEST_CASE(
    "slots that are repeated, adjacent, leading, trailing or empty: exact positions of all that "
    "stands in the prompt") {
  const FilledPrompt prompt =
      filled("{q} is {q}{p}? {e}end {e}{p}", {value("q", "xy"), value("p", "uvw"), value("e", "")},
             {.first_position = 100});
  REQUIRE(prompt.text == "xy is xyuvw? end uvw");
  REQUIRE(prompt.tokens == ids(prompt.text));
  REQUIRE(prompt.mismatches.empty());
  REQUIRE(brief(prompt) == std::vector<Brief>{{Source::slot, 0, 0, 100, 2, 0},
                                              {Source::text, 1, 0, 102, 4, 0},
                                              {Source::slot, 1, 0, 106, 2, 1},
                                              {Source::slot, 2, 0, 108, 3, 2},
                                              {Source::text, 3, 0, 111, 2, 2},
                                              // behind an empty slot: no anchor knows it
                                              {Source::text, 4, 0, 113, 4, -1},
                                              {Source::slot, 5, 0, 117, 3, 5}});
  REQUIRE(prompt.values.size() == 6);
  REQUIRE(prompt.values[2] == ids("uvw"));
  REQUIRE(filled("{e}", {value("e", "")}).runs.empty());
  REQUIRE(brief(filled("only text", {})) == std::vector<Brief>{{Source::text, 0, 0, 0, 9, -1}});

  // Longer and shorter values shift what follows by the exact difference.
  REQUIRE(filled("ask {q} now", {value("q", "x")}).runs[2].position == 5);
  REQUIRE(filled("ask {q} now", {value("q", "xyzzyxyzzy")}).runs[2].position == 14);
}

TEST_CASE("earlier turns, and every refusal by its code") {
  const std::vector<PlaceholderHistory> turns{
      {"p", {{"first", {}}, {"second", {}}, {"third", {}}}}};
  REQUIRE(filled("{p@-2} {p} {p@-1}", turns).text == "first third second");
  const auto code = [](std::string_view text, const std::vector<PlaceholderHistory>& values,
                       const kvmeld::anchors::FillOptions& options = {}) {
    return fill_placeholders(parsed(text), values, tokenizer, options).status().code();
  };
  REQUIRE(code("{p@-3}", turns) == ErrorCode::history_missing);
  REQUIRE(code("{p@-1}", {value("p", "x")}) == ErrorCode::history_missing);
  REQUIRE(code("{p}", {{"p", {}}}) == ErrorCode::slot_missing);
  REQUIRE(code("{p}{q}", {value("p", "x")}) == ErrorCode::slot_missing);
  REQUIRE(code("{p}", {value("p", "x"), value("q", "x")}) == ErrorCode::slot_unknown);
  REQUIRE(code("{p}", {value("p", "x"), value("p", "x")}) == ErrorCode::invalid_argument);
  REQUIRE(code("{p}", {{"p", {{"", {65}}}}}) == ErrorCode::invalid_argument);
  REQUIRE(code("{p}", {value("p", "x")}, {.first_position = -1}) == ErrorCode::invalid_argument);
  REQUIRE(code("1234{p}", {value("p", "567")}, {.first_position = 3, .trained_context = 10}) ==
          ErrorCode::ok);
  REQUIRE(code("1234{p}", {value("p", "567")}, {.first_position = 4, .trained_context = 10}) ==
          ErrorCode::context_exceeded);
}

TEST_CASE("the page's template: values begin with their space, and every piece is found again") {
  const auto prompt = solver_prompt(tokenizer, {" one."}, {{" old."}, {" new."}});
  REQUIRE(prompt.ok());
  REQUIRE(prompt->text == "Notes: one. The planner said: new. Before: old. Solve it.");
  REQUIRE(prompt->mismatches.empty());
  REQUIRE(prompt->runs.size() == 7);
  REQUIRE(solver_prompt(tokenizer, {" one."}, {{" new."}}).status().code() ==
          ErrorCode::history_missing);
}

TEST_CASE("tokens across a boundary: reported, left out of both sides, and to be prefilled") {
  const FilledPrompt prompt = filled("say {p}\nnow {p}", {value("p", "yes.")});
  REQUIRE(prompt.tokens == ids("say yes.\nnow yes."));
  REQUIRE(prompt.mismatches == std::vector<BoundaryMismatch>{{0, 7, Ids{'.', '\n'}, Ids{256}}});
  REQUIRE(brief(prompt) == std::vector<Brief>{{Source::text, 0, 0, 0, 4, -1},
                                              {Source::slot, 0, 0, 4, 3, 0},
                                              {Source::joined, -1, 0, 7, 1, -1},
                                              {Source::text, 1, 1, 8, 4, 0},
                                              {Source::slot, 1, 0, 12, 4, 1}});
  // A token that takes a whole slot, and one that takes a whole text.
  REQUIRE(brief(filled("a{p}c", {value("p", "b")})) ==
          std::vector<Brief>{{Source::joined, -1, 0, 0, 1, -1}});
  const FilledPrompt through = filled("x{p}b{q}", {value("p", "za"), value("q", "cy")});
  REQUIRE(brief(through) == std::vector<Brief>{{Source::text, 0, 0, 0, 1, -1},
                                               {Source::slot, 0, 0, 1, 1, 0},
                                               {Source::joined, -1, 0, 2, 1, -1},
                                               {Source::slot, 1, 1, 3, 1, 1}});
  REQUIRE(through.mismatches ==
          std::vector<BoundaryMismatch>{{0, 2, Ids{'a', 'b', 'c'}, Ids{258}}});
  // Two boundaries, each by itself, the second one between adjacent slots.
  const FilledPrompt two =
      filled("1{p}{q}", {value("p", ",xa"), value("q", "by")}, {.first_position = 10});
  REQUIRE(two.mismatches == std::vector<BoundaryMismatch>{{0, 10, Ids{'1', ','}, Ids{259}},
                                                          {0, 12, Ids{'a', 'b'}, Ids{257}}});
  REQUIRE(brief(two)[0] == Brief{Source::joined, -1, 0, 10, 1, -1});
  REQUIRE(brief(two)[1] == Brief{Source::slot, 0, 1, 11, 1, 0});
  // Ids that an agent wrote otherwise than the tokenizer reads them: the value keeps what the whole
  // has, too.
  const FilledPrompt written =
      filled("say {p}!", {{"p", {{"xabyz", Ids{'x', 'a', 'b', 'y', 'z'}}}}});
  REQUIRE(written.tokens == ids("say xabyz!"));
  REQUIRE(written.mismatches ==
          std::vector<BoundaryMismatch>{{0, 4, Ids{'x', 'a', 'b'}, Ids{'x', 257}}});
  REQUIRE(brief(written)[2] == Brief{Source::slot, 0, 3, 6, 2, 0});
  // Tokens that the pieces alone have (a tokenizer that marks where a text begins) leave a gap in
  // no run.
  const auto marks = [](std::string_view text) -> Result<Ids> {
    Ids out = ids(text);
    out.insert(out.begin(), 7);
    return out;
  };
  const auto marked = fill_placeholders(*PromptTemplate::parse("x{p}yz", marks),
                                        std::vector{value("p", "uv")}, marks);
  REQUIRE(marked.ok());
  REQUIRE(marked->tokens == Ids{7, 'x', 'u', 'v', 'y', 'z'});
  REQUIRE(marked->mismatches ==
          std::vector<BoundaryMismatch>{{0, 2, Ids{7}, {}}, {0, 4, Ids{7}, {}}});
  REQUIRE(brief(*marked) == std::vector<Brief>{{Source::text, 0, 0, 0, 2, -1},
                                               {Source::slot, 0, 1, 2, 2, 0},
                                               {Source::text, 1, 1, 4, 2, 0}});
  // A template that another tokenizer read: what its text begins with is no part of the prompt.
  const auto other = fill_placeholders(*PromptTemplate::parse("xy", marks),
                                       std::vector<PlaceholderHistory>{}, tokenizer);
  REQUIRE(other.ok());
  REQUIRE(brief(*other) == std::vector<Brief>{{Source::text, 0, 1, 0, 2, -1}});
  REQUIRE(other->mismatches == std::vector<BoundaryMismatch>{{-1, 0, Ids{7}, {}}});
}

TEST_CASE("keys of offsets: a slot's own, and its text's behind it") {
  kvmeld::Context before;
  before.prefix.bytes[3] = 5;
  const PromptTemplate one = parsed("a {p} b {p} c");
  const auto key = one.placeholder_context(0, before, "solver");
  REQUIRE(key == parsed("a {p} b {p} c").placeholder_context(0, before, "solver"));
  kvmeld::Context led = before;
  led.lead_in.low = 1;
  const kvmeld::Digest128 others[] = {
      one.placeholder_context(1, before, "solver"),
      one.placeholder_context(0, {}, "solver"),
      one.placeholder_context(0, before, "checker"),
      one.placeholder_context(0, led, "solver"),
      parsed("a {p} b {q} c").placeholder_context(0, before, "solver"),
      parsed("a {p@-1} b {p} c").placeholder_context(0, before, "solver"),
      parsed("a {p} b {p} d").placeholder_context(0, before, "solver")};
  for (const auto& other : others) REQUIRE(!(other == key));
  const FilledPrompt prompt =
      filled("a {p} b {p} c", {value("p", "x")}, {.before = before, .agent = "solver"});
  REQUIRE(prompt.runs.size() == 5);
  REQUIRE(prompt.runs[0].context == kvmeld::Digest128{});
  REQUIRE(prompt.runs[1].context == key);
  REQUIRE(prompt.runs[2].context == key);
  REQUIRE(prompt.runs[3].context == others[0]);
  REQUIRE(prompt.runs[4].context == others[0]);
}

TEST_CASE("laws of filled templates") {
  test::law(
      "runs are what the whole text's tokens say, for random templates, values and boundaries", [] {
        const auto draw_text = [](int most) {
          std::string out;
          for (int n = *rc::gen::inRange(0, most + 1); n > 0; --n)
            out += *rc::gen::element('a', 'b', 'c', '.', '\n', '1', ',', ' ', '{');
          return out;
        };
        const int slots = *rc::gen::inRange(0, 6);
        std::vector<PlaceholderHistory> values;
        std::vector<std::string> names, pieces;
        std::string source;
        for (int s = 0; s <= slots; ++s) {
          pieces.push_back(draw_text(6));
          for (const char c : pieces.back())
            source += c == '{' ? std::string("{{") : std::string(1, c);
          if (s == slots) break;
          const std::string name = *rc::gen::element<std::string>("p", "q", "r");
          auto at = std::find_if(values.begin(), values.end(),
                                 [&](const PlaceholderHistory& h) { return h.name == name; });
          if (at == values.end()) {
            PlaceholderValue given{draw_text(8), {}};
            if (*rc::gen::inRange(0, 4) == 0) {  // an agent's own ids: bytes
              for (const char c : given.text) given.tokens.push_back(static_cast<unsigned char>(c));
            }
            values.push_back({name, {given}});
            at = values.end() - 1;
          }
          source += "{" + name + "}";
          pieces.push_back(at->turns[0].text);
          names.push_back(name);
        }
        RC_PRE(!source.empty());
        const long first = *rc::gen::inRange(0, 1000);
        const auto made = PromptTemplate::parse(source, tokenizer);
        RC_ASSERT(made.ok());
        const auto prompt = fill_placeholders(*made, values, tokenizer, {.first_position = first});
        RC_ASSERT(prompt.ok());

        // Brute force: the rendered text's tokens with their bytes, and each piece's tokens with
        // theirs.
        std::string text;
        for (const std::string& piece : pieces) text += piece;
        const Ids whole = ids(text);
        RC_ASSERT(prompt->text == text);
        RC_ASSERT(prompt->tokens == whole);
        std::vector<Ids> own;
        Ids apart;
        for (std::size_t p = 0; p < pieces.size(); ++p) {
          own.push_back(p % 2 == 0 ? ids(pieces[p]) : prompt->values[p / 2]);
          apart.insert(apart.end(), own.back().begin(), own.back().end());
        }
        RC_ASSERT(prompt->mismatches.empty() == (apart == whole));
        std::vector<std::size_t> begins{0}, piece_begins{0};
        for (const TokenId id : whole) begins.push_back(begins.back() + length_of(id));
        for (const std::string& piece : pieces)
          piece_begins.push_back(piece_begins.back() + piece.size());
        long at = first;
        for (const PromptRun& run : prompt->runs) {
          RC_ASSERT(run.tokens > 0);
          RC_ASSERT(run.position == at);
          const auto token = static_cast<std::size_t>(at - first);
          at += run.tokens;
          RC_ASSERT(std::cmp_less_equal(at - first, whole.size()));
          if (run.source == Source::joined) {
            RC_ASSERT(!prompt->mismatches.empty());
            continue;
          }
          const std::size_t p =
              static_cast<std::size_t>(run.index) * 2 + (run.source == Source::slot ? 1 : 0);
          std::size_t byte = piece_begins[p];
          for (long t = 0; t < run.first; ++t)
            byte += length_of(own[p][static_cast<std::size_t>(t)]);
          for (long t = 0; t < run.tokens; ++t) {  // the same id over the same bytes
            RC_ASSERT(own[p][static_cast<std::size_t>(run.first + t)] ==
                      whole[token + static_cast<std::size_t>(t)]);
            RC_ASSERT(begins[token + static_cast<std::size_t>(t)] == byte);
            byte += length_of(whole[token + static_cast<std::size_t>(t)]);
          }
        }
        RC_ASSERT(std::cmp_equal(at - first, whole.size()));
        // The reports, put in the place of what they replace, make the whole of the pieces.
        Ids mended;
        std::size_t read = 0;
        for (const BoundaryMismatch& m : prompt->mismatches) {
          while (std::cmp_less(mended.size(), m.position - first)) mended.push_back(apart[read++]);
          RC_ASSERT(std::equal(m.apart.begin(), m.apart.end(),
                               apart.begin() + static_cast<std::ptrdiff_t>(read)));
          RC_ASSERT(m.slot >= 0 && m.slot < slots);
          read += m.apart.size();
          mended.insert(mended.end(), m.whole.begin(), m.whole.end());
        }
        mended.insert(mended.end(), apart.begin() + static_cast<std::ptrdiff_t>(read), apart.end());
        RC_ASSERT(mended == whole);
      });
}
