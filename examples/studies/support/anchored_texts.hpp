#pragma once
// What agents with different prefixes read alike: documents of one template, documents of free
// text, and the agents' own instructions.

#include "engine.hpp"
#include "fact_text.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace example {

/// Behind which bases are encoded, and then what five agents are told before they read.
inline constexpr std::string_view base_instructions = "You are a helpful assistant. Document:";
inline constexpr std::array<std::string_view, 5> agent_instructions{
    "You answer questions about the document below. Document:",
    "You are a careful archivist who looks up where things are kept. Read the document and answer "
    "in one word. Document:",
    "You are a critic. Other agents make claims about the document. Check each of them against the "
    "text, quote names exactly, and never "
    "guess what the text does not say. The text follows. Document:",
    "Notes:",
    "You plan errands in a small town. Somebody will ask you where to fetch a thing; the only "
    "source is the record that the office keeps, "
    "which is printed here in full, one entry after the other, as it was written down by those who "
    "came by during the week. Some entries do "
    "not matter today. Read all of it before you answer. Document:"};

/// A document and a question about each of its facts.
struct Document {
  Tokens tokens;
  std::vector<Ask> asks;
};

namespace detail {

inline constexpr std::array<std::string_view, 32> free_sentences{
    " It rained for most of the week, and the road to the mill was closed until Thursday.",
    " Nobody remembers who painted the sign above the door.",
    " The council met twice; both times the heating failed and everyone went home early.",
    " \"We should have asked before the harvest,\" said the woman at the counter, \"not after "
    "it.\"",
    " A box of letters turned up under the stairs, most of them unopened.",
    " Prices rose a little: bread by two cents, lamp oil by five.",
    " The ferry runs at seven, at noon, and once more before dark.",
    " Old maps show a well where the bus stop is now.",
    " Please return the long table to the hall after the fair.",
    " The choir needs two more voices, low ones if possible.",
    " There was a short argument about the fence, which ended when the dog lay down in front of "
    "it.",
    " On the whole it has been a quiet month.",
    " The new clock strikes eleven when it ought to strike ten.",
    " Three windows were mended and one was forgotten.",
    " What the inspector wrote about the bridge fills nine pages, none of which says whether it is "
    "safe.",
    " Snow is expected in the hills by the end of the week.",
    " Tickets for the play are sold at the usual place, but only in the morning.",
    " Somebody left the gate open again.",
    " The school's garden gave forty pounds of beans, six of which were stolen by birds.",
    " If the delivery is late, ring the bell and wait; do not knock.",
    " Her grandfather built the first of these boats in the winter of the great frost.",
    " The recipe asks for butter, but oil does as well, and costs less.",
    " Two of the lights in the square have gone out since Sunday.",
    " They say that the river was moved once, by a whole field, and that it has wanted to go back "
    "ever since.",
    " A parcel without a name lies on the second shelf.",
    " The bakers' dance is on Friday; masks are welcome.",
    " Repairs to the roof will take longer than we thought.",
    " Whoever borrowed the big saw should bring it back sharpened.",
    " In the evening a band played under the trees, badly but with joy.",
    " The minutes of the last meeting were read, corrected in four places, and accepted.",
    " No one has claimed the white horse yet.",
    " Spring came early, and with it the usual quarrel about who cleans the ditch."};

inline Ask ask_of(const std::vector<Fact>& facts, std::size_t fact, std::size_t form) {
  Ask ask{statement(facts[fact], form), facts[fact].place, {}};
  for (std::size_t i = 0; i < 16; ++i) ask.candidates.push_back(facts[i].place);
  return ask;
}

}  // namespace detail

/// Document `index` of one template: four facts of twelve tokens each, 48 tokens.
inline Document structured_document(const Engine& engine, std::uint64_t seed, std::size_t index) {
  Document out;
  const std::vector<Fact> facts = make_facts(seed * 7919u + 31000 + index, 16);
  for (std::size_t i = 0; i < facts.size() && out.asks.size() < 4; ++i) {
    const Tokens tokens = engine.tokens(sentence(facts[i], 0));
    if (tokens.size() != 12) continue;
    append(out.tokens, tokens);
    out.asks.push_back(detail::ask_of(facts, i, 0));
  }
  return out;
}

/// Document `index` of free text: four facts in mixed forms between sentences of other matters, of
/// some 50 to 130 tokens.
inline Document free_document(const Engine& engine, std::uint64_t seed, std::size_t index) {
  Document out;
  const std::vector<Fact> facts = make_facts(seed * 7919u + 77000 + index, 16);
  Draw draw(seed * 131u + index * 17u + 3u);
  std::vector<std::string> sentences = draw.pick(detail::free_sentences, draw.below(5));
  for (std::size_t i = 0; i < 4; ++i) {
    const std::size_t form = draw.below(fit_forms + unseen_forms);
    sentences.push_back(sentence(facts[i], form));
    out.asks.push_back(detail::ask_of(facts, i, form));
  }
  draw.shuffle(sentences);
  for (const std::string& one : sentences) append(out.tokens, engine.tokens(one));
  return out;
}

}  // namespace example
