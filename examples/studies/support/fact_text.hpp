#pragma once
// Notes of facts in several sentence forms, and the questions about them: text to fit maps on, and
// other facts to test them on.

#include "dataset.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace example {

/// Somebody has a thing somewhere.
struct Fact {
  std::string trade, person, colour, thing, place;
};

/// Forms 0 to `fit_forms` − 1 occur in text that maps are fitted on; the two behind them do not.
inline constexpr std::size_t fit_forms = 5, unseen_forms = 2;
/// Named by what is fitted on it, so that a changed text is another one.
inline constexpr const char* fact_text_version = "facts 1";

inline std::vector<Fact> make_facts(std::uint64_t seed, std::size_t count) {
  Draw draw(seed * 1000003u + 77);
  draw.next();
  const std::vector<std::string> people = draw.pick(detail::people, detail::people.size());
  const std::vector<std::string> trades = draw.pick(detail::trades, detail::trades.size());
  const std::vector<std::string> things = draw.pick(detail::things, detail::things.size());
  const std::vector<std::string> places = draw.pick(detail::places, detail::places.size());
  std::vector<Fact> facts;
  for (std::size_t i = 0; i < count; ++i)
    facts.push_back({trades[i], people[i],
                     std::string(detail::colours[draw.below(detail::colours.size())]), things[i],
                     places[i]});
  return facts;
}

inline std::string sentence(const Fact& fact, std::size_t form) {
  const std::string thing = fact.colour + " " + fact.thing;
  switch (form) {
    case 0:
      return " The " + fact.trade + " named " + fact.person + " keeps the " + thing + " in the " +
             fact.place + ".";
    case 1:
      return " The " + thing + " of " + fact.person + " the " + fact.trade + " is stored in the " +
             fact.place + ".";
    case 2:
      return " In the " + fact.place + ", the " + fact.trade + " called " + fact.person +
             " hides a " + thing + ".";
    case 3:
      return " " + fact.person + ", a " + fact.trade + ", left the " + thing + " behind in the " +
             fact.place + ".";
    case 4:
      return " You can find the " + thing + " that " + fact.person + " the " + fact.trade +
             " owns in the " + fact.place + ".";
    case 5:
      return " The " + fact.trade + " " + fact.person + " put a " + thing + " away in the " +
             fact.place + " yesterday.";
    default:
      return " Somebody saw that " + fact.person + ", the " + fact.trade + ", locked the " + thing +
             " up in the " + fact.place + ".";
  }
}

/// The statement that the fact's place completes.
inline std::string statement(const Fact& fact, std::size_t form) {
  const std::string thing = fact.colour + " " + fact.thing;
  switch (form) {
    case 0:
      return fact.person + " keeps the " + thing + " in the";
    case 1:
      return "The " + thing + " of " + fact.person + " is stored in the";
    case 2:
      return fact.person + " hides a " + thing + " in the";
    case 3:
      return fact.person + " left the " + thing + " behind in the";
    case 4:
      return "You can find the " + thing + " that " + fact.person + " owns in the";
    case 5:
      return fact.person + " put a " + thing + " away in the";
    default:
      return fact.person + " locked the " + thing + " up in the";
  }
}

/// Note `index` of the fit's text: eight facts, every other note all in form 0, the others mixed of
/// the other fit forms.
inline std::vector<std::string> fit_note(std::size_t index) {
  std::vector<std::string> note;
  Draw draw(index * 31u + 5u);
  for (const Fact& fact : make_facts(1000 + index, 8))
    note.push_back(sentence(fact, index % 2 == 0 ? 0 : 1 + draw.below(fit_forms - 1)));
  return note;
}

/// Notes of eight facts with a question about each.
struct FactNote {
  std::vector<std::string> sentences;
  std::vector<Ask> questions;
};

/// Note `index` of the test: facts that no fit note holds. Form 0, or, for `unseen`, forms that no
/// fit note has.
inline FactNote test_note(std::size_t index, bool unseen) {
  FactNote note;
  // the last 8 lend their places as wrong answers
  const std::vector<Fact> facts = make_facts(500000 + index, 16);
  Draw draw(index * 97u + 13u);
  for (std::size_t i = 0; i < 8; ++i) {
    const std::size_t form = unseen ? fit_forms + draw.below(unseen_forms) : 0;
    note.sentences.push_back(sentence(facts[i], form));
    Ask ask{statement(facts[i], form), facts[i].place, {}};
    for (const Fact& fact : facts) ask.candidates.push_back(fact.place);
    draw.shuffle(ask.candidates);
    note.questions.push_back(std::move(ask));
  }
  return note;
}

}  // namespace example
