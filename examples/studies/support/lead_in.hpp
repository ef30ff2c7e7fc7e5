#pragma once
// The lead-in: neutral sentences in the style of the notes, encoded before an agent's notes and
// then dropped.

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

namespace example {

inline constexpr std::array<std::string_view, 16> lead_in_sentences{
    " The gardener named Edith trims the tall hedge on Tuesday.",
    " The baker named Ralph washes the white apron after work.",
    " The florist named Lydia ties the yellow ribbon with care.",
    " The clerk named Amos sorts the grey folders by date.",
    " The weaver named Joan mends the torn curtain every winter.",
    " The mason named Cyril mixes the wet cement before noon.",
    " The grocer named Mabel weighs the ripe apples at dawn.",
    " The porter named Edgar carries the heavy crates up the stairs.",
    " The potter named Agnes paints the round bowls in summer.",
    " The carpenter named Silas sands the rough table by hand.",
    " The midwife named Ruth boils the clean towels each day.",
    " The jockey named Dean brushes the young horse at sunset.",
    " The printer named Olga checks the long pages for errors.",
    " The beekeeper named Ned opens the wooden hives in June.",
    " The tutor named Alma marks the short essays on Friday.",
    " The plasterer named Gus smooths the damp wall with a trowel."};

/// The first `count` sentences as one text.
inline std::string lead_in(std::size_t count) {
  std::string out;
  for (std::size_t i = 0; i < count && i < lead_in_sentences.size(); ++i)
    out += lead_in_sentences[i];
  return out;
}

}  // namespace example
