// A second file with the umbrella: everything in it has to be inline.
#include <kvmeld/kvmeld.hpp>

const char* version_in_the_other_file() { return KVMELD_VERSION_STRING; }
